"""Who holds what: placements against the oracle, torch.chunk, DTensor's own rules and an independent flatten."""

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import meshes, tensor_layouts
from oracle import bits, divide, gather, held, numbered
from torch import Tensor
from torch.distributed.tensor import placement_types as upstream
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from areal_core.reshard import (
    Box,
    Flat,
    Layout,
    Mesh,
    Placement,
    Ragged,
    Replicate,
    Shard,
    Spec,
    Storage,
    StridedShard,
    TensorLayout,
)

FLOAT = torch.float32


def line(ranks: int) -> Mesh:
    return Mesh(range(ranks), (ranks,), ("dp",))


def one(shape: tuple[int, ...], mesh: Mesh, *placements: Placement) -> Layout:
    return Layout({"w": TensorLayout(Spec(FLOAT, shape), mesh, placements)})


def elements(layout: Layout, rank: int) -> list[int]:
    """Flattened canonical indices of the boxes of "w", one box after the other."""
    shape = layout.tensors["w"].spec.shape
    at = torch.arange(math.prod(shape)).reshape(shape)
    return [int(i) for box in layout.boxes("w", rank) for i in cut(at, box).flatten()]


def cut(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(*box, strict=True))]


def test_two_elements_on_a_mesh_of_eight() -> None:
    layout = one((2,), line(8), Shard(0))
    assert [elements(layout, rank) for rank in range(8)] == [[0], [1], [], [], [], [], [], []]


def test_both_readings_of_uneven_strided_shards() -> None:
    layout = one((5,), line(2), StridedShard(0, 2))
    assert [elements(layout, rank) for rank in range(2)] == [[0, 1, 3], [2, 4]]
    padded = one((5,), line(2), StridedShard(0, 2, chunk=2))
    assert [elements(padded, rank) for rank in range(2)] == [[0, 1, 3, 4], [2]]


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    assert one((4,), line(2), Shard(0)).boxes("w", 2) == []


@settings(max_examples=120, deadline=None)
@given(tensor_layouts())
def test_boxes_hold_what_the_oracle_lists(tensor: TensorLayout) -> None:
    layout = Layout({"w": tensor})
    for rank in tensor.mesh.ranks:
        expected = held(tensor, rank)
        assert sorted(elements(layout, rank)) == sorted(expected.flatten().tolist())
        buffers = layout.buffers(rank)
        assert buffers == {"w": Spec(tensor.spec.dtype, tuple(expected.shape))}


@settings(max_examples=120, deadline=None)
@given(tensor_layouts())
def test_every_element_is_held_once_per_replica(tensor: TensorLayout) -> None:
    layout = Layout({"w": tensor})
    times = [0] * math.prod(tensor.spec.shape)
    for rank in tensor.mesh.ranks:
        for element in elements(layout, rank):
            times[element] += 1
    if any(isinstance(p, Ragged) for p in tensor.placements):
        assert all(times)
    else:
        shape = zip(tensor.placements, tensor.mesh.shape, strict=True)
        replicas = math.prod(size for placement, size in shape if isinstance(placement, Replicate))
        assert times == [replicas] * len(times)


@settings(max_examples=100, deadline=None)
@given(tensor_layouts())
def test_regions_gather_to_the_full_tensor_bit_for_bit(tensor: TensorLayout) -> None:
    full = numbered(tensor.spec.shape, torch.uint8 if tensor.spec.dtype == torch.bool else tensor.spec.dtype)
    tensor = TensorLayout(Spec(full.dtype, tensor.spec.shape), tensor.mesh, tensor.placements)
    layout = Layout({"w": tensor})
    parts = {}
    for rank in tensor.mesh.ranks:
        parts[rank] = torch.zeros(layout.buffers(rank)["w"].shape, dtype=full.dtype)
        for region in layout.regions(rank):
            region.view(parts[rank]).copy_(cut(full, region.box))
        assert torch.equal(bits(parts[rank]), bits(divide(full, tensor, rank)))
    assert torch.equal(bits(gather(tensor, parts)), bits(full))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 6))
def test_strided_shards_are_those_of_dtensor(size: int, parts: int, factor: int) -> None:
    layout = one((size,), line(parts), StridedShard(0, factor))
    split = upstream._StridedShard(0, split_factor=factor)
    shards, _ = split._split_tensor(torch.arange(size), parts, with_padding=False)
    assert [elements(layout, rank) for rank in range(parts)] == [shard.tolist() for shard in shards]


