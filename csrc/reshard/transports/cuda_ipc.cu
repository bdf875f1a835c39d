#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "cuda/launch.cuh"
#include "reshard/errors.h"
#include "reshard/transports/cuda_ipc.h"

namespace areal::reshard {
namespace {

#define AREAL_CUDA_OK(call) ::areal::cuda::check(call, #call, __FILE__, __LINE__)

constexpr uint64_t kMaxTableBytes = uint64_t{64} << 20;

// As it travels: the allocation that holds the buffer, and where in it.
struct Place {
  cudaIpcMemHandle_t handle;
  uint64_t offset_bytes;
  uint64_t bytes;
};

// The first byte of the allocation that a device pointer lies in. A function of the driver, which a machine without one
// does not have: asked for when it is used.
std::byte* allocation_of(std::byte* pointer) {
  using Fn = int (*)(unsigned long long*, size_t*, unsigned long long);
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 13000
  AREAL_CUDA_OK(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &found, 12000, cudaEnableDefault, &result));
#else
  AREAL_CUDA_OK(cudaGetDriverEntryPoint("cuMemGetAddressRange", &found, cudaEnableDefault, &result));
#endif
  AREAL_CHECK(result == cudaDriverEntryPointSuccess && found != nullptr,
              "CudaIpcTransport: expected a driver with cuMemGetAddressRange, got one without");
  unsigned long long base = 0;
  const int error = reinterpret_cast<Fn>(found)(&base, nullptr, reinterpret_cast<unsigned long long>(pointer));
  AREAL_CHECK(error == 0, "CudaIpcTransport: expected exposed device memory, got CUDA driver error ", error);
  return reinterpret_cast<std::byte*>(base);
}

class CudaIpcTransport final : public SocketEndpoint {
 public:
  CudaIpcTransport(int32_t rank, std::vector<std::byte> token, const std::vector<std::span<std::byte>>& exposed,
                   int device)
      : SocketEndpoint(rank, std::move(token), 1, listen_unix()), device_(device) {
    AREAL_CUDA_OK(cudaSetDevice(device_));
    AREAL_CUDA_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (const std::span<std::byte> buffer : exposed) {
      Place place{};
      if (!buffer.empty()) {
        std::byte* base = allocation_of(buffer.data());
        AREAL_CUDA_OK(cudaIpcGetMemHandle(&place.handle, base));
        place.offset_bytes = static_cast<uint64_t>(buffer.data() - base);
        place.bytes = buffer.size();
      }
      table_.push_back(place);
    }
  }
  ~CudaIpcTransport() override {
    stop();
    cudaSetDevice(device_);
    for (auto& [peer, entry] : peers_) {
      for (auto& [handle, memory] : entry.memories) cudaIpcCloseMemHandle(memory);
    }
    cudaStreamDestroy(stream_);
  }

  const char* name() const override { return "cuda_ipc"; }
  bool exposes_buffers() const override { return !table_.empty(); }
  std::vector<std::span<std::byte>> remote_buffers(int32_t peer) override {
    const std::lock_guard lock(memory_mutex_);
    return peers_.at(peer).buffers;
  }
  std::span<std::byte> acquire(int32_t peer, int64_t, const Deadline&) override {
    throw Error(format_message("CudaIpcTransport: expected rank ", peer, " to expose all its target buffers"));
  }
  void post(int32_t peer, const WireHeader&) override { acquire(peer, 0, Deadline(0)); }
  void post_direct(int32_t peer, const WireHeader& header) override {
    mailbox_.count_direct(peer);
    Frame frame;
    frame.header = header;
    frame.header.flags = kDirect;
    enqueue(peer, 0, WireType::kData, std::move(frame));
  }
  int64_t staging_bytes() const override { return 0; }

  bool copies_itself() const override { return true; }
  void copy(std::byte* target, const std::byte* source, const StridedCopy& shape) override {
    AREAL_CUDA_OK(cudaSetDevice(device_));
    if (shape.dims == 0) return copy_rows(target, source, {static_cast<size_t>(shape.run_bytes), 1, 0, 0});
    const auto last = static_cast<size_t>(shape.dims - 1);
    const Rows rows{static_cast<size_t>(shape.run_bytes), static_cast<size_t>(shape.counts[last]),
                    shape.target_strides[last], shape.source_strides[last]};
    StridedCopy outer = shape;
    --outer.dims;
    for_each_run(outer, [&](int64_t from, int64_t to) { copy_rows(target + to, source + from, rows); });
  }
  void zero(std::byte* target, int64_t bytes) override {
    AREAL_CUDA_OK(cudaSetDevice(device_));
    AREAL_CUDA_OK(cudaMemsetAsync(target, 0, static_cast<size_t>(bytes), stream_));
  }
  void finish_copies() override { AREAL_CUDA_OK(cudaStreamSynchronize(stream_)); }

