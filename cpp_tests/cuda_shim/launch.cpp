#include <algorithm>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "cluster.h"
#include "host_runtime.h"
#include "race_checker.h"

namespace cuda_shim {
namespace {

constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxClusterBlocks = 8;  // more are not portable

void check(const Launch& launch) {
  const dim3 grid = launch.grid, block = launch.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const auto refuse = [&](const std::string& what) {
    throw Error(std::string("cuda_shim: launch of '") + launch.name + "': expected " + what);
  };
  if (threads == 0 || threads > kMaxThreads || block.z > 64) {
    refuse("1 to 1024 threads a block, 64 along z, got " + std::to_string(threads));
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    refuse("a grid of 1 to (2147483647, 65535, 65535) blocks, got (" + std::to_string(grid.x) + ", " +
           std::to_string(grid.y) + ", " + std::to_string(grid.z) + ")");
  }
  const dim3 cluster = launch.cluster;
  if (cluster.x == 0 || cluster.y == 0 || cluster.z == 0 || cluster.x * cluster.y * cluster.z > kMaxClusterBlocks ||
      grid.x % cluster.x != 0 || grid.y % cluster.y != 0 || grid.z % cluster.z != 0) {
    refuse("clusters of 1 to 8 blocks that divide the grid, got (" + std::to_string(cluster.x) + ", " +
           std::to_string(cluster.y) + ", " + std::to_string(cluster.z) + ") of (" + std::to_string(grid.x) + ", " +
           std::to_string(grid.y) + ", " + std::to_string(grid.z) + ")");
  }
  if (launch.dynamic_shared_bytes > dynamic_shared_limit(launch.kernel)) {
    refuse("cudaFuncAttributeMaxDynamicSharedMemorySize >= " + std::to_string(launch.dynamic_shared_bytes) + ", got " +
           std::to_string(dynamic_shared_limit(launch.kernel)) + " bytes");
  }
}

std::vector<uint64_t> cluster_order(uint64_t count, const Options& options) {
  std::vector<uint64_t> order(count);
  std::iota(order.begin(), order.end(), uint64_t{0});
  if (options.order == Order::kReversed) std::reverse(order.begin(), order.end());
  if (options.order == Order::kRandom) std::shuffle(order.begin(), order.end(), std::mt19937_64(options.seed));
  return order;
}

}  // namespace

Context* current = nullptr;

Options& options() {
  static Options instance;
  return instance;
}

Variant variant() {
#if defined(CUDA_SHIM_RACE)
  return Variant::kRace;
#elif defined(CUDA_SHIM_ASAN)
  return Variant::kAsan;
#else
  return Variant::kPlain;
#endif
}

void run_grid(const Launch& launch, const std::function<void()>& body) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> guard(one_at_a_time);
  check(launch);
  Cluster cluster(launch, options(), body);
  race::on_launch(launch.name);
  const dim3 size = launch.cluster;
  const uint64_t row = launch.grid.x / size.x, plane = row * (launch.grid.y / size.y);
  try {
    for (const uint64_t i : cluster_order(plane * (launch.grid.z / size.z), options())) {
      cluster.run({static_cast<unsigned>(i % row) * size.x, static_cast<unsigned>(i % plane / row) * size.y,
                   static_cast<unsigned>(i / plane) * size.z});
    }
  } catch (const Error& error) {  // races found before may be its cause
    const std::string findings = race::findings();
    if (findings.empty()) throw;
    throw Error(findings + "\n" + error.what());
  }
  if (const std::string findings = race::findings(); !findings.empty()) throw Error(findings);
}

void* dynamic_shared() { return running_thread().owner->dynamic_shared(); }
int block_barrier(BarrierKind kind, bool predicate, Location where) {
  return running_thread().owner->barrier(kind, predicate, where);
}
LaneValues warp_meet(WarpOp op, uint32_t mask, uint64_t value, Location where) {
  return running_thread().owner->warp_meet(op, mask, value, where);
}
void warp_leave() { running_thread().owner->warp_leave(); }

}  // namespace cuda_shim
