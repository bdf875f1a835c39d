/* One policy-gradient step on two packed sequences, from logits to their gradient, in C99.
 *
 *     labels     next token of the same sequence             (rows of logits predict the next token)
 *     logprobs   from logits and labels, moved to their token
 *     advantages GAE over the rewards
 *     loss       decoupled PPO, its gradient with respect to the log-probabilities
 *     gradient   of the logits
 *
 * cc -std=c99 ppo_step.c $(python -m areal_core.info --cflags --libs) -lm -o ppo_step */
#include <areal_core/areal_core.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 12, SEQUENCES = 2, VOCAB = 50 };

static const int64_t cu_seqlens[SEQUENCES + 1] = {0, 5, TOKENS};

static void check(areal_status status) {
  if (status == AREAL_OK) return;
  fprintf(stderr, "error %d: %s\n", (int)status, areal_last_error());
  exit(1);
}

/* Moves per-token values by one token inside each sequence: +1 from logits rows to tokens, -1 the other way. */
static void shift(const void* source, void* target, int64_t bytes, int64_t by, const void* fill) {
  areal_segment_map map = {0};
  areal_row_tensor tensor = {0};
  map.size = sizeof map;
  map.segments = SEQUENCES;
  map.source_begin = map.target_begin = cu_seqlens;
  map.target_end = cu_seqlens + 1;
  map.shift = by;
  map.source_rows = map.target_rows = TOKENS;
  tensor.size = sizeof tensor;
  tensor.source = source;
  tensor.target = target;
  tensor.row_bytes = bytes;
  tensor.fill = fill;
  tensor.fill_bytes = bytes;
  check(areal_copy_segments_cpu(&map, &tensor, 1));
}

int main(void) {
  static float logits[TOKENS * VOCAB], grad_logits[TOKENS * VOCAB];
  float rewards[TOKENS] = {0}, values[TOKENS], proximal[TOKENS];
  int64_t ids[TOKENS], labels[TOKENS], i;
  uint8_t mask[TOKENS];
  const int64_t ignore = -100;

  if (areal_abi_version() != AREAL_ABI_VERSION) {
    fprintf(stderr, "expected a library of ABI %d, got %d\n", AREAL_ABI_VERSION, (int)areal_abi_version());
    return 1;
  }

  /* What a model, a critic and an environment would give. */
  for (i = 0; i < TOKENS * VOCAB; ++i) logits[i] = (float)(2 * sin(0.37 * (double)i));
  for (i = 0; i < TOKENS; ++i) {
    ids[i] = (7 * i + 3) % VOCAB;
    values[i] = (float)(0.1 * cos((double)i));
    proximal[i] = (float)(-4 + 0.3 * sin((double)i));
    mask[i] = i != 0 && i != 5; /* nothing predicts the first token of a sequence */
  }
  rewards[4] = 1;
  rewards[11] = -0.5f;

  /* Log-probabilities, one per row of logits, then one per token. */
  float row_logprobs[TOKENS], entropy[TOKENS], lse[TOKENS], row_max[TOKENS], log_sum[TOKENS], logprobs[TOKENS];
  areal_logprob_input input = {0};
  areal_logprob_output output = {0};
  shift(ids, labels, sizeof *ids, -1, &ignore);
  input.size = sizeof input;
  input.dtype = AREAL_FLOAT32;
  input.logits = logits;
  input.row_stride = VOCAB;
  input.rows = TOKENS;
  input.vocab = VOCAB;
  input.labels = labels;
  input.ignore_index = ignore;
  input.temperature = 1;
  output.size = sizeof output;
  output.logprobs = row_logprobs;
  output.entropy = entropy;
  output.lse = lse;
  output.row_max = row_max;
  output.log_sum = log_sum;
  check(areal_logprob_forward_cpu(&input, &output));
  shift(row_logprobs, logprobs, sizeof *logprobs, 1, NULL);

  float advantages[TOKENS], returns[TOKENS];
  areal_gae_args gae = {0};
  gae.size = sizeof gae;
  gae.tokens = TOKENS;
  gae.sequences = SEQUENCES;
  gae.cu_seqlens = cu_seqlens;
  gae.rewards = rewards;
  gae.values = values;
  gae.loss_mask = mask;
  gae.gamma = 1;
  gae.lam = 0.95;
  gae.advantages = advantages;
  gae.returns = returns;
  check(areal_gae_cpu(&gae));

  float loss, scale, grad_logprobs[TOKENS], grad_rows[TOKENS];
  const int64_t stats_count = areal_policy_loss_stat_count();
  double* stats = malloc((size_t)stats_count * sizeof *stats);
  areal_policy_loss_args ppo = {0};
  ppo.size = sizeof ppo;
  ppo.tokens = TOKENS;
  ppo.logprobs = logprobs;
  ppo.proximal_logprobs = proximal;
  ppo.advantages = advantages;
  ppo.loss_mask = mask;
  ppo.clip_low = 0.2;
  ppo.clip_high = 0.28;
  ppo.loss = &loss;
  ppo.grad_logprobs = grad_logprobs;
  ppo.scale = &scale;
  ppo.stats = stats;
  ppo.stats_count = stats_count;
  check(areal_policy_loss_cpu(&ppo));

  /* Back to the logits. */
  areal_logprob_gradient gradient = {0};
  for (i = 0; i < TOKENS; ++i) grad_logprobs[i] *= scale;
  shift(grad_logprobs, grad_rows, sizeof *grad_rows, -1, NULL);
  gradient.size = sizeof gradient;
  gradient.grad_logprobs = grad_rows;
  gradient.logprobs = row_logprobs;
  gradient.entropy = entropy;
  gradient.row_max = row_max;
  gradient.log_sum = log_sum;
  gradient.grad_logits = grad_logits;
  gradient.grad_row_stride = VOCAB;
  check(areal_logprob_backward_cpu(&input, &gradient));

  double norm = 0;
  for (i = 0; i < TOKENS * VOCAB; ++i) norm += (double)grad_logits[i] * grad_logits[i];
  printf("areal_core %s, %s\n", areal_version(), areal_isa());
  printf("loss %.9g\n", loss);
  printf("gradient_norm %.9g\n", sqrt(norm));
  for (i = 0; i < stats_count; ++i) printf("stat.%s %.17g\n", areal_policy_loss_stat_name(i), stats[i]);
  free(stats);
  return 0;
}
