"""Full tensors from the storage of all ranks, and storage from full tensors, without the code under test.

Everything here is plain indexing of the rule that a placement states, one element at a time or by torch's own chunk and
flatten; neither `boxes` nor `regions` is asked. Elements are told apart by `numbered`: each holds its own global index.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from areal_core.reshard import Flat, Mesh, Placement, Ragged, Replicate, Shard, StridedShard, TensorLayout


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor whose element i, flattened, holds the low bytes of i: NaN payloads and all."""
    count = math.prod(shape)
    raw = np.arange(count, dtype="<u8").view(np.uint8).reshape(count, 8)[:, : dtype.itemsize]
    return torch.from_numpy(raw.copy()).view(-1).view(dtype).reshape(shape)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, one row for each element."""
    return tensor.contiguous().flatten().view(torch.uint8).reshape(-1, tensor.dtype.itemsize)


def coordinates(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Where a rank stands in its mesh."""
    return tuple(int(c) for c in np.unravel_index(mesh.ranks.index(rank), mesh.shape))


def held(layout: TensorLayout, rank: int) -> Tensor:
    """The flattened canonical index of every element that a rank holds, in the shape of its local part."""
    return divide(torch.arange(math.prod(layout.spec.shape)).reshape(layout.spec.shape), layout, rank)


def divide(full: Tensor, layout: TensorLayout, rank: int) -> Tensor:
    """The local part of a full tensor."""
    local = full
    coordinate = coordinates(layout.mesh, rank)
    for placement, parts, index in zip(layout.placements, layout.mesh.shape, coordinate, strict=True):
        local = _apply(local, placement, parts, index)
    return local


def gather(layout: TensorLayout, parts: dict[int, Tensor]) -> Tensor:
    """The full tensor of the local parts of all ranks; replicas must agree, and every element must be somebody's."""
    full = torch.zeros(math.prod(layout.spec.shape), layout.spec.dtype.itemsize, dtype=torch.uint8)
    found = torch.zeros(full.shape[0], dtype=torch.bool)
    for rank, part in parts.items():
        at = held(layout, rank).flatten()
        raw = bits(part)
        assert raw.shape[0] == at.numel(), f"rank {rank} holds {raw.shape[0]} elements, expected {at.numel()}"
        again = at[found[at]]
        assert torch.equal(full[again], raw[found[at]]), f"rank {rank} differs from its replicas"
        full[at] = raw
        found[at] = True
    assert bool(found.all()), "some elements are nobody's"
    return full.flatten().view(layout.spec.dtype).reshape(layout.spec.shape)


def _apply(tensor: Tensor, placement: Placement, parts: int, index: int) -> Tensor:
    if isinstance(placement, Shard):
        return _chunks(tensor, placement.dim, parts, placement.chunk)[index]
    if isinstance(placement, StridedShard):
        pieces = _chunks(tensor, placement.dim, placement.split_factor, None)
        cut = [_chunks(piece, placement.dim, parts, placement.chunk)[index] for piece in pieces]
        return torch.cat(cut, placement.dim)
    if isinstance(placement, Flat):
        chunk = placement.chunk or -(-(placement.offset + tensor.numel()) // parts)
        before = torch.empty(placement.offset, dtype=tensor.dtype)
        part = _chunks(torch.cat([before, tensor.flatten()]), 0, parts, chunk)[index]
        return part[min(max(placement.offset - index * chunk, 0), chunk) :]
    if isinstance(placement, Ragged):
        boxes = [tensor[tuple(slice(s, s + n) for s, n in zip(*box, strict=True))] for box in placement.boxes[index]]
        return torch.cat([box.flatten() for box in boxes]) if boxes else tensor.flatten()[:0]
    assert isinstance(placement, Replicate)
    return tensor


def _chunks(tensor: Tensor, dim: int, parts: int, chunk: int | None) -> list[Tensor]:
    """As torch.chunk, or torch.split, with empty tensors for the parts that get nothing."""
    if tensor.shape[dim] == 0:
        return [tensor] * parts
    cut = list(tensor.chunk(parts, dim) if chunk is None else tensor.split(chunk, dim))
    assert len(cut) <= parts
    return cut + [tensor.narrow(dim, 0, 0)] * (parts - len(cut))
