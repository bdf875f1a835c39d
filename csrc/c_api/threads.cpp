// The threads of the CPU functions: a pool of the library's own, or one that the caller lends.
#include "base/threads.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "c_api/boundary.h"

namespace areal::c_api {
namespace {

// A loop of the pool: pieces are taken in order by whoever is free.
struct Loop {
  RangeFn body;
  int64_t end;
  int64_t piece;
  std::atomic<int64_t> next;

  void run_pieces() {
    for (int64_t begin = next.fetch_add(piece); begin < end; begin = next.fetch_add(piece)) {
      body(begin, std::min(end, begin + piece));
    }
  }
};

// Workers that wait for loops. One loop runs at a time; a second caller, or a loop inside a loop, runs in its own
// thread.
class Pool {
 public:
  explicit Pool(int64_t threads) : process_(getpid()) {
    try {
      for (int64_t i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Pool() { stop(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // After a fork the workers are not there. Nor can the pool be destroyed: a condition variable waits for its waiters.
  bool is_lost() const { return process_ != getpid(); }
  int64_t threads() const { return is_lost() ? 1 : static_cast<int64_t>(workers_.size()) + 1; }

  void run(int64_t begin, int64_t end, int64_t grain, RangeFn body) {
    if (threads() == 1 || taken_.test_and_set(std::memory_order_acquire)) return body(begin, end);
    run_alone(begin, end, grain, body);
    taken_.clear(std::memory_order_release);
  }

 private:
  void run_alone(int64_t begin, int64_t end, int64_t grain, RangeFn body) {
    const int64_t even = (end - begin + threads() - 1) / threads();
    Loop loop{body, end, std::max({grain, even, int64_t{1}}), begin};
    {
      const std::lock_guard lock(mutex_);
      loop_ = &loop;
      ++generation_;
      busy_ = static_cast<int64_t>(workers_.size());
    }
    started_.notify_all();
    loop.run_pieces();
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [&] { return busy_ == 0; });
    loop_ = nullptr;
  }

  void work() {
    for (int64_t seen = 0;;) {
      Loop* loop = nullptr;
      {
        std::unique_lock lock(mutex_);
        started_.wait(lock, [&] { return stopping_ || generation_ != seen; });
        if (stopping_) return;
        seen = generation_;
        loop = loop_;
      }
      loop->run_pieces();
      const std::lock_guard lock(mutex_);
      if (--busy_ == 0) finished_.notify_one();
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    started_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  const pid_t process_;
  std::atomic_flag taken_;  // by the caller whose loop runs
  std::mutex mutex_;        // guards what follows
  std::condition_variable started_, finished_;
  Loop* loop_ = nullptr;
  int64_t generation_ = 0;
  int64_t busy_ = 0;  // workers that have not finished the current loop
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

Pool* g_pool = nullptr;  // never destroyed at exit: other threads may still compute
areal_thread_pool g_lent{};

void run_in_pool(int64_t begin, int64_t end, int64_t grain, RangeFn body) { g_pool->run(begin, end, grain, body); }
int64_t pool_threads() { return g_pool->threads(); }

void call_body(void* body, int64_t begin, int64_t end) { (*static_cast<const RangeFn*>(body))(begin, end); }
void run_in_lent(int64_t begin, int64_t end, int64_t grain, RangeFn body) {
  g_lent.parallel_for(g_lent.context, begin, end, grain, &call_body, &body);
}
int64_t lent_threads() { return g_lent.num_threads(g_lent.context); }

void use_own_pool() {
  if (g_pool == nullptr) {
    set_parallel_for(nullptr, nullptr);
  } else {
    set_parallel_for(&run_in_pool, &pool_threads);
  }
}

}  // namespace
}  // namespace areal::c_api

areal_status areal_set_num_threads(int64_t threads) {
  using namespace areal::c_api;
  constexpr int64_t kMostThreads = 4096;
  return guarded([&] {
    AREAL_CHECK(threads >= 1 && threads <= kMostThreads, "areal_set_num_threads: expected threads in 1..", kMostThreads,
                ", got ", threads);
    auto pool = threads > 1 ? std::make_unique<Pool>(threads) : nullptr;
    Pool* old = std::exchange(g_pool, pool.release());
    if (old != nullptr && !old->is_lost()) delete old;
    if (g_lent.parallel_for == nullptr) use_own_pool();
  });
}

int64_t areal_num_threads(void) { return areal::num_threads(); }

areal_status areal_set_thread_pool(const areal_thread_pool* pool) {
  using namespace areal::c_api;
  constexpr const char* op = "areal_set_thread_pool";
  return guarded([&] {
    if (pool == nullptr) {
      g_lent = {};
      return use_own_pool();
    }
    const areal_thread_pool lent = read_struct(pool, op, "pool");
    AREAL_CHECK(lent.parallel_for != nullptr && lent.num_threads != nullptr, op,
                ": expected pool.parallel_for and pool.num_threads, got NULL");
    g_lent = lent;
    areal::set_parallel_for(&run_in_lent, &lent_threads);
  });
}
