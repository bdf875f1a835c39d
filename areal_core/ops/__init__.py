"""Native kernels for packed sequences: one file per folder of csrc/ops."""

import torch  # noqa: F401  (loads libtorch, which the native module links to)

from areal_core import _C as _C
from areal_core.ops.advantages import GAEOutput, discounted_returns, gae
from areal_core.ops.alignment import next_token_labels, position_ids, to_prediction_aligned, to_token_aligned
from areal_core.ops.allocation import allocate_microbatches, partition_balanced
from areal_core.ops.context_parallel import zigzag_merge, zigzag_split
from areal_core.ops.estimators import Estimator, compute_advantages, estimators, register_estimator
from areal_core.ops.lm_head import linear_logprob
from areal_core.ops.logprob import LogprobOutput, logprob_from_logits
from areal_core.ops.loss import PPOLossConfig, PPOLossOutput, PPOLossStats, PPOLossSummary, ppo_loss
from areal_core.ops.moments import Moments, masked_moments, whiten
from areal_core.ops.packing import PackedBatch, merge_microbatches, pack, select_sequences, unpack

__all__ = [
    "Estimator",
    "GAEOutput",
    "LogprobOutput",
    "Moments",
    "PPOLossConfig",
    "PPOLossOutput",
    "PPOLossStats",
    "PPOLossSummary",
    "PackedBatch",
    "allocate_microbatches",
    "compute_advantages",
    "discounted_returns",
    "estimators",
    "gae",
    "linear_logprob",
    "logprob_from_logits",
    "masked_moments",
    "merge_microbatches",
    "next_token_labels",
    "pack",
    "partition_balanced",
    "position_ids",
    "ppo_loss",
    "register_estimator",
    "select_sequences",
    "to_prediction_aligned",
    "to_token_aligned",
    "unpack",
    "whiten",
    "zigzag_merge",
    "zigzag_split",
]
