// Who sends which bytes to whom: a deterministic pure function of the source's layout, the target's, and the topology.
//
// An atom is a box of one canonical tensor that goes from one rank to one other: the common refinement of the source's
// and the target's boxes, cut so that it fits a chunk. A chunk is the unit of transport: whole atoms back to back, each
// row-major in canonical order, so that sender and receiver agree on every byte without a word about names or shapes.
// Bytes that a rank holds already are copied locally and are no wire bytes.
//
// Of several replicas of an atom one sends: chosen so that the most loaded sender is as light as possible.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "reshard/box.h"
#include "reshard/layout.h"
#include "reshard/topology.h"

namespace areal::reshard {

struct PlanOptions {
  int64_t chunk_bytes = int64_t{8} << 20;  // most bytes of one chunk
  // Where several ranks of one node need the same atom, each is sent a stripe of it (small atoms: one is sent all), and
  // they complete each other within the node (phase 1): bytes cross the NICs once for each node.
  bool multicast = false;

  bool operator==(const PlanOptions&) const = default;
};

struct Atom {
  int32_t source_tensor;  // position in the source layout
  int32_t target_tensor;  // position in the target layout
  Box box;                // canonical
};

struct Chunk {
  int32_t id;  // 0, 1, ... within one Message
  int64_t bytes;
  int64_t first_atom;  // positions in Message::atoms
  int64_t atom_count;
};

// All that goes from one rank to another in one phase.
struct Message {
  int32_t source;
  int32_t target;
  int32_t phase;  // 0: from source storage; 1: a target rank passes on what it received (multicast)
  int64_t bytes;
  std::vector<Atom> atoms;
  std::vector<Chunk> chunks;
};

// One rank's part. Messages are sorted by (phase, peer).
struct RankPlan {
  int32_t rank;
  std::vector<Message> sends;
  std::vector<Message> receives;
  std::vector<Atom> local_copies;
};

// What no plan can beat in which every node gets its bytes from their holders. Times in seconds under the topology.
struct LowerBound {
  int64_t wire_bytes = 0;      // bytes that target ranks need and do not hold
  int64_t nic_bytes = 0;       // of these, with no holder on the node (multicast: counted once for the node)
  double ingress_seconds = 0;  // the most loaded target rank
  double node_seconds = 0;     // the most loaded node's ingress
  double egress_seconds = 0;   // the tightest set of holders: the flow's minimum cut
  double seconds = 0;          // the largest of them
};

struct SenderLoad {
  int32_t rank;
  int64_t bytes;      // sent in phase 0
  int64_t nic_bytes;  // of these, to other nodes

  bool operator==(const SenderLoad&) const = default;
};

struct PlanStats {
  int64_t wire_bytes = 0;  // between ranks, both phases
  int64_t nic_bytes = 0;   // of these, between nodes
  int64_t local_bytes = 0;
  int64_t messages = 0;
  int64_t max_received_bytes = 0;     // by one rank, both phases
  std::vector<SenderLoad> senders;    // every rank that could send anything, ascending by rank
  double sender_max_over_mean = 1;    // of bytes / bandwidth in phase 0, among ranks that can take over from each other
  double seconds = 0;                 // estimated under the topology, every link at its rate, phase 1 after phase 0
  int64_t unused_source_tensors = 0;  // in the source, not in the target
};

class Plan {
 public:
  // Throws areal::Error naming the tensor that the target has and the source lacks, that differs in dtype or shape, or
  // of which some box has no reachable holder; the target rank that needs bytes and is unreachable; the option or the
  // part of the topology that makes no sense.
  static std::shared_ptr<const Plan> make(std::shared_ptr<const Layout> source, std::shared_ptr<const Layout> target,
                                          const Topology& topology, const PlanOptions& options);
  virtual ~Plan() = default;

  virtual const Layout& source() const = 0;
  virtual const Layout& target() const = 0;
  virtual const Topology& topology() const = 0;
  virtual const PlanOptions& options() const = 0;
  virtual const PlanStats& stats() const = 0;
  virtual const LowerBound& lower_bound() const = 0;
  // Covers both layouts, topology, options and every choice made: equal on all ranks, compared before data moves.
  virtual uint64_t digest() const = 0;
  // Made when asked, in at most 50 ms for 45,000 tensors. Thread-safe. Throws areal::Error for a rank of neither
  // layout.
  virtual RankPlan rank(int32_t rank) const = 0;
};

}  // namespace areal::reshard
