// Maximum flow from demands to links, by Dinic's algorithm, in exact integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace areal::reshard {

// Bytes times bytes/s: the flow is scaled by the denominator of the time, so that nothing is rounded.
using Wide = __int128;

// source -> demand -> link -> sink. Capacities of demands and links are given; those between are unlimited.
class MaxFlow {
 public:
  MaxFlow(const std::vector<Wide>& demands, const std::vector<Wide>& links);

  // Returns the position of the edge, for flow_of.
  int32_t connect(int32_t demand, int32_t link);
  // Adds flow over what has been connected so far. Links never lose flow to edges that are connected later.
  void augment();

  bool serves_all() const;
  Wide flow_of(int32_t edge) const;
  // Demands on the source's side of the minimum cut: too much for their links. None when all are served.
  std::vector<bool> overfull_demands() const;
  // Demands whose links are all full and cannot shift any of their flow elsewhere.
  std::vector<bool> tight_demands() const;

 private:
  struct Edge {
    int32_t to;
    Wide residual;
  };

  int32_t demand_node(int32_t demand) const { return demand; }
  int32_t link_node(int32_t link) const { return demands_ + link; }
  int32_t source() const { return demands_ + links_; }
  int32_t sink() const { return demands_ + links_ + 1; }
  int32_t add_edge(int32_t from, int32_t to, Wide capacity);
  bool find_levels();
  Wide push(int32_t node, Wide limit);

  int32_t demands_, links_;
  std::vector<Edge> edges_;  // edge e ^ 1 is the reverse of e; the first ones are source -> demand, then link -> sink
  std::vector<std::vector<int32_t>> out_;
  std::vector<int32_t> level_;
  std::vector<size_t> next_;
};

}  // namespace areal::reshard
