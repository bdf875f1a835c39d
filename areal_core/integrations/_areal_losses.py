"""AReaL's losses and masks on our ops; areal.py holds the table. Arguments and statistics are AReaL's."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor

from areal_core import ops
from areal_core.integrations._adapters import computed_dtype, no_kernel_for, row_offsets
from areal_core.integrations._patch import Original

_CLAMP = 20.0  # of log-ratios, in ops.ppo_loss
_HUBER_DELTA = 10.0  # of AReaL's "huber"
_FUNCTIONAL = "areal.utils.functional.functional"


def ppo_actor_loss_fn(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    loss_mask: Tensor,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    rejection_sampling: Any = None,
    importance_sampling_level: str = "token",
    cu_seqlens: Tensor | None = None,
    *,
    original: Original,
) -> tuple[Tensor, dict[str, Any]]:
    """Decoupled PPO; the behavior weight of rejection sampling scales the advantage, which is the same for w >= 0."""
    tensors = (logprobs, proximal_logprobs, old_logprobs, advantages)
    options = (eps_clip_higher, c_clip, rejection_sampling, importance_sampling_level, cu_seqlens)
    clip_high = eps_clip if eps_clip_higher is None else eps_clip_higher
    constants = (proximal_logprobs, old_logprobs, advantages)
    reason = _not_covered(logprobs, constants, loss_mask, importance_sampling_level, cu_seqlens)
    if not (eps_clip >= 0 and 0 <= clip_high < math.inf and (c_clip is None or 1 < c_clip < math.inf)):
        reason = "clipping bounds out of range"
    if reason is None and original.strict and _is_beyond_clamp(logprobs, proximal_logprobs, old_logprobs):
        reason = "strict: log-ratios beyond 20"
    if reason is not None:
        return original.fall_through(reason, *tensors, eps_clip, loss_mask, *options)

    count = loss_mask.count_nonzero().clamp(min=1)  # before rejection, as in AReaL
    ends = _segment_ends(logprobs, cu_seqlens) if importance_sampling_level == "sequence" else None
    rejected, weight = None, None
    if rejection_sampling is not None:
        rejected = _reject(proximal_logprobs, old_logprobs, loss_mask, cu_seqlens, rejection_sampling, original.strict)
        loss_mask, weight = rejected.loss_mask, rejected.behave_imp_weight
    if ends is not None:
        advantages = _sequence_means(advantages, loss_mask, ends)
    weighted = advantages if weight is None else advantages * weight
    # Ratios are positive, so a lower bound of 0 is as good as a negative one.
    config = ops.PPOLossConfig(
        clip_low=min(eps_clip, 1.0),
        clip_high=clip_high,
        dual_clip=c_clip,
        ratio_level=importance_sampling_level,
    )
    loss = _loss(logprobs, proximal_logprobs, weighted, loss_mask, ends, count, config)

    dead = ~loss_mask
    difference = logprobs.detach() - proximal_logprobs
    ratio = _ratio(difference, loss_mask, ends).masked_fill_(dead, 0.0)
    negative = -advantages
    unclipped = negative * ratio
    clipped = ratio.clamp(1.0 - eps_clip, 1.0 + clip_high).mul_(negative)
    clip_mask = (unclipped < clipped) & loss_mask
    term = torch.maximum(unclipped, clipped, out=clipped)
    dual_clip_mask = torch.zeros_like(loss_mask)
    if c_clip is not None:
        bound = negative.abs_().mul_(c_clip)
        dual_clip_mask = (bound < term) & loss_mask
        term = torch.minimum(term, bound, out=term)
    statistics = {
        "loss": term if weight is None else term.mul_(weight),
        "importance_weight": ratio,
        "approx_kl": difference,
        "clip_mask": clip_mask,
        "dual_clip_mask": dual_clip_mask,
    }
    if rejected is not None and weight is not None:
        kept = (weight > 0) & loss_mask
        statistics |= {
            "behave_approx_kl": (proximal_logprobs - old_logprobs).masked_fill_(~kept, 0.0),
            "behave_imp_weight": weight,
            "behave_mask": kept,
            "filtered_fraction": rejected.filtered_fraction,
        }
    return loss, statistics


def sapo_loss_fn(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    tau_pos: float,
    tau_neg: float,
    loss_mask: Tensor,
    importance_sampling_level: str = "token",
    cu_seqlens: Tensor | None = None,
    *,
    original: Original,
) -> tuple[Tensor, dict[str, Any]]:
    """SAPO: a sigmoid of the ratio instead of a clip."""
    arguments = (logprobs, old_logprobs, advantages, tau_pos, tau_neg, loss_mask, importance_sampling_level, cu_seqlens)
    advantages = advantages.detach()
    reason = _not_covered(logprobs, (old_logprobs,), loss_mask, importance_sampling_level, cu_seqlens)
    if not (0 < tau_pos < math.inf and 0 < tau_neg < math.inf):
        reason = "temperatures out of range"
    if reason is None and original.strict and _is_beyond_clamp(logprobs, old_logprobs, old_logprobs):
        reason = "strict: log-ratios beyond 20"
    if reason is not None:
        return original.fall_through(reason, *arguments)

    ends = _segment_ends(logprobs, cu_seqlens) if importance_sampling_level == "sequence" else None
    if ends is not None:
        advantages = _sequence_means(advantages, loss_mask, ends)
    config = ops.PPOLossConfig(
        objective="sapo", tau_positive=tau_pos, tau_negative=tau_neg, ratio_level=importance_sampling_level
    )
    count = loss_mask.count_nonzero().clamp(min=1)
    loss = _loss(logprobs, old_logprobs, advantages, loss_mask, ends, count, config)

    difference = logprobs.detach() - old_logprobs
    ratio = _ratio(difference, loss_mask, ends)
    if ends is not None:
        ratio.masked_fill_(~loss_mask, 0.0)
    positive = torch.sigmoid(tau_pos * (ratio - 1.0)) * (4.0 / tau_pos)
    negative = torch.sigmoid(tau_neg * (ratio - 1.0)) * (4.0 / tau_neg)
    gate = torch.where(advantages > 0, positive, negative)
    none = torch.zeros_like(loss_mask, dtype=torch.bool)
    return loss, {
        "loss": -gate * advantages,
        "importance_weight": ratio,
        "approx_kl": difference,
        "clip_mask": none,
        "dual_clip_mask": none.clone(),
        "sapo_soft_gate": gate,
        "sapo_scaled_gate_pos": positive,
        "sapo_scaled_gate_neg": negative,
    }


def ppo_critic_loss_fn(
    value: Tensor,
    old_value: Tensor,
    target_value: Tensor,
    value_eps_clip: float,
    loss_mask: Tensor | None = None,
    loss_fn_type: str = "mse",
    *,
    original: Original,
) -> tuple[Tensor, dict[str, Any]]:
    """Clipped value loss."""
    arguments = (value, old_value, target_value, value_eps_clip, loss_mask, loss_fn_type)
    reason = None
    if loss_fn_type not in ("mse", "huber"):
        reason = f"loss_fn_type = {loss_fn_type!r}"
    elif not 0 < value_eps_clip < math.inf:
        reason = "value_eps_clip out of range"
    elif any(x.dtype != torch.float32 or x.shape != value.shape for x in (value, old_value, target_value)):
        reason = "values that are not float32 of one shape"
    elif loss_mask is not None and (loss_mask.dtype != torch.bool or loss_mask.shape != value.shape):
        reason = "a mask that is not bool of the shape of the values"
    elif old_value.requires_grad or target_value.requires_grad:
        reason = "gradients to what the loss holds constant"
    if reason is not None:
        return original.fall_through(reason, *arguments)
    delta = _HUBER_DELTA if loss_fn_type == "huber" else None
    live = torch.ones_like(value, dtype=torch.bool) if loss_mask is None else loss_mask
    flat = [x.reshape(-1) for x in (value, old_value, target_value, live)]
    loss = ops.value_loss(*flat, clip=value_eps_clip, huber_delta=delta).loss
    if original.strict:
        loss = loss * torch.where(live.any(), 1.0, math.nan)  # a mean over nothing

    with torch.no_grad():
        held = old_value + (value - old_value).clamp(-value_eps_clip, value_eps_clip)
        unclipped, clipped = (_value_term(x - target_value, delta) for x in (value, held))
        return loss, {"clip_mask": (clipped > unclipped) & live, "loss": torch.maximum(unclipped, clipped)}


def apply_m2po_masking(
    old_logp: Tensor, prox_logp: Tensor, loss_mask: Tensor, m2_threshold: float, *, original: Original
) -> Tensor:
    """Drop the largest squared log-ratios; equal ones share their fate, and where none fits all go."""
    if original.strict or not m2_threshold > 0 or loss_mask.dtype != torch.bool:
        reason = "strict" if original.strict else "a threshold <= 0 or a mask that is not bool"
        return original.fall_through(reason, old_logp, prox_logp, loss_mask, m2_threshold)
    flat = [x.reshape(-1) for x in (prox_logp, old_logp, loss_mask)]
    return ops.m2po_mask(*flat, threshold=m2_threshold).view_as(loss_mask)


def compute_prox_logp_approximations(
    old_logp: Tensor,
    logprobs: Tensor,
    versions: Tensor,
    current_version: int,
    method: str | None = None,
    *,
    original: Original,
) -> dict[str, Tensor]:
    """Interpolate by version; "linear" without AReaL's 1e-10, which lifts rare tokens."""
    methods = ["loglinear", "linear", "rollout"] if method is None else [method]
    reason = None
    if set(methods) - {"loglinear", "linear", "rollout"}:
        reason = f"method = {method!r}"
    elif original.strict and "linear" in methods:
        reason = "strict: linear"
    elif logprobs.requires_grad or old_logp.requires_grad or versions.dtype.is_floating_point:
        reason = "logprobs with gradients, or versions that are no integers"
    elif not (logprobs.dtype == old_logp.dtype and logprobs.shape == old_logp.shape == versions.shape):
        reason = "logprobs and versions that differ in dtype or shape"
    if reason is not None:
        return original.fall_through(reason, old_logp, logprobs, versions, current_version, method)
    flat = [x.reshape(-1) for x in (old_logp, logprobs, versions)]
    return {
        name: old_logp.clone()
        if name == "rollout"
        else ops.interpolate_proximal(*flat, current_version=current_version, method=name).view_as(old_logp)
        for name in methods
    }


