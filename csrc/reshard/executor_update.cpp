#include "reshard/executor_update.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#include "reshard/errors.h"

namespace areal::reshard {
namespace {

// Without the interrupt, which belongs to the calling thread.
Deadline for_helpers(const Deadline& deadline) { return Deadline(deadline.seconds()); }

}  // namespace

Executor::Update::Update(Executor& executor, uint64_t epoch, const BoundBuffers& buffers, const Deadline& deadline)
    : executor_(executor), epoch_(epoch), buffers_(buffers), deadline_(deadline) {
  for (const MessageProgram& message : executor.receives_) {
    if (message.chunks.empty()) continue;
    incoming_[message.peer].messages.push_back(&message);
    if (message.phase == 0) first_phase_left_ += static_cast<int64_t>(message.chunks.size());
  }
  for (const auto& [peer, incoming] : incoming_) awaited_.push_back(peer);
  stats_.epoch = epoch;
}

TransferStats Executor::Update::run() {
  const auto start = Deadline::Clock::now();
  std::vector<Task> tasks;
  const auto threads = static_cast<size_t>(executor_.options_.threads);
  if (!executor_.sends_.empty()) {
    for (size_t i = 0; i < threads; ++i) {
      tasks.push_back([this, i, threads](const Deadline& deadline) { send(i, threads, deadline); });
    }
  }
  if (!incoming_.empty()) {
    for (size_t i = 1; i < threads; ++i) tasks.push_back([this](const Deadline& deadline) { receive(deadline); });
  }
  // Grants go first, so that others start while this rank copies its own.
  tasks.push_back([this](const Deadline& deadline) {
    WireHeader grant{};
    grant.epoch = epoch_;
    grant.plan_digest = executor_.plan_->digest();
    grant.chunk = static_cast<uint32_t>(buffers_.first_exposed);
    for (const auto& [peer, incoming] : incoming_) executor_.transport_->grant(peer, grant);
    executor_.copy_locally(buffers_, deadline);
    finish_first_phase_part();
    receive(deadline);
  });
  run_tasks(std::move(tasks));
  stats_.seconds = std::chrono::duration<double>(Deadline::Clock::now() - start).count();
  stats_.local_bytes = executor_.local_bytes_;
  if (executor_.transport_ != nullptr) stats_.staging_bytes = executor_.transport_->staging_bytes();
  return stats_;
}

// The last task runs in the calling thread, the others beside it.
void Executor::Update::run_tasks(std::vector<Task> tasks) {
  std::vector<std::thread> threads;
  running_ = tasks.size() - 1;
  for (size_t i = 0; i + 1 < tasks.size(); ++i) {
    try {
      threads.emplace_back([this, &task = tasks[i]] {
        run_task(task, for_helpers(deadline_));
        const std::lock_guard lock(mutex_);
        --running_;
        changed_.notify_all();
      });
    } catch (const std::system_error& error) {  // no more threads
      fail(std::make_exception_ptr(
          Error(format_message("Executor: expected a thread to copy with, got ", error.what()))));
      const std::lock_guard lock(mutex_);
      running_ -= tasks.size() - 1 - i;
      break;
    }
  }
  run_task(tasks.back(), deadline_);
  run_task(
      [this](const Deadline& deadline) {
        std::unique_lock lock(mutex_);
        while (running_ > 0) {
          changed_.wait_until(lock, std::chrono::system_clock::now() + Deadline::kSlice);
          lock.unlock();
          deadline.interrupt();
          lock.lock();
        }
      },
      deadline_);
  for (std::thread& thread : threads) thread.join();
  if (error_ != nullptr) std::rethrow_exception(error_);
}

void Executor::Update::run_task(const Task& task, const Deadline& deadline) {
  try {
    task(deadline);
  } catch (...) {
    fail(std::current_exception());
  }
}

// The first error counts: those after it are its consequences. Everything that waits is woken, here and at the peers.
void Executor::Update::fail(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (error_ == nullptr) error_ = error;
    changed_.notify_all();
  }
  executor_.cancel();
}

// -- sending ----------------------------------------------------------------------------------------------------------

void Executor::Update::send(size_t share, size_t shares, const Deadline& deadline) {
  std::vector<size_t> phases[2];
  std::vector<int32_t> peers;
  for (size_t i = 0; i < executor_.sends_.size(); ++i) {
    const MessageProgram& message = executor_.sends_[i];
    if (static_cast<size_t>(message.peer) % shares != share || message.chunks.empty()) continue;
    phases[message.phase == 0 ? 0 : 1].push_back(i);
    if (std::ranges::count(peers, message.peer) == 0) peers.push_back(message.peer);
  }
  send_phase(phases[0], deadline);
  if (!phases[1].empty()) {
    await_first_phase(deadline);
    send_phase(phases[1], deadline);
  }
  for (const int32_t peer : peers) executor_.transport_->drain(peer, deadline);
}

// A chunk to each peer in turn. The first sender begins with the first peer, the second with the second: not all meet
// at one receiver.
void Executor::Update::send_phase(std::span<const size_t> messages, const Deadline& deadline) {
  std::vector<size_t> order(messages.begin(), messages.end());
  if (order.empty()) return;
  std::ranges::rotate(order, order.begin() + static_cast<ptrdiff_t>(executor_.place_among_senders() % order.size()));
  size_t rounds = 0;
  for (const size_t i : order) {
    await_grant(i, deadline);
    rounds = std::max(rounds, executor_.sends_[i].chunks.size());
  }
  for (size_t round = 0; round < rounds; ++round) {
    for (const size_t i : order) {
      const MessageProgram& message = executor_.sends_[i];
      if (round < message.chunks.size()) send_chunk(message, message.chunks[round], deadline);
    }
  }
}

