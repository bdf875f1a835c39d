#include "cluster.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "race_checker.h"
#include "report.h"
#include "shared_arrays.h"

namespace cuda_shim {
namespace {

constexpr unsigned kWarpLanes = 32;

FiberStacks& stacks() {
  static FiberStacks instance;
  return instance;
}

unsigned volume(dim3 size) { return size.x * size.y * size.z; }
uint3 unflatten(unsigned i, dim3 size) { return {i % size.x, i / size.x % size.y, i / (size.x * size.y)}; }
unsigned slots_of(unsigned threads) { return (threads + kWarpLanes - 1) / kWarpLanes * kWarpLanes; }

}  // namespace

Cluster::Cluster(const Launch& launch, const Options& options, const std::function<void()>& body)
    : launch_(launch), options_(options), body_(body), random_(options.seed), copies_(options_, random_) {
  const unsigned blocks = volume(launch.cluster), threads = volume(launch.block);
  threads_.resize(size_t{blocks} * threads);
  stacks().reserve(threads_.size(), options.stack_bytes);
  blocks_.reserve(blocks);
  for (unsigned rank = 0; rank < blocks; ++rank) {
    blocks_.emplace_back(*this, rank, std::span(threads_).subspan(size_t{rank} * threads, threads));
  }
  order_.resize(blocks);
  std::iota(order_.begin(), order_.end(), 0u);
  if (options.order == Order::kReversed) std::reverse(order_.begin(), order_.end());
}

Cluster::~Cluster() { current = nullptr; }

void Cluster::reset(uint3 first) {
  arrived_ = phases_ended_ = 0;
  error_ = nullptr;
  copies_.reset();
  const unsigned threads = volume(launch_.block), slots = slots_of(threads);
  race::ClusterMemory memory;
  for (Block& block : blocks_) {
    const uint3 offset = unflatten(block.rank(), launch_.cluster);
    const uint3 index = {first.x + offset.x, first.y + offset.y, first.z + offset.z};
    for (unsigned i = 0; i < threads; ++i) {
      const unsigned in_cluster = block.rank() * threads + i;
      Thread& thread = threads_[in_cluster];
      static_cast<Context&>(thread) = {unflatten(i, launch_.block),
                                       index,
                                       launch_.block,
                                       launch_.grid,
                                       block.rank(),
                                       static_cast<unsigned>(blocks_.size()),
                                       i,
                                       block.rank() * slots + i,
                                       i % kWarpLanes,
                                       i / kWarpLanes};
      // Stacks a power of two apart would all fall into the same cache sets: shift their tops.
      const size_t colour_bytes = in_cluster % 61 * 128;
      prepare_fiber(thread.fiber, stacks().low(in_cluster), stacks().stack_bytes() - colour_bytes,
                    &Cluster::run_thread);
    }
    block.reset(index);
    memory.blocks.push_back(index);
    memory.dynamic_shared.emplace_back(block.dynamic_shared(), launch_.dynamic_shared_bytes);
  }
  for (const SharedArray& array : shared_arrays()) std::fill_n(array.address, array.bytes, '\xff');
  memory.slots_per_block = slots;
  memory.stacks = {stacks().base(), stacks().total_bytes()};
  memory.threads = {threads_.data(), threads_.size() * sizeof(Thread)};
  race::on_cluster(memory);
}

void Cluster::run(uint3 first) {
  reset(first);
  do {
    run_ready_threads();
  } while (copies_.complete_one());
  if (running_threads() != 0) {
    std::string text;
    for (const Block& block : blocks_) {
      if (!block.finished()) text += (text.empty() ? "" : "\n") + describe_waiting_threads("deadlock", block);
    }
    throw Error(text);
  }
  check_static_shared();
}

void Cluster::run_ready_threads() {
  while (Block* block = next_block()) {
    Thread& thread = block->pop_ready();
    current = &thread;
    switch_fiber(scheduler_, thread.fiber);
    if (error_) std::rethrow_exception(error_);
    if (thread.state == ThreadState::kDone) on_exit(thread);
    copies_.maybe_complete_one();
  }
}

// With random orders the blocks change places now and then, so that one of them may run far ahead of the others.
Block* Cluster::next_block() {
  if (blocks_.size() > 1 && options_.order == Order::kRandom && random_() % 64 == 0) {
    std::shuffle(order_.begin(), order_.end(), random_);
  }
  for (const unsigned rank : order_) {
    if (blocks_[rank].has_ready()) return &blocks_[rank];
  }
  return nullptr;
}

void Cluster::run_thread() {
  Thread& self = running_thread();
  Cluster& cluster = self.owner->cluster();
  try {
    race::watch(true);
    cluster.body_();
  } catch (...) {
    if (!cluster.error_) cluster.error_ = std::current_exception();
  }
  race::watch(false);
  self.state = ThreadState::kDone;
  switch_fiber(self.fiber, cluster.scheduler_, true);
}

void Cluster::yield() { switch_fiber(running_thread().fiber, scheduler_); }

unsigned Cluster::running_threads() const {
  auto running = static_cast<unsigned>(threads_.size());
  for (const Block& block : blocks_) running -= block.exited();
  return running;
}

void Cluster::arrive(Location where) {
  const race::Unwatched scope;
  Thread& self = running_thread();
  if (self.cluster_arrivals > self.cluster_waits) fail("cluster barrier: a thread arrives twice without a wait", where);
  if (running_threads() < threads_.size() && !options_.exited_threads_pass_barriers) {
    fail("divergent cluster barrier: " + std::to_string(threads_.size() - running_threads()) +
             " thread(s) of the cluster exited before it",
         where);
  }
  ++self.cluster_arrivals;
  self.where = where;
  ++arrived_;
  race::on_release(&arrived_);
  end_phase_if_complete();
}

void Cluster::wait(Location where) {
  const race::Unwatched scope;
  Thread& self = running_thread();
  if (self.cluster_arrivals == self.cluster_waits) fail("cluster barrier: a thread waits without arriving", where);
  ++self.cluster_waits;
  if (phases_ended_ < self.cluster_waits) {
    self.owner->park(ThreadState::kAtClusterBarrier, where);
    yield();
  }
  race::on_acquire(&arrived_);
}

void Cluster::end_phase_if_complete() {
  if (arrived_ == 0 || arrived_ < running_threads()) return;
  arrived_ = 0;
  ++phases_ended_;
  race::on_end_phase(&arrived_);
  for (Thread& thread : threads_) {
    if (thread.state == ThreadState::kAtClusterBarrier) thread.owner->make_ready(thread);
  }
}

void Cluster::on_exit(Thread& thread) {
  if (thread.cluster_arrivals > thread.cluster_waits) {
    fail_for(thread, "divergent cluster barrier: a thread arrives and exits without a wait", thread.where);
  }
  thread.owner->on_exit(thread);
  if (thread.owner->finished()) copies_.on_block_exit(*thread.owner);
  if (arrived_ == 0) return;
  if (!options_.exited_threads_pass_barriers) {
    throw Error(describe_waiting_threads("divergent cluster barrier: threads exited while others wait", *thread.owner));
  }
  end_phase_if_complete();
}

void* Cluster::map_shared(const void* address, unsigned rank, Location where) {
  const race::Unwatched scope;
  const Block& own = *running_thread().owner;
  if (rank >= blocks_.size()) {
    fail("expected a rank below the cluster's " + std::to_string(blocks_.size()) + " blocks, got " +
             std::to_string(rank),
         where);
  }
  if (!own.owns_shared(address, 1)) fail("expected an address in the block's dynamic shared memory", where);
  if (blocks_[rank].finished()) {
    fail("the shared memory of the block of rank " + std::to_string(rank) + " is gone: it has exited", where);
  }
  return blocks_[rank].dynamic_shared() + (static_cast<const char*>(address) - own.dynamic_shared());
}

// The program has one copy of every __shared__ variable, which the blocks of a cluster would share.
void Cluster::check_static_shared() const {
  if (blocks_.size() == 1) return;
  for (const SharedArray& array : shared_arrays()) {
    if (std::all_of(array.address, array.address + array.bytes, [](char byte) { return byte == '\xff'; })) continue;
    throw Error(std::string("cuda_shim: kernel '") + launch_.name +
                "': expected dynamic shared memory only in a kernel launched with clusters, got __shared__ " +
                array.name);
  }
}

}  // namespace cuda_shim
