/* Policy loss: decoupled PPO with its gradient and its statistics in one pass. */
#ifndef AREAL_CORE_LOSS_H
#define AREAL_CORE_LOSS_H

#include <areal_core/base.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { AREAL_BEHAVIOR_TRUNCATE = 0, AREAL_BEHAVIOR_MASK = 1 };

typedef struct areal_policy_loss_args {
  size_t size;
  int64_t dtype; /* AREAL_FLOAT32 or AREAL_FLOAT64, of every real array */
  int64_t tokens;
  const void* logprobs; /* real [tokens], as are all inputs but the mask */
  const void* proximal_logprobs;
  const void* advantages;
  const uint8_t* loss_mask;
  const void* behavior_logprobs; /* NULL: weight 1 */
  const void* ref_logprobs;      /* NULL: no KL */
  const void* entropy;           /* NULL: no entropy */
  const double* normalizer;      /* [1] on the device of the arrays; NULL: the live tokens of this call */
  double clip_low;               /* the ratio is clipped to [1 - clip_low, 1 + clip_high] */
  double clip_high;
  double dual_clip;      /* > 1; 0: off */
  int64_t behavior_mode; /* AREAL_BEHAVIOR_* */
  double behavior_low;
  double behavior_cap;  /* 0: off */
  int64_t kl_estimator; /* AREAL_KL_* */
  double kl_coef;
  double entropy_coef;
  void* loss;          /* real [1] */
  void* grad_logprobs; /* real [tokens], of the sum of terms: times *scale it is the gradient of the loss */
  void* scale;         /* real [1], 1 / normalizer; 0 when no token is live */
  double* stats;       /* [stats_count]: sums over live tokens, then maxima */
  int64_t stats_count; /* at least areal_policy_loss_stat_count() */
  void* scratch;       /* of areal_policy_loss_scratch_bytes(); on the CPU NULL will do */
  int64_t scratch_bytes;
} areal_policy_loss_args;

AREAL_API int64_t areal_policy_loss_scratch_bytes(int64_t tokens);
AREAL_API int64_t areal_policy_loss_stat_count(void);
AREAL_API const char* areal_policy_loss_stat_name(int64_t stat); /* NULL beyond the last */
AREAL_API areal_status areal_policy_loss_cpu(const areal_policy_loss_args* args);
AREAL_API areal_status areal_policy_loss_cuda(const areal_policy_loss_args* args, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* AREAL_CORE_LOSS_H */
