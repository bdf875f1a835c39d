"""Packing, shifts and bin packing written out plainly: the oracle of the tests and the baseline of the benches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def pack(tensors: Mapping[str, Tensor], attention_mask: Tensor) -> dict[str, Tensor]:
    """Pack [S, L, ...] to [T, ...], one sequence and one key at a time."""
    keep = [row != 0 for row in attention_mask]
    return {
        k: torch.cat([v[s][keep[s]] for s in range(len(keep))]) if keep else v.reshape(0, *v.shape[2:])
        for k, v in tensors.items()
    }


def unpack(tensors: Mapping[str, Tensor], attention_mask: Tensor, fill: float = 0.0) -> dict[str, Tensor]:
    """Write packed rows back to where the mask is set."""
    sequences, length = attention_mask.shape
    out = {k: torch.full((sequences, length, *v.shape[1:]), fill, dtype=v.dtype) for k, v in tensors.items()}
    for key, value in tensors.items():
        begin = 0
        for s in range(sequences):
            keep = attention_mask[s] != 0
            count = int(keep.sum())
            out[key][s][keep] = value[begin : begin + count]
            begin += count
    return out


def shift(x: Tensor, cu_seqlens: Sequence[int], offset: int, fill: float) -> Tensor:
    """Give out[t] = x[t - offset] where t - offset is in the same sequence, else fill."""
    out = torch.full_like(x, fill)
    for begin, end in itertools.pairwise(cu_seqlens):
        for t in range(begin, end):
            if begin <= t - offset < end:
                out[t] = x[t - offset]
    return out


def first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each sequence, longest first, into the first bin with room."""
    bins: list[list[int]] = []
    loads: list[int] = []
    for i in _longest_first(lengths):
        for b, load in enumerate(loads):
            if load + lengths[i] <= max_tokens:
                bins[b].append(i)
                loads[b] += lengths[i]
                break
        else:
            bins.append([i])
            loads.append(lengths[i])
    return bins


def modified_first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Place by size class. Source: Johnson and Garey, "A 71/60 theorem for bin packing", 1985."""
    left = _longest_first(lengths)
    large = [i for i in left if 2 * lengths[i] > max_tokens]
    mediums = [i for i in left if i not in large and 3 * lengths[i] > max_tokens]
    smalls = [i for i in left if i not in large + mediums and 6 * lengths[i] > max_tokens]
    bins = [[i] for i in large]
    left = left[len(large) :]

    def room(b: list[int]) -> int:
        return max_tokens - sum(lengths[i] for i in b)

    def move(i: int, b: list[int]) -> None:
        b.append(i)
        left.remove(i)
        for group in (mediums, smalls):
            if i in group:
                group.remove(i)

    def longest_that_fits(group: list[int], b: list[int]) -> int | None:
        return next((i for i in group if lengths[i] <= room(b)), None)

    for b in bins:
        if (i := longest_that_fits(mediums, b)) is not None:
            move(i, b)
    for b in reversed(bins):
        if len(b) == 1 and len(smalls) >= 2 and lengths[smalls[-1]] + lengths[smalls[-2]] <= room(b):
            move(smalls[-1], b)
            second = longest_that_fits(smalls, b)
            assert second is not None
            move(second, b)
    for b in bins:
        while (i := longest_that_fits(left, b)) is not None:
            move(i, b)
    rest = list(left)
    return bins + [[rest[j] for j in b] for b in first_fit_decreasing([lengths[i] for i in rest], max_tokens)]


def fewest_bins(lengths: Sequence[int], max_tokens: int) -> int:
    """Count the bins of an optimal packing, by exhaustive search: a dozen lengths at most."""
    order = sorted(lengths, reverse=True)
    best = len(order)

    def search(i: int, loads: list[int]) -> None:
        nonlocal best
        if len(loads) >= best:
            return
        if i == len(order):
            best = len(loads)
            return
        for b, load in enumerate(loads):
            if load + order[i] <= max_tokens and load not in loads[:b]:
                search(i + 1, [*loads[:b], load + order[i], *loads[b + 1 :]])
        search(i + 1, [*loads, order[i]])

    search(0, [])
    return best


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
