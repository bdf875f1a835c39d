// areal_core._C: layouts of the weight transfer engine. areal_core/reshard wraps these classes; nobody else uses them.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "bind/bind.h"
#include "reshard/layout.h"

namespace py = pybind11;

namespace areal::bind {
namespace {

using namespace reshard;

using Sizes = std::vector<int64_t>;
using BoxTuple = std::pair<Sizes, Sizes>;  // start, size
using BufferTuple = std::tuple<std::string, std::string, int64_t, Sizes>;
using RegionTuple = std::tuple<int32_t, BoxTuple, int32_t, int64_t, Sizes>;

Box make_box(const BoxTuple& tuple) {
  const auto& [start, size] = tuple;
  AREAL_CHECK(start.size() == size.size() && start.size() <= kMaxDims, "Ragged: expected boxes of at most ", kMaxDims,
              " starts and as many sizes, got ", start.size(), " and ", size.size());
  Box box{static_cast<int>(start.size()), {}, {}};
  std::copy(start.begin(), start.end(), box.start.begin());
  std::copy(size.begin(), size.end(), box.size.begin());
  return box;
}

BoxTuple box_tuple(const Box& box) {
  return {{box.start.begin(), box.start.begin() + box.dims}, {box.size.begin(), box.size.begin() + box.dims}};
}

Ragged make_ragged(const std::vector<std::vector<BoxTuple>>& boxes) {
  Ragged ragged;
  for (const std::vector<BoxTuple>& of_rank : boxes) {
    std::vector<Box>& made = ragged.boxes.emplace_back();
    std::transform(of_rank.begin(), of_rank.end(), std::back_inserter(made), make_box);
  }
  return ragged;
}

// A tensor as a row of values, which cost Python less than objects: name, dtype, item_bytes, shape, position among the
// meshes, position among the placements, and the fields of its Storage.
using TensorRow = std::tuple<std::string, std::string, int64_t, Sizes, int32_t, size_t, std::string,
                             std::optional<Sizes>, int64_t, Sizes, int64_t, int64_t>;

std::shared_ptr<Layout> make_layout(std::vector<Mesh> meshes, const std::vector<std::vector<Placement>>& placements,
                                    std::vector<TensorRow> rows) {
  const py::gil_scoped_release unlocked;
  std::vector<TensorLayout> tensors;
  tensors.reserve(rows.size());
  for (auto& [name, dtype, item_bytes, shape, mesh, placed, buffer, buffer_shape, offset, strides, group_rows,
              group_stride] : rows) {
    tensors.push_back(
        {{std::move(name), std::move(dtype), item_bytes, std::move(shape)},
         mesh,
         placements.at(placed),
         {std::move(buffer), std::move(buffer_shape), offset, std::move(strides), group_rows, group_stride}});
  }
  return std::make_shared<Layout>(std::move(meshes), std::move(tensors));
}

std::vector<BoxTuple> boxes_of(const Layout& layout, const std::string& name, int32_t rank) {
  const auto tensor = layout.find(name);
  AREAL_CHECK(tensor, "Layout.boxes: expected a tensor of the layout, got '", name, "'");
  std::vector<BoxTuple> boxes;
  for (const Box& box : layout.boxes(*tensor, rank)) boxes.push_back(box_tuple(box));
  return boxes;
}

RankStorage storage_of(const Layout& layout, int32_t rank) {
  const py::gil_scoped_release unlocked;
  return layout.storage(rank);
}

std::vector<BufferTuple> buffers_of(const RankStorage& storage) {
  std::vector<BufferTuple> buffers;
  for (const Buffer& b : storage.buffers) buffers.emplace_back(b.name, b.dtype, b.item_bytes, b.shape);
  return buffers;
}

std::vector<RegionTuple> regions_of(const RankStorage& storage) {
  std::vector<RegionTuple> regions;
  for (const Region& r : storage.regions) {
    regions.emplace_back(r.tensor, box_tuple(r.box), r.buffer, r.offset,
                         Sizes(r.strides.begin(), r.strides.begin() + r.box.dims));
  }
  return regions;
}

}  // namespace

void register_reshard_layout(py::module_& m) {
  py::class_<Mesh>(m, "Mesh").def(py::init<std::vector<int32_t>, Sizes, std::vector<std::string>>(), py::arg("ranks"),
                                  py::arg("shape"), py::arg("dim_names"));

  py::class_<Replicate>(m, "Replicate").def(py::init<>());
  py::class_<Shard>(m, "Shard").def(py::init<int, int64_t>(), py::arg("dim"), py::arg("chunk"));
  py::class_<StridedShard>(m, "StridedShard")
      .def(py::init<int, int64_t, int64_t>(), py::arg("dim"), py::arg("split_factor"), py::arg("chunk"));
  py::class_<Flat>(m, "Flat").def(py::init<int64_t, int64_t>(), py::arg("chunk"), py::arg("offset"));
  py::class_<Ragged>(m, "Ragged").def(py::init(&make_ragged), py::arg("boxes"));

  py::class_<RankStorage>(m, "RankStorage")
      .def_property_readonly("buffers", &buffers_of)
      .def_property_readonly("regions", &regions_of)
      .def_readonly("fully_covered", &RankStorage::fully_covered);

  py::class_<Layout, std::shared_ptr<Layout>>(m, "Layout")
      .def(py::init(&make_layout), py::arg("meshes"), py::arg("placements"), py::arg("rows"))
      .def_property_readonly("digest", &Layout::digest)
      .def_property_readonly("ranks", &Layout::ranks)
      .def("boxes", &boxes_of, py::arg("name"), py::arg("rank"))
      .def("storage", &storage_of, py::arg("rank"));
}

}  // namespace areal::bind
