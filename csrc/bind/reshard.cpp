// areal_core._C: the weight transfer engine. areal_core/reshard wraps these classes; nobody else uses them.
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bind/bind.h"
#include "reshard/errors.h"
#include "reshard/version_store.h"

namespace py = pybind11;

namespace areal::bind {
namespace {

using namespace reshard;

// The bytes of one arena as a Python buffer, which keeps alive what it came from: a publication's memory, or a pin
// (so that tensors made from it are not overwritten while they live, unless the pin is released by name). A pin's
// memory is mapped read-only; the buffer says "writable" all the same, since torch knows no read-only tensors and
// would warn.
struct ArenaView {
  std::shared_ptr<const void> owner;
  std::byte* data;
  int64_t bytes;

  py::buffer_info buffer() const { return {data, 1, "B", 1, {bytes}, {py::ssize_t{1}}, false}; }
};

using SpecTuple = std::tuple<std::string, std::string, int64_t, std::vector<int64_t>>;

Deadline interruptible(double seconds) {
  return Deadline(seconds, [] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
}

VersionStore create(const std::vector<SpecTuple>& specs, int64_t chunk_bytes) {
  std::vector<TensorSpec> tensors;
  for (const auto& [name, dtype, item_bytes, shape] : specs) tensors.push_back({name, dtype, item_bytes, shape});
  const py::gil_scoped_release unlocked;
  return VersionStore::create(ArenaLayout(std::move(tensors)), chunk_bytes);
}

VersionStore attach(int fd) {
  const py::gil_scoped_release unlocked;
  return VersionStore::attach(fd);
}

std::vector<SpecTuple> specs_of(const VersionStore& store) {
  std::vector<SpecTuple> specs;
  for (const TensorSpec& s : store.layout().tensors()) specs.emplace_back(s.name, s.dtype, s.item_bytes, s.shape);
  return specs;
}

std::vector<int64_t> offsets_of(const VersionStore& store) {
  std::vector<int64_t> offsets;
  for (int64_t i = 0; i < store.layout().count(); ++i) offsets.push_back(store.layout().offset_bytes(i));
  return offsets;
}

Pin pin(const VersionStore& store, double timeout) {
  const py::gil_scoped_release unlocked;
  return store.pin(interruptible(timeout));
}

int64_t wait(const VersionStore& store, int64_t version, double timeout) {
  const py::gil_scoped_release unlocked;
  return store.wait(version, interruptible(timeout));
}

Publication begin(const VersionStore& store, int64_t version, bool allow_rollback, double timeout) {
  const py::gil_scoped_release unlocked;
  return store.begin(version, allow_rollback ? VersionOrder::kAnyOrder : VersionOrder::kIncreasing,
                     interruptible(timeout));
}

void write(Publication& publication, const std::vector<uintptr_t>& addresses, int64_t first_chunk, int64_t end_chunk) {
  std::vector<const std::byte*> sources;
  for (const uintptr_t address : addresses) sources.push_back(reinterpret_cast<const std::byte*>(address));
  const py::gil_scoped_release unlocked;
  publication.write(sources, {first_chunk, end_chunk});
}

void seal(Publication& publication, const std::vector<int64_t>& tensors) {
  const py::gil_scoped_release unlocked;
  for (const int64_t tensor : tensors) publication.seal(tensor);
}

void commit(Publication& publication, bool read_back, bool checksums) {
  const py::gil_scoped_release unlocked;
  publication.commit(read_back ? Verify::kReadBack : Verify::kNo,
                     checksums ? Checksums::kRequired : Checksums::kOptional);
}

void verify(const Pin& pin) {
  const py::gil_scoped_release unlocked;
  pin.verify();
}

void copy_to(const Pin& pin, const std::vector<uintptr_t>& addresses, bool verify) {
  std::vector<std::byte*> targets;
  for (const uintptr_t address : addresses) targets.push_back(reinterpret_cast<std::byte*>(address));
  const py::gil_scoped_release unlocked;
  verify ? pin.copy_to(targets) : pin.copy_unverified_to(targets);
}

void translate(std::exception_ptr error) {
  const auto raise = [](const char* name, const std::exception& e) {
    py::set_error(py::module_::import("areal_core.errors").attr(name), e.what());
  };
  try {
    std::rethrow_exception(error);
  } catch (const DeadlineError& e) {
    raise("DeadlineError", e);
  } catch (const CorruptedError& e) {
    raise("CorruptedError", e);
  } catch (const PeerError& e) {
    raise("PeerError", e);
  } catch (const CancelledError& e) {
    raise("CancelledError", e);
  }
}

}  // namespace

void register_reshard(py::module_& m) {
  py::register_local_exception_translator(&translate);

  py::class_<ArenaView>(m, "ArenaView", py::buffer_protocol()).def_buffer(&ArenaView::buffer);

  py::class_<Pin, std::shared_ptr<Pin>>(m, "Pin")
      .def_property_readonly("version", &Pin::version)
      .def_property_readonly("epoch", &Pin::epoch)
      .def("arena",
           [](const std::shared_ptr<Pin>& pin) {
             return ArenaView{pin, const_cast<std::byte*>(pin->arena()), pin->memory().layout().arena_bytes()};
           })
      .def_property_readonly("has_checksums", &Pin::has_checksums)
      .def_property_readonly("content_digest", &Pin::content_digest)
      .def("verify", &verify)
      .def("copy_to", &copy_to, py::arg("addresses"), py::arg("verify"))
      .def("release", &Pin::release);

  py::class_<Publication>(m, "Publication")
      .def_property_readonly("epoch", &Publication::epoch)
      .def("arena",
           [](const Publication& p) { return ArenaView{p.memory(), p.arena(), p.memory()->layout().arena_bytes()}; })
      .def("write", &write, py::arg("addresses"), py::arg("first_chunk"), py::arg("end_chunk"))
      .def("seal", &seal, py::arg("tensors"))
      .def("seal_rest", &Publication::seal_rest, py::call_guard<py::gil_scoped_release>())
      .def("content_digest", &Publication::content_digest)
      .def("commit", &commit, py::arg("read_back"), py::arg("checksums"))
      .def("abort", &Publication::abort);

  py::class_<VersionStore>(m, "VersionStore")
      .def_static("create", &create, py::arg("specs"), py::arg("chunk_bytes"))
      .def_static("attach", &attach, py::arg("fd"))
      .def_property_readonly("fd", &VersionStore::fd)
      .def_property_readonly("specs", &specs_of)
      .def_property_readonly("offsets_bytes", &offsets_of)
      .def_property_readonly("payload_bytes", [](const VersionStore& s) { return s.layout().payload_bytes(); })
      .def_property_readonly("wire_bytes", [](const VersionStore& s) { return s.plan().payload_bytes; })
      .def_property_readonly("bound_bytes", [](const VersionStore& s) { return s.plan().payload_bytes; })
      .def_property_readonly("digest", [](const VersionStore& s) { return s.plan().digest; })
      .def_property_readonly("chunks", [](const VersionStore& s) { return s.plan().chunks.size(); })
      .def("arena_offset_bytes", &VersionStore::arena_offset_bytes, py::arg("arena"))
      .def("version", &VersionStore::version)
      .def("epoch", &VersionStore::epoch)
      .def("wait", &wait, py::arg("version"), py::arg("timeout"))
      .def("pin", &pin, py::arg("timeout"))
      .def("begin", &begin, py::arg("version"), py::arg("allow_rollback"), py::arg("timeout"));
}

}  // namespace areal::bind
