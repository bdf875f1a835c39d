// One run of an executor: who does what in which thread. Private to the executor.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "reshard/executor.h"

namespace areal::reshard {

class Executor::Update {
 public:
  Update(Executor& executor, uint64_t epoch, const BoundBuffers& buffers, const Deadline& deadline);
  TransferStats run();

 private:
  using Task = std::function<void(const Deadline&)>;

  // Chunks of one peer that are still to come, in their order.
  struct Incoming {
    std::vector<const MessageProgram*> messages;  // those of phase 0 first
    size_t message = 0;
    size_t chunk = 0;
  };
  struct Next {
    ReceivedChunk received;
    const MessageProgram* message;
    const ChunkProgram* chunk;
  };

  // Peers of `share` of `shares` threads: their grants, then their chunks in turn, then their credits.
  void send(size_t share, size_t shares, const Deadline& deadline);
  void send_phase(std::span<const size_t> messages, const Deadline& deadline);
  void send_chunk(const MessageProgram& message, const ChunkProgram& chunk, const Deadline& deadline);
  void await_grant(size_t message, const Deadline& deadline);
  void await_first_phase(const Deadline& deadline);

  void receive(const Deadline& deadline);
  bool next(Next& next, const Deadline& deadline);
  void use(const Next& next);
  void finish_first_phase_part();

  void run_tasks(std::vector<Task> tasks);
  void run_task(const Task& task, const Deadline& deadline);
  void fail(std::exception_ptr error);

  Executor& executor_;
  const uint64_t epoch_;
  const BoundBuffers& buffers_;
  const Deadline& deadline_;

  std::timed_mutex receive_mutex_;  // one thread at a time takes the next chunk
  std::map<int32_t, Incoming> incoming_;
  std::vector<int32_t> awaited_;  // peers that have chunks to send yet

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::map<int32_t, std::vector<std::byte*>> remote_;  // buffers in reach, per peer that has granted
  int64_t first_phase_left_ = 1;  // chunks of phase 0 that have not been used, and the local copies
  size_t running_ = 0;
  std::exception_ptr error_;
  TransferStats stats_;
};

}  // namespace areal::reshard
