#include "reshard/strided_copy.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "reshard/strided_copy_isa.h"

namespace areal::reshard {
namespace {

constexpr size_t kLineBytes = 64;

void copy_rows(const ByteRows& rows) { AREAL_ISA_DISPATCH(copy_rows(rows)); }
void stream_rows(const ByteRows& rows) { AREAL_ISA_DISPATCH(stream_rows(rows)); }
void stream_run(std::byte* target, const std::byte* source, size_t bytes) {
  AREAL_ISA_DISPATCH(stream_run(target, source, bytes));
}

bool on_line(const void* p) { return reinterpret_cast<uintptr_t>(p) % kLineBytes == 0; }

// The rows of a copy: its innermost dimension, `count` runs.
struct Rows {
  size_t run_bytes;
  size_t count;
  int64_t source_stride;
  int64_t target_stride;
};

Rows rows_of(const StridedCopy& shape) {
  const auto run = static_cast<size_t>(shape.run_bytes);
  if (shape.dims == 0) return {run, 1, shape.run_bytes, shape.run_bytes};
  const auto last = static_cast<size_t>(shape.dims - 1);
  return {run, static_cast<size_t>(shape.counts[last]), shape.source_strides[last], shape.target_strides[last]};
}

// fn(source offset, target offset) of each set of rows, in wire order.
template <class Fn>
void for_each_rows(StridedCopy shape, const Fn& fn) {
  shape.dims = std::max(shape.dims - 1, 0);
  for_each_run(shape, fn);
}

void write_rows(const ByteRows& rows, Stores stores) {
  const bool whole_lines = (static_cast<size_t>(rows.target_stride) | rows.run_bytes) % kLineBytes == 0;
  if (stores == Stores::kNonTemporal && whole_lines && on_line(rows.target)) return stream_rows(rows);
  copy_rows(rows);
}

void write_run(std::byte* target, const std::byte* source, size_t bytes, Stores stores) {
  if (stores == Stores::kNonTemporal) return stream_run(target, source, bytes);
  std::memcpy(target, source, bytes);
}

// Bytes from here to where the target's next block of kBounceBytes begins, so that blocks share no line of it.
size_t block_bytes(const std::byte* target, size_t left) {
  return std::min(left, kBounceBytes - reinterpret_cast<uintptr_t>(target) % kLineBytes);
}

// Whether whole stripes may be stored as they are hashed: lines of the target begin where stripes do.
bool in_step(const void* target, const Xxh3Stream& hash, Stores stores) {
  return stores == Stores::kCached || (reinterpret_cast<uintptr_t>(target) - hash.taken_bytes()) % kLineBytes == 0;
}

bool is_long(size_t run_bytes) { return run_bytes > kBounceBytes / 2; }

// Leaves the first rows out; returns their bytes.
size_t skip_rows(ByteRows& rows, size_t count) {
  const auto skipped = static_cast<int64_t>(count);
  if (rows.target != nullptr) rows.target = static_cast<std::byte*>(rows.target) + skipped * rows.target_stride;
  rows.source = static_cast<const std::byte*>(rows.source) + skipped * rows.source_stride;
  rows.count -= count;
  return count * rows.run_bytes;
}

}  // namespace

int64_t StridedCopy::bytes() const {
  int64_t product = run_bytes;
  for (int d = 0; d < dims; ++d) product *= counts[static_cast<size_t>(d)];
  return product;
}

std::array<int64_t, kMaxDims> packed_strides(std::span<const int64_t> sizes) {
  std::array<int64_t, kMaxDims> strides{};
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) strides[d] = stride;
  return strides;
}

