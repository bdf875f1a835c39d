#include "reshard/transports/shm.h"

#include <sys/stat.h>

#include <cstring>
#include <utility>

#include "reshard/errors.h"

namespace areal::reshard {
namespace {

constexpr uint64_t kMaxTableBytes = uint64_t{64} << 20;
// WireHeader::chunk of kMemory: a staging buffer, or memory that is exposed from here on.
constexpr uint32_t kFirstExposed = kChunksInFlight;

std::pair<dev_t, ino_t> identity_of(int fd) {
  struct stat info{};
  AREAL_CHECK(fstat(fd, &info) == 0, "ShmTransport: expected an open descriptor, got fd ", fd);
  return {info.st_dev, info.st_ino};
}

}  // namespace

ShmTransport::ShmTransport(int32_t rank, std::vector<std::byte> token, const std::vector<ExposedBuffer>& exposed)
    : SocketEndpoint(rank, std::move(token), 1, listen_unix()) {
  std::map<std::pair<dev_t, ino_t>, uint64_t> known;
  for (const ExposedBuffer& buffer : exposed) {
    const auto [entry, is_new] = known.try_emplace(identity_of(buffer.fd), exposed_.size());
    if (is_new) exposed_.push_back(SharedMemory::attach(buffer.fd));
    const int64_t size = exposed_[entry->second].size_bytes();
    AREAL_CHECK(buffer.offset_bytes >= 0 && buffer.bytes >= 0 && buffer.offset_bytes <= size &&
                    buffer.bytes <= size - buffer.offset_bytes,
                "ShmTransport: expected a buffer within ", size, " bytes of shared memory, got ", buffer.bytes, " at ",
                buffer.offset_bytes);
    table_.push_back({entry->second, static_cast<uint64_t>(buffer.offset_bytes), static_cast<uint64_t>(buffer.bytes)});
  }
}

void ShmTransport::connected(int32_t peer) {
  peers_[peer];
  for (size_t i = 0; i < exposed_.size(); ++i) {
    Frame memory;
    memory.header.chunk = kFirstExposed + static_cast<uint32_t>(i);
    memory.fd = exposed_[i].fd();
    enqueue(peer, 0, WireType::kMemory, std::move(memory));
  }
  if (table_.empty()) return;
  Frame table;
  const auto bytes = std::as_bytes(std::span(table_));
  table.owned.assign(bytes.begin(), bytes.end());
  table.header.length = bytes.size();
  enqueue(peer, 0, WireType::kBuffers, std::move(table));
}

std::vector<std::span<std::byte>> ShmTransport::remote_buffers(int32_t peer) {
  const std::lock_guard lock(memory_mutex_);
  return peers_.at(peer).buffers;
}

// Memory that fits is used again; a larger chunk gets new memory, of which the peer hears first.
std::span<std::byte> ShmTransport::acquire(int32_t peer, int64_t bytes, const Deadline& deadline) {
  const uint32_t index = mailbox_.take_slot(peer, deadline);
  Peer& entry = peers_.at(peer);
  entry.slot = index;
  Slot& slot = entry.outgoing[index];
  if (!slot.memory || slot.memory->size_bytes() < bytes) {
    const int64_t before = slot.memory ? slot.memory->size_bytes() : 0;
    slot.mapping = Mapping();
    slot.memory.reset();
    slot.memory.emplace(SharedMemory::create("areal-staging", std::max<int64_t>(bytes, 1)));
    slot.mapping = slot.memory->map(0, slot.memory->size_bytes(), Access::kReadWrite);
    slot.mapping.prefault();
    staging_bytes_ += slot.memory->size_bytes() - before;
    Frame memory;
    memory.header.chunk = index;
    memory.fd = slot.memory->fd();
    enqueue(peer, 0, WireType::kMemory, std::move(memory));
  }
  return {slot.mapping.data(), static_cast<size_t>(bytes)};
}

void ShmTransport::post(int32_t peer, const WireHeader& header) {
  Frame frame;
  frame.header = header;
  frame.header.flags = peers_.at(peer).slot;
  enqueue(peer, 0, WireType::kData, std::move(frame));
}

void ShmTransport::post_direct(int32_t peer, const WireHeader& header) {
  mailbox_.count_direct(peer);
  Frame frame;
  frame.header = header;
  frame.header.flags = kDirect;
  enqueue(peer, 0, WireType::kData, std::move(frame));
}

std::span<std::byte> ShmTransport::payload_memory(int32_t peer, const WireHeader& header) {
  if (header.type != static_cast<uint16_t>(WireType::kBuffers)) return {};
  if (header.length > kMaxTableBytes || header.length % sizeof(Place) != 0) {
    throw CorruptedError(format_message("expected a table of buffers, got ", header.length, " bytes"));
  }
  std::vector<std::byte>& table = peers_.at(peer).table;
  table.resize(header.length);
  return table;
}

void ShmTransport::frame_arrived(int32_t peer, uint32_t, const WireHeader& header, std::span<const std::byte> payload,
                                 Fd fd) {
  Peer& entry = peers_.at(peer);
  const auto type = static_cast<WireType>(header.type);
  if (type == WireType::kMemory) return take_memory(entry, header, fd);
  if (type == WireType::kBuffers) return take_table(entry, payload);
  if (type != WireType::kData || header.flags == kDirect) return mailbox_.arrived(peer, {header, {}});
  if (header.flags >= kChunksInFlight || header.length > entry.incoming[header.flags].size_bytes()) {
    throw CorruptedError(format_message("expected a chunk within its staging buffer, got ", header.length,
                                        " bytes in slot ", header.flags));
  }
  mailbox_.arrived(peer, {header, {entry.incoming[header.flags].data(), header.length}});
}

void ShmTransport::take_memory(Peer& peer, const WireHeader& header, const Fd& fd) {
  if (!fd) throw CorruptedError("expected a descriptor of shared memory, got none");
  const SharedMemory memory = SharedMemory::attach(fd.get());
  const bool is_staging = header.chunk < kFirstExposed;
  Mapping mapping = memory.map(0, memory.size_bytes(), is_staging ? Access::kRead : Access::kReadWrite);
  mapping.prefault();
  if (is_staging) {
    peer.incoming[header.chunk] = std::move(mapping);
    return;
  }
  const std::lock_guard lock(memory_mutex_);
  peer.memories.push_back(std::move(mapping));
}

void ShmTransport::take_table(Peer& peer, std::span<const std::byte> payload) {
  const std::lock_guard lock(memory_mutex_);
  peer.buffers.clear();
  for (size_t at = 0; at < payload.size(); at += sizeof(Place)) {
    Place place;
    std::memcpy(&place, payload.data() + at, sizeof place);
    const uint64_t size = place.memory < peer.memories.size() ? peer.memories[place.memory].size_bytes() : 0;
    if (place.offset_bytes > size || place.bytes > size - place.offset_bytes) {
      throw CorruptedError(format_message("expected a buffer within ", size, " bytes of shared memory, got ",
                                          place.bytes, " at ", place.offset_bytes));
    }
    peer.buffers.emplace_back(peer.memories[place.memory].data() + place.offset_bytes, place.bytes);
  }
}

}  // namespace areal::reshard
