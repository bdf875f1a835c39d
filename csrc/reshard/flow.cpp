#include "reshard/flow.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "reshard/max_flow.h"

namespace areal::reshard {
namespace {

// Some of the demands, over the links that are still open: one component, or what is left of it after tighter sets.
class Network {
 public:
  // closed: links that carry all they may already.
  Network(const std::vector<Demand>& demands, const std::vector<int64_t>& rates, const std::vector<bool>& closed,
          const std::vector<int32_t>& members) {
    std::vector<int32_t> position_of(rates.size(), -1);
    for (const int32_t k : members) {
      Demand member{demands[size_t(k)].bytes, {}};
      for (const int32_t link : demands[size_t(k)].links) {
        if (closed[size_t(link)]) continue;
        int32_t& position = position_of[size_t(link)];
        if (position < 0) {
          position = int32_t(rates_.size());
          rates_.push_back(rates[size_t(link)]);
        }
        member.links.push_back(position);
      }
      members_.push_back(std::move(member));
    }
  }

  // A flow in which every link may work for `limit` seconds. edges: of each member, in the order of its open links.
  MaxFlow flow(const Tightness& limit, std::vector<std::vector<int32_t>>* edges) const {
    std::vector<Wide> wanted, room;
    for (const Demand& member : members_) wanted.push_back(Wide{member.bytes} * limit.rate);
    for (const int64_t rate : rates_) room.push_back(Wide{limit.bytes} * rate);
    MaxFlow flow(wanted, room);
    edges->assign(members_.size(), {});
    for (size_t i = 0; i < members_.size(); ++i) {
      for (const int32_t link : members_[i].links) (*edges)[i].push_back(flow.connect(int32_t(i), link));
    }
    flow.augment();
    return flow;
  }

  Tightness tightest() const {
    Tightness limit = ratio_of(std::vector<bool>(members_.size(), true));
    for (const Demand& member : members_) {  // saves iterations
      Tightness alone{member.bytes, 0};
      for (const int32_t link : member.links) alone.rate += rates_[size_t(link)];
      limit = std::max(limit, alone);
    }
    if (members_.size() == 1) return limit;
    for (std::vector<std::vector<int32_t>> edges;;) {
      const MaxFlow fitted = flow(limit, &edges);
      if (fitted.serves_all()) return limit;
      limit = ratio_of(fitted.overfull_demands());
    }
  }

 private:
  Tightness ratio_of(const std::vector<bool>& set) const {
    Tightness result{0, 0};
    std::vector<bool> counted(rates_.size());
    for (size_t i = 0; i < members_.size(); ++i) {
      if (!set[i]) continue;
      result.bytes += members_[i].bytes;
      for (const int32_t link : members_[i].links) {
        if (!counted[size_t(link)]) result.rate += rates_[size_t(link)];
        counted[size_t(link)] = true;
      }
    }
    return result;
  }

