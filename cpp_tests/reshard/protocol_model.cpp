#include "protocol_model.h"

#include <algorithm>
#include <array>
#include <functional>
#include <vector>

namespace areal::reshard::model {
namespace {

using Order = std::memory_order;

bool acquires(Order o) { return o == Order::acquire || o == Order::acq_rel || o == Order::seq_cst; }
bool releases(Order o) { return o == Order::release || o == Order::acq_rel || o == Order::seq_cst; }

enum Location { kEpoch, kReaders0, kReaders1, kRecord0, kRecord1, kLocations };
enum Thread { kWriter, kReader, kThreads };

// What a thread knows: for each location the oldest store it may still read, for each thread the steps that
// happened before.
struct Knowledge {
  std::array<int, kLocations> newest{};
  std::array<int, kThreads> steps{};

  void join(const Knowledge& other) {
    for (size_t i = 0; i < newest.size(); ++i) newest[i] = std::max(newest[i], other.newest[i]);
    for (size_t i = 0; i < steps.size(); ++i) steps[i] = std::max(steps[i], other.steps[i]);
  }
};

struct Store {
  int value;
  Knowledge released;  // what an acquiring reader of it learns
};

struct Arena {
  int epoch = 0;  // whose bytes it holds
  std::array<int, kThreads> last_write{}, last_read{};
};

struct Registers {
  int pc = 0, epoch = 0, seen = 0, round = 0;
};

struct State {
  std::array<std::vector<Store>, kLocations> history;
  std::array<int, kLocations> seq_cst{};  // newest store that seq_cst operations have read or written
  std::array<Knowledge, kThreads> threads;
  std::array<Registers, kThreads> registers;
  std::array<Arena, 2> arenas;
  std::string violation;

  // The stores that a load may read are those from this index on.
  int oldest_readable(Thread t, Location l, Order order) const {
    const int known = threads[t].newest[l];
    return order == Order::seq_cst ? std::max(known, seq_cst[l]) : known;
  }
  int load(Thread t, Location l, int index, Order order) {
    threads[t].newest[l] = index;
    if (order == Order::seq_cst) seq_cst[l] = std::max(seq_cst[l], index);
    const Store& store = history[l][size_t(index)];
    if (acquires(order)) threads[t].join(store.released);
    return store.value;
  }
  void store(Thread t, Location l, int value, Order order, const Knowledge& carried = {}) {
    const int index = int(history[l].size());
    threads[t].newest[l] = index;
    if (order == Order::seq_cst) seq_cst[l] = index;
    Knowledge released = carried;
    if (releases(order)) released.join(threads[t]);
    history[l].push_back({value, released});
  }
  void update(Thread t, Location l, Order order, const std::function<int(int)>& change) {
    const int newest = int(history[l].size()) - 1;
    const Knowledge carried = history[l].back().released;
    store(t, l, change(load(t, l, newest, order)), order, carried);
  }

