// The readers' side of the control line: slots, pins, and what becomes of those of the dead. The protocol that these
// are the steps of, and its memory ordering, stand in version_store.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "reshard/process_identity.h"
#include "reshard/store_memory.h"

namespace areal::reshard {

// Makes the caller the owner of a free slot, or of one whose owner is dead (and clears what that one had pinned).
std::optional<int> claim_slot(StoreMemory& memory, ProcessIdentity self);

// Steps 2 and 3 of a reader: pins the arena of `epoch` for the slot. False, and nothing pinned, if that epoch is no
// longer the active one (its arena may be being overwritten).
bool pin_epoch(ControlLine& control, int slot, uint64_t epoch);
void unpin_epoch(ControlLine& control, int slot, uint64_t epoch);

// Frees the slots of dead owners among those that pin this arena.
void reclaim_dead_pins(StoreMemory& memory, int arena, ProcessIdentity self);

// "pid 12 (2 pins), pid 13", for the text of errors.
std::string describe_pins(const StoreMemory& memory, int arena);
// "pid 12", "pid 12 (dead)" or "pid 12 (this process)".
std::string describe_process(ProcessIdentity identity);

}  // namespace areal::reshard
