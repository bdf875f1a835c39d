#include "reshard/plan_chunks.h"

#include <algorithm>

namespace areal::reshard {
namespace {

// The box without its dimensions before d, at index i of dimension d.
Box slice(Box box, int d, int64_t i) {
  box.start[size_t(d)] += i;
  box.size[size_t(d)] = 1;
  return box;
}

// Dimensions before d have size 1.
void append_interval_from(int d, const Box& box, int64_t begin, int64_t end, std::vector<Box>* boxes) {
  if (begin >= end) return;
  if (end - begin == box.elements()) {
    boxes->push_back(box);
    return;
  }
  const int64_t row = box.elements() / box.size[size_t(d)];
  const int64_t first = begin / row, last = (end - 1) / row;
  if (first == last) {
    append_interval_from(d + 1, slice(box, d, first), begin - first * row, end - first * row, boxes);
    return;
  }
  const int64_t head = begin % row == 0 ? first : first + 1, tail = end % row == 0 ? last + 1 : last;
  if (head > first) append_interval_from(d + 1, slice(box, d, first), begin - first * row, row, boxes);
  if (tail > head) {
    boxes->push_back(box);
    boxes->back().start[size_t(d)] += head;
    boxes->back().size[size_t(d)] = tail - head;
  }
  if (tail <= last) append_interval_from(d + 1, slice(box, d, last), 0, end - last * row, boxes);
}

}  // namespace

void append_interval(const Box& box, int64_t begin, int64_t end, std::vector<Box>* boxes) {
  append_interval_from(0, box, begin, end, boxes);
}

void append_fitting(const Box& box, int64_t max_elements, std::vector<Box>* boxes) {
  const int64_t elements = box.elements();
  if (elements <= max_elements) {
    boxes->push_back(box);
    return;
  }
  int d = 0;
  while (box.size[size_t(d)] == 1) ++d;
  const int64_t rows = box.size[size_t(d)], row = elements / rows;
  if (row > max_elements) {
    for (int64_t i = 0; i < rows; ++i) append_fitting(slice(box, d, i), max_elements, boxes);
    return;
  }
  const int64_t fitting = max_elements / row, pieces = (rows + fitting - 1) / fitting;
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t first = rows * i / pieces, last = rows * (i + 1) / pieces;
    boxes->push_back(box);
    boxes->back().start[size_t(d)] += first;
    boxes->back().size[size_t(d)] = last - first;
  }
}

void pack_chunks(const std::vector<int64_t>& atom_bytes, int64_t chunk_bytes, Message* message) {
  for (size_t i = 0; i < atom_bytes.size(); ++i) {
    const int64_t bytes = atom_bytes[i];
    if (message->chunks.empty() || message->chunks.back().bytes + bytes > chunk_bytes) {
      message->chunks.push_back({int32_t(message->chunks.size()), 0, int64_t(i), 0});
    }
    Chunk& chunk = message->chunks.back();
    chunk.bytes += bytes;
    ++chunk.atom_count;
    message->bytes += bytes;
  }
}

}  // namespace areal::reshard
