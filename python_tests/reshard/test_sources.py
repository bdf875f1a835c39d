"""Layouts of real plain tensors, DTensors, FSDP2 and tensor-parallel models, in a world of gloo processes.

Two questions on every rank: does the layout say, bit for bit, what the framework's own local tensors hold; and do the
local tensors of all ranks, joined by the oracle, give the full parameters. Elements are numbered: no two are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import bits, gather, numbered
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Partial, _StridedShard
from worlds import run_all, run_world

from areal_core.reshard import Flat, Layout, Mesh, Replicate, Shard, Spec, StridedShard, TensorLayout
from areal_core.reshard.sources import (
    gather_layout,
    layout_of_model,
    layout_of_state_dict,
    local_buffers,
    merge_layouts,
    mesh_of,
    state_dict_of,
)

RANKS = 4


class Block(nn.Module):
    """Column- and row-parallel linears around a norm; the head shares the first weight."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(inner, hidden)
        self.head = nn.Linear(hidden, inner, bias=False)
        self.head.weight = self.up.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)


def numbered_block(hidden: int, inner: int, dtype: torch.dtype = torch.float32) -> tuple[Block, dict[str, Tensor]]:
    """A model whose parameters are numbered, and what each of them holds in full."""
    model = Block(hidden, inner).to(dtype)
    full = {name: numbered(tuple(value.shape), value.dtype) for name, value in state_dict_of(model).items()}
    model.load_state_dict(full, strict=False)
    return model, full


def check(layout: Layout, source: nn.Module | dict[str, Tensor], full: dict[str, Tensor]) -> None:
    rank = dist.get_rank()
    assert list(layout.tensors) == sorted(full)
    buffers = local_buffers(layout, source, rank=rank)
    left = {name: buffer.numel() for name, buffer in buffers.items()}
    for region in layout.regions(rank):
        index = tuple(slice(start, start + size) for start, size in zip(*region.box, strict=True))
        assert torch.equal(bits(region.view(buffers[region.buffer])), bits(full[region.tensor][index])), region
        left[region.buffer] -= full[region.tensor][index].numel()
    assert not any(left.values()), f"expected every local element in a region, got {left} elsewhere"
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (layout.digest, buffers))
    assert len({digest for digest, _ in everywhere}) == 1
    for name, tensor in layout.tensors.items():
        parts = {r: held[name] for r, (_, held) in enumerate(everywhere) if name in held}
        assert torch.equal(bits(gather(tensor, parts)), bits(full[name])), name


def fsdp2(hidden: int, inner: int) -> None:
    model, full = numbered_block(hidden, inner, torch.bfloat16)
    fully_shard(model.down)
    fully_shard(model)
    layout = gather_layout(layout_of_model(model))
    assert layout.tensors["up.weight"].placements == (Shard(0),)
    check(layout, model, full)


def fsdp2_after_forward() -> None:
    """A root module stays unsharded after its forward: the layout is of the shards all the same."""
    model = nn.Linear(5, 3)
    fully_shard(model, reshard_after_forward=False)
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    before = layout_of_model(model)
    model(torch.ones(2, 5))
    assert not isinstance(model.weight, DTensor)
    assert layout_of_model(model) == before
    check(gather_layout(before), model, full)


def hsdp(hidden: int, inner: int) -> None:
    model, full = numbered_block(hidden, inner)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    layout = gather_layout(layout_of_model(model))
    assert layout.tensors["norm.bias"].placements == (Replicate(), Shard(0))
    check(layout, model, full)


def fsdp2_and_tp(hidden: int, inner: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model, full = numbered_block(hidden, inner)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    full["head.weight"] = full["up.weight"]  # parallelize_module has unshared it
    fully_shard(model, mesh=mesh["dp"])
    layout = gather_layout(layout_of_model(model))
    assert isinstance(state_dict_of(model)["up.weight"].placements[0], _StridedShard)
    assert layout.tensors["up.weight"].mesh.dim_names == ("tp", "dp"), "tensor parallelism cuts first"
    assert layout.tensors["norm.weight"].mesh.dim_names == ("replica", "dp"), "a mesh for each tensor-parallel rank"
    check(layout, model, full)


def fsdp1(hidden: int, inner: int, strategy: str, use_orig_params: bool = True) -> None:
    model, full = numbered_block(hidden, inner)
    groups = None
    if strategy == "HYBRID_SHARD":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[strategy],
        "process_group": groups,
        "device_id": torch.device("cpu"),
        "use_orig_params": use_orig_params,
    }
    model.down = FullyShardedDataParallel(model.down, **options)
    wrapped = FullyShardedDataParallel(model, ignored_states=[model.norm.weight], **options)
    layout = gather_layout(layout_of_model(wrapped))
    assert isinstance(layout.tensors["up.weight"].placements[-1], Flat)
    assert layout.tensors["down.bias"].storage.buffer == "down._flat_param"
    check_flat(layout, wrapped, full)
    with FullyShardedDataParallel.summon_full_params(wrapped):
        assert torch.equal(wrapped.up.weight, full["up.weight"])
    check_flat(layout, wrapped, full)


