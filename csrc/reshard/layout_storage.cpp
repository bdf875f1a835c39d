// Layout::storage(): from canonical boxes to strided regions of one rank's buffers.
#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "reshard/layout.h"
#include "reshard/layout_overlap.h"

namespace areal::reshard {
namespace {

constexpr int64_t kMaxGroups = int64_t{1} << 20;  // of one tensor on one rank

using Strides = std::array<int64_t, kMaxDims>;

void row_major(std::span<const int64_t> sizes, Strides& strides) {
  strides.fill(0);
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes[d];
  }
}

std::span<const int64_t> sizes_of(const Box& box) { return {box.size.data(), static_cast<size_t>(box.dims)}; }

}  // namespace

class StorageBuilder {
 public:
  StorageBuilder(const Layout& layout, int32_t rank) : layout_(layout), rank_(rank) {}

  RankStorage build() && {
    find_positions();
    number_buffers();
    for (int64_t tensor = 0; tensor < layout_.count(); ++tensor) {
      const TensorLayout& layout = layout_.tensors_[static_cast<size_t>(tensor)];
      const int64_t position = positions_[static_cast<size_t>(layout.mesh)];
      if (position < 0) continue;
      layout_.assign_part(tensor, position, part_);
      add_buffer(tensor);
      for (const LocalBox& local : part_.boxes()) add_regions(tensor, local);
    }
    check_overlaps();
    return std::move(result_);
  }

 private:
  // How errors begin. (AREAL_CHECK makes texts only when they are due; this runs for every tensor of every rank.)
  std::string of(int64_t tensor) const {
    return "reshard: tensor '" + layout_.tensors_[static_cast<size_t>(tensor)].spec.name + "' on rank " +
           std::to_string(rank_) + ": ";
  }

  void find_positions() {
    for (const Mesh& mesh : layout_.meshes_) positions_.push_back(mesh.position_of(rank_).value_or(-1));
  }

  // Buffers of this rank in the order of their names, before they are filled in.
  void number_buffers() {
    numbers_.assign(static_cast<size_t>(layout_.buffer_count_), -1);
    size_t held = 0;
    for (size_t tensor = 0; tensor < layout_.tensors_.size(); ++tensor) {
      if (positions_[static_cast<size_t>(layout_.tensors_[tensor].mesh)] < 0) continue;
      numbers_[static_cast<size_t>(layout_.buffer_ids_[tensor])] = 0;
      ++held;
    }
    int32_t next = 0;
    for (int32_t& number : numbers_) number = number < 0 ? -1 : next++;
    result_.buffers.resize(static_cast<size_t>(next));
    elements_.assign(static_cast<size_t>(next), -1);
    result_.regions.reserve(held);
  }

  void add_buffer(int64_t tensor) {
    const TensorLayout& layout = layout_.tensors_[static_cast<size_t>(tensor)];
    const auto number =
        static_cast<size_t>(numbers_[static_cast<size_t>(layout_.buffer_ids_[static_cast<size_t>(tensor)])]);
    Buffer& buffer = result_.buffers[number];
    const std::span<const int64_t> shape =
        layout.storage.buffer_shape ? std::span<const int64_t>(*layout.storage.buffer_shape) : part_.shape();
    if (elements_[number] < 0) {
      buffer = {layout_.buffer_name(layout), layout.spec.dtype, layout.spec.item_bytes, {shape.begin(), shape.end()}};
      elements_[number] = buffer_elements(shape);
    }
    AREAL_CHECK(std::equal(shape.begin(), shape.end(), buffer.shape.begin(), buffer.shape.end()), of(tensor),
                "expected buffer '", buffer.name, "' of shape ", shape_text(buffer.shape),
                " as other tensors say, got ", shape_text({shape.begin(), shape.end()}));
    AREAL_CHECK(layout.spec.dtype == buffer.dtype && layout.spec.item_bytes == buffer.item_bytes, of(tensor),
                "expected buffer '", buffer.name, "' of dtype ", buffer.dtype, " as other tensors say, got ",
                layout.spec.dtype);
    buffer_ = static_cast<int32_t>(number);
    storage_ = &layout.storage;
    set_strides();
  }

  static int64_t buffer_elements(std::span<const int64_t> shape) {
    if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  }

  // Strides of the local index space; those of flat parts are of each box.
  void set_strides() {
    if (part_.flat() || part_.boxes().empty()) return;
    if (storage_->strides.empty()) return row_major(part_.shape(), strides_);
    strides_.fill(0);
    std::copy(storage_->strides.begin(), storage_->strides.end(), strides_.begin());
  }

