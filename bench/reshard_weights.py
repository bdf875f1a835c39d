"""What bench_reshard moves: weights of a public model's shapes, and what each rank holds of them.

Every element follows from its place in the model, and what a rank must have is cut out with torch.narrow alone: none of
this goes through the code that is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_core.reshard.inventory import inventory
from areal_core.reshard.models import load_model

ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")
REPLICATED = ("norm.weight",)
Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(model: str, layers: int | None, width: int | None) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of a bf16 model; layers and width (of everything) shrink it, for smoke tests."""
    sizes = load_model(model)
    if layers is not None:
        sizes = dataclasses.replace(sizes, layers=layers)
    if width is not None:
        heads = width // sizes.heads
        sizes = dataclasses.replace(sizes, hidden=width, intermediate=2 * width, vocabulary=8 * width, head_dim=heads)
    return {name: spec.shape for name, spec in inventory(sizes, dtype=torch.bfloat16).items()}


def tensor_dim(name: str) -> int | None:
    """The dimension that tensor parallelism divides; None: replicated."""
    if name.endswith(REPLICATED):
        return None
    return 1 if name.endswith(ROW_PARALLEL) else 0


@dataclass(frozen=True)
class Side:
    """Ranks that hold the whole model together: shards of `dim` of each tensor ("fsdp": 0; "tp": tensor_dim).

    ranks: shard of tensor i on ranks[i % len] for replicas of `shards` ranks each, one behind the other.
    """

    kind: str
    ranks: tuple[int, ...]
    shards: int

    def dim(self, name: str) -> int | None:
        """The dimension that is divided."""
        return 0 if self.kind == "fsdp" else tensor_dim(name)

    def part(self, name: str, full: Tensor, rank: int) -> Tensor:
        """What the rank holds of the full tensor, as a view."""
        dim = self.dim(name)
        if dim is None:
            return full
        at, length = self.interval(full.shape[dim], rank)
        return full.narrow(dim, at, length)

    def interval(self, size: int, rank: int) -> tuple[int, int]:
        """First index and number of a rank's share of `size`, as torch's chunk has it."""
        chunk = -(-size // self.shards)
        at = min(size, self.ranks.index(rank) % self.shards * chunk)
        return at, min(chunk, size - at)


@dataclass(frozen=True)
class Case:
    """One transfer: between two sides, which are apart or share all their ranks."""

    name: str
    source: Side
    target: Side

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank, once."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))


CASES = [
    Case("tp2-tp4", Side("tp", (0, 1), 2), Side("tp", (2, 3, 4, 5), 4)),
    Case("fsdp4-tp2", Side("fsdp", (0, 1, 2, 3), 4), Side("tp", (4, 5), 2)),
    Case("fsdp4-tp2dp2-colocated", Side("fsdp", (0, 1, 2, 3), 4), Side("tp", (0, 1, 2, 3), 2)),
]


class Weights:
    """The model's tensors, made one at a time."""

    def __init__(self, shapes: Shapes, version: int = 0) -> None:
        self.shapes = shapes
        generator = torch.Generator().manual_seed(version)
        self._pattern = torch.randint(-(2**15), 2**15, (65_537,), dtype=torch.int16, generator=generator)

    def full(self, name: str) -> Tensor:
        """A whole tensor: any bit pattern of bf16, NaN payloads too, different in every tensor."""
        count = torch.Size(self.shapes[name]).numel()
        start = sum(map(ord, name)) % 997
        repeats = -(-(count + start) // self._pattern.numel())
        return self._pattern.repeat(repeats)[start : start + count].view(torch.bfloat16).view(self.shapes[name])

    def parts(self, side: Side, rank: int) -> dict[str, Tensor]:
        """What a rank of a side holds, contiguous."""
        return {name: side.part(name, self.full(name), rank).contiguous() for name in self.shapes}


def first_difference(weights: Weights, side: Side, rank: int, got: Mapping[str, Tensor]) -> str:
    """The first tensor of a rank that is not what it should be, bit for bit; "" when all are."""
    for name in weights.shapes:
        expected = side.part(name, weights.full(name), rank)
        if got[name].shape != expected.shape:
            return f"{name}: shape {tuple(got[name].shape)}"
        if not torch.equal(got[name].view(torch.int16), expected.contiguous().view(torch.int16)):
            return f"{name}: bytes"
    return ""
