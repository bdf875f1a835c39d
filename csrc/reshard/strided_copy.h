// Copies of affine regions: a box of a tensor to or from packed bytes, or from one storage straight to another, with
// XXH3-64 of the bytes in wire order (row-major in the box) taken on the way. Runs may be as short as one byte: what a
// row-parallel tensor on 32 ranks leaves of a row is 128 bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "reshard/box.h"
#include "reshard/xxh3.h"

namespace areal::reshard {

// The shape of a copy in bytes: runs that are contiguous at both ends, repeated along `dims` outer dimensions
// (outermost first, none of count 1), as few as the strides allow.
struct StridedCopy {
  int64_t run_bytes = 0;
  int dims = 0;
  std::array<int64_t, kMaxDims> counts{};
  std::array<int64_t, kMaxDims> source_strides{};
  std::array<int64_t, kMaxDims> target_strides{};

  int64_t bytes() const;
  // The copy the other way.
  StridedCopy reversed() const { return {run_bytes, dims, counts, target_strides, source_strides}; }
};

// Strides in elements, as many as sizes.
StridedCopy make_strided_copy(int64_t item_bytes, std::span<const int64_t> sizes,
                              std::span<const int64_t> source_strides, std::span<const int64_t> target_strides);
// Those of row-major elements of this shape.
std::array<int64_t, kMaxDims> packed_strides(std::span<const int64_t> sizes);

// fn(source offset, target offset) of every run, in wire order.
template <class Fn>
void for_each_run(const StridedCopy& shape, const Fn& fn) {
  if (shape.run_bytes == 0) return;
  std::array<int64_t, kMaxDims> index{};
  int64_t source = 0, target = 0;
  while (true) {
    fn(source, target);
    int d = shape.dims - 1;
    for (; d >= 0; --d) {
      const auto i = static_cast<size_t>(d);
      source += shape.source_strides[i];
      target += shape.target_strides[i];
      if (++index[i] < shape.counts[i]) break;
      source -= shape.counts[i] * shape.source_strides[i];
      target -= shape.counts[i] * shape.target_strides[i];
      index[i] = 0;
    }
    if (d < 0) return;
  }
}

// Without a checksum. Stores are published by a store_fence().
void copy_strided(std::byte* target, const std::byte* source, const StridedCopy& shape, Stores stores);

inline constexpr size_t kBounceBytes = 4096;

// Regions of storage -> packed bytes, one behind the other.
class Packer {
 public:
  // packed: `bytes` of memory, best aligned to 64; nullptr: the regions are only hashed.
  Packer(std::byte* packed, int64_t bytes, Stores stores);
  void add(const std::byte* source, const StridedCopy& shape);
  // The checksum of the packed bytes. Throws areal::Error unless exactly `bytes` were added.
  uint64_t finish();

 private:
  void add_long(ByteRows rows);
  void flush(size_t bytes);
  void advance(size_t bytes) {
    if (at_ != nullptr) at_ += bytes;
  }

  std::byte* at_;
  Stores stores_;
  Xxh3Stream hash_;
  size_t held_ = 0;
  alignas(64) std::byte bounce_[kBounceBytes];
};

// Packed bytes -> regions of storage. The targets are written before anybody knows whether the checksum fits.
class Unpacker {
 public:
  Unpacker(const std::byte* packed, int64_t bytes, Stores stores);
  void add(std::byte* target, const StridedCopy& shape);
  uint64_t finish();

 private:
  void add_long(ByteRows rows);
  const std::byte* hashed(size_t bytes);

  const std::byte* packed_;
  size_t bytes_;
  Stores stores_;
  Xxh3Stream hash_;
  size_t used_ = 0;
};

// Regions of storage -> regions of storage, with the checksum that packed bytes would have had.
class Mover {
 public:
  Mover(int64_t bytes, Stores stores);
  void add(std::byte* target, const std::byte* source, const StridedCopy& shape);
  uint64_t finish();

 private:
  void add_long(ByteRows rows);

  Stores stores_;
  Xxh3Stream hash_;
  alignas(64) std::byte bounce_[kBounceBytes];
};

}  // namespace areal::reshard
