"""Layouts of what training frameworks hold: plain tensors, DTensors, FSDP and tensor-parallel models.

Each process describes what it can know: its own tensors, and the mesh that a DTensor names. `merge_layouts` joins such
views into the layout of all ranks, and `gather_layout` exchanges them first. Nothing is believed: computed local shapes
are compared with those of the real tensors::

    layout = gather_layout(layout_of_model(model), group=gloo)  # the same on every rank
    buffers = local_buffers(layout, model, rank=dist.get_rank())

Names are those of `state_dict()` and count as canonical: equal names are the same tensor on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from areal_core.reshard.layout import DEFAULT_JSON_BYTES, Layout, TensorLayout
from areal_core.reshard.placements import Mesh, Placement, Replicate, Shard, StridedShard
from areal_core.reshard.sources_fsdp1 import fsdp1_buffers, is_fsdp1, layout_of_fsdp1
from areal_core.reshard.sources_safetensors import safetensors_buffers
from areal_core.reshard.spec import Spec

StridedReading = Literal["fully_shard", "dtensor"]


def layout_of_state_dict(
    tensors: Mapping[str, Tensor],
    *,
    rank: int | None = None,
    rank_offset: int = 0,
    strided_shards: StridedReading = "fully_shard",
) -> Layout:
    """Lay out a state dict as this process sees it.

    A DTensor lies on the ranks of its device mesh; a plain tensor lies whole on this rank.
    rank: this process; None: its rank in torch.distributed, or 0 without one, plus rank_offset.
    rank_offset: added to the ranks of device meshes, where trainer and generator are worlds of their own.
    strided_shards: what uneven `_StridedShard`s mean, on which torch does not agree with itself. "fully_shard": tensor
        parallelism has cut the tensor first, and each part was cut over the data-parallel ranks, as FSDP2 does;
        "dtensor": placements apply outer to inner, as `distribute_tensor` does. Even shards are the same.

    Raises: ValueError naming the tensor for partial or unknown placements, or naming tensor and rank for a local tensor
    of another shape than its placements say.
    """
    if strided_shards not in ("fully_shard", "dtensor"):
        raise ValueError(f"layout_of_state_dict: expected strided_shards fully_shard or dtensor, got {strided_shards}")
    rank = _own_rank() + rank_offset if rank is None else rank
    reader = _Reader(rank, rank_offset, strided_shards)
    layout = Layout({name: reader.tensor_layout(name, tensor) for name, tensor in tensors.items()})
    _check_shapes(layout, tensors, rank)
    return layout


def layout_of_model(
    model: torch.nn.Module, *, rank_offset: int = 0, strided_shards: StridedReading = "fully_shard"
) -> Layout:
    """Lay out a model's parameters and persistent buffers as this process sees them: see `layout_of_state_dict`.

    Modules of `fully_shard` get resharded (by `state_dict()`). Of parameters that modules share only the first name
    counts. A model of FullyShardedDataParallel modules (FSDP1) is laid out as `sources_fsdp1` describes.

    Raises: ValueError as `layout_of_state_dict`.
    """
    if is_fsdp1(model):
        return layout_of_fsdp1(model, rank=_own_rank() + rank_offset, rank_offset=rank_offset)
    return layout_of_state_dict(state_dict_of(model), rank_offset=rank_offset, strided_shards=strided_shards)


def state_dict_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Collect what `model.state_dict()` names, once: shared parameters under their first name, sharded ones sharded."""
    named = model.state_dict(keep_vars=True)
    unique = {id(tensor): (name, tensor) for name, tensor in reversed(named.items()) if isinstance(tensor, Tensor)}
    return dict(unique.values())


def local_buffers(
    layout: Layout, source: Mapping[str, Tensor] | torch.nn.Module | str | Path, *, rank: int
) -> dict[str, Tensor]:
    """The local tensors that a rank binds, for a layout of this state dict, this model or these safetensors files.

    They are the memory of the source, not copies. Take them anew when the framework may have moved its parameters.

    Raises: ValueError naming the tensor that is missing, of another dtype or shape, not contiguous or no plain memory.
    """
    tensors = _tensors_of(source)
    buffers = {}
    for name, spec in layout.buffers(rank).items():
        if name not in tensors:
            raise ValueError(f"local_buffers: tensor '{name}' on rank {rank}: expected, got no tensor of that name")
        local = local_tensor(tensors[name]).detach()
        found: object = None
        if Spec.of(local) != spec:
            found = Spec.of(local)
        elif not local.is_contiguous():
            found = f"strides {list(local.stride())}"
        elif is_traceable_wrapper_subclass(local) or local.layout != torch.strided or local.is_meta:
            found = f"{type(local).__name__}, {local.layout} on {local.device}"
        if found is not None:
            raise ValueError(f"local_buffers: tensor '{name}' on rank {rank}: expected contiguous {spec}, got {found}")
        buffers[name] = local
    return buffers


