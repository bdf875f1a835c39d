// Which rank holds what of a model, and where in its storage. One Layout describes one side: all trainer ranks, or all
// generator ranks. Both sides speak of canonical tensors (Hugging Face names and shapes); what is fused, interleaved,
// padded or renamed in a rank's storage is described by Storage, which the planner does not need: it works on canonical
// boxes, the executor alone on storage.
//
// A pure value: the same tensors in any order give the same digest in every process. Regions of all ranks are never
// held at once (DeepSeek-V3 on 256 ranks has 11.6 million); they are made for one rank when asked.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/box.h"
#include "reshard/mesh.h"
#include "reshard/placement.h"
#include "reshard/tensor_spec.h"

namespace areal::reshard {

// Where the local part of a canonical tensor lies in a rank's storage. The local index space is that of local_boxes():
// boxes side by side. With everything at its default the part is a contiguous buffer of its own, named like the tensor.
//
// Example: vLLM's qkv_proj on one rank is [q | k | v] rows of one buffer; k has offset = q_rows * hidden. Megatron's
// linear_qkv has, for each group of heads, q rows, then k, then v: q has group_rows = q_per_group * head_dim and
// group_stride = (q_per_group + 2) * head_dim * hidden.
//
// Flat and Ragged parts are flat: they take neither strides nor groups. A Flat part lies in its rank's window
// [i c, (i + 1) c) of the longer flat buffer; at an offset of that buffer it needs buffer_shape.
struct Storage {
  // The rank's own name of the buffer; empty: the canonical name.
  std::string buffer = {};
  // Of the rank's buffer, padding and neighbours included; nullopt: the local shape.
  std::optional<std::vector<int64_t>> buffer_shape = {};
  int64_t offset = 0;                 // elements; where local element 0 lies
  std::vector<int64_t> strides = {};  // elements, per dimension of the tensor; empty: row-major in the local shape
  int64_t group_rows = 0;             // rows (dim 0) of one group; 0: all rows are one group
  int64_t group_stride = 0;           // elements from the first row of one group to that of the next

  bool operator==(const Storage&) const = default;
};

// Bounds of offset, strides and group_stride.
inline constexpr int64_t kMaxStorageElements = int64_t{1} << 56;

struct TensorLayout {
  TensorSpec spec;                    // canonical
  int32_t mesh = 0;                   // position in Layout::meshes(): the ranks that hold any of this tensor
  std::vector<Placement> placements;  // one per dimension of the mesh
  Storage storage = {};

  bool operator==(const TensorLayout&) const = default;
};

// One local tensor of a rank, contiguous row-major: what the owner of the rank binds memory to. A rank of a tensor's
// mesh has its buffer even where it holds no element of it.
struct Buffer {
  std::string name;
  std::string dtype;
  int64_t item_bytes;
  std::vector<int64_t> shape;

  bool operator==(const Buffer&) const = default;
};

// A box of a canonical tensor that lies in a buffer with constant strides: element i of the box (coordinates relative
// to box.start) is buffer element offset + sum_d i_d strides[d].
struct Region {
  int32_t tensor;  // position in Layout::tensors()
  Box box;
  int32_t buffer;  // position in RankStorage::buffers
  int64_t offset;
  std::array<int64_t, kMaxDims> strides;  // entries from box.dims on are 0
};

struct RankStorage {
  std::vector<Buffer> buffers;  // sorted by name
  std::vector<Region> regions;  // sorted by tensor, then in the order of local_boxes()
  // Whether regions cover every element of the buffer; where they don't, the rest is padding, which a target zeroes.
  std::vector<bool> fully_covered;  // per buffer
};

class Layout {
 public:
  // Sorts tensors by name; sorts meshes and leaves out repeated ones, so that mesh numbers change. Throws areal::Error
  // naming the tensor for a repeated name, a mesh that does not exist, placements that do not fit (check_placements) or
  // storage that contradicts itself.
  Layout(std::vector<Mesh> meshes, std::vector<TensorLayout> tensors);

  const std::vector<Mesh>& meshes() const { return meshes_; }
  const std::vector<TensorLayout>& tensors() const { return tensors_; }
  int64_t count() const { return static_cast<int64_t>(tensors_.size()); }
  std::optional<int64_t> find(std::string_view name) const;
  // Every rank of any mesh, ascending.
  const std::vector<int32_t>& ranks() const { return ranks_; }

  // Covers meshes, names, dtypes, element sizes, shapes, placements and storage.
  uint64_t digest() const { return digest_; }

  // The boxes of a tensor on a rank, empty when it holds none.
  std::vector<Box> boxes(int64_t tensor, int32_t rank) const;
  // The same, of the rank at a position of the tensor's mesh, into memory that is used again.
  void assign_part(int64_t tensor, int64_t position, LocalPart& part) const;

  // Buffers and regions of one rank. A few milliseconds for 45,000 tensors. Throws areal::Error naming the tensor and
  // the rank for storage that leaves its buffer or overlaps other storage of the rank (aliases of one tensor are one
  // entry of a layout), and for buffers of one name that differ in shape or dtype.
  RankStorage storage(int32_t rank) const;

 private:
  friend class StorageBuilder;

  const std::string& buffer_name(const TensorLayout& tensor) const {
    return tensor.storage.buffer.empty() ? tensor.spec.name : tensor.storage.buffer;
  }
  void sort_meshes();
  void number_buffers();
  void collect_ranks();
  uint64_t compute_digest() const;

  std::vector<Mesh> meshes_;
  std::vector<TensorLayout> tensors_;
  std::vector<int32_t> ranks_;
  std::vector<int32_t> buffer_ids_;  // per tensor; numbered in the order of buffer names
  int32_t buffer_count_ = 0;
  uint64_t digest_ = 0;
};

}  // namespace areal::reshard
