"""From a name table and the ranks' arrangement to the layout of every canonical tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from areal_core.reshard.inventory import SCALE_BLOCK, SCALE_SUFFIX
from areal_core.reshard.layout import Storage, TensorLayout
from areal_core.reshard.models import ModelSizes
from areal_core.reshard.names.arrangement import Arrangement, Place, RankGrid, require_divisor, sized
from areal_core.reshard.names.table import Match, NameTable, Row, fill
from areal_core.reshard.placements import Mesh, Placement, Replicate, Shard
from areal_core.reshard.spec import Spec

__all__ = ["Cut", "build_layouts", "mesh_of"]


class Cut(NamedTuple):
    """How one tensor is divided over a group of ranks."""

    dim: int | None  # None: not divided
    shards: int
    repeats: int  # neighbours of the group that hold the same shard
    chunk: int  # of Shard; 0: even
    local: tuple[int, ...]  # shape of a shard's room in the buffer, padding included


class _Room(NamedTuple):
    """Where a part lies in a buffer, but for the place of its expert."""

    buffer_shape: tuple[int, ...]  # of one expert where they are stacked; empty: the part is the whole buffer
    offset: int
    group_rows: int
    group_stride: int


class _Part(NamedTuple):
    """What all tensors of one row have in common."""

    cut: Cut
    placements: tuple[Placement, ...]
    room: _Room


def build_layouts(sizes: ModelSizes, specs: Mapping[str, Spec], arrangement: Arrangement) -> dict[str, TensorLayout]:
    """Lay out every tensor of `specs`.

    Raises:
        ValueError: a tensor that the table does not describe, or that does not divide over its ranks.
    """
    return _Builder(sizes, specs, arrangement).build()


class _Builder:
    def __init__(self, sizes: ModelSizes, specs: Mapping[str, Spec], arrangement: Arrangement) -> None:
        self._sizes = sizes
        self._specs = specs
        self._ranks = arrangement
        self._parts: dict[tuple[str, str, bool], _Part] = {}
        self._mesh = lru_cache(maxsize=None)(self._make_mesh)
        self._group_of = [0] * sum(map(len, arrangement.slots))
        for group, held in enumerate(arrangement.slots):
            for expert in held:
                self._group_of[expert] = group

    def build(self) -> dict[str, TensorLayout]:
        return {name: self._layout(name, spec) for name, spec in self._specs.items()}

    def _layout(self, name: str, spec: Spec) -> TensorLayout:
        ranks = self._ranks
        match, place = self._find(name)
        # Layers of one kind are alike: what is known of a part of one holds for all.
        key = (match.row.canonical, match.suffix, match.layer >= 0 and self._sizes.is_sparse(match.layer))
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = self._make_part(match, spec)
        group = self._group_of[match.expert] if match.expert >= 0 else 0
        stages: tuple[int, ...] = (place.stage,)
        if self._sizes.tied and name == "model.embed_tokens.weight" and ranks.tail.stage != place.stage:
            stages = (place.stage, ranks.tail.stage)
        mesh = self._mesh(match.row.over, stages, group, part.cut.repeats)
        return TensorLayout(spec, mesh, part.placements, self._storage(match, place, part, group))

    def _make_part(self, match: Match, spec: Spec) -> _Part:
        cut = self._cut(match.row, match.suffix, spec.shape, self._weight_shape(match))
        return _Part(cut, _placements(match.row, cut), self._make_room(match, cut))

    def _find(self, name: str) -> tuple[Match, Place]:
        ranks = self._ranks
        match = ranks.dense.match(name) if ".layers." not in name else None
        if match is not None:
            return match, ranks.head if "embed" in name else ranks.tail
        layer = int(name.split(".layers.", 1)[1].split(".", 1)[0])
        if layer >= len(ranks.places):
            raise ValueError(f"{ranks.framework}: expected layers below {len(ranks.places)}, got {name}")
        table = ranks.sparse if self._sizes.is_sparse(layer) else ranks.dense
        return table.match(name), ranks.places[layer]

    def _table(self, match: Match) -> NameTable:
        return self._ranks.sparse if match.layer >= 0 and self._sizes.is_sparse(match.layer) else self._ranks.dense

    def _weight_shape(self, match: Match) -> tuple[int, ...] | None:
        """The shape of the weight whose block scales a tensor holds."""
        if match.suffix != SCALE_SUFFIX:
            return None
        return self._specs[fill(match.row.canonical, match.layer, match.expert, "weight")].shape

    def _cut(self, row: Row, suffix: str, shape: tuple[int, ...], weight: tuple[int, ...] | None) -> Cut:
        if weight is not None:
            return self._scale_cut(row, shape, self._cut(row, "weight", weight, None), weight)
        dim = 1 if row.split == "columns" else 0
        if row.split == "whole" or dim >= len(shape):
            return Cut(None, 1, 1, 0, shape)
        size, ranks = self._group_size(row)
        count, chunk, repeats = shape[dim], 0, 1
        if row.split == "vocabulary":
            count = self._ranks.padded_vocabulary
            require_divisor(self._ranks.framework, size, ranks, count, "padded rows of the vocabulary")
            chunk = count // ranks
        elif row.split == "kv heads" and ranks > self._sizes.kv_heads:
            repeats = ranks // self._sizes.kv_heads
        shards = ranks // repeats
        require_divisor(
            self._ranks.framework, size, shards, count, f"{'columns' if dim else 'rows'} of {row.canonical}"
        )
        local = (*shape[:dim], count // shards, *shape[dim + 1 :])
        return Cut(dim, shards, repeats, chunk, local)

    def _scale_cut(self, row: Row, shape: tuple[int, ...], of_weight: Cut, weight: tuple[int, ...]) -> Cut:
        """Scales go with the blocks of their weight: a block must not lie on two ranks."""
        dim = of_weight.dim
        if dim is not None and of_weight.shards > 1 and of_weight.local[dim] % SCALE_BLOCK:
            size, ranks = self._group_size(row)
            raise ValueError(
                f"{self._ranks.framework}: expected {size} to leave a multiple of {SCALE_BLOCK} "
                f"{'columns' if dim else 'rows'} of {row.canonical} on every rank, because blocks of {SCALE_BLOCK} "
                f"share a scale, got {sized(size, ranks)}, which leaves {of_weight.local[dim]} of {weight[dim]}"
            )
        local = tuple(-(-size // SCALE_BLOCK) for size in of_weight.local)
        return of_weight._replace(local=local)

    def _group_size(self, row: Row) -> tuple[str, int]:
        """Name and size of the group that divides a row's tensors."""
        grid = self._ranks.experts if row.over == "experts" else self._ranks.groups[row.over]
        return self._ranks.sizes_of[row.over], int(grid.shape[-1])

    def _storage(self, match: Match, place: Place, part: _Part, group: int) -> Storage:
        row, room = match.row, part.room
        held = self._ranks.slots[group] if match.expert >= 0 else range(0)
        local_expert = match.expert - held.start if match.expert >= 0 else -1
        buffer = place.prefix + fill(row.buffer, place.layer, local_expert, match.suffix)
        if not room.buffer_shape:
            return Storage(buffer=buffer, buffer_shape=part.cut.local if row.split == "vocabulary" else None)
        shape, offset = room.buffer_shape, room.offset
        if row.is_stacked:
            offset += local_expert * math.prod(shape)
            shape = (len(held), *shape)
        return Storage(
            buffer=buffer,
            buffer_shape=shape,
            offset=offset,
            group_rows=room.group_rows,
            group_stride=room.group_stride,
        )

    def _make_room(self, match: Match, cut: Cut) -> _Room:
        """Lay the parts of a buffer one after the other; for `groups`, one after the other in each group."""
        row = match.row
        parts = self._table(match).parts(row)
        if len(parts) == 1 and not row.is_stacked:
            return _Room((), 0, 0, 0)
        rows_of: dict[Row, int] = {}
        for part in parts:
            other = self._specs.get(match.name(part.canonical))
            if other is not None:
                matched = Match(part, match.layer, match.expert, match.suffix)
                local = self._cut(part, match.suffix, other.shape, self._weight_shape(matched)).local
                rows_of[part] = local[0]
                self._check_joint(part, matched, is_last=part is parts[-1])
        row_elements = math.prod(cut.local[1:])
        before = sum(rows for part, rows in rows_of.items() if parts.index(part) < parts.index(row))
        total = sum(rows_of.values())
        shape = (total, *cut.local[1:])
        if row.split != "groups":
            return _Room(shape, before * row_elements, 0, 0)
        groups = self._sizes.kv_heads // cut.shards
        return _Room(shape, before // groups * row_elements, rows_of[row] // groups, total // groups * row_elements)

    def _check_joint(self, part: Row, match: Match, *, is_last: bool) -> None:
        """Scales of parts that share a buffer: only the last may end within a block, and no group may."""
        weight = self._weight_shape(match)
        if weight is None:
            return
        rows = self._cut(part, "weight", weight, None).local[0]
        if part.split == "groups":
            rows //= self._sizes.kv_heads // self._group_size(part)[1]
        elif is_last:
            return
        if rows % SCALE_BLOCK:
            raise ValueError(
                f"{self._ranks.framework}: expected parts of {part.buffer} to start at multiples of {SCALE_BLOCK} "
                f"rows, because blocks of {SCALE_BLOCK} share a scale, got {rows} rows of {part.canonical}"
            )

    def _make_mesh(self, over: str, stages: tuple[int, ...], group: int, repeats: int) -> Mesh:
        if over == "experts":
            grid = self._ranks.experts[stages[0], group]
        elif over == "-":
            grid = np.concatenate([self._ranks.groups["tp"][stage].reshape(-1) for stage in stages])
            return mesh_of(grid, ("copies",))
        else:
            grid = np.concatenate([self._ranks.groups[over][stage] for stage in stages])
        shards = "etp" if over == "experts" else "tp"
        if repeats == 1:
            return mesh_of(grid, ("copies", shards))
        copies, ranks = grid.shape
        return mesh_of(grid.reshape(copies, ranks // repeats, repeats), ("copies", shards, "repeats"))


def mesh_of(grid: RankGrid, dim_names: tuple[str, ...]) -> Mesh:
    """A mesh of an array of ranks."""
    return Mesh(grid.reshape(-1).tolist(), grid.shape, dim_names)


def _placements(row: Row, cut: Cut) -> tuple[Placement, ...]:
    if row.over == "-":
        return (Replicate(),)
    shard: Placement = Replicate() if cut.dim is None else Shard(cut.dim, cut.chunk or None)
    return (Replicate(), shard) if cut.repeats == 1 else (Replicate(), shard, Replicate())
