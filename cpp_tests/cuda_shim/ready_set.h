// The runnable threads of a block, each with a rank; the lowest rank goes first.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace cuda_shim {

class ReadySet {
 public:
  // thread_of_rank: a permutation of the threads. Keeps who is runnable.
  void set_ranks(const std::vector<unsigned>& thread_of_rank) {
    std::vector<unsigned> runnable;
    while (!empty()) runnable.push_back(pop());
    thread_of_rank_ = thread_of_rank;
    rank_of_thread_.resize(thread_of_rank.size());
    for (unsigned rank = 0; rank < thread_of_rank.size(); ++rank) rank_of_thread_[thread_of_rank[rank]] = rank;
    for (const unsigned thread : runnable) insert(thread);
  }
  void clear() { words_.fill(0); }

  void insert(unsigned thread) {
    const unsigned rank = rank_of_thread_[thread];
    words_[rank / 64] |= uint64_t{1} << rank % 64;
  }
  bool empty() const {
    for (const uint64_t word : words_) {
      if (word != 0) return false;
    }
    return true;
  }
  // Must not be empty.
  unsigned pop() {
    unsigned i = 0;
    while (words_[i] == 0) ++i;
    const unsigned rank = i * 64 + static_cast<unsigned>(__builtin_ctzll(words_[i]));
    words_[i] &= words_[i] - 1;
    return thread_of_rank_[rank];
  }

 private:
  std::array<uint64_t, 1024 / 64> words_{};  // bit r: the thread of rank r is runnable
  std::vector<unsigned> thread_of_rank_, rank_of_thread_;
};

}  // namespace cuda_shim
