"""AReaL's calls with and without our patches, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from areal_core.integrations import areal as ours


def both(*calls: Callable[[], Any], **options: Any) -> tuple[list[Any], list[Any], dict[str, int]]:
    """What AReaL gives for each call, what the patched AReaL gives, and what fell through."""
    theirs = [call() for call in calls]
    with ours.apply(**options) as patches:
        patched = [call() for call in calls]
    return theirs, patched, patches.fallbacks


def one(call: Callable[[], Any], **options: Any) -> tuple[Any, Any, dict[str, int]]:
    (theirs,), (patched,), fallbacks = both(call, **options)
    return theirs, patched, fallbacks


def close(mine: Any, theirs: Any, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def graded(function: Callable[..., Any], leaf: Tensor, *args: Any, **options: Any) -> Any:
    """The result and the gradient of a random projection of its first output."""
    leaf = leaf.detach().clone().requires_grad_()
    result = function(leaf, *args, **options)
    outputs = result if isinstance(result, tuple) else (result,)
    heads = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    weights = [torch.linspace(-1, 1, x.numel()).reshape(x.shape) if x.dim() else torch.tensor(0.7) for x in heads]
    gradient = torch.autograd.grad(heads, leaf, weights)[0]
    return result, gradient
