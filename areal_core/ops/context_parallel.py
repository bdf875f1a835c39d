"""The zigzag layout of context parallelism: every rank gets an early and a late part of each sequence.

A sequence is cut into 2 cp_size equal chunks, and rank r owns chunks r and 2 cp_size - 1 - r, so that causal attention
costs every rank the same. Source: Llama 3, arXiv 2407.21783, section 3.3.2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from areal_core.ops._dispatch import as_int64, call
from areal_core.ops._packed import check_offsets

_ops = torch.ops.areal_core


def zigzag_split(x: Tensor, cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Give one rank's share of packed per-token values.

    Args:
        x: any dtype [T, ...].
        cu_seqlens: int32 or int64 [S+1]; every length a multiple of 2 cp_size. (Pack with lengths rounded up, so that
            padding, which the loss mask leaves out, fills the last chunk.)
        cp_size: int, ranks.
        cp_rank: int in [0, cp_size).

    Returns:
        [T / cp_size, ...], packed along cu_seqlens / cp_size. Differentiable. Bit-exact.

    On an accelerator the values of `cu_seqlens` are trusted; nothing synchronises.

    Raises:
        ValueError: a length that is no multiple of 2 cp_size (naming the sequence), `cu_seqlens` that do not cover the
            T tokens, a rank out of range.
        TypeError: `cu_seqlens` that are not integers.
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"zigzag_split: expected cp_rank in [0, cp_size = {cp_size}), got {cp_rank}")
    if x.dim() == 0:
        raise ValueError("zigzag_split: expected x of shape [T, ...], got []")
    begins, chunk, local = _chunks("zigzag_split", x, cu_seqlens, cp_size)
    early, late = begins + cp_rank * chunk, begins + (2 * cp_size - 1 - cp_rank) * chunk
    source = torch.stack((early, late), 1).flatten()
    target = torch.stack((local, local + chunk), 1).flatten()
    return _copy(x, source, target, chunk.repeat_interleave(2), x.shape[0] // cp_size)


def zigzag_merge(parts: Sequence[Tensor] | Tensor, cu_seqlens: Tensor) -> Tensor:
    """Put the shares of all ranks back in order: the inverse of `zigzag_split`.

    Args:
        parts: the shares [T / cp_size, ...] in rank order, as a sequence or stacked [cp_size, T / cp_size, ...]
            (what an all-gather gives).
        cu_seqlens: int32 or int64 [S+1], of the whole sequences.

    Returns:
        [T, ...]. Differentiable. Bit-exact.

    Raises:
        ValueError: a length that is no multiple of 2 cp_size (naming the sequence), shares that `cu_seqlens` does not
            cover.
        TypeError: `cu_seqlens` that are not integers.
    """
    if isinstance(parts, Tensor) and parts.dim() < 2:
        raise ValueError(f"zigzag_merge: expected parts of shape [cp_size, T / cp_size, ...], got {list(parts.shape)}")
    cp_size = len(parts)
    if cp_size == 0:
        raise ValueError("zigzag_merge: expected at least one part in parts, got none")
    rows = parts.flatten(0, 1) if isinstance(parts, Tensor) else torch.cat(list(parts))
    begins, chunk, local = _chunks("zigzag_merge", rows, cu_seqlens, cp_size)
    order = torch.arange(2 * cp_size, device=begins.device)
    owner = torch.minimum(order, 2 * cp_size - 1 - order)
    source = owner * (rows.shape[0] // cp_size) + local[:, None] + (order >= cp_size) * chunk[:, None]
    target = begins[:, None] + order * chunk[:, None]
    return _copy(rows, source.flatten(), target.flatten(), chunk.repeat_interleave(2 * cp_size), rows.shape[0])


def _chunks(op: str, rows: Tensor, cu_seqlens: Tensor, cp_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return per sequence: first token, tokens of a chunk, first token of a rank's share."""
    cu = as_int64(cu_seqlens, op, "cu_seqlens")
    check_offsets(op, cu, rows.shape[0], rows.device)
    lengths = cu.diff()
    if cu.device.type == "cpu" and not torch.compiler.is_compiling():
        uneven = torch.nonzero(lengths % (2 * cp_size))
        if uneven.numel():
            s = int(uneven[0])
            raise ValueError(
                f"{op}: expected lengths that are multiples of 2 cp_size = {2 * cp_size}, got {int(lengths[s])} tokens "
                f"in sequence {s}"
            )
    return cu[:-1], lengths // (2 * cp_size), cu[:-1] // cp_size


def _copy(x: Tensor, source_begin: Tensor, target_begin: Tensor, lengths: Tensor, rows: int) -> Tensor:
    index = (source_begin, target_begin, target_begin + lengths)
    copied: list[Tensor] = call(_ops.copy_segments, [x.contiguous()], *index, rows, [0.0])
    return copied[0]
