// areal_core._C: plans of the weight transfer engine. areal_core/reshard wraps these classes; nobody else uses them.
#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "reshard/plan.h"

namespace py = pybind11;

namespace areal::bind {
namespace {

using namespace reshard;

using Sizes = std::vector<int64_t>;
using AtomTuple = std::tuple<int32_t, int32_t, Sizes, Sizes>;       // source tensor, target tensor, start, size
using ChunkTuple = std::tuple<int32_t, int64_t, int64_t, int64_t>;  // id, bytes, first atom, atoms

std::vector<AtomTuple> atom_tuples(const std::vector<Atom>& atoms) {
  std::vector<AtomTuple> tuples;
  tuples.reserve(atoms.size());
  for (const Atom& a : atoms) {
    tuples.emplace_back(a.source_tensor, a.target_tensor, Sizes(a.box.start.begin(), a.box.start.begin() + a.box.dims),
                        Sizes(a.box.size.begin(), a.box.size.begin() + a.box.dims));
  }
  return tuples;
}

std::vector<ChunkTuple> chunk_tuples(const Message& message) {
  std::vector<ChunkTuple> tuples;
  for (const Chunk& c : message.chunks) tuples.emplace_back(c.id, c.bytes, c.first_atom, c.atom_count);
  return tuples;
}

Topology make_topology(int32_t ranks_per_node, double nic_bytes_per_s, double intra_node_bytes_per_s,
                       const std::vector<std::pair<int32_t, double>>& links) {
  Topology topology{ranks_per_node, nic_bytes_per_s, intra_node_bytes_per_s, {}};
  for (const auto& [rank, bytes_per_s] : links) topology.links.push_back({rank, bytes_per_s});
  return canonical(std::move(topology));
}

std::shared_ptr<Plan> make_plan(const std::shared_ptr<Layout>& source, const std::shared_ptr<Layout>& target,
                                const Topology& topology, int64_t chunk_bytes, bool multicast) {
  const py::gil_scoped_release unlocked;
  return std::const_pointer_cast<Plan>(Plan::make(source, target, topology, {chunk_bytes, multicast}));
}

RankPlan rank_plan(const Plan& plan, int32_t rank) {
  const py::gil_scoped_release unlocked;
  return plan.rank(rank);
}

std::vector<std::tuple<int32_t, int64_t, int64_t>> sender_tuples(const PlanStats& stats) {
  std::vector<std::tuple<int32_t, int64_t, int64_t>> tuples;
  for (const SenderLoad& s : stats.senders) tuples.emplace_back(s.rank, s.bytes, s.nic_bytes);
  return tuples;
}

void register_results(py::module_& m) {
  py::class_<Message>(m, "Message")
      .def_readonly("source", &Message::source)
      .def_readonly("target", &Message::target)
      .def_readonly("phase", &Message::phase)
      .def_readonly("bytes", &Message::bytes)
      .def_property_readonly("atoms", [](const Message& message) { return atom_tuples(message.atoms); })
      .def_property_readonly("chunks", &chunk_tuples);
  py::class_<RankPlan>(m, "RankPlan")
      .def_readonly("rank", &RankPlan::rank)
      .def_property_readonly(
          "sends", [](const RankPlan& plan) -> const std::vector<Message>& { return plan.sends; },
          py::return_value_policy::reference_internal)
      .def_property_readonly(
          "receives", [](const RankPlan& plan) -> const std::vector<Message>& { return plan.receives; },
          py::return_value_policy::reference_internal)
      .def_property_readonly("local_copies", [](const RankPlan& plan) { return atom_tuples(plan.local_copies); });
  py::class_<LowerBound>(m, "LowerBound")
      .def_readonly("wire_bytes", &LowerBound::wire_bytes)
      .def_readonly("nic_bytes", &LowerBound::nic_bytes)
      .def_readonly("ingress_seconds", &LowerBound::ingress_seconds)
      .def_readonly("node_seconds", &LowerBound::node_seconds)
      .def_readonly("egress_seconds", &LowerBound::egress_seconds)
      .def_readonly("seconds", &LowerBound::seconds);
  py::class_<PlanStats>(m, "PlanStats")
      .def_readonly("wire_bytes", &PlanStats::wire_bytes)
      .def_readonly("nic_bytes", &PlanStats::nic_bytes)
      .def_readonly("local_bytes", &PlanStats::local_bytes)
      .def_readonly("messages", &PlanStats::messages)
      .def_readonly("max_received_bytes", &PlanStats::max_received_bytes)
      .def_property_readonly("senders", &sender_tuples)
      .def_readonly("sender_max_over_mean", &PlanStats::sender_max_over_mean)
      .def_readonly("seconds", &PlanStats::seconds)
      .def_readonly("unused_source_tensors", &PlanStats::unused_source_tensors);
}

}  // namespace

void register_reshard_plan(py::module_& m) {
  register_results(m);
  py::class_<Topology>(m, "Topology")
      .def(py::init(&make_topology), py::arg("ranks_per_node"), py::arg("nic_bytes_per_s"),
           py::arg("intra_node_bytes_per_s"), py::arg("links"));
  // The executor's binding takes a shared_ptr too: a plan outlives whoever made it.
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def(py::init(&make_plan), py::arg("source"), py::arg("target"), py::arg("topology"), py::arg("chunk_bytes"),
           py::arg("multicast"))
      .def_property_readonly("stats", &Plan::stats)
      .def_property_readonly("lower_bound", &Plan::lower_bound)
      .def_property_readonly("digest", &Plan::digest)
      .def("rank", &rank_plan, py::arg("rank"));
}

}  // namespace areal::bind