  std::vector<Demand> members_;  // their links are positions in rates_
  std::vector<int64_t> rates_;
};

// Demands with bytes, as components that share no link: each can be served without regard to the others.
std::vector<std::vector<int32_t>> components(const std::vector<Demand>& demands, size_t links) {
  std::vector<int32_t> parent(links);
  std::iota(parent.begin(), parent.end(), 0);
  const auto root = [&](int32_t link) {
    while (parent[size_t(link)] != link) link = parent[size_t(link)] = parent[size_t(parent[size_t(link)])];
    return link;
  };
  for (const Demand& demand : demands) {
    AREAL_CHECK(demand.bytes == 0 || (demand.bytes > 0 && !demand.links.empty()),
                "flow: expected demands >= 0 with links, got ", demand.bytes, " bytes over ", demand.links.size(),
                " links");
    for (const int32_t link : demand.links) parent[size_t(root(link))] = root(demand.links.front());
  }
  std::vector<std::vector<int32_t>> result;
  std::vector<int32_t> component_of(links, -1);
  for (size_t k = 0; k < demands.size(); ++k) {
    if (demands[k].bytes == 0) continue;
    int32_t& component = component_of[size_t(root(demands[k].links.front()))];
    if (component < 0) {
      component = int32_t(result.size());
      result.emplace_back();
    }
    result[size_t(component)].push_back(int32_t(k));
  }
  return result;
}

// Integers that sum to `total` and are within one of share[i] / scale.
std::vector<int64_t> rounded(const std::vector<Wide>& shares, Wide scale, int64_t total) {
  std::vector<int64_t> result;
  Wide sum = 0;
  int64_t given = 0;
  for (const Wide share : shares) {
    sum += share;
    result.push_back(int64_t(sum / scale) - given);
    given += result.back();
  }
  AREAL_CHECK(given == total, "flow: expected ", total, " bytes served, got ", given);
  return result;
}

// Serves the tightest of the members as evenly as their open links allow, closes these, and returns who is left.
std::vector<int32_t> serve_tightest(const std::vector<Demand>& demands, const std::vector<int64_t>& rates,
                                    const std::vector<int32_t>& members, int32_t group, std::vector<bool>* closed,
                                    Service* service) {
  const Network network(demands, rates, *closed, members);
  const Tightness limit = network.tightest();
  std::vector<std::vector<int32_t>> edges;
  const MaxFlow flow = network.flow(limit, &edges);
  const std::vector<bool> tight = flow.tight_demands();
  std::vector<int32_t> left, full;
  for (size_t i = 0; i < members.size(); ++i) {
    const Demand& demand = demands[size_t(members[i])];
    if (!tight[i]) {
      left.push_back(members[i]);
      continue;
    }
    std::vector<Wide> shares;
    size_t edge = 0;
    for (const int32_t link : demand.links) {
      shares.push_back((*closed)[size_t(link)] ? 0 : flow.flow_of(edges[i][edge++]));
      if (!(*closed)[size_t(link)]) full.push_back(link);
    }
    service->bytes[size_t(members[i])] = rounded(shares, limit.rate, demand.bytes);
  }
  for (const int32_t link : full) {
    (*closed)[size_t(link)] = true;
    service->group_of_link[size_t(link)] = group;
  }
  return left;
}

}  // namespace

bool operator<(const Tightness& a, const Tightness& b) { return Wide{a.bytes} * b.rate < Wide{b.bytes} * a.rate; }

Tightness tightest_set(const std::vector<Demand>& demands, const std::vector<int64_t>& rates) {
  Tightness result;
  const std::vector<bool> closed(rates.size());
  for (const std::vector<int32_t>& component : components(demands, rates.size())) {
    result = std::max(result, Network(demands, rates, closed, component).tightest());
  }
  return result;
}

Service serve(const std::vector<Demand>& demands, const std::vector<int64_t>& rates) {
  Service service;
  for (const Demand& demand : demands) service.bytes.emplace_back(demand.links.size());
  service.group_of_link.assign(rates.size(), -1);
  std::vector<bool> closed(rates.size());
  int32_t group = 0;
  for (std::vector<int32_t> left : components(demands, rates.size())) {
    while (!left.empty()) left = serve_tightest(demands, rates, left, group++, &closed, &service);
  }
  return service;
}

std::vector<int64_t> serve_preferred(const std::vector<Demand>& demands, int32_t first_preferred,
                                     const std::vector<int64_t>& rates, const Tightness& limit) {
  std::vector<Wide> wanted, room;
  for (const Demand& demand : demands) wanted.push_back(Wide{demand.bytes} * limit.rate);
  for (const int64_t rate : rates) room.push_back(Wide{limit.bytes} * rate);
  MaxFlow flow(wanted, room);
  std::vector<std::vector<int32_t>> edges(demands.size());
  // Preferred links first; the others afterwards, since a link keeps the flow it has.
  for (const bool preferred : {true, false}) {
    for (size_t k = 0; k < demands.size(); ++k) {
      for (const int32_t link : demands[k].links) {
        if ((link >= first_preferred) != preferred) continue;
        const int32_t edge = flow.connect(int32_t(k), link);
        if (preferred) edges[k].push_back(edge);
      }
    }
    flow.augment();
  }
  AREAL_CHECK(flow.serves_all(), "flow: expected a limit that fits all demands");
  std::vector<int64_t> result;
  for (size_t k = 0; k < demands.size(); ++k) {
    Wide served = 0;
    for (const int32_t edge : edges[k]) served += flow.flow_of(edge);
    result.push_back(int64_t((served + limit.rate - 1) / limit.rate));
  }
  return result;
}

}  // namespace areal::reshard
