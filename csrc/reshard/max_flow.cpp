#include "reshard/max_flow.h"

#include <algorithm>
#include <limits>

namespace areal::reshard {
namespace {

constexpr Wide kUnlimited = Wide{1} << 126;

}  // namespace

MaxFlow::MaxFlow(const std::vector<Wide>& demands, const std::vector<Wide>& links)
    : demands_(static_cast<int32_t>(demands.size())), links_(static_cast<int32_t>(links.size())) {
  out_.resize(demands.size() + links.size() + 2);
  for (int32_t d = 0; d < demands_; ++d) add_edge(source(), demand_node(d), demands[size_t(d)]);
  for (int32_t l = 0; l < links_; ++l) add_edge(link_node(l), sink(), links[size_t(l)]);
}

int32_t MaxFlow::add_edge(int32_t from, int32_t to, Wide capacity) {
  const auto edge = static_cast<int32_t>(edges_.size());
  edges_.push_back({to, capacity});
  edges_.push_back({from, 0});
  out_[size_t(from)].push_back(edge);
  out_[size_t(to)].push_back(edge + 1);
  return edge;
}

int32_t MaxFlow::connect(int32_t demand, int32_t link) {
  return add_edge(demand_node(demand), link_node(link), kUnlimited);
}

bool MaxFlow::find_levels() {
  level_.assign(out_.size(), -1);
  std::vector<int32_t> queue = {source()};
  level_[size_t(source())] = 0;
  for (size_t i = 0; i < queue.size(); ++i) {
    for (const int32_t e : out_[size_t(queue[i])]) {
      const Edge& edge = edges_[size_t(e)];
      if (edge.residual == 0 || level_[size_t(edge.to)] >= 0) continue;
      level_[size_t(edge.to)] = level_[size_t(queue[i])] + 1;
      queue.push_back(edge.to);
    }
  }
  return level_[size_t(sink())] >= 0;
}

// Recursion is as deep as the levels: at most one for each demand and link.
Wide MaxFlow::push(int32_t node, Wide limit) {
  if (node == sink()) return limit;
  Wide pushed = 0;
  for (size_t& i = next_[size_t(node)]; i < out_[size_t(node)].size(); ++i) {
    const int32_t e = out_[size_t(node)][i];
    Edge& edge = edges_[size_t(e)];
    if (edge.residual == 0 || level_[size_t(edge.to)] != level_[size_t(node)] + 1) continue;
    const Wide sent = push(edge.to, std::min(limit - pushed, edge.residual));
    edge.residual -= sent;
    edges_[size_t(e ^ 1)].residual += sent;
    pushed += sent;
    if (pushed == limit) return pushed;  // the edge may have room left: it stays next
  }
  return pushed;
}

void MaxFlow::augment() {
  while (find_levels()) {
    next_.assign(out_.size(), 0);
    push(source(), kUnlimited);
  }
}

bool MaxFlow::serves_all() const {
  for (int32_t d = 0; d < demands_; ++d) {
    if (edges_[size_t(2 * d)].residual != 0) return false;
  }
  return true;
}

Wide MaxFlow::flow_of(int32_t edge) const { return edges_[size_t(edge ^ 1)].residual; }

std::vector<bool> MaxFlow::overfull_demands() const {
  // After augment() the last search for levels has reached exactly the source's side of the cut.
  std::vector<bool> overfull(static_cast<size_t>(demands_));
  for (int32_t d = 0; d < demands_; ++d) overfull[size_t(d)] = level_[size_t(d)] >= 0;
  return overfull;
}

std::vector<bool> MaxFlow::tight_demands() const {
  std::vector<bool> reaches_sink(out_.size());
  std::vector<int32_t> queue = {sink()};
  reaches_sink[size_t(sink())] = true;
  for (size_t i = 0; i < queue.size(); ++i) {
    for (const int32_t e : out_[size_t(queue[i])]) {
      const int32_t from = edges_[size_t(e)].to;  // e ^ 1 leads from there to queue[i]
      if (edges_[size_t(e ^ 1)].residual == 0 || reaches_sink[size_t(from)]) continue;
      reaches_sink[size_t(from)] = true;
      queue.push_back(from);
    }
  }
  std::vector<bool> tight(static_cast<size_t>(demands_));
  for (int32_t d = 0; d < demands_; ++d) tight[size_t(d)] = !reaches_sink[size_t(demand_node(d))];
  return tight;
}

}  // namespace areal::reshard
