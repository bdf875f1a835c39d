"""Tiny models whose every element holds its own number, and what a layout says of a rank's storage.

The storages to compare with are written by the tests, in NumPy, from what each framework publishes of its layout. They
use neither placements nor regions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from areal_core.reshard.layout import Layout, Region
from areal_core.reshard.models import ModelSizes
from areal_core.reshard.names import NameMap
from areal_core.reshard.spec import Spec

Array = NDArray[np.int64]
Storage = dict[str, Array]
PADDING = -1


def tiny(family: str, **changes: object) -> ModelSizes:
    """Two layers (of DeepSeek one dense, one sparse); sizes that differ from each other and are odd where allowed."""
    sizes: dict[str, object] = {
        "family": family,
        "layers": 2,
        "hidden": 7,
        "intermediate": 20,
        "vocabulary": 131,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 3,
        "qkv_bias": family == "qwen2",
        "qk_norm": family.startswith("qwen3"),
    }
    if family in ("qwen3_moe", "deepseek_v3"):
        sizes |= {"experts": 6, "moe_intermediate": 12}
    if family == "deepseek_v3":
        latent = {"q_lora_rank": 5, "kv_lora_rank": 9, "qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 4}
        sizes |= {"first_sparse": 1, "shared_experts": 1, "kv_heads": 8, **latent}
    return ModelSizes(**{**sizes, **changes})  # type: ignore[arg-type]


def canonical(specs: Mapping[str, Spec]) -> Storage:
    """Every tensor filled with numbers of which no two are equal."""
    arrays, start = {}, 0
    for name, spec in specs.items():
        count = math.prod(spec.shape)
        arrays[name] = np.arange(start, start + count, dtype=np.int64).reshape(spec.shape)
        start += count
    return arrays


def stored(layout: Layout, rank: int, arrays: Mapping[str, Array]) -> Storage:
    """A rank's buffers as the layout would fill them."""
    buffers = {name: np.full(spec.shape, PADDING, np.int64) for name, spec in layout.buffers(rank).items()}
    for region in layout.regions(rank):
        view = view_of(buffers[region.buffer], region)
        assert (view == PADDING).all(), f"{region.tensor} lies on another tensor in {region.buffer}"
        view[...] = arrays[region.tensor][_slices(region.box.start, region.box.size)]
    return buffers


def gathered(layout: Layout, storages: Mapping[int, Storage], specs: Mapping[str, Spec]) -> Storage:
    """Canonical tensors read out of all ranks' storages; every copy of an element must be the same."""
    arrays = {name: np.full(spec.shape, PADDING, np.int64) for name, spec in specs.items()}
    for rank, buffers in storages.items():
        for region in layout.regions(rank):
            read = view_of(buffers[region.buffer], region)
            target = arrays[region.tensor][_slices(region.box.start, region.box.size)]
            assert ((target == PADDING) | (target == read)).all(), f"{region.tensor} differs between ranks"
            target[...] = read
    return arrays


def check(names: NameMap, of_rank: Callable[[Storage, int], Storage]) -> None:
    """Compare a name map's layout with independently written storages, in both directions."""
    arrays = canonical(names.specs)
    expected = {
        rank: {name: np.ascontiguousarray(array) for name, array in of_rank(arrays, rank).items()}
        for rank in names.layout.ranks
    }
    for rank, storage in expected.items():
        found = stored(names.layout, rank, arrays)
        assert sorted(found) == sorted(storage), f"buffers of rank {rank}"
        padded_names = {name for name, array in storage.items() if (array == PADDING).any()}
        assert names.layout.padded_buffers(rank) == padded_names, f"padding of rank {rank}"
        for name, array in storage.items():
            np.testing.assert_array_equal(found[name], array, err_msg=f"rank {rank}: {name}")
    back = gathered(names.layout, expected, names.specs)
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)


def part(array: Array, parts: int, index: int, axis: int = 0) -> Array:
    """One of equal parts."""
    return np.split(array, parts, axis)[index]


def padded(array: Array, rows: int) -> Array:
    """With rows of padding below."""
    return np.concatenate([array, np.full((rows - len(array), *array.shape[1:]), PADDING, np.int64)])


def dtypes(layout: Layout, rank: int) -> dict[str, torch.dtype]:
    return {name: spec.dtype for name, spec in layout.buffers(rank).items()}


def view_of(buffer: Array, region: Region) -> Array:
    """A region's elements as a view of its buffer."""
    flat, size, strides = buffer.reshape(-1), region.box.size, region.strides
    last = region.offset + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    assert 0 <= region.offset <= last < flat.size
    return np.lib.stride_tricks.as_strided(flat[region.offset :], size, [8 * stride for stride in strides])


def _slices(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))
