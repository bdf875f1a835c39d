#include "reshard/layout.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "reshard/xxh3.h"

namespace areal::reshard {
namespace {

std::string of(const TensorLayout& tensor) { return "reshard: tensor '" + tensor.spec.name + "': "; }

void check_bound(const TensorLayout& tensor, const char* name, int64_t value) {
  AREAL_CHECK(value >= 0 && value <= kMaxStorageElements, of(tensor), "expected storage with ", name,
              " in [0, 2^56] elements, got ", value);
}

// What does not depend on the rank.
void check_storage(const TensorLayout& tensor) {
  const Storage& storage = tensor.storage;
  check_bound(tensor, "offset", storage.offset);
  check_bound(tensor, "group_rows", storage.group_rows);
  check_bound(tensor, "group_stride", storage.group_stride);
  for (const int64_t stride : storage.strides) check_bound(tensor, "strides", stride);
  if (storage.buffer_shape) {
    check_spec({tensor.spec.name, tensor.spec.dtype, tensor.spec.item_bytes, *storage.buffer_shape});
    TensorSpec{tensor.spec.name, tensor.spec.dtype, tensor.spec.item_bytes, *storage.buffer_shape}.bytes();
  }
  AREAL_CHECK(storage.strides.empty() || storage.strides.size() == tensor.spec.shape.size(), of(tensor),
              "expected storage with ", tensor.spec.shape.size(), " strides, one for each dimension, got ",
              storage.strides.size());
  AREAL_CHECK(storage.group_rows > 0 || storage.group_stride == 0, of(tensor),
              "expected storage without group_stride where group_rows is 0, got ", storage.group_stride);
  AREAL_CHECK(storage.group_rows == 0 || !tensor.spec.shape.empty(), of(tensor),
              "expected no groups of rows in a scalar, got ", storage.group_rows);
  for (const Placement& placement : tensor.placements) {
    const auto* flat = std::get_if<Flat>(&placement);
    if (flat == nullptr && !std::holds_alternative<Ragged>(placement)) continue;
    AREAL_CHECK(storage.strides.empty() && storage.group_rows == 0, of(tensor),
                "expected storage without strides and groups for a Flat or Ragged tensor, got some");
    AREAL_CHECK(flat == nullptr || flat->offset == 0 || storage.buffer_shape, of(tensor),
                "expected storage with the buffer_shape of a Flat tensor that has an offset, got none");
  }
}

// Values and byte strings one behind the other, for the digest.
class Bytes {
 public:
  void add(int64_t value) { text_.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void add(std::string_view text) {
    add(static_cast<int64_t>(text.size()));
    text_ += text;
  }
  void add(std::span<const int64_t> values) {
    add(static_cast<int64_t>(values.size()));
    for (const int64_t value : values) add(value);
  }
  uint64_t digest() const { return xxh3_64(text_.data(), text_.size()); }

 private:
  std::string text_;
};

void add_placement(Bytes& bytes, const Placement& placement) {
  bytes.add(static_cast<int64_t>(placement.index()));
  if (const auto* shard = std::get_if<Shard>(&placement)) {
    bytes.add(shard->dim);
    bytes.add(shard->chunk);
  } else if (const auto* strided = std::get_if<StridedShard>(&placement)) {
    bytes.add(strided->dim);
    bytes.add(strided->split_factor);
    bytes.add(strided->chunk);
  } else if (const auto* flat = std::get_if<Flat>(&placement)) {
    bytes.add(flat->chunk);
    bytes.add(flat->offset);
  } else if (const auto* ragged = std::get_if<Ragged>(&placement)) {
    bytes.add(static_cast<int64_t>(ragged->boxes.size()));
    for (const std::vector<Box>& boxes : ragged->boxes) {
      bytes.add(static_cast<int64_t>(boxes.size()));
      for (const Box& box : boxes) {
        bytes.add({box.start.data(), static_cast<size_t>(box.dims)});
        bytes.add({box.size.data(), static_cast<size_t>(box.dims)});
      }
    }
  }
}

int64_t mesh_digest(const Mesh& mesh) {
  Bytes bytes;
  for (const int32_t rank : mesh.ranks()) bytes.add(rank);
  bytes.add(mesh.shape());
  for (const std::string& name : mesh.dim_names()) bytes.add(name);
  return static_cast<int64_t>(bytes.digest());
}

void add_tensor(Bytes& bytes, const TensorLayout& tensor, int64_t mesh) {
  bytes.add(tensor.spec.name);
  bytes.add(tensor.spec.dtype);
  bytes.add(tensor.spec.item_bytes);
  bytes.add(tensor.spec.shape);
  bytes.add(mesh);
  for (const Placement& placement : tensor.placements) add_placement(bytes, placement);
  const Storage& storage = tensor.storage;
  bytes.add(storage.buffer);
  bytes.add(storage.buffer_shape ? 1 : 0);
  if (storage.buffer_shape) bytes.add(*storage.buffer_shape);
  bytes.add(storage.offset);
  bytes.add(storage.strides);
  bytes.add(storage.group_rows);
  bytes.add(storage.group_stride);
}

}  // namespace

Layout::Layout(std::vector<Mesh> meshes, std::vector<TensorLayout> tensors)
    : meshes_(std::move(meshes)), tensors_(std::move(tensors)) {
  std::sort(tensors_.begin(), tensors_.end(), [](const auto& a, const auto& b) { return a.spec.name < b.spec.name; });
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const TensorLayout& tensor = tensors_[i];
    check_spec(tensor.spec);
    tensor.spec.bytes();
    AREAL_CHECK(i == 0 || tensor.spec.name != tensors_[i - 1].spec.name, "Layout: expected unique names, got '",
                tensor.spec.name, "' twice");
    AREAL_CHECK(tensor.mesh >= 0 && static_cast<size_t>(tensor.mesh) < meshes_.size(), of(tensor), "expected one of ",
                meshes_.size(), " meshes, got mesh ", tensor.mesh);
    check_placements(tensor.spec.name, tensor.spec.shape, meshes_[static_cast<size_t>(tensor.mesh)], tensor.placements);
    check_storage(tensor);
  }
  sort_meshes();
  number_buffers();
  collect_ranks();
  digest_ = compute_digest();
}

void Layout::sort_meshes() {
  const auto key = [](const Mesh& mesh) { return std::tie(mesh.ranks(), mesh.shape(), mesh.dim_names()); };
  std::vector<size_t> order(meshes_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(meshes_[a]) < key(meshes_[b]); });
  std::vector<Mesh> sorted;
  std::vector<int32_t> number(meshes_.size());
  for (const size_t from : order) {
    if (sorted.empty() || sorted.back() != meshes_[from]) sorted.push_back(meshes_[from]);
    number[from] = static_cast<int32_t>(sorted.size()) - 1;
  }
  for (TensorLayout& tensor : tensors_) tensor.mesh = number[static_cast<size_t>(tensor.mesh)];
  meshes_ = std::move(sorted);
}

