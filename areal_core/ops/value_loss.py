"""Value loss of packed sequences, with its gradient and statistics in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_core.ops._dispatch import OnceDifferentiable, call, register_fake
from areal_core.ops.loss import normalizer_tensor

# The layout of the raw tensor: enum ValueStat of csrc/ops/loss/value_loss.h.
_STAT_COUNT = 8
# Of a difference of float64 sums over many tokens, relative to the sums.
_ROUNDING = 1e-12


class ValueLossSummary(NamedTuple):
    """Statistics over live tokens, each a float64 0-d tensor on the device; all 0 when no token is live.

    loss is the mean term, whatever normalizer scaled the loss. explained_variance = 1 - Var(return - value) /
    Var(return); 0 where the returns do not vary, which is where their deviation is below a millionth of their size.
    """

    loss: Tensor
    clip_fraction: Tensor
    value_mean: Tensor
    return_mean: Tensor
    return_std: Tensor
    error_mean: Tensor
    error_rms: Tensor
    explained_variance: Tensor
    live_tokens: Tensor


class ValueLossStats(NamedTuple):
    """Statistics of a call as sums in one float64 tensor. No method synchronises.

    Micro-batches and ranks combine with `merge` and `all_reduce`; `finalize` then gives means and variances, so that
    the result does not depend on how the batch was split.
    """

    raw: Tensor

    @staticmethod
    def merge(parts: Sequence[ValueLossStats]) -> ValueLossStats:
        """Combine the statistics of several calls (at least one)."""
        return ValueLossStats(torch.stack([part.raw for part in parts]).sum(0))

    def all_reduce(self, group: Any = None) -> ValueLossStats:
        """Combine over the ranks of a torch.distributed group; every rank gets the result."""
        import torch.distributed as dist

        raw = self.raw.clone()
        dist.all_reduce(raw, dist.ReduceOp.SUM, group=group)
        return ValueLossStats(raw)

    def finalize(self) -> ValueLossSummary:
        """Turn sums into means and variances over live tokens."""
        live = self.raw[0]
        _, loss, clipped, value, target, target_square, error, error_square = (self.raw / live.clamp(min=1)).unbind()
        target_variance = target_square - target * target
        # What rounding leaves of equal returns is not a variance.
        target_variance = torch.where(target_variance > _ROUNDING * target_square, target_variance, 0.0)
        explained = 1 - (error_square - error * error).clamp(min=0) / target_variance
        return ValueLossSummary(
            loss=loss,
            clip_fraction=clipped,
            value_mean=value,
            return_mean=target,
            return_std=target_variance.sqrt(),
            error_mean=error,
            error_rms=error_square.sqrt(),
            explained_variance=torch.where(target_variance == 0, torch.zeros_like(explained), explained),
            live_tokens=live,
        )


class ValueLossOutput(NamedTuple):
    """The loss, a differentiable 0-d tensor, and the statistics of the call."""

    loss: Tensor
    stats: ValueLossStats


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    clip: float | None = None,
    huber_delta: float | None = None,
    normalizer: float | Tensor | None = None,
) -> ValueLossOutput:
    """PPO's value loss over packed tokens, with its gradient and its statistics from a single pass.

    term = max(l(values - returns), l(old + clamp(values - old, -clip, clip) - returns)) with l(e) = e^2 / 2, or Huber's
    loss: beyond huber_delta, huber_delta (|e| - huber_delta / 2). loss = sum of terms over live tokens / normalizer.

    Args:
        values: float32 or float64 [T], of the critic now; differentiable.
        old_values: same dtype [T], of the critic when the advantages were made; no gradient. Needed with clip.
        returns: same dtype [T]; no gradient.
        loss_mask: bool or number [T], nonzero = live.
        clip: > 0, the distance from the old value at which values are clipped. None: no clipping.
        huber_delta: > 0. None: squared error.
        normalizer: > 0; number or one-element tensor (not read back). None: the live tokens of this call. Give the
            live tokens of the global batch, so that micro-batch losses add up to the loss of the batch.

    Returns:
        ValueLossOutput(loss, stats); see ValueLossStats.

    Masked tokens are never looked at: NaN or inf there changes no bit of loss, gradient or statistics, and their
    gradient is 0. With no live token loss and gradient are exactly 0. NaN at a live token makes the loss NaN. At a tie
    of the two branches the gradient is the unclipped one, else that of the larger branch. Bitwise the same from run to
    run and for any number of threads; only once differentiable.

    Raises:
        ValueError: wrong shape or device, clip, huber_delta or normalizer not > 0, or clip without old_values.
        TypeError: wrong dtype.

    Source: "The 37 implementation details of PPO" (2022), detail 9; Huber's loss: P. J. Huber (1964).
    """
    for name, bound in (("clip", clip), ("huber_delta", huber_delta)):
        if bound is not None and not bound > 0:
            raise ValueError(f"value_loss: expected {name} > 0, got {bound}")
    if clip is not None and old_values is None:
        raise ValueError("value_loss: expected old_values with clip set, got None")
    loss, stats, *_ = call(
        torch.ops.areal_core.value_loss.default,
        values.contiguous(),
        None if old_values is None else old_values.detach().contiguous(),
        returns.detach().contiguous(),
        loss_mask.to(torch.bool).contiguous(),
        normalizer_tensor(normalizer, values, "value_loss"),
        math.inf if clip is None else float(clip),
        math.inf if huber_delta is None else float(huber_delta),
    )
    return ValueLossOutput(loss, ValueLossStats(stats.detach()))


def _fake(values: Tensor, *_: Any) -> tuple[Tensor, ...]:
    stats = values.new_empty(_STAT_COUNT, dtype=torch.float64)
    return values.new_empty(()), stats, torch.empty_like(values), values.new_empty(())


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(inputs[0], *output[2:])


def _backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    values, grad, scale = ctx.saved_tensors
    with torch.no_grad():
        grad = grad * (grad_loss * scale)
    once: Any = OnceDifferentiable.apply
    return once("value_loss", grad, grad_loss, values), None, None, None, None, None, None


register_fake("value_loss", _fake)
torch.library.register_autograd("areal_core::value_loss", _backward, setup_context=_setup_context)
