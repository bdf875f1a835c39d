"""Hypothesis strategies of meshes, placements and layouts."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from areal_core.reshard import (
    Flat,
    Layout,
    Mesh,
    Placement,
    Ragged,
    Replicate,
    Shard,
    Spec,
    StridedShard,
    TensorLayout,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]
SIZES = [0, 1, 2, 3, 5, 7, 8]


@st.composite
def meshes(draw: st.DrawFn, most: int = 3) -> Mesh:
    shape = tuple(draw(st.lists(st.integers(1, most), min_size=1, max_size=3)))
    ranks = draw(st.lists(st.integers(0, 100), min_size=math.prod(shape), max_size=math.prod(shape), unique=True))
    return Mesh(ranks, shape, ["pp", "dp", "tp"][: len(shape)])


@st.composite
def ragged(draw: st.DrawFn, shape: tuple[int, ...], parts: int) -> Ragged:
    """Bands of rows, dealt to the ranks in any order; some to several."""
    cuts = sorted(draw(st.lists(st.integers(0, shape[0]), max_size=3)))
    bands = [
        ((a, *([0] * (len(shape) - 1))), (b - a, *shape[1:]))
        for a, b in zip([0, *cuts], [*cuts, shape[0]], strict=True)
    ]
    boxes: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = [[] for _ in range(parts)]
    for band in draw(st.permutations(bands)):
        for rank in draw(st.sets(st.integers(0, parts - 1), min_size=1)):
            boxes[rank].append(band)
    return Ragged(boxes)


@st.composite
def placements(draw: st.DrawFn, shape: tuple[int, ...], mesh: Mesh) -> tuple[Placement, ...]:
    if not shape or draw(st.integers(0, 3)) == 0:
        made: list[Placement] = [Replicate()] * len(mesh.shape)
        at = draw(st.integers(0, len(mesh.shape) - 1))
        kinds: list[st.SearchStrategy[Placement]] = [st.just(Replicate()), st.builds(Flat)]
        if shape:
            kinds.append(ragged(shape, mesh.shape[at]))
        made[at] = draw(st.one_of(kinds))
        return tuple(made)
    dims = st.integers(0, len(shape) - 1)
    chunks = st.sampled_from([None, max(*shape, 1)])
    one = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dims, chunks),
        st.builds(StridedShard, dims, st.integers(1, 4), chunks),
    )
    return tuple(draw(st.tuples(*[one] * len(mesh.shape))))


@st.composite
def tensor_layouts(draw: st.DrawFn, mesh: Mesh | None = None) -> TensorLayout:
    shape = tuple(draw(st.lists(st.sampled_from(SIZES), max_size=3)))
    mesh = mesh or draw(meshes())
    return TensorLayout(Spec(draw(st.sampled_from(DTYPES)), shape), mesh, draw(placements(shape, mesh)))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    names = draw(st.lists(st.text(max_size=8).filter(bool), max_size=4, unique=True))
    shared = draw(meshes())
    return Layout({name: draw(tensor_layouts(draw(st.sampled_from([shared, None])))) for name in names})