@settings(max_examples=100, deadline=None)
@given(meshes(), st.lists(st.integers(0, 9), min_size=1, max_size=3), st.data())
def test_local_shapes_are_those_of_dtensor(mesh: Mesh, sizes: list[int], data: st.DataObject) -> None:
    dims = st.integers(0, len(sizes) - 1)
    kinds = st.one_of(
        st.just((Replicate(), upstream.Replicate())),
        dims.map(lambda dim: (Shard(dim), upstream.Shard(dim))),
        st.tuples(dims, st.integers(1, 3)).map(
            lambda pair: (StridedShard(*pair), upstream._StridedShard(pair[0], split_factor=pair[1]))
        ),
    )
    chosen = [data.draw(kinds) for _ in mesh.shape]
    layout = one(tuple(sizes), mesh, *(ours for ours, _ in chosen))
    for position, rank in enumerate(mesh.ranks):
        coordinate = [int(c) for c in torch.unravel_index(torch.tensor(position), mesh.shape)]
        shape, start = _compute_local_shape_and_global_offset(
            tuple(sizes), mesh.shape, coordinate, [theirs for _, theirs in chosen]
        )
        assert layout.buffers(rank)["w"].shape == shape
        if 0 not in shape:
            assert layout.boxes("w", rank)[0].start == start


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 6), st.sampled_from([0, 0, 3, 11]), st.integers(0, 4))
def test_flat_shards_are_intervals_of_a_flattened_buffer(shape: list[int], parts: int, offset: int, slack: int) -> None:
    size = math.prod(shape)
    chunk = -(-(offset + size) // parts) + slack
    window = max(chunk, 1)
    storage = Storage("flat", buffer_shape=(window,))
    layout = Layout({"w": TensorLayout(Spec(FLOAT, tuple(shape)), line(parts), (Flat(window, offset),), storage)})
    buffer = [-1] * offset + list(range(size)) + [-1] * (window * parts - offset - size)
    for rank in range(parts):
        got = [-1] * window
        for region in layout.regions(rank):
            at = torch.arange(window).as_strided(region.box.size, region.strides, region.offset).flatten().tolist()
            indices = cut(torch.arange(size).reshape(shape), region.box).flatten().tolist()
            for i, index in zip(at, indices, strict=True):
                assert got[i] == -1
                got[i] = index
        assert got == buffer[rank * window : (rank + 1) * window]


def test_ragged_boxes_keep_their_order() -> None:
    tensor = Ragged([[((1, 0), (1, 3)), ((0, 1), (1, 2))], [((0, 0), (1, 1))]])
    layout = one((2, 3), line(2), tensor)
    assert elements(layout, 0) == [3, 4, 5, 1, 2]
    assert layout.buffers(0)["w"].shape == (5,)
    assert layout.boxes("w", 1) == [Box((0, 0), (1, 1))]


def test_more_than_two_to_the_31_elements() -> None:
    rows = 3 * 2**31 + 1
    layout = one((rows, 7), Mesh(range(6), (3, 2), ("dp", "tp")), StridedShard(0, 2), Shard(0))
    total = sum(math.prod(box.size) for rank in range(6) for box in layout.boxes("w", rank))
    assert total == rows * 7
    assert layout.boxes("w", 5)[-1] == Box((rows - 2**30 + 1, 0), (2**30 - 1, 7))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Shard(0.5), TypeError, "Shard: expected dim of type int, got float"),  # type: ignore[arg-type]
        (lambda: Shard(True), TypeError, "Shard: expected dim of type int, got bool"),
        (lambda: Shard(2**31), ValueError, "Shard: expected dim of 32 bits"),
        (lambda: Shard(0, 0), ValueError, "Shard: expected a chunk >= 1 or None, got 0"),
        (lambda: Shard(0, 2**63), ValueError, "Shard: expected chunk of 64 bits"),
        (lambda: StridedShard(0, 2**64), ValueError, "StridedShard: expected split_factor of 64 bits"),
        (lambda: Flat(-3), ValueError, "Flat: expected a chunk >= 1 or None, got -3"),
        (lambda: Ragged([[((0, 1), (2,))]]), ValueError, "as many sizes, got 2 and 1"),
        (lambda: Mesh([2**31], (1,), ("dp",)), ValueError, "Mesh: expected ranks below 2\\^31"),
        (lambda: Mesh([0, 0], (2,), ("dp",)), ValueError, "Mesh: expected unique ranks, got 0 twice"),
        (lambda: Mesh([0, 1], (3,), ("dp",)), ValueError, "Mesh: expected a shape of 2 ranks, got \\[3\\]"),
        (lambda: one((4, 4), line(2), Shard(2)), ValueError, "tensor 'w': expected Shard over mesh dimension 'dp'"),
        (lambda: one((5,), line(2), Shard(0, 2)), ValueError, "tensor 'w': .* chunk of at least 3"),
        (lambda: one((5,), line(2)), ValueError, "tensor 'w': expected 1 placements"),
    ],
)
def test_errors_say_what_was_expected(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(make(), "native")  # noqa: B009


@given(tensor_layouts())
@settings(max_examples=50, deadline=None)
def test_layouts_pickle_to_equal_ones(tensor: TensorLayout) -> None:
    layout = Layout({"w": tensor})
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout
    assert copy.digest == layout.digest