def check_flat(layout: Layout, source: nn.Module, full: dict[str, Tensor]) -> None:
    """Flat buffers have padding, which is no tensor's; every element of the tensors lies on some rank."""
    rank = dist.get_rank()
    assert list(layout.tensors) == sorted(full)
    buffers = local_buffers(layout, source, rank=rank)
    held = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in full.items()}
    for region in layout.regions(rank):
        index = tuple(slice(start, start + size) for start, size in zip(*region.box, strict=True))
        assert torch.equal(bits(region.view(buffers[region.buffer])), bits(full[region.tensor][index])), region
        held[region.tensor][index] = True
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (layout.digest, held))
    assert len({digest for digest, _ in everywhere}) == 1
    for name in full:
        assert bool(torch.stack([of_rank[name] for _, of_rank in everywhere]).any(0).all()), name


def one_dtensor(shape: tuple[int, ...], dims: tuple[int, ...], placements: tuple[Any, ...]) -> None:
    mesh = init_device_mesh("cpu", dims)
    full = {"w": numbered(shape, torch.int32)}
    state = {"w": distribute_tensor(full["w"], mesh, placements)}
    check(layout_of_state_dict(state), state, full)


def strided_dtensor(size: int) -> None:
    """What torch makes of strided placements from outer to inner, uneven included: the other reading."""
    mesh = init_device_mesh("cpu", (2, 2))
    placements = (_StridedShard(0, split_factor=2), TorchShard(0))
    full = {"w": numbered((size, 2), torch.int32)}
    whole = distribute_tensor(full["w"], mesh, (TorchReplicate(), TorchReplicate()))
    state = {"w": whole.redistribute(mesh, placements)}
    layout = layout_of_state_dict(state, strided_shards="dtensor")
    assert layout.tensors["w"].placements == (StridedShard(0, 2), Shard(0))
    check(layout, state, full)


