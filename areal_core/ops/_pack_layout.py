"""What `pack` reads off its arguments: where each sequence lies in the padded rows, and which tensors are per-token."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from areal_core.ops._dispatch import as_int64, call, register_fake

_ops = torch.ops.areal_core


def split_layout(
    attention_mask: Tensor | Sequence[int] | None, lengths: Tensor | Sequence[int] | None
) -> tuple[Tensor | None, Tensor | Sequence[int] | None]:
    if (attention_mask is None) == (lengths is None):
        raise ValueError("pack: expected attention_mask or lengths, got " + ("both" if lengths is not None else "none"))
    if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.dim() != 1):
        attention_mask, lengths = None, attention_mask
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"pack: expected attention_mask [S, L], got {list(attention_mask.shape)}")
    return attention_mask, lengths


def mask_extents(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each row's tokens start and how many they are, on the host."""
    extents = call(_ops.mask_extents, (mask if mask.dtype == torch.bool else mask != 0).contiguous())
    starts, spans, counts = extents.cpu()  # the one read: sizes must be known
    holes = torch.nonzero(spans != counts)
    if holes.numel():
        row = int(holes[0])
        raise ValueError(
            f"pack: expected an attention_mask without holes, got {int(counts[row])} tokens in a span of "
            f"{int(spans[row])} in row {row}"
        )
    return starts, counts


def host_lengths(lengths: Tensor | Sequence[int] | None) -> Tensor:
    """The lengths as int64 on the host: a copy, which the caller's later changes do not reach."""
    assert lengths is not None  # without a mask there are lengths
    if not isinstance(lengths, Tensor):
        lengths = torch.as_tensor(lengths, dtype=None if len(lengths) else torch.int64)
    return as_int64(lengths, "pack", "lengths").to("cpu", copy=True)


def common_width(batch: Mapping[str, Tensor], lengths: Tensor, per_sequence: Collection[str]) -> int:
    widths = {k: v.shape[1] for k, v in batch.items() if v.dim() >= 2 and k not in per_sequence}
    if len(set(widths.values())) > 1:
        raise ValueError(
            f"pack: expected per-token tensors of one padded length, got {widths} (name per-sequence tensors in "
            "per_sequence)"
        )
    if widths:
        return next(iter(widths.values()))
    return int(lengths.max()) if lengths.numel() else 0


def check_lengths(lengths: Tensor, width: int) -> None:
    if lengths.dim() != 1:
        raise ValueError(f"pack: expected lengths [S], got {list(lengths.shape)}")
    if lengths.numel() and not (int(lengths.min()) >= 0 and int(lengths.max()) <= width):
        row = int(torch.nonzero((lengths < 0) | (lengths > width))[0])
        raise ValueError(f"pack: expected lengths in [0, {width}], got lengths[{row}] = {int(lengths[row])}")


def per_token_keys(
    batch: Mapping[str, Tensor], sequences: int, width: int, per_sequence: Collection[str]
) -> frozenset[str]:
    for key, value in batch.items():
        if value.dim() < 1 or value.shape[0] != sequences:
            raise ValueError(
                f"pack: expected {key!r} as [{sequences}, ...] (one row per sequence), got {list(value.shape)}"
            )
    return frozenset(k for k, v in batch.items() if v.dim() >= 2 and v.shape[1] == width and k not in per_sequence)


def _fake_mask_extents(mask: Tensor) -> Tensor:
    return mask.new_empty((3, mask.shape[0]), dtype=torch.int64)


register_fake("mask_extents", _fake_mask_extents)