  void read_arena(Thread t, int arena, int expected) {
    Arena& a = arenas[size_t(arena)];
    if (a.last_write[kWriter] > threads[t].steps[kWriter]) violation = "a reader races with the writer's fill";
    if (a.epoch != expected) violation = "a reader sees another version's bytes";
    a.last_read[t] = threads[t].steps[t];
  }
  void write_arena(Thread t, int arena, int epoch) {
    Arena& a = arenas[size_t(arena)];
    if (a.last_read[kReader] > threads[t].steps[kReader]) violation = "the writer races with a reader's loads";
    a.epoch = epoch;
    a.last_write[t] = threads[t].steps[t];
  }
};

constexpr int kBlocked = -1;

// Steps of a thread: run(state, choice) does the one at its pc; choices(state) says in how many ways that can go (which
// store a load reads), 0 when the thread has ended.
struct Program {
  std::function<int(const State&)> choices;
  std::function<void(State&, int)> run;
};

int loadable(const State& s, Thread t, Location l, Order order) {
  return int(s.history[l].size()) - s.oldest_readable(t, l, order);
}

Location readers_of(int epoch) { return epoch % 2 == 0 ? kReaders0 : kReaders1; }
Location record_of(int epoch) { return epoch % 2 == 0 ? kRecord0 : kRecord1; }

// pc 0: drain, 1: fill, 2: record, 3: flip. The round's epoch follows from registers.epoch, the active one.
Program writer(const ProtocolOrders& orders, Fault fault, int updates) {
  const auto step_of = [fault](int pc) {
    constexpr std::array<int, 4> kSwapped = {0, 2, 3, 1};
    return fault == Fault::kFlipBeforeFill ? kSwapped[size_t(pc)] : pc;
  };
  const auto drained = [fault](int next) { return readers_of(fault == Fault::kDrainOtherArena ? next + 1 : next); };
  return {[=](const State& s) {
            const Registers& r = s.registers[kWriter];
            if (r.round == updates) return 0;
            if (step_of(r.pc) != 0 || fault == Fault::kNoDrain) return 1;
            return loadable(s, kWriter, drained(r.epoch + 1), orders.drain);
          },
          [=](State& s, int choice) {
            Registers& r = s.registers[kWriter];
            const int next = r.epoch + 1;
            switch (step_of(r.pc)) {
              case 0: {
                if (fault == Fault::kNoDrain) break;
                const Location readers = drained(next);
                const int index = s.oldest_readable(kWriter, readers, orders.drain) + choice;
                if (s.load(kWriter, readers, index, orders.drain) != 0) {
                  r.pc = kBlocked;  // waits: the executions in which it reads 0 go on
                  return;
                }
                break;
              }
              case 1:
                s.write_arena(kWriter, next % 2, next);
                break;
              case 2:
                s.store(kWriter, record_of(next), next, orders.write_record);
                break;
              default:
                s.store(kWriter, kEpoch, next, orders.flip);
            }
            if (++r.pc == 4) r = {.pc = 0, .epoch = next, .seen = 0, .round = r.round + 1};
          }};
}

// pc 0: look, 1: pin, 2: re-check (undo on failure), 3: use, 4: unpin.
Program pinning_reader(const ProtocolOrders& orders, Fault fault) {
  constexpr int kRounds = 3;
  const auto step_of = [fault](int pc) {
    constexpr std::array<int, 5> kSwapped = {0, 2, 1, 3, 4}, kHasty = {0, 1, 2, 4, 3};
    if (fault == Fault::kRecheckBeforePin) return kSwapped[size_t(pc)];
    return fault == Fault::kUnpinBeforeUse ? kHasty[size_t(pc)] : pc;
  };
  const auto clear = [orders](State& s) {
    const int epoch = s.registers[kReader].epoch;
    s.update(kReader, readers_of(epoch), orders.unpin, [](int) { return 0; });
  };
  return {[=](const State& s) {
            const Registers& r = s.registers[kReader];
            if (r.round == kRounds) return 0;
            const int step = step_of(r.pc);
            if (step == 0) return loadable(s, kReader, kEpoch, orders.look);
            if (step == 2 && fault != Fault::kNoRecheck) return loadable(s, kReader, kEpoch, orders.recheck);
            return 1;
          },
          [=](State& s, int choice) {
            Registers& r = s.registers[kReader];
            switch (step_of(r.pc)) {
              case 0:
                r.epoch =
                    s.load(kReader, kEpoch, s.oldest_readable(kReader, kEpoch, orders.look) + choice, orders.look);
                break;
              case 1:
                s.update(kReader, readers_of(r.epoch), orders.pin, [](int) { return 1; });
                break;
              case 2: {
                if (fault == Fault::kNoRecheck) break;
                const int index = s.oldest_readable(kReader, kEpoch, orders.recheck) + choice;
                if (s.load(kReader, kEpoch, index, orders.recheck) != r.epoch) {
                  if (fault != Fault::kRecheckBeforePin) clear(s);
                  r = {.pc = 0, .epoch = 0, .seen = 0, .round = r.round + 1};
                  return;
                }
                break;
              }
              case 3:
                s.read_arena(kReader, r.epoch % 2, r.epoch);
                break;
              default:
                clear(s);
            }
            if (++r.pc == 5) r = {.pc = 0, .epoch = 0, .seen = 0, .round = r.round + 1};
          }};
}

// pc 0: poll, 1: record, 2: poll again (which is the first load of the next try).
Program polling_reader(const ProtocolOrders& orders) {
  constexpr int kTries = 3;
  const auto next_load = [orders](int pc, int epoch) {
    if (pc == 0) return std::pair{kEpoch, orders.poll};
    return pc == 1 ? std::pair{record_of(epoch), orders.read_record} : std::pair{kEpoch, orders.poll_again};
  };
  return {[=](const State& s) {
            const Registers& r = s.registers[kReader];
            const auto [location, order] = next_load(r.pc, r.epoch);
            return r.round == kTries ? 0 : loadable(s, kReader, location, order);
          },
          [=](State& s, int choice) {
            Registers& r = s.registers[kReader];
            const auto [location, order] = next_load(r.pc, r.epoch);
            const int value = s.load(kReader, location, s.oldest_readable(kReader, location, order) + choice, order);
            if (r.pc == 0) {
              r = {.pc = 1, .epoch = value, .seen = 0, .round = r.round};
            } else if (r.pc == 1) {
              r.seen = value;
              r.pc = 2;
            } else if (value != r.epoch) {
              r = {.pc = 1, .epoch = value, .seen = 0, .round = r.round + 1};
            } else {
              if (r.seen != r.epoch) s.violation = "a poll returns a version that was not active";
              r.round = kTries;
            }
          }};
}

// Epoch 1 is active when it starts, its arena filled and known to all.
State initial() {
  State s;
  for (auto& history : s.history) history.push_back({0, {}});
  s.history[kEpoch][0].value = 1;
  s.history[kRecord1][0].value = 1;
  s.arenas[1].epoch = 1;
  s.registers[kWriter].epoch = 1;
  return s;
}

void explore(const State& state, const std::array<Program, kThreads>& programs, Outcome& outcome) {
  bool ended = true;
  for (const Thread t : {kWriter, kReader}) {
    if (state.registers[t].pc == kBlocked) continue;
    const int choices = programs[t].choices(state);
    ended &= choices == 0;
    for (int choice = 0; choice < choices && outcome.violation.empty(); ++choice) {
      State next = state;
      ++next.threads[t].steps[t];
      programs[t].run(next, choice);
      outcome.violation = next.violation;
      if (outcome.violation.empty()) explore(next, programs, outcome);
    }
  }
  outcome.executions += ended;
}

}  // namespace

Outcome explore_pins(const ProtocolOrders& orders, Fault fault, int updates) {
  Outcome outcome;
  explore(initial(), {writer(orders, fault, updates), pinning_reader(orders, fault)}, outcome);
  return outcome;
}

Outcome explore_polls(const ProtocolOrders& orders, int updates) {
  Outcome outcome;
  explore(initial(), {writer(orders, Fault::kNone, updates), polling_reader(orders)}, outcome);
  return outcome;
}

}  // namespace areal::reshard::model
