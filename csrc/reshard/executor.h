// Carries out one rank's part of a plan, update after update: local copies, chunks to peers, chunks from peers.
//
// For each update every rank calls run() with the same epoch. A receiver grants each of its senders the epoch of the
// plan, so no byte moves before both have compared digests and the receiver's memory is free to be written; a sender
// returns when its receivers have used all chunks. A failure anywhere cancels this rank's transport, which its peers
// see as a PeerError: nothing is left half done and unnoticed. Targets then hold no version; try again over a new
// transport.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "reshard/deadline.h"
#include "reshard/executor_program.h"
#include "reshard/plan.h"
#include "reshard/strided_copy.h"
#include "reshard/transport.h"

namespace areal::reshard {

// The memory of one update, per buffer in the order of RankStorage::buffers; empty where the rank is not on that side.
struct BoundBuffers {
  std::vector<std::span<const std::byte>> source;
  std::vector<std::span<std::byte>> target;
  // Position of target[0] among the buffers that the transport exposes: of several arenas, the one to be filled.
  int64_t first_exposed = 0;
};

struct ExecutorOptions {
  int threads = 1;           // that copy, for each of sending and receiving
  bool read_back = false;    // hash again what peers have written directly: a second pass over these bytes
  bool allow_direct = true;  // write into buffers that peers expose
};

struct TransferStats {
  uint64_t epoch = 0;
  double seconds = 0;
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
  int64_t local_bytes = 0;
  int64_t direct_bytes = 0;   // of those sent: written straight into the peers' buffers
  int64_t staging_bytes = 0;  // memory the transport has made for chunks, sent or received
  // Of all chunks, whatever their order: equal on both sides when summed over ranks.
  uint64_t sent_checksum = 0;
  uint64_t received_checksum = 0;
};

class Executor {
 public:
  // transport: connected to every peer of the rank's messages, used by this executor alone; nullptr for a rank that
  // only copies locally. Throws areal::Error when the plan's storage does not hold what it moves.
  Executor(std::shared_ptr<const Plan> plan, int32_t rank, std::shared_ptr<Transport> transport,
           const ExecutorOptions& options = {});
  ~Executor();

  const RankStorage& source_storage() const { return source_; }
  const RankStorage& target_storage() const { return target_; }

  // Moves one update. Not for two threads at once. Parts of the target that no tensor covers (padding) are zeroed.
  // Throws areal::Error naming the buffer whose memory does not fit, before anything moves;
  // DeadlineError, PeerError, CorruptedError, CancelledError.
  TransferStats run(uint64_t epoch, const BoundBuffers& buffers, const Deadline& deadline);

  // From any thread: run() ends with CancelledError, and so does every later one.
  void cancel();
  // Bytes of the update under way (or the last) that are done, of total_bytes().
  int64_t done_bytes() const { return done_bytes_.load(std::memory_order_relaxed); }
  int64_t total_bytes() const { return total_bytes_; }

  // For transports that move whole messages by themselves (process groups). A chunk with its header before it, in
  // sizeof(WireHeader) + chunk bytes of memory.
  const std::vector<MessageProgram>& sends() const { return sends_; }
  const std::vector<MessageProgram>& receives() const { return receives_; }
  // Both return the chunk's checksum.
  uint64_t pack_frame(const MessageProgram& message, const ChunkProgram& chunk, uint64_t epoch, std::byte* frame,
                      const BoundBuffers& buffers);
  uint64_t unpack_frame(const MessageProgram& message, const ChunkProgram& chunk, uint64_t epoch,
                        const std::byte* frame, const BoundBuffers& buffers);
  // What precedes the first chunk of an update: memory is checked, padding zeroed.
  void begin(const BoundBuffers& buffers);
  void copy_locally(const BoundBuffers& buffers, const Deadline& deadline);
  uint64_t plan_digest() const { return plan_->digest(); }
  int64_t local_bytes() const { return local_bytes_; }

 private:
  class Update;
  struct Gap {  // bytes of a target buffer that no region covers
    int32_t buffer;
    int64_t offset;
    int64_t bytes;
  };

  bool on_device() const { return transport_ != nullptr && transport_->copies_itself(); }
  size_t place_among_senders() const;
  void check_cancelled() const;
  void compile_padding();
  void compile_direct(size_t index);
  std::vector<std::byte*> remote_buffers(int32_t peer, size_t first_exposed) const;
  void check_buffers(const BoundBuffers& buffers) const;
  WireHeader header_of(const MessageProgram& message, const ChunkProgram& chunk, uint64_t epoch) const;
  void check_expected(const WireHeader& header, const MessageProgram& message, const ChunkProgram& chunk,
                      uint64_t epoch) const;
  uint64_t pack(const MessageProgram& message, const ChunkProgram& chunk, const BoundBuffers& buffers,
                std::byte* packed) const;
  uint64_t move(const MessageProgram& message, const ChunkProgram& chunk, const BoundBuffers& buffers,
                std::span<std::byte* const> remote) const;
  uint64_t unpack(const MessageProgram& message, const ChunkProgram& chunk, const BoundBuffers& buffers,
                  const std::byte* packed) const;
  uint64_t hash_target(const MessageProgram& message, const ChunkProgram& chunk, const BoundBuffers& buffers) const;
  void check_checksum(const WireHeader& header, const MessageProgram& message, uint64_t hash) const;

  const std::shared_ptr<const Plan> plan_;
  const int32_t rank_;
  const std::shared_ptr<Transport> transport_;
  const ExecutorOptions options_;
  RankStorage source_;
  RankStorage target_;
  std::vector<Message> messages_;  // per entry of sends_, until it is known whether the peer's buffers are in reach
  std::vector<MessageProgram> sends_;
  std::vector<MessageProgram> receives_;
  std::vector<CopyPiece> local_copies_;
  std::vector<Gap> padding_;
  int64_t local_bytes_ = 0;
  int64_t total_bytes_ = 0;
  Stores stores_ = Stores::kCached;
  std::atomic<int64_t> done_bytes_ = 0;
  std::atomic<bool> cancelled_ = false;
};

}  // namespace areal::reshard
