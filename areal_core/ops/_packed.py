"""Per-token arguments as the native ops take them: packed [T]. A padded batch [S, L] is one too: rows of length L."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_core.ops._dispatch import as_int64


def as_mask(loss_mask: Tensor | None) -> Tensor | None:
    """A mask of any dtype, nonzero = live, as the native ops take it."""
    return None if loss_mask is None else loss_mask.to(torch.bool).contiguous()


def packed_tokens(
    op: str, cu_seqlens: Tensor | None, tensors: dict[str, Tensor | None]
) -> tuple[Tensor, dict[str, Tensor | None], torch.Size | None]:
    """cu_seqlens as int64, the per-token tensors as contiguous [T] without gradient, and the shape to give results.

    Without cu_seqlens the tensors are padded [S, L]. The shape is None when no tensor tells T.

    Raises:
        ValueError: neither cu_seqlens nor a per-token tensor, or tensors that are not 2-D where they must be.
    """
    shape = next((x.shape for x in tensors.values() if x is not None), None)
    if cu_seqlens is None:
        if shape is None:
            raise ValueError(f"{op}: expected cu_seqlens, or padded [S, L] tensors such as loss_mask, got neither")
        for name, x in tensors.items():
            if x is not None and (x.shape != shape or x.dim() != 2):
                wanted = list(shape) if len(shape) == 2 else "[S, L]"
                raise ValueError(
                    f"{op}: expected {name} of shape {wanted} without cu_seqlens (padded data), got {list(x.shape)}"
                )
        rows, columns = shape
        device = next(x.device for x in tensors.values() if x is not None)
        cu_seqlens = torch.arange(rows + 1, device=device) * columns
        tensors = {name: None if x is None else x.reshape(-1) for name, x in tensors.items()}
    flat = {name: None if x is None else x.detach().contiguous() for name, x in tensors.items()}
    return as_int64(cu_seqlens, op, "cu_seqlens"), flat, shape


def check_offsets(op: str, cu_seqlens: Tensor, tokens: int, device: torch.device) -> None:
    """Check cu_seqlens of a function that calls no native op: its values on the CPU only, and not in a trace."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"{op}: expected cu_seqlens [S+1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.device != device:
        raise ValueError(f"{op}: expected cu_seqlens on {device}, got {cu_seqlens.device}")
    if device.type != "cpu" or torch.compiler.is_compiling():
        return
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != tokens or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(
            f"{op}: expected non-decreasing cu_seqlens from 0 to {tokens} (number of packed tokens), "
            f"got {cu_seqlens.tolist()}"
        )


def check_alike(op: str, tensors: dict[str, Tensor], floating: tuple[str, ...]) -> None:
    """Check that tensors have one shape and device, and those of `floating` one floating dtype, the first's."""
    first = next(iter(tensors.values()))
    for name, x in tensors.items():
        if x.shape != first.shape:
            raise ValueError(f"{op}: expected {name} of shape {list(first.shape)}, got {list(x.shape)}")
        if x.device != first.device:
            raise ValueError(f"{op}: expected {name} on {first.device}, got {x.device}")
        if name in floating and not x.dtype.is_floating_point:
            raise TypeError(f"{op}: expected {name} of a floating dtype, got {x.dtype}")
        if name in floating and x.dtype != first.dtype:
            raise TypeError(f"{op}: expected {name} dtype = {first.dtype}, got {x.dtype}")
