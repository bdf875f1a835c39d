"""How a mesh of ranks divides a tensor: the words of a layout.

A placement says what one dimension of a mesh does, and those of a tensor apply outer to inner, as in
torch.distributed.tensor: `(Shard(0), Shard(1))` on a (dp, tp) mesh cuts rows over dp, and columns of what is left over
tp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from areal_core import _C

_INT64 = range(-(2**63), 2**63)


def check_int(call: str, name: str, value: object) -> int:
    """The value, an int of 64 bits. Raises TypeError or ValueError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{call}: expected {name} of type int, got {type(value).__name__}")
    if value not in _INT64:
        raise ValueError(f"{call}: expected {name} of 64 bits, got {value}")
    return value


def check_ints(call: str, name: str, values: Iterable[object]) -> tuple[int, ...]:
    """The values as a tuple, each an int of 64 bits. Raises TypeError or ValueError naming the argument."""
    found: tuple[Any, ...] = tuple(values)
    if set(map(type, found)) != {int} or min(found) < _INT64[0] or max(found) > _INT64[-1]:
        return tuple(check_int(call, name, value) for value in found)
    return found  # as nearly all are: quicker than value by value


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid.

    ranks: row-major over shape, unique, >= 0. Trainer and generator number their ranks together: equal numbers are the
        same process, whose bytes need no wire.
    shape: size of each dimension, outermost first.
    dim_names: one for each dimension ("pp", "dp", "tp", ...), unique.

    Raises: ValueError naming what does not fit.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    dim_names: tuple[str, ...]
    native: _C.Mesh = field(init=False, repr=False, compare=False)

    def __init__(self, ranks: Iterable[int], shape: Sequence[int], dim_names: Sequence[str]) -> None:
        object.__setattr__(self, "ranks", check_ints("Mesh", "ranks", ranks))
        object.__setattr__(self, "shape", check_ints("Mesh", "shape", shape))
        object.__setattr__(self, "dim_names", tuple(dim_names))
        if any(rank >= 2**31 or rank < -(2**31) for rank in self.ranks):
            raise ValueError(f"Mesh: expected ranks below 2^31, got {max(self.ranks, key=abs)}")
        object.__setattr__(self, "native", _C.Mesh(self.ranks, self.shape, self.dim_names))

    def __reduce__(self) -> tuple[type[Mesh], tuple[object, ...]]:
        return Mesh, (self.ranks, self.shape, self.dim_names)


class Box(NamedTuple):
    """The half-open box [start, start + size) of a tensor's index space, in elements."""

    start: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class Replicate:
    """Every rank along the mesh dimension holds all of it."""

    @property
    def native(self) -> _C.Replicate:
        """The C++ twin."""
        return _C.Replicate()


@dataclass(frozen=True)
class Shard:
    """Rank i of m holds elements [i c, (i + 1) c) along `dim`, as far as there are any.

    chunk: c; None: ceil(n / m), as torch.chunk and DTensor cut: 10 over 4 gives 3, 3, 3, 1, and 3 over 4 gives 1, 1, 1,
        0. A chunk of its own says that storage is padded, or that heads stay whole.
    """

    dim: int
    chunk: int | None = None

    def __post_init__(self) -> None:
        _check_dim("Shard", self.dim)
        _check_chunk("Shard", self.chunk)

    @property
    def native(self) -> _C.Shard:
        """The C++ twin."""
        return _C.Shard(self.dim, self.chunk or 0)


@dataclass(frozen=True)
class StridedShard:
    """FSDP2 over tensor parallelism: an outer mesh dimension that divides what `split_factor` inner shards have left.

    The elements along `dim` are cut in split_factor pieces, each piece over the m ranks of this mesh dimension, so that
    a rank holds up to split_factor boxes. Uneven pieces are read in different ways: 5 elements with split factor 2 over
    2 ranks are [0, 1, 3] and [2, 4], as in torch 2.13 and as `fully_shard` leaves tensor-parallel parameters; with
    chunk=2 they are [0, 1, 3, 4] and [2], the reading of padded pieces.

    chunk: elements of a piece for each rank; None: ceil(piece / m).
    """

    dim: int
    split_factor: int
    chunk: int | None = None

    def __post_init__(self) -> None:
        _check_dim("StridedShard", self.dim)
        check_int("StridedShard", "split_factor", self.split_factor)
        _check_chunk("StridedShard", self.chunk)

    @property
    def native(self) -> _C.StridedShard:
        """The C++ twin."""
        return _C.StridedShard(self.dim, self.split_factor, self.chunk or 0)


@dataclass(frozen=True)
class Flat:
    """FSDP1 and distributed optimizers: rank i holds elements [i c, (i + 1) c) of a flat buffer.

    In this buffer the tensor lies flattened (row-major), from `offset` on. Only Replicate may stand beside it.
    chunk: c; None: ceil((offset + n) / m).
    """

    chunk: int | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        _check_chunk("Flat", self.chunk)
        check_int("Flat", "offset", self.offset)

    @property
    def native(self) -> _C.Flat:
        """The C++ twin."""
        return _C.Flat(self.chunk or 0, self.offset)


@dataclass(frozen=True)
class Ragged:
    """Explicit boxes, for what no rule describes.

    boxes: for each rank along the mesh dimension its boxes, disjoint, in the order in which its storage holds them (one
        behind the other, each row-major). Boxes of different ranks may overlap: they are replicas. Only Replicate may
        stand beside it.
    """

    boxes: tuple[tuple[Box, ...], ...]

    def __init__(self, boxes: Iterable[Iterable[tuple[Sequence[int], Sequence[int]]]]) -> None:
        made = tuple(tuple(_box(start, size) for start, size in of_rank) for of_rank in boxes)
        object.__setattr__(self, "boxes", made)

    @property
    def native(self) -> _C.Ragged:
        """The C++ twin."""
        return _C.Ragged(self.boxes)


Placement: TypeAlias = Replicate | Shard | StridedShard | Flat | Ragged


def _box(start: Sequence[int], size: Sequence[int]) -> Box:
    return Box(check_ints("Ragged", "starts", start), check_ints("Ragged", "sizes", size))


def _check_dim(call: str, dim: int) -> None:
    if check_int(call, "dim", dim) not in range(-(2**31), 2**31):
        raise ValueError(f"{call}: expected dim of 32 bits, got {dim}")


def _check_chunk(call: str, chunk: int | None) -> None:
    if chunk is not None and check_int(call, "chunk", chunk) <= 0:
        raise ValueError(f"{call}: expected a chunk >= 1 or None, got {chunk}")
