/* Advantages: scans over the tokens of each sequence, scores of sequences within their groups. */
#ifndef AREAL_CORE_ADVANTAGES_H
#define AREAL_CORE_ADVANTAGES_H

#include <areal_core/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Arrays of `tokens` elements; dtype AREAL_FLOAT32 or AREAL_FLOAT64 says what real is. */
typedef struct areal_gae_args {
  size_t size;
  int64_t dtype;
  int64_t tokens;
  int64_t sequences;
  const int64_t* cu_seqlens;
  const void* rewards;            /* real; NULL: 0 */
  const void* values;             /* real; NULL: 0, returns are then discounted sums (lam = 1) */
  const uint8_t* loss_mask;       /* NULL: every token is live */
  double gamma;                   /* in [0, 1] */
  double lam;                     /* in [0, 1] */
  void* advantages;               /* real; NULL: not wanted */
  void* returns;                  /* real */
  const double* terminal_rewards; /* [sequences], on the last live token; NaN: a failed sample, all 0. NULL: 0 */
} areal_gae_args;
AREAL_API areal_status areal_gae_cpu(const areal_gae_args* args);
AREAL_API areal_status areal_gae_cuda(const areal_gae_args* args, void* stream);

enum { AREAL_LEVEL_NONE = 0, AREAL_LEVEL_GROUP = 1, AREAL_LEVEL_BATCH = 2 };
/* scores = (rewards - baseline) / scale, with statistics over groups of sequences. */
typedef struct areal_group_scores_args {
  size_t size;
  int64_t dtype;
  int64_t sequences;
  const void* rewards;       /* real [sequences]; NaN: a failed sample, which counts nowhere and scores NaN */
  const int64_t* sorted_ids; /* [sequences], group of each sequence in the order of `order` */
  const int64_t* order;      /* [sequences], a permutation: see areal_sort_groups_cpu */
  int64_t mean_level;        /* AREAL_LEVEL_*: whose mean is the baseline */
  int64_t std_level;         /* AREAL_LEVEL_*: whose standard deviation is the scale */
  int64_t leave_one_out;     /* 1: the baseline is the mean of the others */
  int64_t leave_one_out_std; /* 1, with std_level AREAL_LEVEL_GROUP: the scale is that of the others */
  int64_t length_weighted;   /* 1, with mean_level AREAL_LEVEL_GROUP: the mean is weighted by lengths */
  int64_t divide_by_mean;    /* 1: scale = mean + eps */
  int64_t ddof;              /* 0 or 1: var = sum of squares / (n - ddof) */
  double eps;
  int64_t eps_in_root;   /* 1: sqrt(var + eps) instead of sqrt(var) + eps */
  int64_t singleton_raw; /* 1: a group of one scores its reward instead of 0 */
  const double* lengths; /* [sequences], live tokens; for length_weighted and mean_lengths */
  double* scores;        /* [sequences] */
  double* mean_lengths;  /* [sequences], of the group; NULL: not wanted */
  uint8_t* has_signal;   /* [sequences], 1 where the rewards of the group differ; NULL: not wanted */
  void* scratch;         /* CUDA: areal_group_scores_scratch_bytes() on the device */
  int64_t scratch_bytes;
} areal_group_scores_args;
/* order: a stable sort of group_ids; sorted_ids[i] = group_ids[order[i]]. */
AREAL_API areal_status areal_sort_groups_cpu(const int64_t* group_ids, int64_t sequences, int64_t* sorted_ids,
                                             int64_t* order);
AREAL_API int64_t areal_group_scores_scratch_bytes(void);
AREAL_API areal_status areal_group_scores_cpu(const areal_group_scores_args* args);
AREAL_API areal_status areal_group_scores_cuda(const areal_group_scores_args* args, void* stream);

/* scores = (E[best of k with this one] - E[best of k]) / scale, over the k-subsets of the group. Rewards are sorted
 * within a group, NaN last, by order. */