  void add_regions(int64_t tensor, const LocalBox& local) {
    if (part_.flat()) {
      row_major(sizes_of(local.box), strides_);
      return add_region(tensor, local.box, __int128{storage_->offset} + local.local_start[0]);
    }
    const int64_t group_rows = storage_->group_rows;
    const bool grouped = group_rows > 0 && storage_->group_stride != __int128{group_rows} * strides_[0];
    __int128 inner = storage_->offset;
    for (size_t d = grouped ? 1 : 0; d < static_cast<size_t>(local.box.dims); ++d) {
      inner += __int128{local.local_start[d]} * strides_[d];
    }
    if (!grouped) return add_region(tensor, local.box, inner);

    const int64_t first = local.local_start[0], end = first + local.box.size[0];
    AREAL_CHECK((end - first) / group_rows < kMaxGroups, of(tensor), "expected at most ", kMaxGroups,
                " groups of rows, got ", (end - first) / group_rows);
    for (int64_t row = first; row < end;) {
      const int64_t group = row / group_rows, in_group = row % group_rows;
      Box box = local.box;
      box.start[0] += row - first;
      box.size[0] = std::min(end - row, group_rows - in_group);
      add_region(tensor, box, inner + __int128{group} * storage_->group_stride + __int128{in_group} * strides_[0]);
      row += box.size[0];
    }
  }

  // Offsets and strides are at most 2^56 each and extents below 2^63, so that no sum leaves 128 bits.
  void add_region(int64_t tensor, const Box& box, __int128 offset) {
    __int128 last = offset;
    for (size_t d = 0; d < static_cast<size_t>(box.dims); ++d) last += __int128{box.size[d] - 1} * strides_[d];
    const Buffer& buffer = result_.buffers[static_cast<size_t>(buffer_)];
    AREAL_CHECK(last < elements_[static_cast<size_t>(buffer_)], of(tensor), "expected storage within buffer '",
                buffer.name, "' of shape ", shape_text(buffer.shape), ", got elements beyond it for ", box_text(box));
    result_.regions.push_back({static_cast<int32_t>(tensor), box, buffer_, static_cast<int64_t>(offset), strides_});
  }

  // Sweeps over each buffer's regions in the order of their first elements.
  void check_overlaps() {
    const size_t buffers = result_.buffers.size();
    std::vector<int64_t> covered(buffers, 0), counts(buffers, 0);
    for (const Region& region : result_.regions) {
      covered[static_cast<size_t>(region.buffer)] += region.box.elements();
      ++counts[static_cast<size_t>(region.buffer)];
    }
    for (size_t b = 0; b < buffers; ++b) result_.fully_covered.push_back(covered[b] == elements_[b]);
    std::vector<Placed> placed;
    placed.reserve(result_.regions.size());
    for (const Region& region : result_.regions) {
      const ElementSet set = element_set(region.offset, sizes_of(region.box),
                                         {region.strides.data(), static_cast<size_t>(region.box.dims)});
      AREAL_CHECK(is_nested(set), of(region.tensor),
                  "expected strides that lay elements apart, got some that do not for ", box_text(region.box));
      if (counts[static_cast<size_t>(region.buffer)] > 1) placed.push_back({region.buffer, region.tensor, set});
    }
    std::sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
      return std::pair(a.buffer, a.set.first) < std::pair(b.buffer, b.set.first);
    });
    sweep(placed);
  }

  struct Placed {
    int32_t buffer;
    int32_t tensor;
    ElementSet set;
  };

  void sweep(const std::vector<Placed>& placed) const {
    std::vector<const Placed*> open;  // of the same buffer, not yet ended
    for (const Placed& next : placed) {
      std::erase_if(open, [&](const Placed* p) { return p->buffer != next.buffer || p->set.last < next.set.first; });
      for (const Placed* other : open) {
        AREAL_CHECK(!meet(other->set, next.set), of(next.tensor), "expected storage of its own in buffer '",
                    result_.buffers[static_cast<size_t>(next.buffer)].name, "', got an overlap with tensor '",
                    layout_.tensors_[static_cast<size_t>(other->tensor)].spec.name, "'");
      }
      open.push_back(&next);
    }
  }

  const Layout& layout_;
  int32_t rank_;
  RankStorage result_;
  std::vector<int64_t> positions_;  // per mesh; -1: the rank is not of it
  std::vector<int32_t> numbers_;    // per buffer of the layout; -1: not of this rank
  std::vector<int64_t> elements_;   // per buffer of this rank

  // Of the tensor in turn.
  LocalPart part_;
  Strides strides_{};
  int32_t buffer_ = 0;
  const Storage* storage_ = nullptr;
};

RankStorage Layout::storage(int32_t rank) const { return StorageBuilder(*this, rank).build(); }

}  // namespace areal::reshard
