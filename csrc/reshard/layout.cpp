#include "reshard/layout.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "reshard/xxh3.h"

namespace areal::reshard {
namespace {

constexpr int64_t kMaxItemBytes = 64;
constexpr size_t kMaxDims = 64;

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
    AREAL_CHECK(bytes <= rest_.size(), "Layout: expected ", bytes, " more bytes of a serialized layout, got ",
                rest_.size());
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }

  std::string_view rest_;
};

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

void check_spec(const TensorSpec& spec) {
  AREAL_CHECK(!spec.name.empty(), "Layout: expected tensors with a name, got an empty one");
  AREAL_CHECK(spec.item_bytes >= 1 && spec.item_bytes <= kMaxItemBytes, "Layout: tensor '", spec.name,
              "': expected an element size of 1 to ", kMaxItemBytes, " bytes, got ", spec.item_bytes);
  AREAL_CHECK(spec.shape.size() <= kMaxDims, "Layout: tensor '", spec.name, "': expected at most ", kMaxDims,
              " dimensions, got ", spec.shape.size());
  for (const int64_t size : spec.shape) {
    AREAL_CHECK(size >= 0, "Layout: tensor '", spec.name, "': expected sizes >= 0, got ", shape_text(spec.shape));
  }
}

int64_t add_checked(int64_t a, int64_t b) {
  int64_t sum;
  AREAL_CHECK(!__builtin_add_overflow(a, b, &sum), "Layout: expected fewer than 2^63 bytes in all, got more");
  return sum;
}

}  // namespace

int64_t TensorSpec::bytes() const {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t total = item_bytes;
  for (const int64_t size : shape) {
    AREAL_CHECK(!__builtin_mul_overflow(total, size, &total), "Layout: tensor '", name,
                "': expected fewer than 2^63 bytes, got shape ", shape_text(shape));
  }
  return total;
}

Layout::Layout(std::vector<TensorSpec> tensors) : tensors_(std::move(tensors)) {
  std::sort(tensors_.begin(), tensors_.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  offsets_.reserve(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    check_spec(tensors_[i]);
    AREAL_CHECK(i == 0 || tensors_[i].name != tensors_[i - 1].name, "Layout: expected unique names, got '",
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

std::optional<int64_t> Layout::find(std::string_view name) const {
  const auto at = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                   [](const TensorSpec& spec, std::string_view wanted) { return spec.name < wanted; });
  if (at == tensors_.end() || at->name != name) return std::nullopt;
  return at - tensors_.begin();
}

std::string Layout::serialize() const {
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

Layout Layout::parse(std::string_view text) {
  Reader reader(text);
  std::vector<TensorSpec> tensors;
  for (uint32_t left = reader.take<uint32_t>(); left > 0; --left) {
    TensorSpec spec;
    spec.name = reader.take_string();
    spec.dtype = reader.take_string();
    spec.item_bytes = reader.take<uint32_t>();
    for (uint32_t dims = reader.take<uint32_t>(); dims > 0; --dims) spec.shape.push_back(reader.take<int64_t>());
    AREAL_CHECK(tensors.empty() || tensors.back().name < spec.name,
                "Layout: expected a serialized layout sorted by name, got '", spec.name, "' out of order");
    tensors.push_back(std::move(spec));
  }
  AREAL_CHECK(reader.empty(), "Layout: expected nothing behind a serialized layout, got more bytes");
  return Layout(std::move(tensors));
}

std::string describe_difference(const Layout& expected, const Layout& got) {
  const auto &want = expected.tensors(), &have = got.tensors();
  for (size_t i = 0; i < want.size() || i < have.size(); ++i) {
    const bool have_more = i < have.size(), want_more = i < want.size();
    if (want_more && (!have_more || want[i].name < have[i].name)) {
      return format_message("tensor '", want[i].name, "': expected, got no tensor of that name");
    }
    if (!want_more || have[i].name < want[i].name) {
      return format_message("tensor '", have[i].name, "': expected no tensor of that name, got one");
    }
    if (want[i].dtype != have[i].dtype || want[i].item_bytes != have[i].item_bytes) {
      return format_message("tensor '", want[i].name, "': expected dtype = ", want[i].dtype, " of ", want[i].item_bytes,
                            " bytes, got ", have[i].dtype, " of ", have[i].item_bytes);
    }
    if (want[i].shape != have[i].shape) {
      return format_message("tensor '", want[i].name, "': expected shape = ", shape_text(want[i].shape), ", got ",
                            shape_text(have[i].shape));
    }
  }
  return "";
}

}  // namespace areal::reshard
