"""Native kernels for packed sequences: one file per folder of csrc/ops."""

import torch  # noqa: F401  (loads libtorch, which the native module links to)

from areal_core import _C as _C
from areal_core.ops._estimator import Estimator
from areal_core.ops.advantages import GAEOutput, discounted_returns, gae
from areal_core.ops.alignment import next_token_labels, position_ids, to_prediction_aligned, to_token_aligned
from areal_core.ops.allocation import allocate_microbatches, partition_balanced
from areal_core.ops.context_parallel import zigzag_merge, zigzag_split
from areal_core.ops.estimators import compute_advantages, estimators, get_estimator, register_estimator
from areal_core.ops.lm_head import FusedPPOLossOutput, linear_logprob, linear_ppo_loss
from areal_core.ops.logits_loss import ppo_loss_from_logits
from areal_core.ops.logprob import LogprobOutput, logprob_from_logits
from areal_core.ops.loss import PPOLossOutput, ppo_loss
from areal_core.ops.loss_config import PPOLossConfig
from areal_core.ops.loss_stats import PPOLossStats, PPOLossSummary
from areal_core.ops.moments import Moments, masked_moments, whiten
from areal_core.ops.packing import PackedBatch, merge_microbatches, pack, select_sequences, unpack
from areal_core.ops.proximal import interpolate_proximal, m2po_mask
from areal_core.ops.rewards import (
    AdaptiveKL,
    GroupFilter,
    RewardConfig,
    ShapedRewards,
    filter_groups,
    kl_penalty,
    scale_rewards,
    shape_rewards,
    soft_overlong_penalty,
    turn_ends,
)
from areal_core.ops.value_loss import ValueLossOutput, ValueLossStats, ValueLossSummary, value_loss

__all__ = [
    "AdaptiveKL",
    "Estimator",
    "FusedPPOLossOutput",
    "GAEOutput",
    "GroupFilter",
    "LogprobOutput",
    "Moments",
    "PPOLossConfig",
    "PPOLossOutput",
    "PPOLossStats",
    "PPOLossSummary",
    "PackedBatch",
    "RewardConfig",
    "ShapedRewards",
    "ValueLossOutput",
    "ValueLossStats",
    "ValueLossSummary",
    "allocate_microbatches",
    "compute_advantages",
    "discounted_returns",
    "estimators",
    "filter_groups",
    "gae",
    "get_estimator",
    "interpolate_proximal",
    "kl_penalty",
    "linear_logprob",
    "linear_ppo_loss",
    "logprob_from_logits",
    "m2po_mask",
    "masked_moments",
    "merge_microbatches",
    "next_token_labels",
    "pack",
    "partition_balanced",
    "position_ids",
    "ppo_loss",
    "ppo_loss_from_logits",
    "register_estimator",
    "scale_rewards",
    "select_sequences",
    "shape_rewards",
    "soft_overlong_penalty",
    "to_prediction_aligned",
    "to_token_aligned",
    "turn_ends",
    "unpack",
    "value_loss",
    "whiten",
    "zigzag_merge",
    "zigzag_split",
]
