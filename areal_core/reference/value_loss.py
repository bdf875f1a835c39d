"""The value loss and the M2PO mask as their definitions read, in plain fp64 torch: the oracle of `areal_core.ops`."""

from __future__ import annotations

import torch
from torch import Tensor


def error_loss(error: Tensor, huber_delta: float | None) -> Tensor:
    """Half the squared error, or Huber's loss."""
    if huber_delta is None:
        return error * error / 2
    size = error.abs()
    return torch.where(size <= huber_delta, error * error / 2, huber_delta * (size - huber_delta / 2))


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    clip: float | None = None,
    huber_delta: float | None = None,
    normalizer: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Give the loss (fp64, differentiable) and the statistics by name. Only live tokens are looked at."""
    live = loss_mask.bool()
    count = int(live.sum())
    value, target = values[live].double(), returns[live].double()
    term, clipped = error_loss(value - target, huber_delta), torch.zeros_like(value)
    if clip is not None and old_values is not None:
        old = old_values[live].double()
        held = error_loss(old + (value - old).clamp(-clip, clip) - target, huber_delta)
        # torch.maximum splits the gradient at a tie; the unclipped branch is ours.
        clipped = (held > term) & ((value - old).abs() > clip)
        term = torch.where(clipped, held, term)
    loss = term.sum() / (count or 1 if normalizer is None else normalizer)
    error, zero = (target - value).detach(), torch.zeros((), dtype=torch.float64)

    def mean(x: Tensor) -> Tensor:
        return x.detach().double().mean() if count else zero

    variance = target.var(correction=0) if count else zero
    stats = {
        "loss": mean(term),
        "clip_fraction": mean(clipped),
        "value_mean": mean(value),
        "return_mean": mean(target),
        "return_std": variance.sqrt(),
        "error_mean": mean(error),
        "error_rms": mean(error * error).sqrt(),
        "explained_variance": 1 - error.var(correction=0) / variance if float(variance) > 0 else zero,
        "live_tokens": torch.tensor(float(count), dtype=torch.float64),
    }
    return loss, stats


def m2po_mask(proximal: Tensor, behavior: Tensor, loss_mask: Tensor, threshold: float) -> Tensor:
    """Drop the live tokens of the largest squared log-ratio, one value at a time, until the rest averages below."""
    difference = torch.where(proximal == behavior, 0.0, proximal - behavior).float()
    moment = difference.clamp(-20, 20).square().double()
    keep = loss_mask.bool() & ~moment.isnan()
    while keep.any() and not moment[keep].mean() < threshold:
        keep &= moment < moment[keep].max()
    return keep