typedef struct areal_best_of_scores_args {
  size_t size;
  int64_t dtype;
  int64_t sequences;
  const void* rewards;       /* real [sequences] */
  const int64_t* sorted_ids; /* [sequences] */
  const int64_t* order;      /* [sequences] */
  int64_t k;                 /* >= 1 */
  int64_t divide_by_std;     /* 1: the scale is the standard deviation of the best of k */
  double eps;
  int64_t eps_in_root;
  int64_t singleton_raw;
  double* scores; /* [sequences] */
} areal_best_of_scores_args;
AREAL_API areal_status areal_best_of_scores_cpu(const areal_best_of_scores_args* args);
AREAL_API areal_status areal_best_of_scores_cuda(const areal_best_of_scores_args* args, void* stream);

/* A score per sequence laid over its live tokens:
 * advantages_t = (scores_s + beta (pi_ref / pi - 1)) / divisors_s; 0 where the score is NaN. */
typedef struct areal_spread_scores_args {
  size_t size;
  int64_t dtype;
  int64_t tokens;
  int64_t sequences;
  const int64_t* cu_seqlens;
  const double* scores;     /* [sequences] */
  const double* divisors;   /* [sequences], such as areal_live_tokens_*; NULL: 1 */
  const uint8_t* loss_mask; /* NULL: every token is live */
  const void* logprobs;     /* real [tokens]; NULL where beta is 0, as ref_logprobs */
  const void* ref_logprobs;
  double beta;
  void* advantages; /* real [tokens] */
} areal_spread_scores_args;
AREAL_API areal_status areal_spread_scores_cpu(const areal_spread_scores_args* args);
AREAL_API areal_status areal_spread_scores_cuda(const areal_spread_scores_args* args, void* stream);

/* sums_s = sum over the live tokens of s of rewards_t - beta kl_t, with d = log pi - log pi_ref clamped to [-20, 20]
 * and kl_t = d (k1), d^2 / 2 (k2), e^-d - 1 + d (k3). */
typedef struct areal_sequence_rewards_args {
  size_t size;
  int64_t dtype;
  int64_t tokens;
  int64_t sequences;
  const int64_t* cu_seqlens;
  const uint8_t* loss_mask; /* NULL: every token is live */
  const void* rewards;      /* real [tokens]; NULL: 0 */
  const void* logprobs;     /* real [tokens]; NULL, as ref_logprobs: no KL */
  const void* ref_logprobs;
  double beta;
  int64_t kl;   /* AREAL_KL_* */
  double* sums; /* [sequences] */
} areal_sequence_rewards_args;
AREAL_API areal_status areal_sequence_rewards_cpu(const areal_sequence_rewards_args* args);
AREAL_API areal_status areal_sequence_rewards_cuda(const areal_sequence_rewards_args* args, void* stream);

/* out_t = rewards_t - beta kl_t, the summands of the above; 0 where masked. */
typedef struct areal_token_rewards_args {
  size_t size;
  int64_t dtype;
  int64_t tokens;
  const uint8_t* loss_mask; /* NULL: every token is live */
  const void* rewards;      /* real [tokens]; NULL: 0 */
  const void* logprobs;     /* real [tokens]; NULL, as ref_logprobs: no KL */
  const void* ref_logprobs;
  double beta;
  int64_t kl; /* AREAL_KL_K1, _K2, _K3 */
  void* out;  /* real [tokens] */
} areal_token_rewards_args;
AREAL_API areal_status areal_token_rewards_cpu(const areal_token_rewards_args* args);
AREAL_API areal_status areal_token_rewards_cuda(const areal_token_rewards_args* args, void* stream);

/* counts_s = live tokens of s. */
typedef struct areal_live_tokens_args {
  size_t size;
  int64_t tokens;
  int64_t sequences;
  const int64_t* cu_seqlens;
  const uint8_t* loss_mask; /* NULL: every token is live */
  double* counts;           /* [sequences] */
} areal_live_tokens_args;
AREAL_API areal_status areal_live_tokens_cpu(const areal_live_tokens_args* args);
AREAL_API areal_status areal_live_tokens_cuda(const areal_live_tokens_args* args, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* AREAL_CORE_ADVANTAGES_H */
