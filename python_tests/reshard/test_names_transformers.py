"""The name map "fsdp" against real transformers models under fully_shard and transformers' own tensor-parallel plan.

One process plays rank 0 of a world that does not exist: DTensors know who holds what of all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from names_oracle import tiny
from test_inventory import hugging_face_config
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from areal_core.reshard import NameMap
from areal_core.reshard.sources import layout_of_model

STYLES = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
}


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    try:
        yield request.param
    finally:
        dist.destroy_process_group()


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    """Divide the modules that the model's plan names; what the plan replicates is left as it is."""
    plan = {f"model.{name}": style for name, style in model.config.base_model_tp_plan.items()}
    plan |= type(model)._tp_plan
    assert {style for style in plan.values() if not style.startswith("replicated")} <= set(STYLES)
    for name, module in list(model.named_modules()):
        style = plan.get(re.sub(r"\.\d+\.", ".*.", name))
        if style in STYLES:
            parallelize_module(module, mesh, STYLES[style]())


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(
    ("family", "sizes", "world"),
    [
        ("qwen2", {"dp": 3}, 3),
        ("qwen2", {"dp": 2, "tp": 2}, 4),
        ("qwen3", {"dp": 3, "tp": 2}, 6),
        ("llama", {"replicas": 2, "dp": 5}, 10),
        ("qwen3_moe", {"dp": 4}, 4),
        ("deepseek_v3", {"dp": 5}, 5),
    ],
    indirect=["world"],
)
def test_boxes_of_every_rank(family: str, sizes: dict[str, int], world: int) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    config = hugging_face_config(tiny(family, vocabulary=132, hidden=8))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    keep = [name for name in ("replicas", "dp", "tp") if name in sizes]
    mesh = init_device_mesh("cpu", tuple(sizes[name] for name in keep), mesh_dim_names=tuple(keep))
    if "tp" in sizes:
        parallelize(model, mesh["tp"])
    shard(model, mesh[tuple(name for name in keep if name != "tp")])
    theirs = layout_of_model(model)
    ours = NameMap.for_model(config, "fsdp", **sizes).layout
    for rank in range(world):
        held = {name: spec.shape for name, spec in ours.buffers(rank).items()}
        for name, spec in theirs.buffers(rank).items():
            if 0 not in spec.shape:
                assert held[name] == tuple(spec.shape), f"rank {rank}: {name}"
    for name, tensor in theirs.tensors.items():
        if ".experts." in name:  # fused: no canonical tensor
            continue
        for rank in tensor.mesh.ranks:  # of what tp replicates, this process knows its own dp group alone
            assert ours.boxes(name, rank) == theirs.boxes(name, rank), f"rank {rank}: {name}: {tensor.placements}"
    assert len(theirs.tensors["lm_head.weight"].mesh.ranks) == world
