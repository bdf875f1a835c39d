// areal_core._C: transports and executors of the weight transfer engine. areal_core/reshard wraps these classes; nobody
// else uses them.
#include <pybind11/stl.h>

#include <array>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "reshard/executor.h"
#include "reshard/shared_memory.h"
#if defined(AREAL_WITH_CUDA)
#include "reshard/transports/cuda_ipc.h"
#endif
#include "reshard/transports/inproc.h"
#include "reshard/transports/shm.h"
#include "reshard/transports/tcp.h"

namespace py = pybind11;

namespace areal::bind {
namespace {

using namespace reshard;

using Range = std::pair<uintptr_t, size_t>;  // address, bytes
using Exposed = std::tuple<int, int64_t, int64_t>;
using BufferTuple = std::tuple<std::string, std::string, int64_t, std::vector<int64_t>>;
using MessageTuple = std::tuple<int32_t, int32_t, std::vector<int64_t>>;  // peer, phase, bytes of each chunk

Deadline interruptible(double seconds) {
  return Deadline(seconds, [] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
}

std::vector<std::byte> token_bytes(const py::bytes& token) {
  const std::string text = token;
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

template <class Byte>
std::vector<std::span<Byte>> spans_of(const std::vector<Range>& ranges) {
  std::vector<std::span<Byte>> spans;
  for (const auto& [address, bytes] : ranges) spans.emplace_back(reinterpret_cast<Byte*>(address), bytes);
  return spans;
}

BoundBuffers bind_buffers(const std::vector<Range>& source, const std::vector<Range>& target, int64_t first_exposed) {
  return {spans_of<const std::byte>(source), spans_of<std::byte>(target), first_exposed};
}

std::shared_ptr<Transport> inproc_endpoint(InprocGroup& group, int32_t rank, const std::vector<Range>& exposed) {
  return group.endpoint(rank, spans_of<std::byte>(exposed));
}

std::shared_ptr<TcpTransport> make_tcp(int32_t rank, const py::bytes& token, const std::string& host, int port,
                                       int streams) {
  TcpOptions options;
  options.host = host;
  options.port = port;
  options.streams = streams;
  return std::make_shared<TcpTransport>(rank, token_bytes(token), options);
}

std::shared_ptr<ShmTransport> make_shm(int32_t rank, const py::bytes& token, const std::vector<Exposed>& exposed) {
  std::vector<ExposedBuffer> buffers;
  for (const auto& [fd, offset_bytes, bytes] : exposed) buffers.push_back({fd, offset_bytes, bytes});
  return std::make_shared<ShmTransport>(rank, token_bytes(token), buffers);
}

std::shared_ptr<SocketEndpoint> make_cuda_ipc([[maybe_unused]] int32_t rank, [[maybe_unused]] const py::bytes& token,
                                              [[maybe_unused]] const std::vector<Range>& exposed,
                                              [[maybe_unused]] int device) {
#if defined(AREAL_WITH_CUDA)
  return make_cuda_ipc_transport(rank, token_bytes(token), spans_of<std::byte>(exposed), device);
#else
  throw Error("CudaIpcTransport: expected a build with CUDA, got one without");
#endif
}

void connect(SocketEndpoint& endpoint, const std::map<int32_t, std::string>& addresses, double timeout) {
  const py::gil_scoped_release unlocked;
  endpoint.connect(addresses, interruptible(timeout));
}

std::unique_ptr<Executor> make_executor(const std::shared_ptr<Plan>& plan, int32_t rank,
                                        const std::shared_ptr<Transport>& transport, int threads, bool read_back,
                                        bool allow_direct) {
  const py::gil_scoped_release unlocked;
  return std::make_unique<Executor>(plan, rank, transport, ExecutorOptions{threads, read_back, allow_direct});
}

TransferStats run(Executor& executor, uint64_t epoch, const BoundBuffers& buffers, double timeout) {
  const py::gil_scoped_release unlocked;
  return executor.run(epoch, buffers, interruptible(timeout));
}

void begin(Executor& executor, const BoundBuffers& buffers) {
  const py::gil_scoped_release unlocked;
  executor.begin(buffers);
}

uint64_t pack_frame(Executor& executor, size_t message, size_t chunk, uint64_t epoch, uintptr_t frame,
                    const BoundBuffers& buffers) {
  const py::gil_scoped_release unlocked;
  const MessageProgram& sent = executor.sends().at(message);
  return executor.pack_frame(sent, sent.chunks.at(chunk), epoch, reinterpret_cast<std::byte*>(frame), buffers);
}

uint64_t unpack_frame(Executor& executor, size_t message, size_t chunk, uint64_t epoch, uintptr_t frame,
                      const BoundBuffers& buffers) {
  const py::gil_scoped_release unlocked;
  const MessageProgram& received = executor.receives().at(message);
  return executor.unpack_frame(received, received.chunks.at(chunk), epoch, reinterpret_cast<const std::byte*>(frame),
                               buffers);
}

void copy_locally(Executor& executor, const BoundBuffers& buffers) {
  const py::gil_scoped_release unlocked;
  executor.copy_locally(buffers, interruptible(std::numeric_limits<double>::infinity()));
}

// Rows from one address to another, as executors copy them: for benches. Returns the checksum, 0 without one.
uint64_t copy_rows(uintptr_t target, uintptr_t source, int64_t run_bytes, int64_t count, int64_t target_stride,
                   int64_t source_stride, bool checksum) {
  const py::gil_scoped_release unlocked;
  auto* to = reinterpret_cast<std::byte*>(target);
  const auto* from = reinterpret_cast<const std::byte*>(source);
  const std::array<int64_t, 2> sizes{count, run_bytes}, from_strides{source_stride, 1}, to_strides{target_stride, 1};
  const StridedCopy shape = make_strided_copy(1, sizes, from_strides, to_strides);
  if (checksum && target_stride == run_bytes) {
    Packer packer(to, shape.bytes(), Stores::kNonTemporal);
    packer.add(from, shape);
    return packer.finish();
  }
  if (checksum && source_stride == run_bytes) {
    Unpacker unpacker(from, shape.bytes(), Stores::kNonTemporal);
    unpacker.add(to, shape);
    return unpacker.finish();
  }
  if (checksum) {
    Mover mover(shape.bytes(), Stores::kNonTemporal);
    mover.add(to, from, shape);
    return mover.finish();
  }
  copy_strided(to, from, shape, Stores::kNonTemporal);
  store_fence();
  return 0;
}

std::vector<MessageTuple> message_tuples(const std::vector<MessageProgram>& messages) {
  std::vector<MessageTuple> tuples;
  for (const MessageProgram& message : messages) {
    std::vector<int64_t> chunks;
    for (const ChunkProgram& chunk : message.chunks) chunks.push_back(chunk.bytes);
    tuples.emplace_back(message.peer, message.phase, std::move(chunks));
  }
  return tuples;
}

std::vector<BufferTuple> buffer_tuples(const RankStorage& storage) {
  std::vector<BufferTuple> tuples;
  for (const Buffer& b : storage.buffers) tuples.emplace_back(b.name, b.dtype, b.item_bytes, b.shape);
  return tuples;
}

// Shared memory as a Python buffer that keeps it mapped.
class SharedArea {
 public:
  explicit SharedArea(int64_t bytes)
      : memory_(SharedMemory::create("areal-tensors", bytes)), mapping_(memory_.map(0, bytes, Access::kReadWrite)) {
    mapping_.prefault();
  }
  int fd() const { return memory_.fd(); }
  py::buffer_info buffer() const {
    return {mapping_.data(), 1, "B", 1, {mapping_.size_bytes()}, {py::ssize_t{1}}, false};
  }

 private:
  SharedMemory memory_;
  Mapping mapping_;
};

void register_transports(py::module_& m) {
  py::class_<SharedArea>(m, "SharedArea", py::buffer_protocol())
      .def(py::init<int64_t>(), py::arg("bytes"))
      .def_property_readonly("fd", &SharedArea::fd)
      .def_buffer(&SharedArea::buffer);

  py::class_<Transport, std::shared_ptr<Transport>>(m, "Transport")
      .def_property_readonly("name", &Transport::name)
      .def_property_readonly("rank", &Transport::rank)
      .def_property_readonly("exposes_buffers", &Transport::exposes_buffers)
      .def_property_readonly("staging_bytes", &Transport::staging_bytes)
      .def("cancel", &Transport::cancel);
  py::class_<InprocGroup>(m, "InprocGroup")
      .def(py::init<std::vector<int32_t>>(), py::arg("ranks"))
      .def("endpoint", &inproc_endpoint, py::arg("rank"), py::arg("exposed"));
  py::class_<SocketEndpoint, Transport, std::shared_ptr<SocketEndpoint>>(m, "SocketEndpoint")
      .def_property_readonly("address", &SocketEndpoint::address)
      .def("connect", &connect, py::arg("addresses"), py::arg("timeout"));
  py::class_<TcpTransport, SocketEndpoint, std::shared_ptr<TcpTransport>>(m, "TcpTransport")
      .def(py::init(&make_tcp), py::arg("rank"), py::arg("token"), py::arg("host"), py::arg("port"),
           py::arg("streams"));
  m.def("cuda_ipc_transport", &make_cuda_ipc, py::arg("rank"), py::arg("token"), py::arg("exposed"), py::arg("device"));
  py::class_<ShmTransport, SocketEndpoint, std::shared_ptr<ShmTransport>>(m, "ShmTransport")
      .def(py::init(&make_shm), py::arg("rank"), py::arg("token"), py::arg("exposed"));
}

}  // namespace

void register_reshard_executor(py::module_& m) {
  register_transports(m);
  py::class_<BoundBuffers>(m, "BoundBuffers")
      .def(py::init(&bind_buffers), py::arg("source"), py::arg("target"), py::arg("first_exposed"));
  py::class_<TransferStats>(m, "TransferStats")
      .def_readonly("epoch", &TransferStats::epoch)
      .def_readonly("seconds", &TransferStats::seconds)
      .def_readonly("sent_bytes", &TransferStats::sent_bytes)
      .def_readonly("received_bytes", &TransferStats::received_bytes)
      .def_readonly("local_bytes", &TransferStats::local_bytes)
      .def_readonly("direct_bytes", &TransferStats::direct_bytes)
      .def_readonly("staging_bytes", &TransferStats::staging_bytes)
      .def_readonly("sent_checksum", &TransferStats::sent_checksum)
      .def_readonly("received_checksum", &TransferStats::received_checksum);
  py::class_<Executor>(m, "Executor")
      .def(py::init(&make_executor), py::arg("plan"), py::arg("rank"), py::arg("transport"), py::arg("threads"),
           py::arg("read_back"), py::arg("allow_direct"))
      .def_property_readonly("source_buffers", [](const Executor& e) { return buffer_tuples(e.source_storage()); })
      .def_property_readonly("target_buffers", [](const Executor& e) { return buffer_tuples(e.target_storage()); })
      .def_property_readonly("sends", [](const Executor& e) { return message_tuples(e.sends()); })
      .def_property_readonly("receives", [](const Executor& e) { return message_tuples(e.receives()); })
      .def_property_readonly("plan_digest", &Executor::plan_digest)
      .def_property_readonly("local_bytes", &Executor::local_bytes)
      .def_property_readonly("done_bytes", &Executor::done_bytes)
      .def_property_readonly("total_bytes", &Executor::total_bytes)
      .def("run", &run, py::arg("epoch"), py::arg("buffers"), py::arg("timeout"))
      .def("cancel", &Executor::cancel)
      .def("begin", &begin, py::arg("buffers"))
      .def("copy_locally", &copy_locally, py::arg("buffers"))
      .def("pack_frame", &pack_frame, py::arg("message"), py::arg("chunk"), py::arg("epoch"), py::arg("frame"),
           py::arg("buffers"))
      .def("unpack_frame", &unpack_frame, py::arg("message"), py::arg("chunk"), py::arg("epoch"), py::arg("frame"),
           py::arg("buffers"));
  m.def("copy_rows", &copy_rows, py::arg("target"), py::arg("source"), py::arg("run_bytes"), py::arg("count"),
        py::arg("target_stride"), py::arg("source_stride"), py::arg("checksum"));
  m.attr("WIRE_HEADER_BYTES") = sizeof(WireHeader);
}

}  // namespace areal::bind
