"""Which rank holds what of a model, and where in its storage.

One `Layout` describes one side of a transfer: all ranks that train, or all that generate. Both speak of canonical
tensors (the names and shapes of Hugging Face files); what a rank's storage fuses, interleaves, pads or renames is said
by `Storage`. A layout is a value: the same tensors in any order give the same digest in every process::

    mesh = Mesh(range(4), (2, 2), ("dp", "tp"))
    trainer = Layout({"w": TensorLayout(Spec(torch.bfloat16, (10, 6)), mesh, (StridedShard(0, 2), Shard(0)))})
    trainer.boxes("w", rank=1)  # [Box(start=(5, 0), size=(3, 6))]
    trainer.buffers(rank=1)     # {"w": Spec(torch.bfloat16, (3, 6))}: what to bind there
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from areal_core import _C
from areal_core.reshard.placements import Box, Mesh, Placement, check_int, check_ints
from areal_core.reshard.spec import Spec, dtype_name, dtype_of

DEFAULT_JSON_BYTES = 32 << 20


@dataclass(frozen=True)
class Storage:
    """Where the local part of a tensor lies in a rank's storage; at its default, in a contiguous buffer of its own.

    Row r of the local part starts at `offset + (r // group_rows) * group_stride + (r % group_rows) * strides[0]` of the
    buffer. vLLM's qkv_proj is [q | k | v]: k has offset = q_rows * hidden. Megatron's linear_qkv has for each group of
    heads its rows of q, of k, of v: q has group_rows = q_rows_per_group and group_stride = rows_per_group * hidden.

    buffer: the rank's own name of the buffer; "": the canonical name.
    buffer_shape: of the rank's buffer, padding and neighbours included; None: the local shape.
    offset: elements; where local element 0 lies.
    strides: elements, one for each dimension of the tensor; None: row-major in the local shape.
    group_rows: rows (dimension 0) of one group; 0: all rows are one group.
    group_stride: elements from the first row of one group to that of the next.
    """

    buffer: str = ""
    buffer_shape: tuple[int, ...] | None = None
    offset: int = 0
    strides: tuple[int, ...] | None = None
    group_rows: int = 0
    group_stride: int = 0

    def __post_init__(self) -> None:
        for name in ("offset", "group_rows", "group_stride"):
            check_int("Storage", name, getattr(self, name))
        for name in ("buffer_shape", "strides"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_ints("Storage", name, getattr(self, name)))


_OWN_BUFFER = Storage()


@dataclass(frozen=True)
class TensorLayout:
    """One canonical tensor: what it is, which ranks hold any of it, how they divide it, where it lies on each.

    placements: one for each dimension of the mesh.
    """

    spec: Spec
    mesh: Mesh
    placements: tuple[Placement, ...]
    storage: Storage = field(default=_OWN_BUFFER)

    def __post_init__(self) -> None:
        object.__setattr__(self, "placements", tuple(self.placements))


class Region(NamedTuple):
    """A box of a tensor that lies in a buffer with constant strides.

    Element i of the box, in coordinates relative to its start, is element offset + sum(i * strides) of the buffer.
    """

    tensor: str
    box: Box
    buffer: str
    offset: int
    strides: tuple[int, ...]

    def view(self, buffer: Tensor) -> Tensor:
        """The box's elements as a view of the buffer, which must be contiguous."""
        return buffer.as_strided(self.box.size, self.strides, buffer.storage_offset() + self.offset)