// A peer grants once for all phases.
void Executor::Update::await_grant(size_t index, const Deadline& deadline) {
  const int32_t peer = executor_.sends_[index].peer;
  {
    const std::lock_guard lock(mutex_);
    if (remote_.contains(peer)) return;
  }
  const WireHeader grant = executor_.transport_->await_grant(peer, deadline);
  if (grant.plan_digest != executor_.plan_->digest() || grant.epoch != epoch_) {
    throw PeerError(format_message("rank ", executor_.rank_, ": expected rank ", peer, " to receive epoch ", epoch_,
                                   " of plan ", executor_.plan_->digest(), ", got epoch ", grant.epoch, " of plan ",
                                   grant.plan_digest));
  }
  if (executor_.options_.allow_direct && executor_.transport_->remote_buffers(peer).size() > grant.chunk) {
    for (size_t i = 0; i < executor_.sends_.size(); ++i) {
      if (executor_.sends_[i].peer == peer) executor_.compile_direct(i);
    }
  }
  std::vector<std::byte*> buffers = executor_.remote_buffers(peer, grant.chunk);
  const std::lock_guard lock(mutex_);
  remote_[peer] = std::move(buffers);
}

void Executor::Update::await_first_phase(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  while (first_phase_left_ > 0) {
    if (error_ != nullptr) throw CancelledError("Executor: the update failed in another thread");
    if (deadline.passed()) {
      throw DeadlineError(
          format_message("rank ", executor_.rank_, ": no chunks to pass on within ", deadline.seconds(), " s"));
    }
    changed_.wait_until(lock, std::chrono::system_clock::now() + Deadline::kSlice);
  }
}

void Executor::Update::send_chunk(const MessageProgram& message, const ChunkProgram& chunk, const Deadline& deadline) {
  Transport& transport = *executor_.transport_;
  WireHeader header = executor_.header_of(message, chunk, epoch_);
  const std::vector<std::byte*>* remote = nullptr;
  {
    const std::lock_guard lock(mutex_);
    remote = &remote_.at(message.peer);
  }
  const bool direct = std::ranges::all_of(message.pieces_of(chunk), [&](const CopyPiece& piece) {
    return piece.target_buffer != kWire && (*remote)[static_cast<size_t>(piece.target_buffer)] != nullptr;
  });
  executor_.check_cancelled();
  if (direct) {
    header.length = 0;
    header.xxh3_64 = executor_.move(message, chunk, buffers_, *remote);
    transport.post_direct(message.peer, header);
  } else {
    const std::span<std::byte> slot = transport.acquire(message.peer, chunk.bytes, deadline);
    header.xxh3_64 = executor_.pack(message, chunk, buffers_, slot.data());
    transport.post(message.peer, header);
  }
  executor_.done_bytes_.fetch_add(chunk.bytes, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  stats_.sent_bytes += chunk.bytes;
  stats_.direct_bytes += direct ? chunk.bytes : 0;
  stats_.sent_checksum += header.xxh3_64;
}

// -- receiving --------------------------------------------------------------------------------------------------------

void Executor::Update::receive(const Deadline& deadline) {
  Lookout lookout(deadline);
  for (Next chunk{}; next(chunk, deadline);) {
    lookout.look();
    use(chunk);
  }
}

// Takes the next chunk that arrives, if it is the one expected from its sender. False when all have come.
bool Executor::Update::next(Next& next, const Deadline& deadline) {
  std::unique_lock lock(receive_mutex_, std::defer_lock);
  while (!lock.try_lock_until(std::chrono::system_clock::now() + Deadline::kSlice)) deadline.interrupt();
  if (awaited_.empty()) return false;
  next.received = executor_.transport_->receive(awaited_, deadline);
  Incoming& incoming = incoming_.at(static_cast<int32_t>(next.received.header.source));
  next.message = incoming.messages[incoming.message];
  next.chunk = &next.message->chunks[incoming.chunk];
  executor_.check_expected(next.received.header, *next.message, *next.chunk, epoch_);
  if (++incoming.chunk == next.message->chunks.size()) {
    incoming.chunk = 0;
    if (++incoming.message == incoming.messages.size()) std::erase(awaited_, next.message->peer);
  }
  return true;
}

void Executor::Update::use(const Next& next) {
  const WireHeader& header = next.received.header;
  if (header.flags != kDirect) {
    const uint64_t hash = executor_.unpack(*next.message, *next.chunk, buffers_, next.received.bytes.data());
    executor_.check_checksum(header, *next.message, hash);
  } else if (executor_.options_.read_back) {
    executor_.check_checksum(header, *next.message, executor_.hash_target(*next.message, *next.chunk, buffers_));
  }
  executor_.transport_->release(next.received);
  executor_.done_bytes_.fetch_add(next.chunk->bytes, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    stats_.received_bytes += next.chunk->bytes;
    stats_.received_checksum += header.xxh3_64;
  }
  if (next.message->phase == 0) finish_first_phase_part();
}

void Executor::Update::finish_first_phase_part() {
  const std::lock_guard lock(mutex_);
  if (--first_phase_left_ == 0) changed_.notify_all();
}

}  // namespace areal::reshard