def the_other_reading_is_refused() -> None:
    """7 rows over 3 x 2 ranks: the last two hold 0 rows and 1 row by FSDP2, 1 and 0 from outer to inner."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Linear(2, 7), mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    layout_of_model(model)
    if dist.get_rank() < 4:
        layout_of_model(model, strided_shards="dtensor")
        return
    expected = r"tensor '(weight|bias)' on rank \d: expected a local shape .* by its placements .*, got "
    with pytest.raises(ValueError, match=expected):
        layout_of_model(model, strided_shards="dtensor")


def plain_and_offset() -> None:
    """Plain tensors lie whole on every rank; a world may number its ranks from an offset."""
    full = {"w": numbered((3, 2)), "b": numbered(())}
    layout = gather_layout(layout_of_state_dict(full))
    assert layout.tensors["w"].mesh.shape == (RANKS, 1)
    check(layout, full, full)
    moved = gather_layout(layout_of_state_dict(full, rank_offset=10))
    assert moved.ranks == (10, 11, 12, 13)
    sharded = {"w": distribute_tensor(full["w"], init_device_mesh("cpu", (RANKS,)), [TorchShard(0)])}
    assert layout_of_state_dict(sharded, rank_offset=10).ranks == (10, 11, 12, 13)


def stages_of_a_pipeline() -> None:
    """Each rank has tensors of its own; together they are one layout."""
    rank = dist.get_rank()
    own = {f"layers.{rank}.w": numbered((rank, 2))}
    layout = gather_layout(layout_of_state_dict(own))
    assert layout.ranks == (0, 1, 2, 3)
    assert layout.tensors["layers.2.w"].mesh.ranks == (2,)
    assert local_buffers(layout, own, rank=rank)[f"layers.{rank}.w"].data_ptr() == own[f"layers.{rank}.w"].data_ptr()


def partial_is_refused() -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {"w": DTensor.from_local(torch.ones(3), mesh, [Partial()])}
    with pytest.raises(ValueError, match="tensor 'w': expected Replicate, Shard or _StridedShard, got"):
        layout_of_state_dict(state)


SIZES = [(6, 8), (5, 3), (3, 13), (1, 2)]
CALLS: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    *((scenario, size) for scenario in (fsdp2, hsdp, fsdp2_and_tp) for size in SIZES),
    (fsdp2_after_forward, ()),
    *((fsdp1, (5, 3, strategy)) for strategy in ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD")),
    (fsdp1, (5, 3, "FULL_SHARD", False)),
    (one_dtensor, ((10, 3), (4,), (TorchShard(0),))),
    (one_dtensor, ((3, 4), (4,), (TorchShard(0),))),
    (one_dtensor, ((2, 5, 3), (2, 2), (TorchShard(1), TorchShard(1)))),
    (one_dtensor, ((2, 5, 3), (2, 2), (TorchShard(2), TorchShard(-2)))),
    (one_dtensor, ((7,), (2, 2), (TorchReplicate(), TorchShard(0)))),
    (one_dtensor, ((), (4,), (TorchReplicate(),))),
    *((strided_dtensor, (size,)) for size in (1, 5, 7, 8, 9, 11)),
    (plain_and_offset, ()),
    (stages_of_a_pipeline, ()),
    (partial_is_refused, ()),
]


SIX: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (fsdp2_and_tp, (5, 7)),
    (fsdp2_and_tp, (2, 13)),
    (the_other_reading_is_refused, ()),
]


def name_of(call: tuple[Callable[..., None], tuple[Any, ...]]) -> str:
    return f"{call[0].__name__}{call[1]}"


def expect_no_failure(world: list[list[str]], call: int) -> None:
    failed = [f"rank {rank}: {results[call]}" for rank, results in enumerate(world) if results[call]]
    assert not failed, "\n".join(failed)


@pytest.fixture(scope="module")
def world_of_four() -> list[list[str]]:
    return run_world(4, run_all, CALLS)


@pytest.fixture(scope="module")
def world_of_six() -> list[list[str]]:
    return run_world(6, run_all, SIX)


@pytest.mark.parametrize("call", range(len(CALLS)), ids=map(name_of, CALLS))
def test_on_four_ranks(world_of_four: list[list[str]], call: int) -> None:
    expect_no_failure(world_of_four, call)


@pytest.mark.parametrize("call", range(len(SIX)), ids=map(name_of, SIX))
def test_on_six_ranks(world_of_six: list[list[str]], call: int) -> None:
    expect_no_failure(world_of_six, call)


# -- One process ------------------------------------------------------------------------------------------------------


def test_a_plain_model_lies_whole_on_one_rank() -> None:
    model, full = numbered_block(6, 8)
    layout = layout_of_model(model)
    assert list(layout.tensors) == sorted(full)
    assert "head.weight" not in full, "shared with up.weight"
    assert "scratch" not in full, "not persistent"
    assert layout.ranks == (0,)
    buffers = local_buffers(layout, model, rank=0)
    assert all(buffers[name].data_ptr() == value.data_ptr() for name, value in state_dict_of(model).items())
    assert layout_of_state_dict(full, rank=7).ranks == (7,)


FOUR = Spec(torch.float32, (4,))


def one(mesh: Mesh, spec: Spec = FOUR, *placements: Any) -> Layout:
    return Layout({"w": TensorLayout(spec, mesh, placements or (Shard(0),))})


def test_merged_views_are_replicas() -> None:
    even, odd = Mesh([0, 2], (2,), ("dp",)), Mesh([1, 3], (2,), ("dp",))
    merged = merge_layouts([one(odd), one(even), one(odd)])
    assert merged.tensors["w"].mesh == Mesh([0, 2, 1, 3], (2, 2), ("replica", "dp"))
    assert merged.tensors["w"].placements == (Replicate(), Shard(0))
    assert merge_layouts([one(even), one(odd)]).digest == merged.digest
    assert merge_layouts([one(even)]) == one(even)
    later = merge_layouts([merged, merge_layouts([one(Mesh([4, 5], (2,), ("dp",))), one(Mesh([6, 7], (2,), ("dp",)))])])
    assert later.tensors["w"].mesh.dim_names == ("replica_", "replica", "dp")
    assert merge_layouts([]) == Layout({})


@pytest.mark.parametrize(
    "other",
    [
        one(Mesh([2, 3], (2,), ("dp",)), Spec(torch.float16, (4,))),
        one(Mesh([2, 3], (2,), ("dp",)), Spec(torch.float32, (5,))),
        one(Mesh([2, 3], (2,), ("dp",)), FOUR, Replicate()),
        one(Mesh([2, 3, 4], (3,), ("dp",))),
        one(Mesh([1, 2], (2,), ("dp",))),
    ],
)
def test_views_that_contradict_one_another_are_refused(other: Layout) -> None:
    with pytest.raises(ValueError, match="tensor 'w': expected views that differ in their ranks alone"):
        merge_layouts([one(Mesh([0, 1], (2,), ("dp",))), other])


def test_buffers_that_do_not_fit_are_refused() -> None:
    layout = layout_of_state_dict({"w": torch.ones(4, 3)})
    for wrong, message in [
        ({}, "tensor 'w' on rank 0: expected, got no tensor"),
        ({"w": torch.ones(3, 4)}, "expected contiguous .*, got Spec"),
        ({"w": torch.ones(4, 3, dtype=torch.float64)}, "got Spec"),
        ({"w": torch.ones(3, 4).t()}, r"got strides \[1, 4\]"),
        ({"w": torch.ones(4, 3, device="meta")}, "on meta"),
        ({"w": torch.eye(4, 3).to_sparse()}, "expected contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            local_buffers(layout, wrong, rank=0)


def test_an_unknown_reading_is_refused() -> None:
    with pytest.raises(ValueError, match="expected strided_shards fully_shard or dtensor, got both"):
        layout_of_state_dict({}, strided_shards="both")  # type: ignore[arg-type]


def test_a_mesh_without_names_gets_some() -> None:
    class Named:
        mesh = torch.tensor([[3, 1], [0, 2]])
        mesh_dim_names = None

    assert mesh_of(Named(), rank_offset=4) == Mesh([7, 5, 4, 6], (2, 2), ("dim0", "dim1"))