class Layout:
    """All tensors of one side.

    tensors: canonical name -> TensorLayout.

    Raises: ValueError naming the tensor for placements or storage that do not fit, and for dtypes of no plain bytes.
    """

    def __init__(self, tensors: Mapping[str, TensorLayout]) -> None:
        for name in tensors:
            _check_text("Layout", "names", name)
        self._tensors = MappingProxyType({name: tensors[name] for name in sorted(tensors)})
        self.native = _native(self._tensors)
        self._ranks = tuple(self.native.ranks)

    @property
    def tensors(self) -> Mapping[str, TensorLayout]:
        """Canonical name -> TensorLayout, sorted by name."""
        return self._tensors

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of any mesh, ascending."""
        return self._ranks

    @property
    def digest(self) -> int:
        """Equal in every process for equal layouts (up to hash collisions), whatever the order of their tensors."""
        return self.native.digest

    def boxes(self, name: str, rank: int) -> list[Box]:
        """What a rank holds of a tensor, in the order of its storage; [] when that is nothing.

        Raises: ValueError for a tensor that the layout does not have.
        """
        return [Box(tuple(start), tuple(size)) for start, size in self.native.boxes(name, rank)]

    def buffers(self, rank: int) -> dict[str, Spec]:
        """The contiguous local tensors of a rank, by its own names, sorted: what the owner of the rank binds.

        Raises: ValueError naming tensor and rank for storage that leaves its buffer or overlaps another tensor's.
        """
        return _buffers(self.native.storage(rank))

    def regions(self, rank: int) -> list[Region]:
        """Where each box lies in a rank's buffers, sorted by tensor, then in the order of `boxes`.

        Raises: as `buffers`.
        """
        storage = self.native.storage(rank)
        names, buffers = list(self._tensors), list(_buffers(storage))
        return [
            Region(names[tensor], Box(tuple(start), tuple(size)), buffers[buffer], offset, tuple(strides))
            for tensor, (start, size), buffer, offset, strides in storage.regions
        ]

    def padded_buffers(self, rank: int) -> frozenset[str]:
        """The buffers of a rank with elements that are no tensor's: padding, which a transfer sets to zero."""
        storage = self.native.storage(rank)
        return frozenset(
            name for name, covered in zip(_buffers(storage), storage.fully_covered, strict=True) if not covered
        )

    def to_json(self) -> str:
        """The layout as JSON text, which `from_json` turns back into an equal one."""
        from areal_core.reshard.layout_json import layout_to_json

        return layout_to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes, *, max_bytes: int = DEFAULT_JSON_BYTES) -> Layout:
        """The layout of a JSON text, which may come from anywhere: it is checked in every detail.

        Raises: ValueError saying what `to_json` cannot have written; for more than max_bytes.
        """
        from areal_core.reshard.layout_json import layout_from_json

        return layout_from_json(text, max_bytes)

    def __eq__(self, other: object) -> bool:
        return self._tensors == other._tensors if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Layout({len(self._tensors)} tensors on {len(self._ranks)} ranks, digest={self.digest:016x})"

    def __reduce__(self) -> tuple[type[Layout], tuple[dict[str, TensorLayout]]]:
        return Layout, (dict(self._tensors),)


def _check_text(call: str, what: str, text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{call}: expected {what} of type str, got {type(text).__name__}")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{call}: expected {what} without surrogates, got {text!r}")


def _native(tensors: Mapping[str, TensorLayout]) -> _C.Layout:
    """The C++ twin. What many tensors share, as they do in models, is looked at once."""
    dtypes: dict[torch.dtype, str] = {}
    meshes: dict[int, tuple[int, Mesh]] = {}
    placements: dict[int, tuple[int, list[_C._Placement]]] = {}
    rows = []
    for name, tensor in tensors.items():
        spec, storage = tensor.spec, tensor.storage
        dtype = dtypes.get(spec.dtype)
        if dtype is None:
            dtype = dtypes[spec.dtype] = dtype_name(spec.dtype)
            dtype_of("Layout", name, dtype)
        mesh, _ = meshes.setdefault(id(tensor.mesh), (len(meshes), tensor.mesh))
        placed = placements.get(id(tensor.placements))
        if placed is None:
            placed = placements[id(tensor.placements)] = (len(placements), _native_placements(name, tensor.placements))
        _check_text(f"Layout: tensor '{name}'", "a buffer", storage.buffer)
        rows.append(
            (
                *(name, dtype, spec.dtype.itemsize, check_ints(f"Layout: tensor '{name}'", "shape", spec.shape)),
                *(mesh, placed[0], storage.buffer, storage.buffer_shape, storage.offset, storage.strides or ()),
                *(storage.group_rows, storage.group_stride),
            )
        )
    return _C.Layout([m.native for _, m in meshes.values()], [natives for _, natives in placements.values()], rows)


def _native_placements(name: str, placements: tuple[Placement, ...]) -> list[_C._Placement]:
    for placement in placements:
        if not isinstance(placement, Placement):
            raise TypeError(f"Layout: tensor '{name}': expected placements of areal_core.reshard, got {placement!r}")
    return [placement.native for placement in placements]


def _buffers(storage: _C.RankStorage) -> dict[str, Spec]:
    return {name: Spec(dtype_of("Layout", name, dtype), tuple(shape)) for name, dtype, _, shape in storage.buffers}
