"""What decoupled PPO needs to know of stale tokens: proximal log-probabilities without a forward pass, and which tokens
M2PO drops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal_core.ops._dispatch import as_int64
from areal_core.ops._packed import check_alike

_METHODS = ("loglinear", "linear")
# Squared log-ratios are at most this: log-ratios are clamped to [-20, 20], as in ppo_loss.
_MAX_LOG_RATIO = 20.0


def interpolate_proximal(
    behavior_logprobs: Tensor,
    logprobs: Tensor,
    versions: Tensor,
    *,
    current_version: int | Tensor,
    proximal_version: int | Tensor | None = None,
    method: str = "loglinear",
) -> Tensor:
    """Approximate the proximal log-probabilities from two other policies, instead of computing them.

    The proximal policy lies between the policy that produced a token (version b) and the current one (version c):
    a = (proximal_version - b) / (c - b), clamped to [0, 1], and
    "loglinear": (1 - a) behavior + a current;  "linear": log((1 - a) exp(behavior) + a exp(current)).

    Args:
        behavior_logprobs: floating [T], nats, of the policy that produced the token.
        logprobs: same dtype [T], of the current policy. Its gradient is not followed.
        versions: integer [T], policy version that produced the token; aligned with the logprobs. A token with b >= c,
            or without a version (b < 0), keeps its behavior logprob.
        current_version: number or one-element tensor.
        proximal_version: the same; None: current_version - 1.
        method: "loglinear" or "linear".

    Returns:
        [T] of that dtype, without gradient.

    A token with a = 0 or a = 1 gets exactly one of the two logprobs, whatever the other is. NaN at a token stays there.
    Elementwise, so masked tokens reach no other.

    Raises:
        ValueError: an unknown method, or shapes that differ.
        TypeError: versions of a floating dtype.

    Source: log-linear interpolation by version as in AReaL (arXiv 2505.24298) since 1.0.
    """
    if method not in _METHODS:
        raise ValueError(f"interpolate_proximal: expected method in {_METHODS}, got {method!r}")
    tensors = {"behavior_logprobs": behavior_logprobs, "logprobs": logprobs, "versions": versions}
    check_alike("interpolate_proximal", tensors, ("behavior_logprobs", "logprobs"))
    versions = as_int64(versions, "interpolate_proximal", "versions")
    if isinstance(current_version, Tensor) and current_version.dtype.is_complex:
        raise TypeError(f"interpolate_proximal: expected current_version of a real dtype, got {current_version.dtype}")
    if isinstance(current_version, Tensor) and current_version.is_meta != versions.is_meta:
        raise ValueError(
            f"interpolate_proximal: expected current_version on {versions.device}, got {current_version.device}"
        )
    with torch.no_grad():
        behavior, current = behavior_logprobs.detach(), logprobs.detach()
        proximal = current_version - 1 if proximal_version is None else proximal_version
        span = current_version - versions
        known = (versions >= 0) & (span > 0)
        wide = torch.promote_types(behavior.dtype, torch.float32)  # the quotient of integers would be float32
        steps, span = (proximal - versions).to(wide), torch.where(known, span, 1).to(wide)
        share = torch.where(known, steps / span, 0.0).clamp(0, 1).to(behavior.dtype)
        if method == "linear":
            mixed = torch.logaddexp(behavior + torch.log1p(-share), current + torch.log(share))
        else:
            mixed = behavior + share * (current - behavior)
            mixed = torch.where(behavior.isneginf() | current.isneginf(), -torch.inf, mixed)
        return torch.where(share == 0, behavior, torch.where(share == 1, current, mixed))


def m2po_mask(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    threshold: float = 0.04,
    group: Any = None,
) -> Tensor:
    """Which tokens M2PO keeps: the largest squared log-ratios go until the rest averages below the threshold.

    With m = (proximal - behavior)^2 of the live tokens of the whole batch (over all ranks of `group`), in float32, the
    tokens kept are those with m <= c, for the largest c at which their mean is below the threshold. Equal m share
    their fate. Where not even the smallest m is below the threshold, no token is kept.

    Args:
        proximal_logprobs: float32 or float64 [T], nats.
        behavior_logprobs: same dtype [T].
        loss_mask: bool or number [T], nonzero = live.
        threshold: > 0, of the mean of m.
        group: a torch.distributed group whose ranks hold parts of the batch; every rank must call. None: this call
            holds the batch.

    Returns:
        bool [T], False at masked tokens: the keep_mask of ppo_loss, to be made before the batch is cut into
        micro-batches.

    Log-ratios are clamped to [-20, 20], and 0 where both logprobs are -inf. A live token whose log-ratio is NaN is
    dropped and counts in no mean. Deterministic, and but for the last bit of a mean the same however the batch is split
    over ranks; no synchronisation with a GPU.

    Raises:
        ValueError: a threshold that is not > 0, or shapes that differ.

    Source: M2PO, arXiv 2510.01161.
    """
    if not threshold > 0:
        raise ValueError(f"m2po_mask: expected threshold > 0, got {threshold}")
    tensors = {"proximal_logprobs": proximal_logprobs, "behavior_logprobs": behavior_logprobs, "loss_mask": loss_mask}
    check_alike("m2po_mask", tensors, ("proximal_logprobs", "behavior_logprobs"))
    with torch.no_grad():
        proximal, behavior = proximal_logprobs.detach().float(), behavior_logprobs.detach().float()
        log_ratio = torch.where(proximal == behavior, 0.0, proximal - behavior)
        moment = log_ratio.clamp_(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).square_()
        keep = loss_mask.to(torch.bool) & ~moment.isnan()
        # Non-negative floats are ordered as their bits are.
        bits = torch.where(keep, moment, torch.inf).view(torch.int32)
        return keep & (bits < _first_dropped(bits, threshold, group))


_FINE_BITS = 15


def _first_dropped(bits: Tensor, threshold: float, group: Any) -> Tensor:
    """The least value, as bits, that cannot be kept if the mean of all that is kept shall be below the threshold.

    Means of ever more values in ascending order grow. So: add up coarse bins of values, find the first that is too
    much, and look inside that one again.
    """
    total = torch.zeros(2, dtype=torch.float64, device=bits.device)  # count and sum of what is surely kept
    coarse = bits >> _FINE_BITS
    bin_, total = _first_too_many(coarse, bits, 2 ** (31 - _FINE_BITS), total, threshold, group)
    within = torch.where(coarse == bin_, bits & (2**_FINE_BITS - 1), 2**_FINE_BITS)  # beyond the last bin: left out
    fine, _ = _first_too_many(within, bits, 2**_FINE_BITS, total, threshold, group)
    return (bin_ << _FINE_BITS) + fine


def _first_too_many(
    bins: Tensor, bits: Tensor, count: int, total: Tensor, threshold: float, group: Any
) -> tuple[Tensor, Tensor]:
    """The first bin that does not fit wholly, and count and sum of what lies below it."""
    moments = bits.view(torch.float32).double()
    parts = torch.stack((_histogram(bins, torch.ones_like(moments), count), _histogram(bins, moments, count)))
    if group is not None:
        torch.distributed.all_reduce(parts, group=group)
    sums = torch.cat((total[:, None], total[:, None] + parts.cumsum(1)), dim=1)  # below bin i, and at the end of all
    counts, moments = sums[:, 1:].unbind()
    first = ((moments < threshold * counts) | (counts == 0)).sum().clamp(max=count - 1)
    return first, sums.index_select(1, first.reshape(1)).squeeze(1)


def _histogram(bins: Tensor, weights: Tensor, count: int) -> Tensor:
    """Sum of weights by bin in a fixed order; what lies beyond the last bin is left out."""
    if bins.device.type == "cpu":
        return torch.bincount(bins, weights=weights, minlength=count + 1)[:count]
    sums = torch.zeros(count + 1, dtype=weights.dtype, device=weights.device)
    return sums.index_put_((bins.long(),), weights, accumulate=True)[:count]  # by sorting, no float atomics