 private:
  struct Rows {
    size_t run_bytes;
    size_t count;
    int64_t target_stride;
    int64_t source_stride;
  };
  struct Peer {
    std::vector<std::byte> table;               // touched by the I/O thread
    std::map<std::string, void*> memories;      // by handle, under memory_mutex_
    std::vector<std::span<std::byte>> buffers;  // likewise
  };

  void copy_rows(std::byte* target, const std::byte* source, const Rows& rows) {
    if (rows.count == 1) {
      AREAL_CUDA_OK(cudaMemcpyAsync(target, source, rows.run_bytes, cudaMemcpyDefault, stream_));
      return;
    }
    AREAL_CUDA_OK(cudaMemcpy2DAsync(target, static_cast<size_t>(rows.target_stride), source,
                                    static_cast<size_t>(rows.source_stride), rows.run_bytes, rows.count,
                                    cudaMemcpyDefault, stream_));
  }

  void connected(int32_t peer) override {
    peers_[peer];
    if (table_.empty()) return;
    Frame frame;
    const auto bytes = std::as_bytes(std::span(table_));
    frame.owned.assign(bytes.begin(), bytes.end());
    frame.header.length = bytes.size();
    enqueue(peer, 0, WireType::kBuffers, std::move(frame));
  }
  std::span<std::byte> payload_memory(int32_t peer, const WireHeader& header) override {
    if (header.type != static_cast<uint16_t>(WireType::kBuffers)) return {};
    if (header.length > kMaxTableBytes || header.length % sizeof(Place) != 0) {
      throw CorruptedError(format_message("expected a table of buffers, got ", header.length, " bytes"));
    }
    std::vector<std::byte>& table = peers_.at(peer).table;
    table.resize(header.length);
    return table;
  }
  void frame_arrived(int32_t peer, uint32_t, const WireHeader& header, std::span<const std::byte> payload,
                     Fd) override {
    const auto type = static_cast<WireType>(header.type);
    if (type == WireType::kBuffers) return open_buffers(peers_.at(peer), payload);
    if (type == WireType::kData && header.flags != kDirect) {
      throw CorruptedError("expected chunks that were written directly, got one with bytes");
    }
    mailbox_.arrived(peer, {header, {}});
  }
  // Every allocation once, whatever the number of buffers in it.
  void open_buffers(Peer& peer, std::span<const std::byte> payload) {
    AREAL_CUDA_OK(cudaSetDevice(device_));
    const std::lock_guard lock(memory_mutex_);
    for (size_t at = 0; at < payload.size(); at += sizeof(Place)) {
      Place place;
      std::memcpy(&place, payload.data() + at, sizeof place);
      if (place.bytes == 0) {
        peer.buffers.emplace_back();
        continue;
      }
      const std::string key(reinterpret_cast<const char*>(&place.handle), sizeof place.handle);
      auto [entry, is_new] = peer.memories.try_emplace(key, nullptr);
      if (is_new) {
        AREAL_CUDA_OK(cudaIpcOpenMemHandle(&entry->second, place.handle, cudaIpcMemLazyEnablePeerAccess));
      }
      peer.buffers.emplace_back(static_cast<std::byte*>(entry->second) + place.offset_bytes, place.bytes);
    }
  }

  const int device_;
  cudaStream_t stream_ = nullptr;
  std::vector<Place> table_;
  std::map<int32_t, Peer> peers_;
  std::mutex memory_mutex_;
};

#undef AREAL_CUDA_OK

}  // namespace

std::shared_ptr<SocketEndpoint> make_cuda_ipc_transport(int32_t rank, std::vector<std::byte> token,
                                                        const std::vector<std::span<std::byte>>& exposed, int device) {
  return std::make_shared<CudaIpcTransport>(rank, std::move(token), exposed, device);
}

}  // namespace areal::reshard
