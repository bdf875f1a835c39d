// What an endpoint knows of its peers, and how its threads wait for news of them. Whoever brings news (a thread that
// reads sockets, a peer of the same process) calls the functions that end in _arrived, or lose().
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "reshard/transport.h"

namespace areal::reshard {

enum class Loss {
  kGone,       // PeerError
  kCorrupted,  // CorruptedError
};

// Thread-safe. Waits throw as Transport says.
class Mailbox {
 public:
  explicit Mailbox(int32_t rank) : rank_(rank) {}

  int32_t rank() const { return rank_; }
  void add_peer(int32_t peer);

  // -- news -----------------------------------------------------------------------------------------------------------
  // Data, a grant or a credit. Throws CorruptedError for any other header, or one that names other ranks.
  void arrived(int32_t peer, const ReceivedChunk& message);
  // The first reason stays.
  void lose(int32_t peer, Loss loss, const std::string& why);
  void cancel();

  // -- waits ----------------------------------------------------------------------------------------------------------
  // A staging buffer of the peer's that is free: 0 ... kChunksInFlight - 1.
  uint32_t take_slot(int32_t peer, const Deadline& deadline);
  WireHeader next_grant(int32_t peer, const Deadline& deadline);
  ReceivedChunk next_chunk(std::span<const int32_t> peers, const Deadline& deadline);
  void drain(int32_t peer, const Deadline& deadline);

  // A chunk was written directly: drain() waits for its credit.
  void count_direct(int32_t peer);
  // Throws unless the peer is there and nobody has cancelled.
  void check(int32_t peer) const;

 private:
  struct Peer {
    std::vector<uint32_t> free_slots;
    int64_t direct_in_flight = 0;
    std::deque<WireHeader> grants;
    std::string lost;  // why; empty while it is there
    Loss loss = Loss::kGone;
  };

  template <class Ready>
  void wait(std::unique_lock<std::mutex>& lock, std::span<const int32_t> peers, const char* what,
            const Deadline& deadline, const Ready& ready);
  void check_locked(int32_t peer) const;
  Peer& peer_locked(int32_t peer);
  bool take_credit(Peer& peer, uint32_t slot);

  const int32_t rank_;
  mutable std::mutex mutex_;
  std::condition_variable news_;
  std::map<int32_t, Peer> peers_;
  std::deque<ReceivedChunk> chunks_;
  bool cancelled_ = false;
};

}  // namespace areal::reshard