StridedCopy make_strided_copy(int64_t item_bytes, std::span<const int64_t> sizes,
                              std::span<const int64_t> source_strides, std::span<const int64_t> target_strides) {
  struct Dim {
    int64_t count, source, target;
  };
  // Innermost first; each dimension that continues the one before it joins it.
  std::array<Dim, kMaxDims + 1> dims{{{item_bytes, 1, 1}}};
  size_t last = 0;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] == 0) return {};
    if (sizes[d] == 1) continue;
    const Dim next{sizes[d], source_strides[d] * item_bytes, target_strides[d] * item_bytes};
    Dim& inner = dims[last];
    if (next.source == inner.count * inner.source && next.target == inner.count * inner.target) {
      inner.count *= next.count;
    } else {
      dims[++last] = next;
    }
  }
  StridedCopy shape;
  shape.run_bytes = dims[0].count;
  shape.dims = static_cast<int>(last);
  for (size_t d = 0; d < last; ++d) {
    const Dim& dim = dims[last - d];
    shape.counts[d] = dim.count;
    shape.source_strides[d] = dim.source;
    shape.target_strides[d] = dim.target;
  }
  return shape;
}

void copy_strided(std::byte* target, const std::byte* source, const StridedCopy& shape, Stores stores) {
  if (shape.run_bytes == 0) return;
  const Rows rows = rows_of(shape);
  for_each_rows(shape, [&](int64_t from, int64_t to) {
    const ByteRows here{target + to, source + from, rows.target_stride, rows.source_stride, rows.run_bytes, rows.count};
    if (!is_long(rows.run_bytes)) return write_rows(here, stores);
    for (size_t i = 0; i < rows.count; ++i) {
      const auto row = static_cast<int64_t>(i);
      write_run(target + to + row * rows.target_stride, source + from + row * rows.source_stride, rows.run_bytes,
                stores);
    }
  });
}

// All three below copy whole stripes of the checksum in one pass where runs and addresses allow (copy_rows of the
// stream). What is left goes through blocks that stay in the first-level cache.

// -- Packer -----------------------------------------------------------------------------------------------------------

Packer::Packer(std::byte* packed, int64_t bytes, Stores stores)
    : at_(packed), stores_(stores), hash_(static_cast<size_t>(bytes)) {}

void Packer::add(const std::byte* source, const StridedCopy& shape) {
  if (shape.run_bytes == 0) return;
  const Rows rows = rows_of(shape);
  const auto run = static_cast<int64_t>(rows.run_bytes);
  for_each_rows(shape, [&](int64_t from, int64_t) {
    ByteRows left{at_, source + from, run, rows.source_stride, rows.run_bytes, rows.count};
    if (held_ == 0) advance(skip_rows(left, hash_.copy_rows(left, stores_)));
    if (is_long(rows.run_bytes)) return add_long(left);
    while (left.count > 0) {
      left.target = bounce_ + held_;
      ByteRows fitting = left;
      fitting.count = std::min(left.count, (kBounceBytes - held_) / rows.run_bytes);
      copy_rows(fitting);
      held_ += skip_rows(left, fitting.count);
      if (held_ + rows.run_bytes > kBounceBytes) flush(held_ - (hash_.taken_bytes() + held_) % kLineBytes);
    }
  });
}

void Packer::add_long(ByteRows rows) {
  flush(held_);
  while (rows.count > 0) {
    hash_.copy(at_, rows.source, rows.run_bytes, stores_);
    advance(skip_rows(rows, 1));
  }
}

void Packer::flush(size_t bytes) {
  hash_.copy(at_, bounce_, bytes, stores_);
  advance(bytes);
  held_ -= bytes;
  std::memmove(bounce_, bounce_ + bytes, held_);
}

uint64_t Packer::finish() {
  flush(held_);
  store_fence();
  return hash_.finish();
}

// -- Unpacker ---------------------------------------------------------------------------------------------------------

Unpacker::Unpacker(const std::byte* packed, int64_t bytes, Stores stores)
    : packed_(packed), bytes_(static_cast<size_t>(bytes)), stores_(stores), hash_(bytes_) {}

// The next bytes, hashed: up to the end of the line they end in, so that the stream stays on stripes.
const std::byte* Unpacker::hashed(size_t bytes) {
  const std::byte* here = packed_ + used_;
  used_ += bytes;
  const size_t taken = hash_.taken_bytes();
  if (used_ > taken) {
    const size_t until = std::min(bytes_, (used_ + kLineBytes - 1) / kLineBytes * kLineBytes);
    hash_.take(packed_ + taken, until - taken);
  }
  return here;
}

