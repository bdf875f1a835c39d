"""Packed sequences: padded [S, L] to packed [T] and back, and choosing among packed sequences.

A packed batch lays S sequences end to end; `cu_seqlens` [S+1] starts at 0 and holds the running sum of their lengths,
so sequence s is the tokens [cu_seqlens[s], cu_seqlens[s+1]). Empty sequences are legal everywhere.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from areal_core.ops._pack_layout import (
    check_lengths,
    common_width,
    host_lengths,
    mask_extents,
    per_token_keys,
    split_layout,
)
from areal_core.ops._segments import Fill, copy_segments, copy_segments_into, fill_values, to_device

_ops = torch.ops.areal_core


@dataclass(frozen=True)
class PackedBatch:
    """Packed sequences: per-token tensors of `data` are [T, ...], those named in `per_sequence` are [S, ...].

    With an alignment of the pack (`multiple_of` above 1) one dummy segment, possibly empty, follows the S sequences:
    `cu_seqlens` then has S+2 entries and T counts its tokens too. It has no row in per-sequence tensors.

    With an alignment of each sequence (`sequence_multiple_of` above 1) every segment is rounded up: `cu_seqlens` then
    counts the padding behind a sequence's tokens, `lengths` does not.
    """

    data: dict[str, Tensor]
    cu_seqlens: Tensor  # int64 [segments + 1], on the device of the data
    lengths: Tensor  # int64 [S], tokens, on the host, without the dummy
    max_seqlen: int  # tokens of the longest segment, the dummy included
    total_tokens: int  # T, the number of rows of every per-token tensor, the dummy included
    padded_length: int  # tokens, the L that `unpack` restores unless told otherwise
    sequence_multiple_of: int = 1  # tokens, what the segments of the sequences are rounded up to
    per_sequence: frozenset[str] = field(default_factory=frozenset)

    @property
    def num_sequences(self) -> int:
        """S, without the dummy segment."""
        return self.lengths.numel()

    @property
    def num_tokens(self) -> int:
        """Tokens of the S sequences, without padding and the dummy segment."""
        return int(self.lengths.sum())

    def __getitem__(self, key: str) -> Tensor:
        """Return the tensor of a key."""
        return self.data[key]


def pack(
    batch: Mapping[str, Tensor],
    attention_mask: Tensor | Sequence[int] | None = None,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    padding: Literal["right", "left"] = "right",
    multiple_of: int = 1,
    sequence_multiple_of: int = 1,
    fill: Fill = 0.0,
    per_sequence: Collection[str] = (),
) -> PackedBatch:
    """Pack every padded tensor of a batch in one pass.

    Args:
        batch: tensors of any dtype. [S, L, ...] is per-token and becomes [T, ...]; any other [S, ...] is per-sequence
            and passes through.
        attention_mask: bool or number [S, L], non-zero on tokens; left or right padding is read off each row. A 1-D
            tensor or a list of ints is taken as `lengths`.
        lengths: int [S], tokens of each sequence, instead of a mask; `padding` then says where they lie, and all
            tensors of two or more dimensions count as per-token unless named in `per_sequence`.
        padding: side of the padding, used with `lengths` only.
        multiple_of: int >= 1, tokens; above 1 a dummy segment rounds T up to a multiple of it, its rows hold `fill`
            (0 by default, so a loss mask leaves it out).
        sequence_multiple_of: int >= 1, tokens; above 1 every sequence is rounded up to a multiple of it with rows that
            hold `fill` (2 cp_size of them make a sequence fit for `zigzag_split`).
        fill: float, or one per key (missing keys: 0).
        per_sequence: names of per-sequence tensors that the shape rule would take for per-token ones.

    Returns:
        PackedBatch on the device of the batch. Differentiable: the gradient of a padded position is 0.

    What padded positions hold is never read. T and the longest length must be known to size the result: with a mask
    or lengths on an accelerator that is one synchronising read; with lengths on the host there is none. Bit-exact.

    Raises:
        ValueError: a mask row with a hole, a shape that does not fit (naming the key), a length out of range.
        TypeError: lengths that are not integers.
    """
    mask, lengths = split_layout(attention_mask, lengths)
    unknown = set(per_sequence) - set(batch)
    if unknown:
        raise ValueError(f"pack: expected per_sequence among {sorted(batch)}, got {sorted(unknown)}")
    if mask is not None:
        width = mask.shape[1]
        starts, counts = mask_extents(mask)
    else:
        counts = host_lengths(lengths)
        width = common_width(batch, counts, per_sequence)
        check_lengths(counts, width)
        _check_choice("pack", "padding", padding, ("right", "left"))
        starts = torch.zeros_like(counts) if padding == "right" else width - counts
    device = next((v.device for v in batch.values()), torch.device("cpu") if mask is None else mask.device)
    sequences = counts.numel()
    per_token = per_token_keys(batch, sequences, width, per_sequence)
    return _assemble(
        "pack",
        {k: v.reshape(sequences * width, *v.shape[2:]) if k in per_token else v for k, v in batch.items()},
        frozenset(batch) - per_token,
        device,
        source_begin=starts + width * torch.arange(sequences),
        lengths=counts,
        alignment=(multiple_of, sequence_multiple_of),
        fill=fill,
        padded_length=width,
    )


def select_sequences(
    packed: PackedBatch,
    indices: Sequence[int],
    *,
    multiple_of: int = 1,
    sequence_multiple_of: int = 1,
    fill: Fill = 0.0,
) -> PackedBatch:
    """Pack the given sequences of a packed batch, in the given order: a micro-batch, or a permutation.

    Args:
        packed: PackedBatch; padding and the dummy segment, if any, are left behind.
        indices: ints in [0, S), without repetition.
        multiple_of: as in `pack`.
        sequence_multiple_of: as in `pack`.
        fill: as in `pack`.

    Returns:
        PackedBatch. Differentiable. Bit-exact, without synchronisation.

    Raises:
        ValueError: an index out of range or repeated.
    """
    sequences = packed.num_sequences
    if not all(0 <= i < sequences for i in indices) or len(set(indices)) != len(indices):
        raise ValueError(f"select_sequences: expected distinct indices in [0, {sequences}), got {list(indices)}")
    chosen = torch.tensor(indices, dtype=torch.int64)
    per_token = _check_packed("select_sequences", packed)
    return _assemble(
        "select_sequences",
        {k: v if k in per_token else v[to_device(chosen, v.device)] for k, v in packed.data.items()},
        packed.per_sequence,
        packed.cu_seqlens.device,
        source_begin=_begins(packed)[chosen],
        lengths=packed.lengths[chosen],
        alignment=(multiple_of, sequence_multiple_of),
        fill=fill,
        padded_length=packed.padded_length,
    )


def merge_microbatches(
    parts: Sequence[PackedBatch],
    bins: Sequence[Sequence[int]],
    *,
    multiple_of: int = 1,
    sequence_multiple_of: int = 1,
    fill: Fill = 0.0,
) -> PackedBatch:
    """Put the sequences of micro-batches back in order: the inverse of `select_sequences(packed, b) for b in bins`.

    Args:
        parts: at least one PackedBatch, all with the same keys; padding and dummy segments are left behind.
        bins: int indices of the sequences of each part; together every index of [0, S) once.
        multiple_of: as in `pack`.
        sequence_multiple_of: as in `pack`.
        fill: as in `pack`.

    Returns:
        PackedBatch with sequences 0, 1, ..., S-1. Differentiable. Bit-exact, without synchronisation.

    Raises:
        ValueError: parts, keys and indices that do not fit together.
    """
    order = [i for b in bins for i in b]
    sizes = [part.num_sequences for part in parts]
    if not parts or sizes != [len(b) for b in bins] or sorted(order) != list(range(len(order))):
        raise ValueError(f"merge_microbatches: expected every index once in bins of sizes {sizes}, got {list(bins)}")
    keys = [(set(part.data), part.per_sequence) for part in parts]
    if any(k != keys[0] for k in keys):
        raise ValueError(f"merge_microbatches: expected the same keys in all parts, got {keys}")
    for part in parts:
        _check_packed("merge_microbatches", part)
    inverse = torch.tensor(order, dtype=torch.int64).argsort()
    tensors = {k: torch.cat([part.data[k] for part in parts]) for k in parts[0].data}
    bases = itertools.accumulate((part.total_tokens for part in parts), initial=0)
    begins = torch.cat([base + _begins(part) for base, part in zip(bases, parts, strict=False)])
    return _assemble(
        "merge_microbatches",
        {k: v[to_device(inverse, v.device)] if k in parts[0].per_sequence else v for k, v in tensors.items()},
        parts[0].per_sequence,
        parts[0].cu_seqlens.device,
        source_begin=begins[inverse],
        lengths=torch.cat([part.lengths for part in parts])[inverse],
        alignment=(multiple_of, sequence_multiple_of),
        fill=fill,
        padded_length=max(part.padded_length for part in parts),
    )


def unpack(
    packed: PackedBatch,
    padding: Literal["right", "left"] = "right",
    fill: Fill = 0.0,
    *,
    length: int | None = None,
    out: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Restore padded tensors: [T, ...] becomes [S, L, ...], per-sequence tensors pass through.

    Args:
        packed: PackedBatch. Keys may have been added to or removed from `data`; those not named in its `per_sequence`
            must be [T, ...].
        padding: side on which to pad.
        fill: float, or one per key (missing keys: 0), the value of padded positions.
        length: int, tokens, L of the result; default: `packed.padded_length`, so that unpacking restores the shape
            that was packed. At least the longest sequence.
        out: contiguous tensors [S, L, ...], one for every per-token key, to write into: every element is written.
            Padded tensors of a step's size are expensive to allocate anew (their pages must be zeroed first), and
            shapes repeat from step to step. Default: new tensors.

    Returns:
        dict of tensors, those of `out` where given. Padding and the dummy segment are dropped. Differentiable, except
        with `out`. Bit-exact, without synchronisation.

    Raises:
        ValueError: a per-token tensor without T rows (naming the key), a `length` below the longest sequence, keys or
            shapes of `out` that do not fit, `out` for tensors that require gradients.
        TypeError: a dtype of `out` that is not that of the packed tensor.
    """
    _check_choice("unpack", "padding", padding, ("right", "left"))
    width = packed.padded_length if length is None else length
    longest = int(packed.lengths.max()) if packed.num_sequences else 0
    if width < longest:
        raise ValueError(f"unpack: expected length >= {longest} (the longest sequence), got {width}")
    per_token = _check_packed("unpack", packed)
    rows = packed.num_sequences * width
    target_begin = width * torch.arange(packed.num_sequences)
    if padding == "left":
        target_begin = target_begin + width - packed.lengths
    fills = fill_values("unpack", per_token, fill)
    index = (_begins(packed), target_begin, target_begin + packed.lengths)
    shape = (packed.num_sequences, width)
    if out is not None:
        copy_segments_into(per_token, _rows_of(out, per_token, shape), index, fills)
        return {k: out[k] if k in per_token else v for k, v in packed.data.items()}
    padded = copy_segments(per_token, index, rows, fills)
    return {k: padded[k].reshape(*shape, *v.shape[1:]) if k in padded else v for k, v in packed.data.items()}


