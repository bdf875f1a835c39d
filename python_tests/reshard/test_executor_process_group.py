"""Executors over a gloo process group, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transfers import empty_bytes

from areal_core.errors import DeadlineError, PeerError
from areal_core.reshard import Executor, Flat, Layout, Mesh, Shard, Spec, TensorLayout, plan
from areal_core.reshard.process_group import ProcessGroupTransport

SPECS = {"a": Spec(torch.bfloat16, (31, 10)), "b": Spec(torch.float8_e4m3fn, (64, 3)), "s": Spec(torch.int64, ())}


def layout(ranks: range, flat: bool) -> Layout:
    mesh = Mesh(ranks, (len(ranks),), ("x",))
    placement = Flat() if flat else Shard(0)
    return Layout(
        {name: TensorLayout(spec, mesh, (placement if spec.shape else Flat(),)) for name, spec in SPECS.items()}
    )


def parts(side: Layout, rank: int, salt: int) -> dict[str, torch.Tensor]:
    made = {}
    for name, tensor in side.tensors.items():
        full = (oracle.bits(oracle.numbered(tensor.spec.shape, tensor.spec.dtype)) ^ salt).flatten()
        whole = full.view(tensor.spec.dtype).reshape(tensor.spec.shape)
        made[name] = oracle.divide(whole, tensor, rank).contiguous()
    return made


def start(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    dist.barrier()


def move(rank: int, store: str) -> None:
    """Ranks 0, 1, 2 train; 1, 2, 3 generate; twenty updates."""
    start(rank, 4, store)
    made = plan(layout(range(3), flat=True), layout(range(1, 4), flat=False), chunk_bytes=4096)
    target = {n: empty_bytes(s) for n, s in made.target.buffers(rank).items()} if rank > 0 else None
    transport = ProcessGroupTransport()
    executor = Executor(made, rank, transport, source=parts(made.source, rank, 0) if rank < 3 else None, target=target)
    for epoch in range(1, 21):
        stats = executor.run(epoch, 60.0, source=parts(made.source, rank, epoch) if rank < 3 else None)
        assert stats.sent_bytes == sum(m.bytes for m in made.rank(rank).sends)
        assert stats.received_bytes == sum(m.bytes for m in made.rank(rank).receives)
        assert stats.peak_staging_bytes <= 2 * 4096 * (len(executor.native.sends) + len(executor.native.receives))
        for name, expected in (parts(made.target, rank, epoch) if target else {}).items():
            assert target is not None
            assert torch.equal(oracle.bits(target[name]), oracle.bits(expected)), (rank, epoch, name)
    dist.destroy_process_group()


def disagree(rank: int, store: str) -> None:
    """Rank 1 expects another epoch: the sender says so, and sends nothing."""
    start(rank, 2, store)
    made = plan(layout(range(1), flat=True), layout(range(1, 2), flat=True))
    buffers = {n: empty_bytes(s) for n, s in (made.source if rank == 0 else made.target).buffers(rank).items()}
    executor = Executor(made, rank, ProcessGroupTransport(), buffers)
    with pytest.raises((PeerError, DeadlineError) if rank == 1 else PeerError, match="rank"):
        executor.run(1 + rank, 2.0)


def outlive(rank: int, store: str) -> None:
    """Rank 1 is gone: a typed error within the timeout."""
    start(rank, 2, store)
    if rank == 1:
        return
    made = plan(layout(range(1), flat=True), layout(range(1, 2), flat=True))
    buffers = {n: empty_bytes(s) for n, s in made.source.buffers(0).items()}
    executor = Executor(made, 0, ProcessGroupTransport(), buffers)
    with pytest.raises((PeerError, DeadlineError), match="rank 0: process group"):
        executor.run(1, 5.0)


WORKS = {"move": (move, 4), "disagree": (disagree, 2), "outlive": (outlive, 2)}


def test_over_gloo(tmp_path: Path) -> None:
    """All works in a process that has no threads yet, which may fork: starting it takes longer than they do."""
    folder = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(folder.parents[1])])}
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


if __name__ == "__main__":
    for name, (function, world) in WORKS.items():
        mp.start_processes(function, (f"{sys.argv[1]}/{name}",), nprocs=world, start_method="fork")