void Unpacker::add(std::byte* target, const StridedCopy& shape) {
  if (shape.run_bytes == 0) return;
  AREAL_CHECK(shape.bytes() <= static_cast<int64_t>(bytes_ - used_), "Unpacker: expected at most ", bytes_ - used_,
              " more bytes, got ", shape.bytes());
  const Rows rows = rows_of(shape);
  const auto run = static_cast<int64_t>(rows.run_bytes);
  for_each_rows(shape, [&](int64_t, int64_t to) {
    ByteRows left{target + to, packed_ + used_, rows.target_stride, run, rows.run_bytes, rows.count};
    if (hash_.taken_bytes() == used_) used_ += skip_rows(left, hash_.copy_rows(left, stores_));
    if (is_long(rows.run_bytes)) return add_long(left);
    while (left.count > 0) {
      ByteRows block = left;
      block.count = std::min(left.count, kBounceBytes / rows.run_bytes);
      block.source = hashed(block.count * rows.run_bytes);
      write_rows(block, stores_);
      skip_rows(left, block.count);
    }
  });
}

void Unpacker::add_long(ByteRows rows) {
  for (; rows.count > 0; skip_rows(rows, 1)) {
    auto* target = static_cast<std::byte*>(rows.target);
    if (hash_.taken_bytes() == used_ && in_step(target, hash_, stores_)) {
      hash_.copy(target, packed_ + used_, rows.run_bytes, stores_);
      used_ += rows.run_bytes;
      continue;
    }
    for (size_t at = 0; at < rows.run_bytes;) {
      const size_t bytes = block_bytes(target + at, rows.run_bytes - at);
      write_run(target + at, hashed(bytes), bytes, stores_);
      at += bytes;
    }
  }
}

uint64_t Unpacker::finish() {
  store_fence();
  AREAL_CHECK(used_ == bytes_, "Unpacker: expected ", bytes_, " bytes, got ", used_);
  return hash_.finish();
}

// -- Mover ------------------------------------------------------------------------------------------------------------

Mover::Mover(int64_t bytes, Stores stores) : stores_(stores), hash_(static_cast<size_t>(bytes)) {}

void Mover::add(std::byte* target, const std::byte* source, const StridedCopy& shape) {
  if (shape.run_bytes == 0) return;
  const Rows rows = rows_of(shape);
  const auto run = static_cast<int64_t>(rows.run_bytes);
  for_each_rows(shape, [&](int64_t from, int64_t to) {
    ByteRows left{target + to, source + from, rows.target_stride, rows.source_stride, rows.run_bytes, rows.count};
    skip_rows(left, hash_.copy_rows(left, stores_));
    if (is_long(rows.run_bytes)) return add_long(left);
    while (left.count > 0) {
      ByteRows block = left;
      block.count = std::min(left.count, kBounceBytes / rows.run_bytes);
      if (rows.source_stride != run) {
        copy_rows({bounce_, block.source, run, rows.source_stride, rows.run_bytes, block.count});
        block.source = bounce_;
        block.source_stride = run;
      }
      hash_.take(block.source, block.count * rows.run_bytes);
      write_rows(block, stores_);
      skip_rows(left, block.count);
    }
  });
}

void Mover::add_long(ByteRows rows) {
  for (; rows.count > 0; skip_rows(rows, 1)) {
    auto* target = static_cast<std::byte*>(rows.target);
    const auto* source = static_cast<const std::byte*>(rows.source);
    if (in_step(target, hash_, stores_)) {
      hash_.copy(target, source, rows.run_bytes, stores_);
      continue;
    }
    for (size_t at = 0; at < rows.run_bytes;) {
      const size_t bytes = block_bytes(target + at, rows.run_bytes - at);
      hash_.take(source + at, bytes);
      write_run(target + at, source + at, bytes, stores_);
      at += bytes;
    }
  }
}

uint64_t Mover::finish() {
  store_fence();
  return hash_.finish();
}

}  // namespace areal::reshard
