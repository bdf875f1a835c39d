#include "reshard/executor_program.h"

#include <algorithm>
#include <optional>

#include "base/check.h"

namespace areal::reshard {
namespace {

size_t at(int d) { return static_cast<size_t>(d); }

std::span<const Region> regions_of(const RankStorage& storage, int32_t tensor) {
  const auto range = std::ranges::equal_range(storage.regions, tensor, {}, &Region::tensor);
  return {range.begin(), range.end()};
}

bool contains(const Box& outer, const Box& inner) {
  for (int d = 0; d < inner.dims; ++d) {
    if (inner.start[at(d)] < outer.start[at(d)] ||
        inner.start[at(d)] + inner.size[at(d)] > outer.start[at(d)] + outer.size[at(d)]) {
      return false;
    }
  }
  return true;
}

// Calls emit(part, region) for parts of the box in row-major order, each within one region. A box that regions divide
// along several dimensions comes apart in rows.
template <class Emit>
void split(const Box& box, std::span<const Region> regions, int dim, const std::string& tensor, const Emit& emit) {
  if (box.empty()) return;
  std::vector<int64_t> cuts;
  bool held = false;
  for (const Region& region : regions) {
    const std::optional<Box> common = intersect(box, region.box);
    if (!common) continue;
    if (*common == box) return emit(box, region);
    held = true;
    if (dim == box.dims) continue;
    cuts.push_back(common->start[at(dim)]);
    cuts.push_back(common->start[at(dim)] + common->size[at(dim)]);
  }
  AREAL_CHECK(held && dim < box.dims, "Executor: tensor '", tensor, "': expected storage for ", box_text(box),
              ", got none for some of it");
  cuts.push_back(box.start[at(dim)]);
  cuts.push_back(box.start[at(dim)] + box.size[at(dim)]);
  std::ranges::sort(cuts);
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    Box slab = box;
    slab.start[at(dim)] = cuts[i];
    slab.size[at(dim)] = cuts[i + 1] - cuts[i];
    const bool whole = std::ranges::any_of(regions, [&](const Region& r) { return contains(r.box, slab); });
    const int64_t rows = whole ? 1 : slab.size[at(dim)];
    if (!whole) slab.size[at(dim)] = 1;
    for (int64_t row = 0; row < rows; ++row, ++slab.start[at(dim)]) {
      split(slab, regions, whole ? dim : dim + 1, tensor, emit);
    }
  }
}

// Where a box lies in an end: strides and first element, in elements. On the wire it is packed.
struct Place {
  int32_t buffer = kWire;
  int64_t offset = 0;
  std::array<int64_t, kMaxDims> strides{};
};

Place on_wire(const Box& box) { return {kWire, 0, packed_strides(std::span(box.size).first(at(box.dims)))}; }

Place in_region(const Box& box, const Region& region) {
  Place place{region.buffer, region.offset, region.strides};
  for (int d = 0; d < box.dims; ++d) {
    place.offset += (box.start[at(d)] - region.box.start[at(d)]) * region.strides[at(d)];
  }
  return place;
}

// Calls emit(part, region) for the parts of the box, nullptr for the wire.
template <class Emit>
void split_end(const Box& box, const End& end, const Atom& atom, const std::string& name, const Emit& emit) {
  if (end.storage == nullptr) return emit(box, nullptr);
  split(box, regions_of(*end.storage, end.tensor_of(atom)), 0, name,
        [&](const Box& part, const Region& region) { emit(part, &region); });
}

}  // namespace

void append_pieces(const Layout& target, const Atom& atom, const End& from, const End& to,
                   std::vector<CopyPiece>& pieces) {
  const TensorSpec& spec = target.tensors()[static_cast<size_t>(atom.target_tensor)].spec;
  const auto dims = at(atom.box.dims);
  split_end(atom.box, from, atom, spec.name, [&](const Box& outer, const Region* source_region) {
    split_end(outer, to, atom, spec.name, [&](const Box& box, const Region* target_region) {
      const Place source = source_region == nullptr ? on_wire(box) : in_region(box, *source_region);
      const Place into = target_region == nullptr ? on_wire(box) : in_region(box, *target_region);
      pieces.push_back({source.buffer, into.buffer, source.offset * spec.item_bytes, into.offset * spec.item_bytes,
                        make_strided_copy(spec.item_bytes, std::span(box.size).first(dims),
                                          std::span(source.strides).first(dims), std::span(into.strides).first(dims))});
    });
  });
}

MessageProgram compile_message(const Layout& target, const Message& message, int32_t peer, const End& from,
                               const End& to) {
  MessageProgram program{peer, message.phase, message.bytes, {}, {}, {}};
  for (const Chunk& chunk : message.chunks) {
    const auto first = static_cast<int64_t>(program.pieces.size());
    for (int64_t i = chunk.first_atom; i < chunk.first_atom + chunk.atom_count; ++i) {
      append_pieces(target, message.atoms[static_cast<size_t>(i)], from, to, program.pieces);
    }
    const auto end = static_cast<int64_t>(program.pieces.size());
    program.chunks.push_back({chunk.id, chunk.bytes, first, end - first});
  }
  return program;
}

}  // namespace areal::reshard
