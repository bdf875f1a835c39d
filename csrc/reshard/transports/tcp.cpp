#include "reshard/transports/tcp.h"

#include "reshard/errors.h"

namespace areal::reshard {

TcpTransport::TcpTransport(int32_t rank, std::vector<std::byte> token, const TcpOptions& options)
    : SocketEndpoint(rank, std::move(token), options.streams, listen_tcp(options.host, options.port)),
      max_chunk_bytes_(options.max_chunk_bytes) {}

void TcpTransport::connected(int32_t peer) { peers_[peer].streams.resize(static_cast<size_t>(streams_)); }

std::span<std::byte> TcpTransport::slot_of(Staging& staging, uint32_t slot, int64_t bytes) {
  const int64_t before = staging.bytes();
  const std::span<std::byte> memory = staging.slot(slot, bytes);
  staging_bytes_ += staging.bytes() - before;
  return memory;
}

std::span<std::byte> TcpTransport::acquire(int32_t peer, int64_t bytes, const Deadline& deadline) {
  AREAL_CHECK(bytes <= max_chunk_bytes_, "TcpTransport: expected chunks of at most ", max_chunk_bytes_, " bytes, got ",
              bytes);
  const uint32_t slot = mailbox_.take_slot(peer, deadline);
  Peer& entry = peers_.at(peer);
  entry.slot = slot;
  return slot_of(entry.outgoing, slot, bytes);
}

// The peer's receiver takes chunks from the streams in the same turn.
void TcpTransport::post(int32_t peer, const WireHeader& header) {
  Peer& entry = peers_.at(peer);
  Frame frame;
  frame.header = header;
  frame.header.flags = entry.slot;
  frame.payload = entry.outgoing.slot(entry.slot, static_cast<int64_t>(header.length));
  enqueue(peer, entry.posted++ % static_cast<uint32_t>(streams_), WireType::kData, std::move(frame));
}

void TcpTransport::post_direct(int32_t peer, const WireHeader&) {
  throw Error(format_message("TcpTransport: expected chunks with bytes, got a direct one for rank ", peer));
}

std::span<std::byte> TcpTransport::payload_memory(int32_t peer, const WireHeader& header) {
  const bool is_data = header.type == static_cast<uint16_t>(WireType::kData);
  if (!is_data && header.length == 0) return {};
  if (!is_data || header.flags >= kChunksInFlight || header.length > static_cast<uint64_t>(max_chunk_bytes_)) {
    throw CorruptedError(format_message("expected at most ", max_chunk_bytes_, " bytes in slot 0 or 1, got ",
                                        header.length, " of type ", header.type, " in slot ", header.flags));
  }
  return slot_of(peers_.at(peer).incoming, header.flags, static_cast<int64_t>(header.length));
}

void TcpTransport::frame_arrived(int32_t peer, uint32_t stream, const WireHeader& header,
                                 std::span<const std::byte> payload, Fd) {
  if (header.type != static_cast<uint16_t>(WireType::kData)) return mailbox_.arrived(peer, {header, payload});
  Peer& entry = peers_.at(peer);
  entry.streams[stream].push_back({header, payload});
  while (true) {
    std::deque<ReceivedChunk>& next = entry.streams[entry.delivered % static_cast<uint32_t>(streams_)];
    if (next.empty()) return;
    mailbox_.arrived(peer, next.front());
    next.pop_front();
    ++entry.delivered;
  }
}

}  // namespace areal::reshard
