"""The native copy of segments that packing, unpacking, selecting and zigzag splitting share; its gradient is the
transposed copy.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from areal_core.ops._dispatch import call, register_fake

Fill = float | Mapping[str, float]
_ops = torch.ops.areal_core


def fill_values(op: str, keys: Collection[str], fill: Fill) -> list[float]:
    """One value per key: the same for all, or what the mapping says (missing keys: 0)."""
    if not isinstance(fill, Mapping):
        return [float(fill)] * len(keys)
    unknown = set(fill) - set(keys)
    if unknown:
        raise ValueError(f"{op}: expected fill for per-token keys {sorted(keys)}, got {sorted(unknown)}")
    return [float(fill.get(k, 0.0)) for k in keys]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small host tensor on the device, without waiting for it: only a copy from pinned memory is asynchronous."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def copy_segments(
    tensors: dict[str, Tensor], index: tuple[Tensor, Tensor, Tensor], target_rows: int, fills: list[float]
) -> dict[str, Tensor]:
    """Run the native copy on tensors of rows; `index` is (source_begin, target_begin, target_end) on the host."""
    if not tensors:
        return {}
    rows = [v.contiguous() for v in tensors.values()]
    source_begin, target_begin, target_end = to_device(torch.stack(index), rows[0].device)
    copied = call(_ops.copy_segments, rows, source_begin, target_begin, target_end, target_rows, fills)
    return dict(zip(tensors, copied, strict=True))


def copy_segments_into(
    tensors: dict[str, Tensor], targets: dict[str, Tensor], index: tuple[Tensor, Tensor, Tensor], fills: list[float]
) -> None:
    """The same into tensors of rows that are given, and written whole. No gradients."""
    if not tensors:
        return
    rows = [v.contiguous() for v in tensors.values()]
    source_begin, target_begin, target_end = to_device(torch.stack(index), rows[0].device)
    written = [targets[k] for k in tensors]
    call(_ops.copy_segments_into, rows, written, source_begin, target_begin, target_end, fills)
    torch.autograd.graph.increment_version(written)  # the dispatcher leaves that to whoever registers an op


def _fake_copy_segments(
    tensors: list[Tensor], source_begin: Tensor, target_begin: Tensor, target_end: Tensor, rows: int, fills: list[float]
) -> list[Tensor]:
    return [x.new_empty((rows, *x.shape[1:])) for x in tensors]


def _copy_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, source_begin, target_begin, target_end, _, _ = inputs
    ctx.save_for_backward(source_begin, target_begin, target_end)
    ctx.source_rows = tensors[0].shape[0]


def _copy_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    # The transposed copy. Targets must be ordered: by begin + end, which puts an empty segment before its neighbour.
    source_begin, target_begin, target_end = ctx.saved_tensors
    source_end = source_begin + (target_end - target_begin)
    order = torch.argsort(source_begin + source_end)
    index = (target_begin[order], source_begin[order], source_end[order])
    present = [g.contiguous() for g in grads if g is not None]
    copied = iter(_ops.copy_segments(present, *index, ctx.source_rows, [0.0] * len(present)) if present else [])
    return [None if g is None else next(copied) for g in grads], None, None, None, None, None


register_fake("copy_segments", _fake_copy_segments)
register_fake("copy_segments_into", lambda *arguments: None)
torch.library.register_autograd("areal_core::copy_segments", _copy_backward, setup_context=_copy_setup)
