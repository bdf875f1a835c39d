"""LoRA adapters alone: the names of peft's files, its parameters in memory, and vLLM's slots.

Canonical names and shapes are those of an adapter_model.safetensors:
`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` [rank, in] and `...lora_B.weight` [out, rank].

- peft keeps them as `...lora_A.{adapter}.weight`; FSDP2 divides dimension 0 of each.
- vLLM keeps, for each projection that it fused, one slice of each part: buffer `...qkv_proj.lora_a_stacked.1` here is
  the adapter's slot of k_proj, `lora_a_stacked[1][slot]` [1, max_rank, in]; `lora_b_stacked.1` is [1, out, max_rank].
  Tensor parallelism divides B where the projection is divided by rows, and A where it is divided by columns; what is
  above the adapter's rank is padding (without --fully-sharded-loras).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from areal_core.reshard.inventory import inventory
from areal_core.reshard.layout import Storage, TensorLayout
from areal_core.reshard.models import ModelSizes
from areal_core.reshard.names.arrangement import Arrangement, number_ranks, require_divisor
from areal_core.reshard.names.build import mesh_of
from areal_core.reshard.names.table import fill
from areal_core.reshard.placements import Placement, Replicate, Shard
from areal_core.reshard.spec import Spec

__all__ = ["LoRA", "lora_inventory", "peft_layouts", "vllm_lora_layouts"]

_PREFIX = "base_model.model."
_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoRA:
    """An adapter: its rank, which projections it adapts, what peft calls it, and the rank for which vLLM has room."""

    rank: int
    targets: tuple[str, ...] = _ALL
    adapter: str = "default"
    max_rank: int | None = None  # None: rank

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora: expected rank >= 1, got {self.rank}")
        if self.room < self.rank:
            raise ValueError(f"lora: expected max_rank >= rank = {self.rank}, got {self.max_rank}")
        unknown = sorted(set(self.targets) - set(_ALL))
        if unknown or not self.targets:
            raise ValueError(f"lora: expected targets of {', '.join(_ALL)}, got {', '.join(unknown) or 'none'}")

    @property
    def room(self) -> int:
        """Rows of A and columns of B in vLLM's slots."""
        return self.rank if self.max_rank is None else self.max_rank


def lora_inventory(sizes: ModelSizes, lora: LoRA, dtype: torch.dtype | None = None) -> dict[str, Spec]:
    """List the adapter's tensors as its file names them; experts are not adapted."""
    specs = {}
    for name, spec in inventory(sizes, dtype=dtype).items():
        module = name.removesuffix(".weight")
        if module == name or module.rpartition(".")[2] not in lora.targets or ".experts." in name:
            continue
        out, columns = spec.shape
        specs[f"{_PREFIX}{module}.lora_A.weight"] = Spec(spec.dtype, (lora.rank, columns))
        specs[f"{_PREFIX}{module}.lora_B.weight"] = Spec(spec.dtype, (out, lora.rank))
    return specs


def peft_layouts(
    specs: Mapping[str, Spec],
    lora: LoRA,
    *,
    first_rank: int = 0,
    dp: int = 1,
    tp: int = 1,
    replicas: int = 1,
    separate: bool = False,
) -> dict[str, TensorLayout]:
    """Lay out an adapter as peft holds it, under FSDP2 or HSDP; `separate` is of no effect, experts are not adapted.

    Raises:
        ValueError: tp other than 1: how adapters are divided then is not described.
    """
    if tp != 1:
        raise ValueError(f"fsdp: expected tp1 for an adapter, got tp{tp}")
    ranks = number_ranks("fsdp", first_rank, (replicas, dp))
    mesh = mesh_of(ranks, ("replicas", "dp"))
    names = {name: name.removesuffix("weight") + f"{lora.adapter}.weight" for name in specs}
    return {
        name: TensorLayout(spec, mesh, (Replicate(), Shard(0)), Storage(buffer=names[name]))
        for name, spec in specs.items()
    }


def vllm_lora_layouts(
    sizes: ModelSizes, specs: Mapping[str, Spec], lora: LoRA, arrangement: Arrangement
) -> dict[str, TensorLayout]:
    """Lay out an adapter in vLLM's slots."""
    return {name: _slot(sizes, name, spec, lora, arrangement) for name, spec in specs.items()}


def _slot(sizes: ModelSizes, name: str, spec: Spec, lora: LoRA, arrangement: Arrangement) -> TensorLayout:
    module, matrix = name.removeprefix(_PREFIX).removesuffix(".weight").rsplit(".", 1)
    match = arrangement.dense.match(f"{module}.weight")
    row = match.row
    piece = arrangement.dense.parts(row).index(row)
    place = arrangement.places[match.layer]
    grid = arrangement.groups["tp"][place.stage]
    copies, tp = grid.shape
    # B goes with the rows of its projection, A with the columns.
    dim = {"lora_A": 1 if row.split == "columns" else None, "lora_B": None if row.split == "columns" else 0}[matrix]
    repeats = tp // sizes.kv_heads if dim == 0 and row.split == "kv heads" and tp > sizes.kv_heads else 1
    shards = 1 if dim is None else tp // repeats
    local = [*spec.shape]
    if dim is not None:
        require_divisor("vllm", "tp", shards, spec.shape[dim], f"{'columns' if dim else 'rows'} of {module}")
        local[dim] //= shards
    shape = (1, lora.room, local[1]) if matrix == "lora_A" else (1, local[0], lora.room)
    buffer = fill(row.buffer, match.layer, "", "").rstrip(".")
    storage = Storage(
        buffer=f"{buffer}.{matrix[:4]}_{matrix[-1].lower()}_stacked.{piece}",
        buffer_shape=shape,
        strides=(shape[2], 1),
    )
    mesh = mesh_of(grid.reshape(copies, tp // repeats, repeats), ("copies", "tp", "repeats"))
    shard: Placement = Replicate() if dim is None else Shard(dim)
    return TensorLayout(spec, mesh, (Replicate(), shard, Replicate()), storage)