def _tensors_of(source: Mapping[str, Tensor] | torch.nn.Module | str | Path) -> Mapping[str, Tensor]:
    if isinstance(source, torch.nn.Module):
        return fsdp1_buffers(source) if is_fsdp1(source) else state_dict_of(source)
    return safetensors_buffers(source) if isinstance(source, (str, Path)) else source


def local_tensor(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: the local tensor of a DTensor, a plain one itself."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def mesh_of(device_mesh: Any, *, rank_offset: int = 0) -> Mesh:
    """The mesh of a torch DeviceMesh. Dimensions without a name are called dim0, dim1, ..."""
    ranks = device_mesh.mesh
    names = device_mesh.mesh_dim_names or [f"dim{d}" for d in range(ranks.dim())]
    return Mesh((ranks.flatten() + rank_offset).tolist(), ranks.shape, names)


def merge_layouts(layouts: Iterable[Layout]) -> Layout:
    """Join the views of several processes into one layout.

    A tensor that several have on different ranks is replicated among them: FSDP2 keeps the norms of a tensor-parallel
    model on one mesh for each tensor-parallel rank. Equal views count once.

    Raises: ValueError naming the tensor of which the views differ in more than the ranks.
    """
    views: dict[str, list[TensorLayout]] = {}
    for layout in layouts:
        for name, tensor in layout.tensors.items():
            found = views.setdefault(name, [])
            if not any(tensor is other or tensor == other for other in found):
                found.append(tensor)
    return Layout({name: _merge(name, found) for name, found in views.items()})


def gather_layout(layout: Layout, group: Any = None) -> Layout:
    """The merged layout of all processes of a torch.distributed group, the same on each of them.

    A collective call over a group for CPU tensors (gloo). Only layouts that differ travel, as JSON, checked when read.

    Raises: ValueError as `merge_layouts` and `Layout.from_json`, on every process of the group.
    """
    import torch.distributed as dist

    text = layout.to_json().encode()
    own = torch.tensor([layout.digest - 2**63, len(text)])
    heads = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(heads, own, group=group)
    largest = max(int(size) for _, size in heads)
    if largest > DEFAULT_JSON_BYTES:
        raise ValueError(f"gather_layout: expected layouts of at most {DEFAULT_JSON_BYTES} bytes, got {largest}")
    first = {int(digest): (source, int(size)) for source, (digest, size) in reversed(list(enumerate(heads)))}
    layouts = []
    for source, size in sorted(first.values()):
        mine = source == dist.get_rank(group)
        sent = torch.frombuffer(bytearray(text), dtype=torch.uint8) if mine else torch.empty(size, dtype=torch.uint8)
        dist.broadcast(sent, group=group, group_src=source)
        layouts.append(layout if mine else Layout.from_json(sent.numpy().tobytes()))
    return merge_layouts(layouts)


class _Reader:
    """Reads tensors of one process; meshes that tensors share become one Mesh."""

    def __init__(self, rank: int, rank_offset: int, strided_shards: StridedReading) -> None:
        self._own = Mesh([rank], (1,), ("rank",))
        self._rank_offset = rank_offset
        self._strided_shards = strided_shards
        self._meshes: dict[tuple[int, tuple[int, ...]], tuple[Mesh, Any]] = {}

    def tensor_layout(self, name: str, tensor: Tensor) -> TensorLayout:
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return TensorLayout(Spec.of(tensor), self._own, (Replicate(),))
        placements = [_placement(name, placement, tensor.dim()) for placement in tensor.placements]
        order = list(range(len(placements)))
        if self._strided_shards == "fully_shard":
            order = _order_of_application(placements, tensor.device_mesh.shape)
        moved = [_unstrided(placements, order, k) for k in order]
        return TensorLayout(Spec.of(tensor), self._mesh(tensor.device_mesh, order), tuple(moved))

    def _mesh(self, device_mesh: Any, order: Sequence[int]) -> Mesh:
        key = (id(device_mesh), tuple(order))
        if key not in self._meshes:  # the device mesh is kept, or another could get its id
            mesh = mesh_of(device_mesh, rank_offset=self._rank_offset)
            ranks = torch.tensor(mesh.ranks).reshape(mesh.shape).permute(tuple(order))
            names = [mesh.dim_names[k] for k in order]
            self._meshes[key] = Mesh(ranks.flatten().tolist(), ranks.shape, names), device_mesh
        return self._meshes[key][0]


def _placement(name: str, placement: Any, dims: int) -> Placement:
    from torch.distributed.tensor import placement_types as upstream

    if isinstance(placement, upstream.Replicate):
        return Replicate()
    if isinstance(placement, upstream._StridedShard):  # before Shard: in some versions it is one
        return StridedShard(placement.dim % max(dims, 1), int(placement.split_factor))
    if type(placement) is upstream.Shard:
        return Shard(placement.dim % max(dims, 1))
    raise ValueError(
        f"layout_of_state_dict: tensor '{name}': expected Replicate, Shard or _StridedShard, got {placement}"
    )


def _inner_shards(placements: Sequence[Placement], sizes: Sequence[int], k: int) -> list[int]:
    """The mesh dimensions whose shards the strided one at k divides further, [] when they are not of this mesh."""
    strided = placements[k]
    assert isinstance(strided, StridedShard)
    inner: list[int] = []
    factor = 1
    for j in range(k + 1, len(placements)):
        other = placements[j]
        if isinstance(other, (Shard, StridedShard)) and other.dim == strided.dim:
            inner.append(j)
            factor *= sizes[j]
    return inner if factor == strided.split_factor else []


def _order_of_application(placements: Sequence[Placement], sizes: Sequence[int]) -> list[int]:
    """Mesh dimensions in the order in which they cut: a strided one after the shards that it divides."""
    order = list(range(len(placements)))
    for k in reversed(range(len(placements))):
        if isinstance(placements[k], StridedShard) and (inner := _inner_shards(placements, sizes, k)):
            order.remove(k)
            order.insert(max(order.index(j) for j in inner) + 1, k)
    return order


def _unstrided(placements: Sequence[Placement], order: Sequence[int], k: int) -> Placement:
    """The placement of mesh dimension k in the new order: a strided one that was moved is a plain shard there."""
    placement = placements[k]
    moved = isinstance(placement, StridedShard) and any(j > k for j in order[: order.index(k)])
    return Shard(placement.dim) if moved and isinstance(placement, StridedShard) else placement


def _check_shapes(layout: Layout, tensors: Mapping[str, Tensor], rank: int) -> None:
    for name, spec in layout.buffers(rank).items():
        shape = tuple(local_tensor(tensors[name]).shape)
        if shape != spec.shape:
            placements = getattr(tensors[name], "placements", ())
            raise ValueError(
                f"layout_of_state_dict: tensor '{name}' on rank {rank}: expected a local shape {list(spec.shape)} "
                f"by its placements {placements}, got {list(shape)}"
            )


def _merge(name: str, views: Sequence[TensorLayout]) -> TensorLayout:
    first = views[0]
    if len(views) == 1:
        return first
    views = sorted(views, key=lambda view: view.mesh.ranks)
    same = all(
        (view.spec, view.placements, view.storage, view.mesh.shape, view.mesh.dim_names)
        == (first.spec, first.placements, first.storage, first.mesh.shape, first.mesh.dim_names)
        for view in views
    )
    ranks = [rank for view in views for rank in view.mesh.ranks]
    if not same or len(set(ranks)) != len(ranks):
        raise ValueError(
            f"merge_layouts: tensor '{name}': expected views that differ in their ranks alone, got {views}"
        )
    names = ("replica" + "_" * sum(n.startswith("replica") for n in first.mesh.dim_names), *first.mesh.dim_names)
    mesh = Mesh(ranks, (len(views), *first.mesh.shape), names)
    return TensorLayout(first.spec, mesh, (Replicate(), *first.placements), first.storage)


def _own_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
