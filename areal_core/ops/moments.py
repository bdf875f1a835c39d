"""Mean and variance of the live numbers of a batch that ranks may share, and the numbers normalised by them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_core.ops._dispatch import call, register_fake
from areal_core.ops._packed import as_mask

_ops = torch.ops.areal_core
_PARTS = 128  # kParts of csrc/ops/advantages/moments.h


class Moments(NamedTuple):
    """Statistics of the live numbers: float64 tensors without dimensions, on the device of the numbers."""

    live: Tensor
    """How many numbers are live."""
    mean: Tensor
    squares: Tensor
    """Sum of (x - mean)^2."""
    min: Tensor
    max: Tensor

    def std(self, *, ddof: int = 1, eps: float = 0.0, eps_in_root: bool = False) -> Tensor:
        """sqrt(squares / (live - ddof)) + eps, or sqrt(squares / (live - ddof) + eps); of too few numbers: of 0."""
        variance = self.squares / (self.live - ddof).clamp(min=1)
        return (variance + eps).sqrt() if eps_in_root else variance.sqrt() + eps


def masked_moments(numbers: Tensor, *, loss_mask: Tensor | None = None, group: Any = None) -> Moments:
    """Number, mean, sum of squared deviations, minimum and maximum of the live numbers, in two passes in float64.

    Args:
        numbers: float32 or float64, any shape; no gradient flows.
        loss_mask: bool or number, same shape, nonzero = live. None: all are live.
        group: torch.distributed process group whose ranks hold the parts of the batch; each must call. None: this
            process has all of it.

    Returns:
        Moments, the same on every rank.

    Masked numbers are never read. Without live numbers: live 0, mean NaN, squares 0, min inf, max -inf. A live NaN or
    infinity makes mean and squares NaN. The sums are exact: the same bits for any order of the numbers, any number of
    threads and any split over ranks. No host synchronisation.

    Raises:
        ValueError: wrong shape.
        TypeError: wrong dtype.
    """
    if loss_mask is not None and loss_mask.shape != numbers.shape:
        raise ValueError(
            f"masked_moments: expected loss_mask of shape {list(numbers.shape)}, got {list(loss_mask.shape)}"
        )
    flat = numbers.detach().reshape(-1).contiguous()
    mask = as_mask(None if loss_mask is None else loss_mask.reshape(-1))
    parts = call(_ops.moment_ranges.default, flat, mask, public="masked_moments")
    count = _all_reduce(parts[:, 0].sum(), "SUM", group)
    # One collective for both ends.
    ends = _all_reduce(torch.stack([-parts[:, 1].amin(), parts[:, 2].amax()]), "MAX", group)
    low, high = -ends[0], ends[1]
    extent = torch.stack([count, low, high])
    mean = _sum(flat, mask, extent, None, group) / count
    squares = _sum(flat, mask, extent, mean.reshape(1), group)
    return Moments(count, mean, squares, low, high)


def whiten(
    numbers: Tensor,
    *,
    loss_mask: Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-8,
    eps_in_root: bool = True,
    group: Any = None,
) -> Tensor:
    """Normalise the live numbers to mean 0 and variance 1: (x - mean) / sqrt(var + eps).

    Args:
        numbers: float32 or float64, any shape; no gradient flows.
        loss_mask: bool or number, same shape, nonzero = live. None: all are live.
        ddof: 0 or 1: var = sum of squares / (count - ddof).
        eps: see eps_in_root.
        eps_in_root: divide by sqrt(var + eps), else by sqrt(var) + eps.
        group: torch.distributed process group whose ranks hold the parts of the batch; each must call.

    Returns:
        Tensor like numbers; 0 where masked.

    Masked numbers are never read. Equal numbers, and a single one, give exactly 0. A live NaN or infinity makes every
    live number NaN. Same bits for any order of the numbers, any number of threads and any split over ranks.

    Raises:
        ValueError: wrong shape, ddof or eps.
        TypeError: wrong dtype.

    Source: of advantages, "The 37 implementation details of PPO" (2022), detail 7; over the global batch, REINFORCE++,
    arXiv 2501.03262.
    """
    if ddof not in (0, 1):
        raise ValueError(f"whiten: expected ddof in (0, 1), got {ddof!r}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"whiten: expected eps >= 0 and finite, got {eps}")
    moments = masked_moments(numbers, loss_mask=loss_mask, group=group)
    std = moments.std(ddof=ddof, eps=eps, eps_in_root=eps_in_root)
    scale = torch.where(moments.min == moments.max, 0.0, 1 / std)
    flat = numbers.detach().reshape(-1).contiguous()
    mask = as_mask(None if loss_mask is None else loss_mask.reshape(-1))
    normalized: Tensor = call(_ops.normalize.default, flat, mask, moments.mean.reshape(1), scale.reshape(1))
    return normalized.reshape(numbers.shape)


def _sum(numbers: Tensor, mask: Tensor | None, extent: Tensor, mean: Tensor | None, group: Any) -> Tensor:
    """Sum of the live numbers, or of their squared deviations; adding the parts up is exact in any order."""
    parts: Tensor = call(_ops.moment_sums.default, numbers, mask, extent, mean)
    return _all_reduce(parts.sum(dim=0), "SUM", group).sum()


def _all_reduce(tensor: Tensor, operation: str, group: Any) -> Tensor:
    if group is None:
        return tensor
    import torch.distributed as dist

    tensor = tensor.contiguous()
    dist.all_reduce(tensor, getattr(dist.ReduceOp, operation), group)
    return tensor


def _moment_ranges_fake(numbers: Tensor, loss_mask: Any) -> Tensor:
    return numbers.new_empty(_PARTS, 3, dtype=torch.float64)


def _moment_sums_fake(numbers: Tensor, loss_mask: Any, extent: Tensor, mean: Any) -> Tensor:
    return numbers.new_empty(_PARTS, 2, dtype=torch.float64)


def _normalize_fake(numbers: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(numbers)


register_fake("moment_ranges", _moment_ranges_fake)
register_fake("moment_sums", _moment_sums_fake)
register_fake("normalize", _normalize_fake)
