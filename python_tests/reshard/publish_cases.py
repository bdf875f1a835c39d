"""Small layouts to publish, and what every rank holds of them, cut out by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_core.reshard.layout import Layout, TensorLayout
from areal_core.reshard.placements import Mesh, Replicate, Shard
from areal_core.reshard.plan import Plan, plan
from areal_core.reshard.spec import Spec

SHAPES = {"embed": (103, 16), "norm": (16,), "up": (64, 16), "down": (16, 64), "scale": ()}
TARGET_DIM = {"embed": 0, "norm": None, "up": 0, "down": 1, "scale": None}
SENDERS, RECEIVERS = 3, 2


def weights(version: int) -> dict[str, Tensor]:
    """Whole tensors: every element follows from its index and the version."""
    full = {}
    for at, (name, shape) in enumerate(SHAPES.items()):
        count = torch.Size(shape).numel()
        full[name] = (torch.arange(count, dtype=torch.int32) * 7 + 1000 * version + at).view(shape)
    return full


def chunked(full: Tensor, dim: int | None, parts: int, index: int) -> Tensor:
    """Part `index` of a tensor cut as torch.chunk cuts it; empty behind the last."""
    if dim is None:
        return full.clone()
    chunk = -(-full.shape[dim] // parts)
    start = min(full.shape[dim], index * chunk)
    return full.narrow(dim, start, min(chunk, full.shape[dim] - start)).contiguous()


def source_part(version: int, rank: int) -> dict[str, Tensor]:
    """Fully sharded along dimension 0 over SENDERS ranks, scalars replicated."""
    return {n: chunked(t, 0 if t.dim() else None, SENDERS, rank) for n, t in weights(version).items()}


def target_part(version: int, rank: int) -> dict[str, Tensor]:
    """Tensor parallel over RECEIVERS ranks, numbered behind the senders."""
    return {n: chunked(t, TARGET_DIM[n], RECEIVERS, rank - SENDERS) for n, t in weights(version).items()}


def make_plan(chunk_bytes: int = 1024) -> Plan:
    """FSDP over ranks 0, 1, 2 -> TP over ranks 3, 4."""
    source = Mesh(range(SENDERS), (SENDERS,), ("fsdp",))
    target = Mesh(range(SENDERS, SENDERS + RECEIVERS), (RECEIVERS,), ("tp",))
    sides = []
    for mesh, dim_of in ((source, {n: 0 if s else None for n, s in SHAPES.items()}), (target, TARGET_DIM)):
        layout = {}
        for name, shape in SHAPES.items():
            dim = dim_of[name]
            placement = Replicate() if dim is None else Shard(dim)
            layout[name] = TensorLayout(Spec(torch.int32, shape), mesh, (placement,))
        sides.append(Layout(layout))
    return plan(*sides, chunk_bytes=chunk_bytes)
