"""What verl's FSDP engine exports of a rank's own: whether it is what verl would gather, and where it lies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from areal_core.integrations._patch import source_hash
from areal_core.reshard import Layout, Mesh, Replicate, Spec, TensorLayout, layout_of_state_dict

__all__ = ["exports_shards", "shard_layout"]

SHARD_EXPORTS = {"5d428071e40d82f6"}  # sources of FSDPEngine.get_per_tensor_param_shard that were looked at


def shard_layout(name: str, dtype: torch.dtype, spec: Any, trainers: tuple[int, ...]) -> Callable[[], TensorLayout]:
    """How a tensor lies on the trainers, by the ranks of the sync."""

    def make() -> TensorLayout:
        if spec.mesh is None:  # whole on every trainer; verl sends the first one's
            return TensorLayout(Spec(dtype, spec.full_shape), Mesh([trainers[0]], (1,), ("rank",)), (Replicate(),))
        found = _layout_of_spec(name, dtype, spec)
        mesh = Mesh([trainers[r] for r in found.mesh.ranks], found.mesh.shape, found.mesh.dim_names)
        return TensorLayout(found.spec, mesh, found.placements)

    return make


def _layout_of_spec(name: str, dtype: torch.dtype, spec: Any) -> TensorLayout:
    """By torch's ranks; the local shape by torch's rules is compared with ours."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, _ = compute_local_shape_and_global_offset(spec.full_shape, spec.mesh, spec.placements)
    local = torch.empty(tuple(shape), dtype=dtype, device=spec.mesh.device_type)
    strides = torch.empty(spec.full_shape, device="meta").stride()
    full = torch.Size(spec.full_shape)
    tensor = DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=full, stride=strides)
    layout: Layout = layout_of_state_dict({name: tensor})
    return layout.tensors[name]


def exports_shards(engine: Any) -> bool:
    """Whether the engine's shards are what verl would gather: FSDP2's own export, no adapter, no quantization.

    Packed experts are not: verl takes them apart after gathering.
    """
    module = sys.modules.get("verl.workers.engine.fsdp.transformer_impl")
    if module is None or not isinstance(engine, module.FSDPEngine):
        return False
    export = module.FSDPEngine.get_per_tensor_param_shard
    if type(engine).get_per_tensor_param_shard is not export or source_hash(export) not in SHARD_EXPORTS:
        return False
    model = engine.module
    is_packed = any(x.dim() == 3 and ".mlp.experts." in name for name, x in model.named_parameters())
    is_plain = module.fsdp_version(model) == 2 and not hasattr(model, "peft_config") and not engine._qat_enabled
    return is_plain and not is_packed
