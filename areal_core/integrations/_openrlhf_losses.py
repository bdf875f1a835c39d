"""OpenRLHF's losses on our ops: aggregation, policy loss and value loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal_core import ops
from areal_core.integrations._adapters import (
    NotOursError,
    Reduction,
    aggregate,
    any_true,
    check_tokens,
    computed_dtype,
    is_usable_total,
    live_mean,
    row_offsets,
)
from areal_core.integrations._patch import Original
from areal_core.ops import PPOLossConfig


def _reduction(token_level: bool, dp_size: int, batch_num_tokens: Any, global_batch_size: Any) -> Reduction:
    total = batch_num_tokens if token_level else global_batch_size
    if not is_usable_total(total):
        raise NotOursError("a total of the global batch that is not positive")
    return Reduction(
        "token_mean" if token_level else "sequence_mean_token_mean", None if total is None else total / dp_size
    )


def aggregate_loss(
    loss: Tensor,
    loss_mask: Tensor,
    token_level_loss: bool = True,
    dp_size: int = 1,
    batch_num_tokens: Any = None,
    global_batch_size: Any = None,
    *,
    original: Original,
) -> Any:
    """A loss of its terms."""
    totals = (dp_size, batch_num_tokens, global_batch_size)
    try:
        if loss_mask is None:
            raise NotOursError("no mask")
        check_tokens(loss_mask, loss, strict=original.strict)
        return aggregate(loss, loss_mask.bool(), _reduction(token_level_loss, *totals))
    except NotOursError as reason:
        return original.fall_through(str(reason), loss, loss_mask, token_level_loss, *totals)


def policy_loss(
    self: Any,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    action_mask: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    dp_size: int = 1,
    batch_num_tokens: Any = None,
    global_batch_size: Any = None,
    *,
    original: Original,
) -> Any:
    """PPO and GSPO, with dual clip and the correction for the rollout's policy."""
    totals = (dp_size, batch_num_tokens, global_batch_size)
    constants = (log_probs, old_log_probs, advantages)
    try:
        if self.policy_loss_type not in ("ppo", "gspo"):
            raise NotOursError(f"policy_loss_type {self.policy_loss_type}")
        if action_mask is None or (self.is_correction_level != "off" and rollout_log_probs is None):
            raise NotOursError("no mask, or no log-probabilities of the rollout")
        rollout = None if self.is_correction_level == "off" else rollout_log_probs
        check_tokens(action_mask, *constants, strict=original.strict)
        if rollout is not None:
            check_tokens(action_mask, log_probs, rollout, strict=original.strict)
        reduction = _reduction(self.token_level_loss, *totals)
        return _policy_loss(self, *constants, action_mask.bool(), rollout, reduction, original.strict)
    except NotOursError as reason:
        return original.fall_through(str(reason), self, *constants, action_mask, rollout_log_probs, *totals)


def _policy_loss(
    loss: Any,
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    live: Tensor,
    rollout: Tensor | None,
    reduction: Reduction,
    strict: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    dtype = computed_dtype(logprobs, old, advantages, rollout)
    current, proximal, weighted = (x.to(dtype) for x in (logprobs, old, advantages))
    raw_ratio = torch.where(live, current.detach() - proximal, 0.0)
    options: dict[str, Any] = {"clip_low": min(loss.clip_eps_low, 1.0), "clip_high": loss.clip_eps_high}
    keep = rollout_kl = filtered = None
    if loss.policy_loss_type == "gspo":
        options["ratio_level"] = "sequence"
        proximal = proximal if rollout is None else rollout.to(dtype)
        if strict and any_true(((current.detach() - proximal).abs() > 20).any()):
            raise NotOursError("strict: log-ratios beyond 20 in a sequence ratio")
    elif rollout is not None:
        weights, filtered = _correction(loss, proximal, rollout.to(dtype), live)
        keep = weights != 0
        weighted = torch.where(keep, weighted * weights, weighted)
        rollout_kl = live_mean(rollout.to(dtype) - proximal, live).to(dtype)
    if not (options["clip_low"] >= 0 and options["clip_high"] >= 0):
        raise NotOursError("a negative clip range")
    out = ops.ppo_loss(
        current.reshape(-1),
        proximal.reshape(-1),
        weighted.reshape(-1),
        live.reshape(-1),
        keep_mask=None if keep is None else keep.reshape(-1),
        cu_seqlens=row_offsets(live),
        normalizer=reduction.normalizer,
        config=PPOLossConfig(dual_clip=loss.dual_clip, aggregation=reduction.aggregation, **options),
    )
    x = out.stats.finalize()
    clipped = (x.clip_fraction_low + x.clip_fraction_high).float()
    return out.loss, clipped, live_mean(-raw_ratio, live).to(dtype), rollout_kl, filtered


def _correction(loss: Any, old: Tensor, rollout: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the policy terms, and the fraction of tokens, or of rows, whose statistic is out of its band."""
    low, high = loss.is_correction_threshold
    log_ratio = torch.where(live, old - rollout, 0.0)
    ratio, by_row = log_ratio.exp(), loss.is_correction_level == "seq"
    if loss.is_correction_gating == "ratio":
        statistic = log_ratio
    else:
        was, now = (torch.where(live, x, 0.0).exp().clamp(1e-6, 1 - 1e-6) for x in (rollout, old))
        divergence = was * (was / now).log() + (1 - was) * ((1 - was) / (1 - now)).log()
        statistic = divergence if loss.is_correction_gating == "binary_kl" else (was - now).abs()
    if by_row:
        live_tokens = live.sum(1, keepdim=True)
        statistic = torch.where(live, statistic, 0.0).sum(1, keepdim=True) / live_tokens  # NaN: nothing to judge by
    if loss.is_correction_gating == "ratio":
        statistic = statistic.exp()
    inside = (statistic >= low) & (statistic <= high)
    weights = statistic.clamp(low, high) if loss.is_correction_mode == "clip" else torch.where(inside, ratio, 0.0)
    fraction = (~inside).double().mean() if by_row else live_mean(~inside, live)
    return weights, fraction.float()


def value_loss(
    self: Any,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    action_mask: Tensor | None = None,
    dp_size: int = 1,
    batch_num_tokens: Any = None,
    global_batch_size: Any = None,
    *,
    original: Original,
) -> Any:
    """PPO's value loss, clipped or not."""
    totals = (dp_size, batch_num_tokens, global_batch_size)
    try:
        if action_mask is None or not self.token_level_loss:
            raise NotOursError("no mask, or a mean over sequences")
        if self.clip_eps is not None and not self.clip_eps > 0:
            raise NotOursError("a clip range not above 0")
        check_tokens(action_mask, values, old_values, returns, strict=original.strict)
        reduction = _reduction(True, *totals)
    except NotOursError as reason:
        return original.fall_through(str(reason), self, values, old_values, returns, action_mask, *totals)
    dtype = computed_dtype(values, old_values, returns)
    new, old, targets = (x.to(dtype).reshape(-1) for x in (values, old_values, returns))
    live = action_mask.bool().reshape(-1)
    return ops.value_loss(new, old, targets, live, clip=self.clip_eps, normalizer=reduction.normalizer).loss
