#include "reshard/executor.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "reshard/errors.h"
#include "reshard/executor_update.h"

namespace areal::reshard {
namespace {

// Below this an update fits the caches of those who want its bytes next.
constexpr int64_t kNonTemporalFromBytes = int64_t{4} << 20;

// Both staging buffers of a peer fit the second-level cache, where the next to read them finds them. 64 MiB in chunks
// of 1 MiB, Xeon VM with 2 MiB a core, under load, 2026-11-30: 4.8 -> 5.7 GB/s between threads, 3.7 -> 5.4 through
// shared memory; chunks of 2 MiB or more gain nothing.
constexpr int64_t kStagedCachedBytes = int64_t{1} << 20;

bool holds(const Layout& layout, int32_t rank) { return std::ranges::binary_search(layout.ranks(), rank); }

int64_t bytes_of(const Buffer& buffer) {
  int64_t bytes = buffer.item_bytes;
  for (const int64_t size : buffer.shape) bytes *= size;
  return bytes;
}

template <class Bytes>
void check_side(const char* side, const RankStorage& storage, const std::vector<std::span<Bytes>>& bound) {
  AREAL_CHECK(bound.size() == storage.buffers.size(), "Executor: expected ", storage.buffers.size(), " ", side,
              " buffers, got ", bound.size());
  for (size_t i = 0; i < bound.size(); ++i) {
    const int64_t expected = bytes_of(storage.buffers[i]);
    AREAL_CHECK(static_cast<int64_t>(bound[i].size()) == expected, "Executor: ", side, " buffer '",
                storage.buffers[i].name, "': expected ", expected, " bytes, got ", bound[i].size());
  }
}

const std::byte* source_of(const CopyPiece& piece, const MessageProgram& message, const BoundBuffers& buffers) {
  const auto index = static_cast<size_t>(piece.source_buffer);
  // What is passed on lies where it was received.
  return (message.phase == 0 ? buffers.source[index].data() : buffers.target[index].data()) + piece.source_offset;
}

std::byte* target_of(const CopyPiece& piece, const BoundBuffers& buffers) {
  return buffers.target[static_cast<size_t>(piece.target_buffer)].data() + piece.target_offset;
}

}  // namespace

Executor::Executor(std::shared_ptr<const Plan> plan, int32_t rank, std::shared_ptr<Transport> transport,
                   const ExecutorOptions& options)
    : plan_(std::move(plan)), rank_(rank), transport_(std::move(transport)), options_(options) {
  AREAL_CHECK(options.threads >= 1, "Executor: expected threads >= 1, got ", options.threads);
  AREAL_CHECK(transport_ == nullptr || transport_->rank() == rank, "Executor: expected the transport of rank ", rank,
              ", got that of rank ", transport_->rank());
  AREAL_CHECK(!options.read_back || !on_device(), "Executor: expected no read_back of device memory, got one");
  if (holds(plan_->source(), rank)) source_ = plan_->source().storage(rank);
  if (holds(plan_->target(), rank)) target_ = plan_->target().storage(rank);
  RankPlan mine = plan_->rank(rank);
  for (const Message& message : mine.sends) {
    const End from{message.phase == 0 ? &source_ : &target_, message.phase != 0};
    sends_.push_back(compile_message(plan_->target(), message, message.target, from, End{}));
    total_bytes_ += message.bytes;
  }
  for (const Message& message : mine.receives) {
    receives_.push_back(compile_message(plan_->target(), message, message.source, End{}, End{&target_, true}));
    total_bytes_ += message.bytes;
  }
  for (const Atom& atom : mine.local_copies) {
    append_pieces(plan_->target(), atom, End{&source_, false}, End{&target_, true}, local_copies_);
  }
  for (const CopyPiece& piece : local_copies_) local_bytes_ += piece.shape.bytes();
  total_bytes_ += local_bytes_;
  messages_ = std::move(mine.sends);
  stores_ = total_bytes_ >= kNonTemporalFromBytes ? Stores::kNonTemporal : Stores::kCached;
  compile_padding();
}

Executor::~Executor() = default;

void Executor::compile_padding() {
  struct Run {
    int64_t offset, bytes;
  };
  std::vector<std::vector<Run>> covered(target_.buffers.size());
  for (const Region& region : target_.regions) {
    const auto index = static_cast<size_t>(region.buffer);
    if (target_.fully_covered[index]) continue;
    const auto dims = static_cast<size_t>(region.box.dims);
    const int64_t item_bytes = target_.buffers[index].item_bytes;
    const StridedCopy shape =
        make_strided_copy(item_bytes, std::span(region.box.size).first(dims), std::span(region.strides).first(dims),
                          std::span(region.strides).first(dims));
    for_each_run(shape, [&](int64_t, int64_t at) {
      covered[index].push_back({region.offset * item_bytes + at, shape.run_bytes});
    });
  }
  for (size_t index = 0; index < covered.size(); ++index) {
    if (target_.fully_covered[index]) continue;
    std::ranges::sort(covered[index], {}, &Run::offset);
    covered[index].push_back({bytes_of(target_.buffers[index]), 0});
    int64_t end = 0;
    for (const Run& run : covered[index]) {
      if (run.offset > end) padding_.push_back({static_cast<int32_t>(index), end, run.offset - end});
      end = std::max(end, run.offset + run.bytes);
    }
  }
}

// Once it is known that the peer's buffers are in reach: copies from this rank's straight to them.
void Executor::compile_direct(size_t index) {
  Message message = std::move(messages_[index]);
  messages_[index] = {};
  if (message.chunks.empty()) return;
  const RankStorage theirs = plan_->target().storage(message.target);
  const End from{message.phase == 0 ? &source_ : &target_, message.phase != 0};
  MessageProgram program = compile_message(plan_->target(), message, message.target, from, End{&theirs, true});
  // Other threads read the rest of their messages meanwhile.
  sends_[index].chunks = std::move(program.chunks);
  sends_[index].pieces = std::move(program.pieces);
  for (const Buffer& buffer : theirs.buffers) sends_[index].target_bytes.push_back(bytes_of(buffer));
}

// Where the target buffers of a peer that has granted an update lie: nullptr for those that it does not expose. Nothing
// is written to memory of another size than the plan says.
std::vector<std::byte*> Executor::remote_buffers(int32_t peer, size_t first_exposed) const {
  const std::vector<std::span<std::byte>> exposed = transport_->remote_buffers(peer);
  std::vector<std::byte*> buffers;
  for (const MessageProgram& message : sends_) {
    if (message.peer != peer) continue;
    for (size_t i = buffers.size(); i < message.target_bytes.size(); ++i) {
      const auto here = first_exposed + i < exposed.size() ? exposed[first_exposed + i] : std::span<std::byte>{};
      if (!here.empty() && static_cast<int64_t>(here.size()) != message.target_bytes[i]) {
        throw PeerError(format_message("rank ", rank_, ": expected rank ", peer, " to expose ", message.target_bytes[i],
                                       " bytes as buffer ", first_exposed + i, ", got ", here.size()));
      }
      buffers.push_back(here.data());
    }
  }
  return buffers;
}

void Executor::check_buffers(const BoundBuffers& buffers) const {
  check_side("source", source_, buffers.source);
  check_side("target", target_, buffers.target);
}

void Executor::begin(const BoundBuffers& buffers) {
  check_buffers(buffers);
  done_bytes_.store(0, std::memory_order_relaxed);
  for (const Gap& gap : padding_) {
    std::byte* buffer = buffers.target[static_cast<size_t>(gap.buffer)].data();
    if (on_device()) {
      transport_->zero(buffer + gap.offset, gap.bytes);
    } else {
      std::memset(buffer + gap.offset, 0, static_cast<size_t>(gap.bytes));
    }
  }
  if (on_device()) transport_->finish_copies();
}

void Executor::copy_locally(const BoundBuffers& buffers, const Deadline& deadline) {
  Lookout lookout(deadline);
  for (const CopyPiece& piece : local_copies_) {
    lookout.look();
    check_cancelled();
    const std::byte* source = buffers.source[static_cast<size_t>(piece.source_buffer)].data() + piece.source_offset;
    if (on_device()) {
      transport_->copy(target_of(piece, buffers), source, piece.shape);
    } else {
      copy_strided(target_of(piece, buffers), source, piece.shape, stores_);
    }
    done_bytes_.fetch_add(piece.shape.bytes(), std::memory_order_relaxed);
  }
  if (on_device()) transport_->finish_copies();
  store_fence();
}

WireHeader Executor::header_of(const MessageProgram& message, const ChunkProgram& chunk, uint64_t epoch) const {
  WireHeader header{};
  header.type = static_cast<uint16_t>(WireType::kData);
  header.epoch = epoch;
  header.plan_digest = plan_->digest();
  header.source = static_cast<uint32_t>(rank_);
  header.target = static_cast<uint32_t>(message.peer);
  header.chunk = static_cast<uint32_t>(chunk.id);
  header.length = static_cast<uint64_t>(chunk.bytes);
  return header;
}

void Executor::check_expected(const WireHeader& header, const MessageProgram& message, const ChunkProgram& chunk,
                              uint64_t epoch) const {
  const auto check = [&](const char* field, uint64_t value, uint64_t expected) {
    if (value == expected) return;
    throw CorruptedError(format_message("rank ", rank_, ": chunk from rank ", message.peer, ": expected ", field, " = ",
                                        expected, ", got ", value));
  };
  check("type", header.type, static_cast<uint64_t>(WireType::kData));
  check("source", header.source, static_cast<uint64_t>(message.peer));
  check("target", header.target, static_cast<uint64_t>(rank_));
  check("epoch", header.epoch, epoch);
  check("plan_digest", header.plan_digest, plan_->digest());
  check("chunk", header.chunk, static_cast<uint64_t>(chunk.id));
  const bool direct = header.flags == kDirect;
  if (direct) check("flags", header.flags, transport_ != nullptr && transport_->exposes_buffers() ? kDirect : 0);
  check("length", header.length, direct ? 0 : static_cast<uint64_t>(chunk.bytes));
}

void Executor::check_checksum(const WireHeader& header, const MessageProgram& message, uint64_t hash) const {
  if (hash == header.xxh3_64) return;
  throw CorruptedError(format_message("rank ", rank_, ": chunk ", header.chunk, " from rank ", message.peer,
                                      ": expected xxh3_64 = ", header.xxh3_64, ", got ", hash));
}

uint64_t Executor::pack(const MessageProgram& message, const ChunkProgram& chunk, const BoundBuffers& buffers,
                        std::byte* packed) const {
  Packer packer(packed, chunk.bytes, chunk.bytes <= kStagedCachedBytes ? Stores::kCached : stores_);
  for (const CopyPiece& piece : message.pieces_of(chunk)) {
    packer.add(source_of(piece, message, buffers), piece.shape);
  }
  return packer.finish();
}

uint64_t Executor::move(const MessageProgram& message, const ChunkProgram& chunk, const BoundBuffers& buffers,
                        std::span<std::byte* const> remote) const {
  if (on_device()) {
    for (const CopyPiece& piece : message.pieces_of(chunk)) {
      transport_->copy(remote[static_cast<size_t>(piece.target_buffer)] + piece.target_offset,
                       source_of(piece, message, buffers), piece.shape);
    }
    transport_->finish_copies();
    return 0;
  }
  Mover mover(chunk.bytes, stores_);
  for (const CopyPiece& piece : message.pieces_of(chunk)) {
    mover.add(remote[static_cast<size_t>(piece.target_buffer)] + piece.target_offset,
              source_of(piece, message, buffers), piece.shape);
  }
  return mover.finish();
}

uint64_t Executor::unpack(const MessageProgram& message, const ChunkProgram& chunk, const BoundBuffers& buffers,
                          const std::byte* packed) const {
  Unpacker unpacker(packed, chunk.bytes, stores_);
  for (const CopyPiece& piece : message.pieces_of(chunk)) unpacker.add(target_of(piece, buffers), piece.shape);
  return unpacker.finish();
}

uint64_t Executor::hash_target(const MessageProgram& message, const ChunkProgram& chunk,
                               const BoundBuffers& buffers) const {
  Packer reader(nullptr, chunk.bytes, stores_);
  for (const CopyPiece& piece : message.pieces_of(chunk)) {
    reader.add(target_of(piece, buffers), piece.shape.reversed());
  }
  return reader.finish();
}

uint64_t Executor::pack_frame(const MessageProgram& message, const ChunkProgram& chunk, uint64_t epoch,
                              std::byte* frame, const BoundBuffers& buffers) {
  WireHeader header = header_of(message, chunk, epoch);
  header.xxh3_64 = pack(message, chunk, buffers, frame + sizeof header);
  seal_header(header);
  std::memcpy(frame, &header, sizeof header);
  done_bytes_.fetch_add(chunk.bytes, std::memory_order_relaxed);
  return header.xxh3_64;
}

uint64_t Executor::unpack_frame(const MessageProgram& message, const ChunkProgram& chunk, uint64_t epoch,
                                const std::byte* frame, const BoundBuffers& buffers) {
  WireHeader header;
  std::memcpy(&header, frame, sizeof header);
  check_header(header);
  check_expected(header, message, chunk, epoch);
  check_checksum(header, message, unpack(message, chunk, buffers, frame + sizeof header));
  done_bytes_.fetch_add(chunk.bytes, std::memory_order_relaxed);
  return header.xxh3_64;
}

TransferStats Executor::run(uint64_t epoch, const BoundBuffers& buffers, const Deadline& deadline) {
  AREAL_CHECK(transport_ != nullptr || (sends_.empty() && receives_.empty()),
              "Executor: expected a transport for the messages of rank ", rank_, ", got none");
  AREAL_CHECK(buffers.first_exposed >= 0 && buffers.first_exposed <= std::numeric_limits<uint32_t>::max(),
              "Executor: expected first_exposed >= 0, got ", buffers.first_exposed);
  check_cancelled();
  begin(buffers);
  return Update(*this, epoch, buffers, deadline).run();
}

// Of this rank among the source's, or, where it only passes on, among the target's.
size_t Executor::place_among_senders() const {
  const std::vector<int32_t>& ranks = holds(plan_->source(), rank_) ? plan_->source().ranks() : plan_->target().ranks();
  return static_cast<size_t>(std::ranges::lower_bound(ranks, rank_) - ranks.begin());
}

void Executor::check_cancelled() const {
  if (cancelled_) throw CancelledError(format_message("rank ", rank_, ": the update was cancelled"));
}

void Executor::cancel() {
  cancelled_ = true;
  if (transport_ != nullptr) transport_->cancel();
}

}  // namespace areal::reshard
