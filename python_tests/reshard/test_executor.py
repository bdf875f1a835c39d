"""Executors move what plans say: every element, bit for bit, over every transport."""

from __future__ import annotations

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import DTYPES, SIZES, meshes, placements
from transfers import KINDS, World

from areal_core.reshard import Flat, Layout, Mesh, Replicate, Shard, Spec, TensorLayout
from areal_core.reshard.plan import plan

BF16 = torch.bfloat16


def one_sided(specs: dict[str, Spec], first: int, parts: int, placement: Shard | Flat | Replicate) -> Layout:
    mesh = Mesh(range(first, first + parts), (parts,), ("x",))
    return Layout({name: TensorLayout(spec, mesh, (placement,)) for name, spec in specs.items()})


SMALL = {"a": Spec(BF16, (31, 10)), "b": Spec(torch.float32, (64, 3))}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """The same tensors in two layouts; ranks may be on both sides."""
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True))
    sides = []
    specs = {
        name: Spec(draw(st.sampled_from(DTYPES)), tuple(draw(st.lists(st.sampled_from(SIZES), max_size=3))))
        for name in names
    }
    for _ in range(2):
        mesh = draw(meshes(2))
        sides.append(Layout({n: TensorLayout(s, mesh, draw(placements(s.shape, mesh))) for n, s in specs.items()}))
    return sides[0], sides[1]


def fill(world: World, layout: Layout, memory: dict[int, dict[str, torch.Tensor]], salt: int) -> None:
    for rank, tensors in memory.items():
        for name, tensor in layout.tensors.items():
            if rank in tensor.mesh.ranks:
                part = oracle.bits(oracle.divide(content(tensor, salt), tensor, rank))
                tensors[name].view(-1).view(torch.uint8).copy_(part.view(-1))


def content(tensor: TensorLayout, salt: int) -> torch.Tensor:
    full = oracle.numbered(tensor.spec.shape, tensor.spec.dtype)
    raw = oracle.bits(full) ^ salt
    if tensor.spec.dtype == torch.bool:
        raw &= 1  # torch makes other bytes 1 when it concatenates
    return raw.flatten().view(tensor.spec.dtype).reshape(tensor.spec.shape)


def assert_targets(world: World, salt: int) -> None:
    for rank, tensors in world.targets.items():
        for name, tensor in world.plan.target.tensors.items():
            if rank in tensor.mesh.ranks:
                expected = oracle.bits(oracle.divide(content(tensor, salt), tensor, rank))
                assert torch.equal(oracle.bits(tensors[name]), expected), (name, rank)


@pytest.mark.parametrize("kind", KINDS)
@given(pair=pairs(), chunk_bytes=st.sampled_from([4096, 1 << 20]))
@settings(max_examples=20, deadline=None)
def test_every_element_arrives(kind: str, pair: tuple[Layout, Layout], chunk_bytes: int) -> None:
    world = World(plan(*pair, chunk_bytes=chunk_bytes), kind)
    for epoch in (1, 2):
        fill(world, world.plan.source, world.sources, epoch)
        stats = world.run(epoch)
        assert_targets(world, epoch)
        assert sum(s.sent_bytes for s in stats.values()) == world.plan.stats.wire_bytes
        assert sum(s.received_bytes for s in stats.values()) == world.plan.lower_bound.wire_bytes
        assert sum(s.local_bytes for s in stats.values()) == world.plan.stats.local_bytes
        checksums = [sum(getattr(s, f) for s in stats.values()) for f in ("sent_checksum", "received_checksum")]
        assert checksums[0] % 2**64 == checksums[1] % 2**64
    world.close()
