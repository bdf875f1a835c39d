// What kernels ask of clusters, mbarriers and bulk copies, passed on to the running thread's cluster.
#include "cluster.h"
#include "engine.h"
#include "race_checker.h"

namespace cuda_shim {
namespace {

Cluster& cluster() { return running_thread().owner->cluster(); }

}  // namespace

void cluster_arrive(Location where) { cluster().arrive(where); }
void cluster_wait(Location where) { cluster().wait(where); }
void* map_shared(const void* address, unsigned rank, Location where) {
  return cluster().map_shared(address, rank, where);
}

void mbarrier_init(const void* barrier, unsigned arrivals, Location where) {
  const race::Unwatched scope;
  cluster().copies().init(barrier, arrivals, where, __builtin_return_address(0));
}
void mbarrier_init_fence() {
  const race::Unwatched scope;
  cluster().copies().init_fence();
}
void mbarrier_arrive(const void* barrier, unsigned rank, uint32_t expected_bytes, Location where) {
  const void* mapped = cluster().map_shared(barrier, rank, where);
  const race::Unwatched scope;
  cluster().copies().arrive(mapped, expected_bytes, where, __builtin_return_address(0));
}
void mbarrier_wait(const void* barrier, unsigned parity, Location where) {
  const race::Unwatched scope;
  cluster().copies().wait(barrier, parity, where, __builtin_return_address(0));
}

void bulk_load(void* shared, const void* global, uint32_t bytes, const void* barrier, Location where) {
  const race::Unwatched scope;
  cluster().copies().load(shared, global, bytes, barrier, where, __builtin_return_address(0));
}
void bulk_store(void* global, const void* shared, uint32_t bytes, Location where) {
  const race::Unwatched scope;
  cluster().copies().store(global, shared, bytes, where, __builtin_return_address(0));
}
void bulk_commit() {
  const race::Unwatched scope;
  cluster().copies().commit();
}
void bulk_wait(unsigned pending, bool read_only) {
  const race::Unwatched scope;
  cluster().copies().wait_stores(pending, read_only);
}

}  // namespace cuda_shim