void Layout::number_buffers() {
  std::vector<size_t> order(tensors_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto name = [this](size_t tensor) -> const std::string& { return buffer_name(tensors_[tensor]); };
  const auto by_name = [&](size_t a, size_t b) { return name(a) < name(b); };
  if (!std::is_sorted(order.begin(), order.end(), by_name)) std::sort(order.begin(), order.end(), by_name);
  buffer_ids_.resize(tensors_.size());
  for (size_t i = 0; i < order.size(); ++i) {
    if (i == 0 || name(order[i]) != name(order[i - 1])) ++buffer_count_;
    buffer_ids_[order[i]] = buffer_count_ - 1;
  }
}

void Layout::collect_ranks() {
  for (const Mesh& mesh : meshes_) ranks_.insert(ranks_.end(), mesh.ranks().begin(), mesh.ranks().end());
  std::sort(ranks_.begin(), ranks_.end());
  ranks_.erase(std::unique(ranks_.begin(), ranks_.end()), ranks_.end());
}

uint64_t Layout::compute_digest() const {
  Bytes bytes;
  std::vector<int64_t> meshes;
  for (const Mesh& mesh : meshes_) meshes.push_back(mesh_digest(mesh));
  bytes.add(meshes);
  for (const TensorLayout& tensor : tensors_) add_tensor(bytes, tensor, meshes[static_cast<size_t>(tensor.mesh)]);
  return bytes.digest();
}

std::optional<int64_t> Layout::find(std::string_view name) const {
  const auto at =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const TensorLayout& tensor, std::string_view wanted) { return tensor.spec.name < wanted; });
  if (at == tensors_.end() || at->spec.name != name) return std::nullopt;
  return at - tensors_.begin();
}

void Layout::assign_part(int64_t tensor, int64_t position, LocalPart& part) const {
  const TensorLayout& layout = tensors_[static_cast<size_t>(tensor)];
  part.assign(layout.spec.shape, meshes_[static_cast<size_t>(layout.mesh)], layout.placements, position);
}

std::vector<Box> Layout::boxes(int64_t tensor, int32_t rank) const {
  AREAL_CHECK(tensor >= 0 && tensor < count(), "Layout: expected a tensor in [0, ", count(), "), got ", tensor);
  const Mesh& mesh = meshes_[static_cast<size_t>(tensors_[static_cast<size_t>(tensor)].mesh)];
  std::vector<Box> boxes;
  if (const auto position = mesh.position_of(rank)) {
    LocalPart part;
    assign_part(tensor, *position, part);
    for (const LocalBox& local : part.boxes()) boxes.push_back(local.box);
  }
  return boxes;
}

}  // namespace areal::reshard
