// Ranks that are processes with GPUs of one machine: headers over Unix sockets, bytes from device to device by the copy
// engines, straight into buffers that the receiver has exposed through CUDA IPC. Nothing is staged, so all target
// buffers must be exposed; no checksum is taken (the bytes never pass a CPU).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "reshard/transports/socket_endpoint.h"

namespace areal::reshard {

// exposed: device memory of this rank, of allocations that CUDA IPC can share (cudaMalloc, not virtual memory
// management). device: whose copy engines are used. Throws areal::Error with CUDA's text.
std::shared_ptr<SocketEndpoint> make_cuda_ipc_transport(int32_t rank, std::vector<std::byte> token,
                                                        const std::vector<std::span<std::byte>>& exposed, int device);

}  // namespace areal::reshard