def _not_covered(
    logprobs: Tensor, constants: tuple[Tensor, ...], loss_mask: Tensor, level: str, cu_seqlens: Tensor | None
) -> str | None:
    """Why a policy loss goes to AReaL's function; None where ours takes it."""
    if level not in ("token", "sequence"):
        return f"importance_sampling_level = {level!r}"
    if level == "sequence" and logprobs.dim() == 1 and cu_seqlens is None:
        return "a ratio by sequence without cu_seqlens"
    if logprobs.dim() not in (1, 2) or any(x.shape != logprobs.shape for x in (*constants, loss_mask)):
        return "tensors that differ in shape"
    if loss_mask.dtype != torch.bool:
        return "a mask that is not bool"
    if any(x.requires_grad for x in constants):
        return "gradients to what the loss holds constant"
    if any(x.dtype not in (torch.float32, torch.float64) for x in (logprobs, *constants)):
        return "half-precision logprobs or advantages"
    return no_kernel_for(logprobs.device, torch.float32)


def _is_beyond_clamp(logprobs: Tensor, proximal: Tensor, behavior: Tensor) -> bool:
    """Whether AReaL's unbounded ratios differ from ours somewhere, NaN included."""
    differences = torch.stack([logprobs.detach() - proximal, proximal - behavior])
    return not bool((differences.abs() <= _CLAMP).all())


