// From parts of atoms to the chunks of a message.
#pragma once

#include <cstdint>
#include <vector>

#include "reshard/plan.h"

namespace areal::reshard {

// Appends elements [begin, end) of the box, counted row-major, as boxes in that order: one where they are whole rows,
// at most 2 dims - 1.
void append_interval(const Box& box, int64_t begin, int64_t end, std::vector<Box>* boxes);

// Appends the box in pieces of at most max_elements (>= 1), cut along the outermost dimension that can be: one behind
// the other they are the box, row-major.
void append_fitting(const Box& box, int64_t max_elements, std::vector<Box>* boxes);

// Fills bytes and chunks of a message from its atoms, in order: whole atoms, as many as fit. item_bytes: of each atom.
void pack_chunks(const std::vector<int64_t>& atom_bytes, int64_t chunk_bytes, Message* message);

}  // namespace areal::reshard
