"""The backend of verl's checkpoint engine against gathering every tensor and broadcasting it, between processes.

verl's own backends need a GPU or its network, so gathering and broadcasting, which is what they do, stands for them:
over gloo, in buckets, in the same processes, alternating with ours. Trainers hold a model under FSDP2 in bfloat16, and
rollout workers take every tensor whole. `python bench/bench_verl_weights.py [trainers] [rollouts] [MB]`
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal_core.integrations.verl_weights import WeightBackend

BUCKET_BYTES = 64 << 20
ROUNDS = 5


class Spec:
    """verl's ShardSpec, as far as it is read."""

    def __init__(self, param: Any) -> None:
        self.full_shape, self.mesh, self.placements = tuple(param.shape), param.device_mesh, param.placements
        self.place = self.to_hf_chunk = None


class Engine:
    """verl's FSDP engine: what it exports."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    def get_per_tensor_param_shard(self) -> tuple[Any, None]:
        return ((n, p.to_local().reshape(-1), Spec(p)) for n, p in self.module.state_dict().items()), None


def sharded_model(megabytes: int, trainers: int) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    width = 1024
    layers = max(1, megabytes * 1_000_000 // (2 * width * 4 * width))
    model = nn.ModuleList([nn.Linear(width, 4 * width - 1, bias=False, dtype=torch.bfloat16) for _ in range(layers)])
    mesh = dist.init_device_mesh("cpu", (trainers,), mesh_dim_names=("fsdp",))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model


def gather_and_send(model: nn.Module, group: dist.ProcessGroup, is_master: bool) -> None:
    bucket, used = torch.empty(BUCKET_BYTES, dtype=torch.uint8), 0
    for param in model.state_dict().values():
        whole = param.full_tensor().reshape(-1).view(torch.uint8)
        if not is_master:
            continue
        if used + whole.numel() > BUCKET_BYTES:
            dist.broadcast(bucket[:used], 0, group=group)
            used = 0
        bucket[used : used + whole.numel()] = whole
        used += whole.numel()
    if is_master:
        dist.broadcast(bucket[:used], 0, group=group)


def receive_broadcast(shapes: list[tuple[int, ...]], group: dist.ProcessGroup) -> list[Tensor]:
    bucket, held = torch.empty(BUCKET_BYTES, dtype=torch.uint8), []
    waiting: list[tuple[int, ...]] = []

    def take() -> None:
        sizes = [2 * a * b for a, b in waiting]
        dist.broadcast(bucket[: sum(sizes)], 0, group=group)
        parts = bucket[: sum(sizes)].split(sizes)
        held.extend(p.view(torch.bfloat16).view(s).clone() for p, s in zip(parts, waiting, strict=True))
        waiting.clear()

    for shape in shapes:
        if sum(2 * a * b for a, b in [*waiting, shape]) > BUCKET_BYTES:
            take()
        waiting.append(shape)
    take()
    return held


async def receive_ours(backend: WeightBackend) -> list[Tensor]:
    return [tensor async for _, tensor in backend.receive_weights(1)]


def rank_main(rank: int, trainers: int, rollouts: int, megabytes: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    world = trainers + rollouts
    minute = timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=minute)
    sending = dist.new_group([0, *range(trainers, world)])
    is_trainer = rank < trainers
    model = None
    backends = {t: WeightBackend(BUCKET_BYTES, rank == 0, transport=t) for t in ("shm", "tcp")}
    shapes: list[Any] = [None]
    if is_trainer:
        model = train(sharded_model(megabytes, trainers))
        shapes = [[tuple(p.shape) for p in model.state_dict().values()]]
        for backend in backends.values():
            backend.training_engine = Engine(model)
    dist.broadcast_object_list(shapes, 0)
    received: dict[str, list[Tensor]] = {}

    def ours(transport: str) -> None:
        backend = backends[transport]
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, backend.prepare() | {"shards": is_trainer})
        made = [WeightBackend.build_topology(trainers, rollouts, gathered) if rank == 0 else None]
        dist.broadcast_object_list(made, 0)  # the token is the same for all
        assert made[0] is not None
        kwargs = made[0][0 if is_trainer else 1]
        place = rank if is_trainer else rank - trainers
        backend.init_process_group(**{k: v[place] for k, v in kwargs.items()})
        if is_trainer:
            asyncio.run(backend.send_weights(iter(()), 1))
        else:
            received[transport] = asyncio.run(receive_ours(backend))
        backend.finalize()

    def theirs() -> None:
        if model is not None:
            gather_and_send(model, sending, rank == 0)
        else:
            received["gather"] = receive_broadcast(shapes[0], sending)

    seconds: dict[str, list[float]] = {"gather": [], "shm": [], "tcp": []}
    for _ in range(ROUNDS + 1):
        for name, call in (("gather", theirs), ("shm", lambda: ours("shm")), ("tcp", lambda: ours("tcp"))):
            dist.barrier()
            start = time.perf_counter()
            call()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    if not is_trainer:
        for name in ("shm", "tcp"):
            assert all(torch.equal(a, b) for a, b in zip(received["gather"], received[name], strict=True)), name
    pipe.send({name: times[1:] for name, times in seconds.items()})
    dist.barrier()


def train(model: nn.Module) -> nn.Module:
    for param in model.parameters():
        nn.init.normal_(param)
    return model


def main() -> None:
    numbers = [int(a) for a in sys.argv[1:]]
    trainers, rollouts, megabytes = (*numbers, *(2, 2, 128)[len(numbers) :])
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(trainers + rollouts)]
        processes = [
            context.Process(target=rank_main, args=(r, trainers, rollouts, megabytes, f"{folder}/store", ends[r][1]))
            for r in range(trainers + rollouts)
        ]
        for process in processes:
            process.start()
        times = ends[0][0].recv()
        for process in processes:
            process.join()
    base = times["gather"]
    print(f"{megabytes} MB in bfloat16, {trainers} FSDP2 trainers, {rollouts} rollout workers, {ROUNDS} rounds")
    for name, label in (("gather", "gather + broadcast, gloo"), ("shm", "areal_core, shm"), ("tcp", "areal_core, tcp")):
        ratios = [b / t for b, t in zip(base, times[name], strict=True)]
        best, median = min(times[name]), statistics.median(times[name])
        print(f"{label:26} best {best:6.3f} s  median {median:6.3f} s  {statistics.median(ratios):5.2f} x")


if __name__ == "__main__":
    main()
