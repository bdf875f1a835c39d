#include "reshard/transports/mailbox.h"

#include <algorithm>
#include <chrono>

#include "reshard/errors.h"

namespace areal::reshard {
namespace {

std::string ranks_text(std::span<const int32_t> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  constexpr size_t kMost = 8;
  for (size_t i = 0; i < std::min(ranks.size(), kMost); ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return ranks.size() > kMost ? text + ", ..." : text;
}

}  // namespace

void Mailbox::add_peer(int32_t peer) {
  const std::lock_guard lock(mutex_);
  Peer& entry = peers_[peer];
  for (uint32_t slot = kChunksInFlight; slot-- > 0;) entry.free_slots.push_back(slot);
}

void Mailbox::arrived(int32_t peer, const ReceivedChunk& message) {
  const WireHeader& header = message.header;
  if (header.source != static_cast<uint32_t>(peer) || header.target != static_cast<uint32_t>(rank_)) {
    throw CorruptedError(format_message("rank ", rank_, ": expected a header from ", peer, " to ", rank_,
                                        ", got one from ", header.source, " to ", header.target));
  }
  const std::lock_guard lock(mutex_);
  switch (static_cast<WireType>(header.type)) {
    case WireType::kData:
      chunks_.push_back(message);
      break;
    case WireType::kGrant:
      peer_locked(peer).grants.push_back(header);
      break;
    case WireType::kCredit:
      if (take_credit(peer_locked(peer), header.flags)) break;
      throw CorruptedError(format_message("rank ", rank_, ": expected credits for chunks in flight to rank ", peer,
                                          ", got one for ", header.flags));
    default:
      throw CorruptedError(
          format_message("rank ", rank_, ": expected a chunk, grant or credit, got type ", header.type));
  }
  news_.notify_all();
}

bool Mailbox::take_credit(Peer& peer, uint32_t slot) {
  if (slot == kDirect) return peer.direct_in_flight-- > 0;
  if (slot >= kChunksInFlight || std::ranges::count(peer.free_slots, slot) > 0) return false;
  peer.free_slots.push_back(slot);
  return true;
}

void Mailbox::lose(int32_t peer, Loss loss, const std::string& why) {
  const std::lock_guard lock(mutex_);
  Peer& entry = peer_locked(peer);
  if (entry.lost.empty()) {
    entry.lost = why;
    entry.loss = loss;
  }
  news_.notify_all();
}

void Mailbox::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  news_.notify_all();
}

Mailbox::Peer& Mailbox::peer_locked(int32_t peer) {
  const auto found = peers_.find(peer);
  AREAL_CHECK(found != peers_.end(), "rank ", rank_, ": expected a connected peer, got rank ", peer);
  return found->second;
}

void Mailbox::check_locked(int32_t peer) const {
  if (cancelled_) throw CancelledError(format_message("rank ", rank_, ": the transport was cancelled"));
  const auto found = peers_.find(peer);
  AREAL_CHECK(found != peers_.end(), "rank ", rank_, ": expected a connected peer, got rank ", peer);
  if (found->second.lost.empty()) return;
  const std::string text = format_message("rank ", rank_, ": lost rank ", peer, ": ", found->second.lost);
  if (found->second.loss == Loss::kCorrupted) throw CorruptedError(text);
  throw PeerError(text);
}

void Mailbox::check(int32_t peer) const {
  const std::lock_guard lock(mutex_);
  check_locked(peer);
}

// What has arrived is used before the loss of its sender is noticed.
template <class Ready>
void Mailbox::wait(std::unique_lock<std::mutex>& lock, std::span<const int32_t> peers, const char* what,
                   const Deadline& deadline, const Ready& ready) {
  while (true) {
    if (!cancelled_ && ready()) return;
    for (const int32_t peer : peers) check_locked(peer);
    if (deadline.passed()) {
      throw DeadlineError(
          format_message("rank ", rank_, ": no ", what, " ", ranks_text(peers), " within ", deadline.seconds(), " s"));
    }
    // The system clock: ThreadSanitizer knows no other wait. A slice is short enough for it to jump.
    news_.wait_until(lock, std::chrono::system_clock::now() +
                               std::chrono::duration_cast<std::chrono::system_clock::duration>(deadline.left()));
    lock.unlock();
    deadline.interrupt();
    lock.lock();
  }
}

uint32_t Mailbox::take_slot(int32_t peer, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  Peer& entry = peer_locked(peer);
  check_locked(peer);
  wait(lock, {&peer, 1}, "credit from", deadline, [&] { return !entry.free_slots.empty(); });
  const uint32_t slot = entry.free_slots.back();
  entry.free_slots.pop_back();
  return slot;
}

void Mailbox::count_direct(int32_t peer) {
  const std::lock_guard lock(mutex_);
  check_locked(peer);
  ++peer_locked(peer).direct_in_flight;
}

WireHeader Mailbox::next_grant(int32_t peer, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  Peer& entry = peer_locked(peer);
  wait(lock, {&peer, 1}, "grant from", deadline, [&] { return !entry.grants.empty(); });
  const WireHeader header = entry.grants.front();
  entry.grants.pop_front();
  return header;
}

ReceivedChunk Mailbox::next_chunk(std::span<const int32_t> peers, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  wait(lock, peers, "chunk from", deadline, [&] { return !chunks_.empty(); });
  const ReceivedChunk chunk = chunks_.front();
  chunks_.pop_front();
  if (std::ranges::count(peers, static_cast<int32_t>(chunk.header.source)) == 0) {
    throw CorruptedError(format_message("rank ", rank_, ": expected chunks from ", ranks_text(peers),
                                        ", got one from rank ", chunk.header.source));
  }
  return chunk;
}

void Mailbox::drain(int32_t peer, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  const Peer& entry = peer_locked(peer);
  wait(lock, {&peer, 1}, "credit for all chunks from", deadline,
       [&] { return entry.direct_in_flight == 0 && entry.free_slots.size() == kChunksInFlight; });
}

}  // namespace areal::reshard
