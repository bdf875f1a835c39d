// From a padded rollout to micro-batches of packed tokens in C++, on a thread pool of the program's own.
//
// c++ -std=c++17 microbatches.cpp $(python -m areal_core.info --cflags --libs) -pthread -o microbatches
#include <areal_core/areal_core.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

void check(areal_status status) {
  if (status != AREAL_OK) throw std::runtime_error(areal_last_error());
}

template <class T>
T make() {  // a struct of the C API: zero, and its size
  T args{};
  args.size = sizeof args;
  return args;
}

// Any pool does that runs all pieces before it returns. This one starts threads for every loop.
void run_on_two_threads(void*, int64_t begin, int64_t end, int64_t grain, areal_body_fn body, void* context) {
  const int64_t middle = std::min(end, begin + std::max(grain, (end - begin) / 2));
  std::thread other([&] { body(context, begin, middle); });
  if (middle < end) body(context, middle, end);
  other.join();
}

struct Packed {
  std::vector<int64_t> cu_seqlens{0};
  std::vector<float> rewards;
  std::vector<int64_t> positions;
};

// The chosen rows of `padded` [sequences, width], laid end to end without their padding.
Packed pack(const std::vector<float>& padded, int64_t width, const std::vector<int64_t>& lengths,
            const std::vector<int64_t>& chosen) {
  Packed packed;
  std::vector<int64_t> begins;
  for (const int64_t s : chosen) {
    begins.push_back(s * width);
    packed.cu_seqlens.push_back(packed.cu_seqlens.back() + lengths[s]);
  }
  const int64_t tokens = packed.cu_seqlens.back();
  packed.rewards.resize(tokens);
  packed.positions.resize(tokens);

  auto map = make<areal_segment_map>();
  map.segments = static_cast<int64_t>(chosen.size());
  map.source_begin = begins.data();
  map.target_begin = packed.cu_seqlens.data();
  map.target_end = packed.cu_seqlens.data() + 1;
  map.source_rows = static_cast<int64_t>(padded.size());
  map.target_rows = tokens;
  auto tensor = make<areal_row_tensor>();
  tensor.source = padded.data();
  tensor.target = packed.rewards.data();
  tensor.row_bytes = sizeof(float);
  check(areal_copy_segments_cpu(&map, &tensor, 1));

  auto ids = make<areal_position_ids_args>();
  ids.tokens = tokens;
  ids.sequences = map.segments;
  ids.cu_seqlens = packed.cu_seqlens.data();
  ids.positions = packed.positions.data();
  check(areal_position_ids_cpu(&ids));
  return packed;
}

void run() {
  auto pool = make<areal_thread_pool>();
  pool.parallel_for = run_on_two_threads;
  pool.num_threads = [](void*) -> int64_t { return 2; };
  check(areal_set_thread_pool(&pool));

  const int64_t width = 10;
  const std::vector<int64_t> lengths = {9, 3, 7, 1, 5, 5};
  std::vector<float> padded(lengths.size() * width, -1.0f);
  for (size_t s = 0; s < lengths.size(); ++s) {
    for (int64_t t = 0; t < lengths[s]; ++t) padded[s * width + t] = static_cast<float>(100 * s + t);
  }

  std::vector<int64_t> bin_of(lengths.size());
  int64_t bins = 0;
  auto allocate = make<areal_allocate_args>();
  allocate.sequences = static_cast<int64_t>(lengths.size());
  allocate.lengths = lengths.data();
  allocate.max_tokens = 10;
  allocate.bin_of = bin_of.data();
  allocate.bin_count = &bins;
  check(areal_allocate_microbatches(&allocate));

  for (int64_t bin = 0; bin < bins; ++bin) {
    std::vector<int64_t> chosen;
    for (size_t s = 0; s < lengths.size(); ++s) {
      if (bin_of[s] == bin) chosen.push_back(static_cast<int64_t>(s));
    }
    const Packed packed = pack(padded, width, lengths, chosen);
    std::printf("bin");
    for (size_t t = 0; t < packed.rewards.size(); ++t) {
      std::printf(" %g:%lld", packed.rewards[t], static_cast<long long>(packed.positions[t]));
    }
    std::printf("\n");
  }

  allocate.max_tokens = 4;  // a sequence of 9 tokens does not fit
  if (areal_allocate_microbatches(&allocate) == AREAL_INVALID_ARGUMENT) std::printf("error %s\n", areal_last_error());
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
