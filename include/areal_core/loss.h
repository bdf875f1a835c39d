/* Policy loss: decoupled PPO with its gradient and its statistics in one pass. */
#ifndef AREAL_CORE_LOSS_H
#define AREAL_CORE_LOSS_H

#include <areal_core/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* f(u) of the ratio u and the advantage A; the formulas are in docs/ops.md. */
enum {
  AREAL_OBJECTIVE_PPO = 0,
  AREAL_OBJECTIVE_CISPO = 1,
  AREAL_OBJECTIVE_SAPO = 2,
  AREAL_OBJECTIVE_GMPO = 3,
  AREAL_OBJECTIVE_REINFORCE = 4
};
/* The log of u: of the token, its mean or its sum over the sequence, none. */
enum { AREAL_RATIO_TOKEN = 0, AREAL_RATIO_SEQUENCE = 1, AREAL_RATIO_SEQUENCE_PRODUCT = 2, AREAL_RATIO_OFF = 3 };
/* The log of the behavior weight: of the token, its sum or its mean over the sequence. */
enum { AREAL_BEHAVIOR_TOKEN = 0, AREAL_BEHAVIOR_SEQUENCE = 1, AREAL_BEHAVIOR_GEOMETRIC = 2 };
enum { AREAL_BEHAVIOR_TRUNCATE = 0, AREAL_BEHAVIOR_MASK = 1 };
enum {
  AREAL_TOKEN_MEAN = 0,
  AREAL_SEQUENCE_MEAN_TOKEN_SUM = 1,
  AREAL_SEQUENCE_MEAN_TOKEN_MEAN = 2,
  AREAL_CONSTANT = 3 /* the caller gives a normalizer */
};

typedef struct areal_policy_loss_args {
  size_t size;
  int64_t dtype; /* AREAL_FLOAT32 or AREAL_FLOAT64, of every real array */
  int64_t tokens;
  int64_t sequences;
  const int64_t* cu_seqlens; /* needed where an option speaks of sequences */
  const void* logprobs;      /* real [tokens], as are the inputs up to teacher_logprobs */
  const void* proximal_logprobs;
  const void* advantages;
  const void* behavior_logprobs; /* NULL: weight 1 */
  const void* ref_logprobs;      /* NULL: no KL */
  const void* entropy;           /* NULL: no entropy */
  const void* teacher_logprobs;  /* NULL: no distillation */
  const uint8_t* loss_mask;
  const uint8_t* keep_mask;       /* NULL: all; where 0 the policy term of a live token is left out */
  const int64_t* versions;        /* NULL: no statistics of staleness */
  const int64_t* current_version; /* [1] beside versions */
  const double* normalizer;       /* [1] beside the arrays; NULL: the live tokens or sequences of this call */
  int64_t objective;              /* AREAL_OBJECTIVE_* */
  int64_t ratio_level;            /* AREAL_RATIO_* */
  double clip_low;                /* the ratio is clipped to [1 - clip_low, 1 + clip_high] */
  double clip_high;
  double dual_clip;       /* > 1; 0: off */
  double tau_positive;    /* of SAPO; 0: 1 */
  double tau_negative;    /* of SAPO; 0: 1.05 */
  int64_t behavior_level; /* AREAL_BEHAVIOR_TOKEN, _SEQUENCE, _GEOMETRIC */
  int64_t behavior_mode;  /* AREAL_BEHAVIOR_TRUNCATE, _MASK */
  double behavior_low;
  double behavior_cap;  /* 0: off */
  int64_t kl_estimator; /* AREAL_KL_* */
  double kl_coef;
  double entropy_coef;
  double distill_coef;
  int64_t aggregation; /* AREAL_TOKEN_MEAN and the like */
  void* loss;          /* real [1] */
  void* grad_logprobs; /* real [tokens]: times *scale it is the gradient of the loss */
  void* grad_entropy;  /* likewise; needed where entropy_coef is not 0 */
  void* scale;         /* real [1], 1 / normalizer; 0 when no token is live */
  double* stats;       /* [stats_count]: sums over live tokens, then maxima */
  int64_t stats_count; /* at least areal_policy_loss_stat_count() */
  void* scratch;       /* of areal_policy_loss_scratch_bytes(); on the CPU NULL will do */
  int64_t scratch_bytes;
} areal_policy_loss_args;

AREAL_API int64_t areal_policy_loss_scratch_bytes(int64_t tokens, int64_t sequences);
AREAL_API int64_t areal_policy_loss_stat_count(void);
AREAL_API const char* areal_policy_loss_stat_name(int64_t stat); /* NULL beyond the last */
AREAL_API areal_status areal_policy_loss_cpu(const areal_policy_loss_args* args);
AREAL_API areal_status areal_policy_loss_cuda(const areal_policy_loss_args* args, void* stream);

/* Value loss: squared or Huber error, with the value clipped around its old value. Statistics are sums over live
 * tokens: their number, terms, clipped tokens, values, returns, returns squared, errors, errors squared. */
enum { AREAL_VALUE_STAT_COUNT = 8 };
typedef struct areal_value_loss_args {
  size_t size;
  int64_t dtype; /* AREAL_FLOAT32 or AREAL_FLOAT64, of every real array */
  int64_t tokens;
  const void* values;     /* real [tokens] */
  const void* old_values; /* real [tokens]; needed with clip */
  const void* returns;    /* real [tokens] */
  const uint8_t* loss_mask;
  const double* normalizer; /* [1] beside the arrays; NULL: the live tokens of this call */
  double clip;              /* 0: off */
  double huber_delta;       /* 0: squared error */
  void* loss;               /* real [1] */
  void* grad_values;        /* real [tokens]: times *scale it is the gradient of the loss */
  void* scale;              /* real [1], 1 / normalizer; 0 when no token is live */
  double* stats;            /* [AREAL_VALUE_STAT_COUNT] */
  void* scratch;            /* of areal_value_loss_scratch_bytes(); on the CPU NULL will do */
  int64_t scratch_bytes;
} areal_value_loss_args;

AREAL_API int64_t areal_value_loss_scratch_bytes(int64_t tokens);
AREAL_API areal_status areal_value_loss_cpu(const areal_value_loss_args* args);
AREAL_API areal_status areal_value_loss_cuda(const areal_value_loss_args* args, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* AREAL_CORE_LOSS_H */
