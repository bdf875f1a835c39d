#include "reshard/arena_layout.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "reshard/xxh3.h"

namespace areal::reshard {
namespace {

template <class T>
void append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}
void append(std::string& out, const std::string& text) {
  append(out, static_cast<uint32_t>(text.size()));
  out += text;
}

// Takes values off the front of a byte string; throws when it is too short.
class Reader {
 public:
  explicit Reader(std::string_view text) : rest_(text) {}

  template <class T>
  T take() {
    T value;
    std::memcpy(&value, take_bytes(sizeof value).data(), sizeof value);
    return value;
  }
  std::string take_string() { return std::string(take_bytes(take<uint32_t>())); }
  bool empty() const { return rest_.empty(); }

 private:
  std::string_view take_bytes(size_t bytes) {
    AREAL_CHECK(bytes <= rest_.size(), "ArenaLayout: expected ", bytes, " more bytes of a serialized layout, got ",
                rest_.size());
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }

  std::string_view rest_;
};

int64_t add_checked(int64_t a, int64_t b) {
  int64_t sum;
  AREAL_CHECK(!__builtin_add_overflow(a, b, &sum), "ArenaLayout: expected fewer than 2^63 bytes in all, got more");
  return sum;
}

}  // namespace

ArenaLayout::ArenaLayout(std::vector<TensorSpec> tensors) : tensors_(std::move(tensors)) {
  std::sort(tensors_.begin(), tensors_.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  offsets_.reserve(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    check_spec(tensors_[i]);
    AREAL_CHECK(i == 0 || tensors_[i].name != tensors_[i - 1].name, "ArenaLayout: expected unique names, got '",
                tensors_[i].name, "' twice");
    offsets_.push_back(arena_bytes_);
    const int64_t bytes = tensors_[i].bytes();
    payload_bytes_ = add_checked(payload_bytes_, bytes);
    arena_bytes_ = add_checked(arena_bytes_, add_checked(bytes, kAlignmentBytes - 1)) & -kAlignmentBytes;
  }
  arena_bytes_ = std::max(arena_bytes_, kAlignmentBytes);
  std::string text = serialize();
  for (const int64_t offset : offsets_) append(text, offset);
  digest_ = xxh3_64(text.data(), text.size());
}

std::optional<int64_t> ArenaLayout::find(std::string_view name) const {
  const auto at = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                   [](const TensorSpec& spec, std::string_view wanted) { return spec.name < wanted; });
  if (at == tensors_.end() || at->name != name) return std::nullopt;
  return at - tensors_.begin();
}

std::string ArenaLayout::serialize() const {
  std::string out;
  append(out, static_cast<uint32_t>(tensors_.size()));
  for (const TensorSpec& spec : tensors_) {
    append(out, spec.name);
    append(out, spec.dtype);
    append(out, static_cast<uint32_t>(spec.item_bytes));
    append(out, static_cast<uint32_t>(spec.shape.size()));
    for (const int64_t size : spec.shape) append(out, size);
  }
  return out;
}

ArenaLayout ArenaLayout::parse(std::string_view text) {
  Reader reader(text);
  std::vector<TensorSpec> tensors;
  for (uint32_t left = reader.take<uint32_t>(); left > 0; --left) {
    TensorSpec spec;
    spec.name = reader.take_string();
    spec.dtype = reader.take_string();
    spec.item_bytes = reader.take<uint32_t>();
    for (uint32_t dims = reader.take<uint32_t>(); dims > 0; --dims) spec.shape.push_back(reader.take<int64_t>());
    AREAL_CHECK(tensors.empty() || tensors.back().name < spec.name,
                "ArenaLayout: expected a serialized layout sorted by name, got '", spec.name, "' out of order");
    tensors.push_back(std::move(spec));
  }
  AREAL_CHECK(reader.empty(), "ArenaLayout: expected nothing behind a serialized layout, got more bytes");
  return ArenaLayout(std::move(tensors));
}

}  // namespace areal::reshard
