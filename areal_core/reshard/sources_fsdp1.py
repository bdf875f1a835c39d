"""Layouts of FullyShardedDataParallel models (FSDP1): parameters are intervals of flat buffers.

Each wrapped module lays its parameters one behind the other in a flat buffer, with some padding, and gives every rank
of its process group an equal part: `Flat` placements. What no wrapped module manages lies whole on its rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_core.reshard.layout import Layout, Storage, TensorLayout
from areal_core.reshard.placements import Flat, Mesh, Replicate
from areal_core.reshard.spec import Spec

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class _Unit(NamedTuple):
    """The flat buffer of one wrapped module."""

    buffer: str
    local: Tensor  # this rank's part
    ranks: list[int]
    tensors: dict[str, tuple[tuple[int, ...], int]]  # shape, offset in the flat buffer


def is_fsdp1(model: torch.nn.Module) -> bool:
    """Whether any module of the model is wrapped by FullyShardedDataParallel."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def layout_of_fsdp1(model: torch.nn.Module, *, rank: int, rank_offset: int = 0) -> Layout:
    """Lay out a model of FullyShardedDataParallel modules as this process sees it.

    Names are those of the model before it was wrapped; each flat buffer is called `<module>._flat_param`.
    rank: this process, rank_offset included.
    rank_offset: added to the ranks of process groups.

    Raises: ValueError naming the module whose local part is not of the size that its parameters and ranks say.
    """
    tensors: dict[str, TensorLayout] = {}
    for unit in _units(model):
        mesh = Mesh([r + rank_offset for r in unit.ranks], (len(unit.ranks),), ("fsdp",))
        chunk = unit.local.numel()
        for name, (shape, offset) in unit.tensors.items():
            storage = Storage(unit.buffer, (chunk,))
            tensors[name] = TensorLayout(Spec(unit.local.dtype, shape), mesh, (Flat(chunk, offset),), storage)
    own = Mesh([rank], (1,), ("rank",))
    for name, tensor in _unmanaged(model, set(tensors)):
        tensors[name] = TensorLayout(Spec.of(tensor), own, (Replicate(),))
    return Layout(tensors)


def fsdp1_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """This rank's flat buffers, and what no wrapped module manages, as `layout_of_fsdp1` names them."""
    units = list(_units(model))
    managed = {name for unit in units for name in unit.tensors}
    return {unit.buffer: unit.local.detach() for unit in units} | dict(_unmanaged(model, managed))


def _units(model: torch.nn.Module) -> Iterator[_Unit]:
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    for path, module in model.named_modules():
        handle = module._handle if isinstance(module, FullyShardedDataParallel) else None
        if handle is None:
            continue
        flat: Any = handle.flat_param
        sharded = handle.uses_sharded_strategy
        local: Tensor = getattr(flat, "_local_shard", flat).detach() if sharded else flat.detach()
        ends = list(accumulate(flat._numels_with_padding))
        starts = [
            end - numel
            for end, numel, padding in zip(ends, flat._numels_with_padding, flat._is_padding_mask, strict=True)
            if not padding
        ]
        tensors = {
            _clean(f"{path}.{name}"): (tuple(shape), start)
            for name, shape, start in zip(flat._fqns, flat._shapes, starts, strict=True)
        }
        ranks = dist.get_process_group_ranks(handle.process_group) if sharded else [dist.get_rank()]
        if local.dim() != 1 or local.numel() * len(ranks) < max(ends, default=0):
            raise ValueError(
                f"layout_of_fsdp1: module '{_clean(path)}': expected a local part of {max(ends)} elements over "
                f"{len(ranks)} ranks, got shape {list(local.shape)}"
            )
        yield _Unit(_clean(f"{path}._flat_param"), local, ranks, tensors)


def _unmanaged(model: torch.nn.Module, managed: set[str]) -> Iterator[tuple[str, Tensor]]:
    from torch.distributed.fsdp import FlatParameter

    for name, parameter in model.named_parameters():
        if _clean(name) not in managed and not isinstance(parameter, FlatParameter):
            yield _clean(name), parameter.detach()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield _clean(f"{path}.{name}"), buffer


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix(".")
