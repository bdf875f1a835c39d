"""From any map to any other along the plan's atoms, in NumPy: what arrives is what the target's layout says, once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from names_oracle import PADDING, Array, Storage, canonical, stored, tiny, view_of

from areal_core.reshard import Layout, NameMap, Region
from areal_core.reshard.models import ModelSizes
from areal_core.reshard.names import LoRA
from areal_core.reshard.plan import Atom, plan

QWEN = tiny("qwen2", vocabulary=132, layers=4)
TIED = tiny("qwen2", vocabulary=132, layers=4, tied=True, kv_heads=2)
MOE = tiny("qwen3_moe", vocabulary=132, layers=4)
DEEPSEEK = tiny("deepseek_v3", vocabulary=132)
PAIRS: dict[str, tuple[ModelSizes, Any, Any]] = {
    "fc1 of tp2 to tp4": (QWEN, ("megatron", {"tp": 2}), ("megatron", {"tp": 4})),
    "stages to engines": (QWEN, ("megatron", {"tp": 2, "pp": 2, "vpp": 2}), ("vllm", {"tp": 4, "replicas": 2})),
    "tied, keys doubled": (TIED, ("megatron", {"tp": 2, "pp": 2}), ("sglang", {"tp": 4, "pp": 2})),
    "uneven shards to heads": (QWEN, ("fsdp", {"dp": 3}), ("vllm", {"tp": 2})),
    "strided shards to groups": (QWEN, ("fsdp", {"dp": 4, "tp": 2}), ("megatron", {"tp": 4})),
    "back to files": (TIED, ("vllm", {"tp": 4}), ("hf", {})),
    "experts to stacks": (
        MOE,
        ("megatron", {"tp": 2, "ep": 3, "etp": 1, "dp": 1}),
        ("vllm", {"tp": 2, "dp": 2, "ep": True}),
    ),
    "stacks to fused": (MOE, ("sglang", {"tp": 4, "ep": 2}), ("fsdp", {"dp": 4})),
    "latent attention": (DEEPSEEK, ("megatron", {"pp": 2, "ep": 2, "tp": 2}), ("sglang", {"tp": 4, "ep": 2, "adp": 2})),
    "an adapter": (QWEN, ("fsdp", {"dp": 3, "lora": LoRA(3)}), ("vllm", {"tp": 2, "lora": LoRA(3)})),
}


def region_parts(region: Region, box: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Any, Any] | None:
    """Where a box meets a region: slices of the region, slices of the box."""
    in_region, in_box = [], []
    for start, size, first, count in zip(*region.box, *box, strict=True):
        low, high = max(start, first), min(start + size, first + count)
        if low >= high:
            return None
        in_region.append(slice(low - start, high - start))
        in_box.append(slice(low - first, high - first))
    return tuple(in_region), tuple(in_box)


class Rank:
    """A rank's buffers, read and written by canonical boxes."""

    def __init__(self, layout: Layout, rank: int, buffers: Storage) -> None:
        self.buffers = buffers
        self.regions: dict[str, list[Region]] = {}
        for region in layout.regions(rank):
            self.regions.setdefault(region.tensor, []).append(region)

    def read(self, atom: Atom) -> Array:
        value = np.full(atom.box.size, PADDING, np.int64)
        for region in self.regions[atom.tensor]:
            parts = region_parts(region, atom.box)
            if parts is not None:
                value[parts[1]] = view_of(self.buffers[region.buffer], region)[parts[0]]
        assert (value != PADDING).all(), f"{atom} is not all there"
        return value

    def write(self, atom: Atom, value: Array) -> None:
        for region in self.regions[atom.tensor]:
            parts = region_parts(region, atom.box)
            if parts is not None:
                target = view_of(self.buffers[region.buffer], region)[parts[0]]
                assert (target == PADDING).all(), f"{atom} arrives twice"
                target[...] = value[parts[1]]


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_what_arrives(pair: str, colocated: bool) -> None:
    sizes, (source_name, source_sizes), (target_name, target_sizes) = PAIRS[pair]
    source = NameMap.for_model(sizes, source_name, **source_sizes)
    first = 0 if colocated else max(source.layout.ranks) + 1
    target = NameMap.for_model(sizes, target_name, first_rank=first, **target_sizes)
    arrays = canonical(source.specs)
    made = plan(source.layout, target.layout, chunk_bytes=1 << 12)
    senders = {rank: Rank(source.layout, rank, stored(source.layout, rank, arrays)) for rank in source.layout.ranks}
    for rank in target.layout.ranks:
        expected = stored(target.layout, rank, arrays)
        receiver = Rank(target.layout, rank, {name: np.full_like(a, PADDING) for name, a in expected.items()})
        part = made.rank(rank)
        for atom in part.local_copies:
            receiver.write(atom, senders[rank].read(atom))
        for message in part.receives:
            for atom in message.atoms:
                receiver.write(atom, senders[message.source].read(atom))
        for name, array in expected.items():
            np.testing.assert_array_equal(receiver.buffers[name], array, err_msg=f"rank {rank}: {name}")
    assert made.stats.wire_bytes == made.lower_bound.wire_bytes
