"""Which rank has which part in a framework's parallelism: what a name table needs beside its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from areal_core.reshard.models import ModelSizes
from areal_core.reshard.names.table import NameTable

__all__ = [
    "MAX_RANKS",
    "Arrangement",
    "Place",
    "RankGrid",
    "check_heads",
    "divisors",
    "even_slots",
    "layer_places",
    "number_ranks",
    "pad",
    "require_divisor",
    "sized",
]

RankGrid = NDArray[np.int32]
MAX_RANKS = 1 << 16  # planning for more takes minutes


@dataclass(frozen=True)
class Place:
    """Where a layer runs and what its buffers are called there."""

    stage: int
    layer: int  # the number in the names of its buffers
    prefix: str = ""  # before these names: the model chunk of a virtual pipeline


@dataclass(frozen=True, eq=False)
class Arrangement:
    """The ranks of one framework, by the part they play.

    Attributes:
        framework: for the text of errors.
        dense, sparse: the tables of layers without and with experts; names outside of layers are in both.
        groups: group of a table's rows ("tp", "attention") -> ranks [stages, copies, shards].
        experts: ranks [stages, expert groups, copies, shards].
        sizes_of: group -> what its number of shards is called in the framework.
        slots: of each expert group, the experts that it holds, in the order of its storage.
        places: of each layer.
        head: place of what precedes the layers.
        tail: place of what follows the layers.
        padded_vocabulary: rows of embedding and lm_head over all shards.
        aliases: what the last stage calls a buffer of the first one (a tied lm_head) -> the layout's name of it.
    """

    framework: str
    dense: NameTable
    sparse: NameTable
    groups: Mapping[str, RankGrid]
    experts: RankGrid
    sizes_of: Mapping[str, str]
    slots: Sequence[range]
    places: Sequence[Place]
    head: Place
    tail: Place
    padded_vocabulary: int
    aliases: Mapping[str, str] = field(default_factory=dict)


def number_ranks(framework: str, first_rank: int, shape: Sequence[int]) -> RankGrid:
    """Ranks from `first_rank` on in an array of this shape, the last dimension fastest.

    Raises:
        ValueError: more than MAX_RANKS of them, or numbers that are negative or leave 31 bits.
    """
    count = math.prod(shape)
    if count > MAX_RANKS:
        raise ValueError(f"{framework}: expected at most {MAX_RANKS} ranks, got {count}")
    if not 0 <= first_rank < 2**31 - count:
        raise ValueError(f"{framework}: expected first_rank in [0, {2**31 - count}), got {first_rank}")
    return first_rank + np.arange(count, dtype=np.int32).reshape(shape)


def layer_places(counts: Sequence[Sequence[int]], *, renumber: bool) -> list[Place]:
    """Lay a model's layers over stages.

    Args:
        counts: layers of [model chunk][stage], in the order in which a token passes them.
        renumber: buffers count layers from 0 in each chunk of a stage (Megatron); otherwise they keep their number.
    """
    places: list[Place] = []
    for chunk, stages in enumerate(counts):
        prefix = f"model{chunk}." if len(counts) > 1 else ""
        for stage, count in enumerate(stages):
            places += [Place(stage, local if renumber else len(places) + local, prefix) for local in range(count)]
    return places


def even_slots(experts: int, groups: int) -> list[range]:
    """Split experts over groups in order; the first groups hold one more where they do not divide."""
    least, more = divmod(experts, groups)
    starts = [group * least + min(group, more) for group in range(groups + 1)]
    return [range(starts[group], starts[group + 1]) for group in range(groups)]


def pad(size: int, multiple: int) -> int:
    """The least multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def divisors(count: int) -> list[int]:
    """All divisors, ascending."""
    small = [number for number in range(1, math.isqrt(count) + 1) if count % number == 0]
    return sorted({*small, *(count // number for number in small)})


def require_divisor(framework: str, size: str, value: int, count: int, what: str) -> None:
    """Check that a parallel size divides a number.

    Raises:
        ValueError: naming the size, what it does not divide, and the sizes that do.
    """
    if count % value:
        fitting = ", ".join(str(number) for number in divisors(count)[:12])
        raise ValueError(
            f"{framework}: expected {size} to divide {count} {what}, got {sized(size, value)}; these do: {fitting}"
        )


def sized(size: str, value: int) -> str:
    """ "tp6", and "dp x tp = 6"."""
    return f"{size}{value}" if size.isalpha() else f"{size} = {value}"


def check_heads(framework: str, size: str, value: int, sizes: ModelSizes, *, copies: bool) -> None:
    """Check that whole attention heads fall to every rank; `copies`: ranks may share a key/value head."""
    require_divisor(framework, size, value, sizes.heads, "attention heads")
    if sizes.is_mla:
        return
    if copies and value > sizes.kv_heads:
        if value % sizes.kv_heads:
            raise ValueError(
                f"{framework}: expected {size} to be a multiple of {sizes.kv_heads} key/value heads, or to divide "
                f"them, got {sized(size, value)}"
            )
        return
    require_divisor(framework, size, value, sizes.kv_heads, "key/value heads")
