#include "reshard/transports/inproc.h"

#include <atomic>
#include <map>
#include <mutex>

#include "base/check.h"
#include "reshard/errors.h"
#include "reshard/transports/mailbox.h"
#include "reshard/transports/staging.h"

namespace areal::reshard {
namespace {

// What one endpoint has for one peer. Only the thread that sends to the peer touches it.
struct Outgoing {
  Staging staging;
  uint32_t slot = 0;
  std::atomic<int64_t> staging_bytes = 0;
};

}  // namespace

// Lives as long as any endpoint of the group does, so that a peer may always be told something.
struct InprocGroup::State {
  struct Member {
    explicit Member(int32_t rank) : mailbox(rank) {}
    Mailbox mailbox;
    std::map<int32_t, Outgoing> outgoing;
    std::mutex mutex;  // of what follows
    std::vector<std::span<std::byte>> exposed;
    bool taken = false;
  };
  std::map<int32_t, Member> members;

  Member& member(int32_t rank) {
    const auto found = members.find(rank);
    AREAL_CHECK(found != members.end(), "InprocGroup: expected a rank of the group, got ", rank);
    return found->second;
  }
};

namespace {

using State = InprocGroup::State;

class InprocTransport final : public Transport {
 public:
  InprocTransport(std::shared_ptr<State> group, int32_t rank) : group_(std::move(group)), self_(group_->member(rank)) {}
  ~InprocTransport() override { cancel(); }

  const char* name() const override { return "inproc"; }
  int32_t rank() const override { return self_.mailbox.rank(); }

  void grant(int32_t peer, const WireHeader& header) override { tell(peer, WireType::kGrant, header, {}); }
  ReceivedChunk receive(std::span<const int32_t> peers, const Deadline& deadline) override {
    return self_.mailbox.next_chunk(peers, deadline);
  }
  void release(const ReceivedChunk& chunk) override {
    tell(static_cast<int32_t>(chunk.header.source), WireType::kCredit, chunk.header, {});
  }
  bool exposes_buffers() const override { return !self_.exposed.empty(); }

  WireHeader await_grant(int32_t peer, const Deadline& deadline) override {
    return self_.mailbox.next_grant(peer, deadline);
  }
  std::vector<std::span<std::byte>> remote_buffers(int32_t peer) override {
    State::Member& member = group_->member(peer);
    const std::lock_guard lock(member.mutex);
    return member.exposed;
  }
  std::span<std::byte> acquire(int32_t peer, int64_t bytes, const Deadline& deadline) override {
    Outgoing& out = self_.outgoing.at(peer);
    out.slot = self_.mailbox.take_slot(peer, deadline);
    const std::span<std::byte> slot = out.staging.slot(out.slot, bytes);
    out.staging_bytes = out.staging.bytes();
    return slot;
  }
  void post(int32_t peer, const WireHeader& header) override {
    Outgoing& out = self_.outgoing.at(peer);
    WireHeader sent = header;
    sent.flags = out.slot;
    tell(peer, WireType::kData, sent, out.staging.slot(out.slot, static_cast<int64_t>(header.length)));
  }
  void post_direct(int32_t peer, const WireHeader& header) override {
    self_.mailbox.count_direct(peer);
    WireHeader sent = header;
    sent.flags = kDirect;
    tell(peer, WireType::kData, sent, {});
  }
  void drain(int32_t peer, const Deadline& deadline) override { self_.mailbox.drain(peer, deadline); }

  int64_t staging_bytes() const override {
    int64_t sum = 0;
    for (const auto& [peer, out] : self_.outgoing) sum += out.staging_bytes;
    return sum;
  }

  void cancel() override {
    self_.mailbox.cancel();
    for (auto& [peer, member] : group_->members) {
      if (peer != rank()) member.mailbox.lose(rank(), Loss::kGone, "its endpoint was cancelled or closed");
    }
  }

 private:
  void tell(int32_t peer, WireType type, WireHeader header, std::span<const std::byte> bytes) {
    self_.mailbox.check(peer);
    header.type = static_cast<uint16_t>(type);
    header.source = static_cast<uint32_t>(rank());
    header.target = static_cast<uint32_t>(peer);
    seal_header(header);
    group_->member(peer).mailbox.arrived(rank(), {header, bytes});
  }

  std::shared_ptr<State> group_;
  State::Member& self_;
};

}  // namespace

InprocGroup::InprocGroup(std::vector<int32_t> ranks) : state_(std::make_shared<State>()) {
  for (const int32_t rank : ranks) {
    AREAL_CHECK(state_->members.try_emplace(rank, rank).second, "InprocGroup: expected unique ranks, got ", rank,
                " twice");
  }
  for (auto& [rank, member] : state_->members) {
    for (const int32_t peer : ranks) {
      if (peer == rank) continue;
      member.mailbox.add_peer(peer);
      member.outgoing.try_emplace(peer);
    }
  }
}

InprocGroup::~InprocGroup() = default;

std::unique_ptr<Transport> InprocGroup::endpoint(int32_t rank, std::vector<std::span<std::byte>> exposed) {
  State::Member& member = state_->member(rank);
  const std::lock_guard lock(member.mutex);
  AREAL_CHECK(!member.taken, "InprocGroup: expected one endpoint of rank ", rank, ", got a second");
  member.taken = true;
  member.exposed = std::move(exposed);
  return std::make_unique<InprocTransport>(state_, rank);
}

}  // namespace areal::reshard