# --- layout -----------------------------------------------------------------------------------------------------------


def _check_packed(op: str, packed: PackedBatch) -> dict[str, Tensor]:
    """Return the per-token tensors of a packed batch, checked."""
    for key, value in packed.data.items():
        kind, rows = ("S", packed.num_sequences) if key in packed.per_sequence else ("T", packed.total_tokens)
        if value.dim() < 1 or value.shape[0] != rows:
            raise ValueError(f"{op}: expected {key!r} as [{kind} = {rows}, ...], got {list(value.shape)}")
    return {k: v for k, v in packed.data.items() if k not in packed.per_sequence}


def _rows_of(out: Mapping[str, Tensor], per_token: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
    """The tensors to write into, [S, L, ...], as rows; checked."""
    if set(out) != set(per_token):
        raise ValueError(f"unpack: expected out for the per-token keys {sorted(per_token)}, got {sorted(out)}")
    for key, value in per_token.items():
        target, wanted = out[key], (*shape, *value.shape[1:])
        if tuple(target.shape) != wanted or not target.is_contiguous():
            raise ValueError(f"unpack: expected out[{key!r}] contiguous {list(wanted)}, got {list(target.shape)}")
        if target.dtype != value.dtype:
            raise TypeError(f"unpack: expected out[{key!r}] dtype = {value.dtype}, got {target.dtype}")
        if torch.is_grad_enabled() and (value.requires_grad or target.requires_grad):
            raise ValueError(f"unpack: expected no gradients through out, got {key!r} that requires them")
    return {k: v.view(shape[0] * shape[1], *v.shape[2:]) for k, v in out.items()}


def _rounded_up(tokens: Tensor, multiple: int) -> Tensor:
    return (tokens + (multiple - 1)) // multiple * multiple


def _begins(packed: PackedBatch) -> Tensor:
    """First row of each sequence, on the host."""
    segments = _rounded_up(packed.lengths, packed.sequence_multiple_of)
    return segments.cumsum(0) - segments


def _check_choice(op: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{op}: expected {name} in {choices}, got {value!r}")


def _assemble(
    op: str,
    tensors: dict[str, Tensor],
    per_sequence: frozenset[str],
    device: torch.device,
    *,
    source_begin: Tensor,
    lengths: Tensor,
    alignment: tuple[int, int],
    fill: Fill,
    padded_length: int,
) -> PackedBatch:
    """Lay segments of `lengths` rows, rounded up, end to end, the dummy segment last. Index tensors come on the host.

    alignment: `multiple_of` and `sequence_multiple_of`.
    """
    for name, value in zip(("multiple_of", "sequence_multiple_of"), alignment, strict=True):
        if value < 1:
            raise ValueError(f"{op}: expected {name} >= 1, got {value}")
    multiple_of, sequence_multiple_of = alignment
    segments = lengths if sequence_multiple_of == 1 else _rounded_up(lengths, sequence_multiple_of)
    sequences, tokens = lengths.numel(), int(segments.sum())
    total = -(-tokens // multiple_of) * multiple_of
    cu_seqlens = torch.zeros(sequences + (2 if multiple_of > 1 else 1), dtype=torch.int64)
    torch.cumsum(segments, 0, out=cu_seqlens[1 : sequences + 1])
    cu_seqlens[sequences + 1 :] = total
    begins = cu_seqlens[:sequences]
    per_token = {k: v for k, v in tensors.items() if k not in per_sequence}
    copied = copy_segments(per_token, (source_begin, begins, begins + lengths), total, fill_values(op, per_token, fill))
    return PackedBatch(
        data={k: copied.get(k, v) for k, v in tensors.items()},
        cu_seqlens=to_device(cu_seqlens, device),
        lengths=lengths,
        max_seqlen=max(int(segments.max()) if sequences else 0, total - tokens),
        total_tokens=total,
        padded_length=padded_length,
        sequence_multiple_of=sequence_multiple_of,
        per_sequence=per_sequence,
    )
