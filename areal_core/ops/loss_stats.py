"""Statistics of the policy loss that add up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PPOLossSummary(NamedTuple):
    """Statistics over live tokens, each a float64 0-d tensor on the device; all 0 when no token is live.

    kl_<p>_<q>_k1 and _k3 estimate KL(p || q) in nats from samples of p, token by token. loss and policy_loss are what
    the config's aggregation makes of the terms with its own normalizer (with "constant": the token mean), whatever
    normalizer scaled the loss. The ratio is the one the objective uses, of the token or of its sequence. Behavior
    weights are those before capping; effective_sample_size, in tokens, is (sum w)^2 / sum w^2 of those after it.
    Staleness counts versions. Entries whose input was not given are 0 (weights: 1).
    """

    loss: Tensor
    policy_loss: Tensor
    ratio_mean: Tensor
    clip_fraction_low: Tensor
    clip_fraction_high: Tensor
    clip_fraction_dual: Tensor
    kl_proximal_current_k1: Tensor
    kl_proximal_current_k3: Tensor
    kl_behavior_proximal_k1: Tensor
    kl_behavior_proximal_k3: Tensor
    kl_current_reference_k1: Tensor
    kl_current_reference_k3: Tensor
    kl_proximal_teacher_k1: Tensor
    kl_proximal_teacher_k3: Tensor
    behavior_weight_mean: Tensor
    behavior_capped_fraction: Tensor
    behavior_masked_fraction: Tensor
    dropped_fraction: Tensor
    entropy: Tensor
    staleness_mean: Tensor
    live_tokens: Tensor
    live_sequences: Tensor
    ratio_min: Tensor
    ratio_max: Tensor
    behavior_weight_max: Tensor
    staleness_max: Tensor
    effective_sample_size: Tensor


# The layout of the raw tensor: enum Stat of csrc/ops/loss/loss.h.
_SUMS = (
    "live_tokens",
    "live_sequences",
    "loss_weight",
    "loss",
    "policy_loss",
    "ratio_mean",
    "clip_fraction_low",
    "clip_fraction_high",
    "clip_fraction_dual",
    "kl_proximal_current_k1",
    "kl_proximal_current_k3",
    "kl_behavior_proximal_k1",
    "kl_behavior_proximal_k3",
    "kl_current_reference_k1",
    "kl_current_reference_k3",
    "kl_proximal_teacher_k1",
    "kl_proximal_teacher_k3",
    "behavior_weight_mean",
    "applied_weight",
    "applied_weight_square",
    "behavior_capped_fraction",
    "behavior_masked_fraction",
    "dropped_fraction",
    "entropy",
    "staleness_mean",
)
_MAXIMA = ("ratio_max", "negative_ratio_min", "behavior_weight_max", "staleness_max")
STAT_COUNT = len(_SUMS) + len(_MAXIMA)


class PPOLossStats(NamedTuple):
    """Statistics of a call as one float64 tensor: sums over live tokens, then maxima. No method synchronises.

    Micro-batches and ranks combine with `merge` and `all_reduce`; `finalize` then gives means, so that the result does
    not depend on how the batch was split.
    """

    raw: Tensor

    @staticmethod
    def merge(parts: Sequence[PPOLossStats]) -> PPOLossStats:
        """Combine the statistics of several calls (at least one)."""
        stacked = torch.stack([part.raw for part in parts])
        return PPOLossStats(torch.cat((stacked[:, : len(_SUMS)].sum(0), stacked[:, len(_SUMS) :].amax(0))))

    def all_reduce(self, group: Any = None) -> PPOLossStats:
        """Combine over the ranks of a torch.distributed group; every rank gets the result."""
        import torch.distributed as dist

        sums, maxima = self.raw[: len(_SUMS)].clone(), self.raw[len(_SUMS) :].clone()
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        return PPOLossStats(torch.cat((sums, maxima)))

    def finalize(self) -> PPOLossSummary:
        """Turn sums into means over live tokens."""
        sums, maxima = self.raw[: len(_SUMS)], self.raw[len(_SUMS) :]
        any_live = self.raw[0] > 0
        named = dict(zip(_SUMS, (sums / self.raw[0].clamp(min=1)).unbind(), strict=True))
        named |= zip(_MAXIMA, torch.where(any_live, maxima, torch.zeros_like(maxima)).unbind(), strict=True)
        for name in ("live_tokens", "live_sequences"):
            named[name] = self.raw[_SUMS.index(name)]
        weight = self.raw[_SUMS.index("loss_weight")].clamp(min=1)
        for name in ("loss", "policy_loss"):
            named[name] = self.raw[_SUMS.index(name)] / weight
        del named["loss_weight"]
        named["ratio_min"] = -named.pop("negative_ratio_min")
        applied, square = named.pop("applied_weight"), named.pop("applied_weight_square")
        size = self.raw[0] * applied * applied / square
        named["effective_sample_size"] = torch.where(square == 0, torch.zeros_like(size), size)
        return PPOLossSummary(**named)