def _reject(
    proximal: Tensor, behavior: Tensor, loss_mask: Tensor, cu_seqlens: Tensor | None, config: Any, strict: bool
) -> Any:
    """AReaL's rejection sampling, which reads differences alone: of bounded ones, unless strict.

    AReaL gives a log-ratio that is infinite or NaN the weight 1; bounded it is too large for any cap, or too small, and
    a NaN makes the loss NaN.
    """
    apply = importlib.import_module(_FUNCTIONAL).apply_rejection_sampling
    if strict:
        return apply(proximal, behavior, loss_mask, cu_seqlens, config)
    difference = (proximal - behavior).masked_fill_(proximal == behavior, 0.0).clamp_(-_CLAMP, _CLAMP)
    result = apply(difference, torch.zeros_like(difference), loss_mask, cu_seqlens, config)
    unknown = difference.isnan() & loss_mask
    result.behave_imp_weight.masked_fill_(unknown, math.nan)
    result.loss_mask = result.loss_mask | unknown
    return result


def _segment_ends(like: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """cu_seqlens of packed tensors, or of the rows of padded ones."""
    if like.dim() == 1 and cu_seqlens is not None:
        return cu_seqlens.to(torch.int64)
    return row_offsets(like)


def _sequence_means(x: Tensor, live: Tensor, ends: Tensor) -> Tensor:
    """The mean over the live tokens of its sequence for each of them, 0 for the others."""
    lengths = ends.diff()
    kept = torch.where(live, x.detach(), 0.0).reshape(-1).double()
    sums, counts = (
        torch.segment_reduce(y, "sum", lengths=lengths, initial=0.0) for y in (kept, live.reshape(-1).double())
    )
    means = (sums / counts.clamp(min=1)).to(x.dtype).repeat_interleave(lengths, output_size=x.numel())
    return torch.where(live, means.view(x.shape), 0.0)


def _ratio(log_ratio: Tensor, live: Tensor, ends: Tensor | None) -> Tensor:
    """The ratio that the loss used, for AReaL's statistics."""
    bounded = log_ratio.clamp(-_CLAMP, _CLAMP)
    return bounded.exp_() if ends is None else _sequence_means(bounded, live, ends).exp_()


def _loss(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    live: Tensor,
    ends: Tensor | None,
    count: Tensor,
    config: ops.PPOLossConfig,
) -> Tensor:
    dtype = computed_dtype(logprobs, proximal, advantages)
    logprobs, proximal, advantages = (x.to(dtype).reshape(-1) for x in (logprobs, proximal, advantages))
    live = live.reshape(-1)
    return ops.ppo_loss(logprobs, proximal, advantages, live, cu_seqlens=ends, normalizer=count, config=config).loss


def _value_term(error: Tensor, delta: float | None) -> Tensor:
    square = 0.5 * error * error
    if delta is None:
        return square
    size = error.abs()
    return torch.where(size < delta, square, delta * (size - 0.5 * delta))
