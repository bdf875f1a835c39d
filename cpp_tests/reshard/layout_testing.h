// What the tests of layouts share: an oracle that lists the indices each rank holds, one by one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "base/check.h"
#include "reshard/layout.h"

namespace areal::reshard {

inline void expect_error(const std::string& part, const auto& call) {
  try {
    call();
    ADD_FAILURE() << "expected an error with '" << part << "'";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

inline Mesh line(int64_t ranks, std::string name = "dp") {
  std::vector<int32_t> numbers(static_cast<size_t>(ranks));
  std::iota(numbers.begin(), numbers.end(), 0);
  return Mesh(numbers, {ranks}, {std::move(name)});
}

inline Mesh grid(int64_t outer, int64_t inner) {
  std::vector<int32_t> numbers(static_cast<size_t>(outer * inner));
  std::iota(numbers.begin(), numbers.end(), 0);
  return Mesh(numbers, {outer, inner}, {"dp", "tp"});
}

inline int64_t product(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

using Indices = std::vector<int64_t>;

// torch.chunk, with empty chunks at the end.
inline std::vector<Indices> chunks(const Indices& indices, int64_t parts, int64_t chunk = 0) {
  const auto n = static_cast<int64_t>(indices.size());
  if (chunk == 0) chunk = (n + parts - 1) / parts;
  std::vector<Indices> out(static_cast<size_t>(parts));
  for (int64_t i = 0; i < n; ++i) out[static_cast<size_t>(i / chunk)].push_back(indices[static_cast<size_t>(i)]);
  return out;
}

// The canonical indices along every dimension that a coordinate of the mesh holds, by Replicate, Shard, StridedShard.
inline std::vector<Indices> held_indices(const std::vector<int64_t>& shape, const Mesh& mesh,
                                         const std::vector<Placement>& placements, int64_t position) {
  std::vector<Indices> held;
  for (const int64_t size : shape) {
    held.emplace_back(static_cast<size_t>(size));
    std::iota(held.back().begin(), held.back().end(), 0);
  }
  const std::vector<int64_t> coordinate = mesh.coordinate(position);
  for (size_t k = 0; k < placements.size(); ++k) {
    const auto rank = static_cast<size_t>(coordinate[k]);
    if (const auto* by = std::get_if<Shard>(&placements[k])) {
      Indices& indices = held[static_cast<size_t>(by->dim)];
      indices = chunks(indices, mesh.shape()[k], by->chunk)[rank];
    } else if (const auto* strided = std::get_if<StridedShard>(&placements[k])) {
      Indices& indices = held[static_cast<size_t>(strided->dim)];
      Indices taken;
      for (const Indices& piece : chunks(indices, strided->split_factor)) {
        const Indices part = chunks(piece, mesh.shape()[k], strided->chunk)[rank];
        taken.insert(taken.end(), part.begin(), part.end());
      }
      indices = taken;
    }
  }
  return held;
}

// Flattened canonical positions of the elements of a box, row-major.
inline Indices elements_of(const Box& box, const std::vector<int64_t>& shape) {
  Indices out;
  for (int64_t i = 0; i < box.elements(); ++i) {
    int64_t rest = i, flat = 0, stride = 1;
    for (size_t d = shape.size(); d-- > 0;) {
      flat += (box.start[d] + rest % box.size[d]) * stride;
      rest /= box.size[d];
      stride *= shape[d];
    }
    out.push_back(flat);
  }
  return out;
}

}  // namespace areal::reshard
