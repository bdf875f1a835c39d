"""Between the memory of GPUs, where there is one."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch
from transfers import TOKEN

from areal_core.reshard import CudaIpcTransport, Executor, Flat, Layout, Mesh, Shard, Spec, TensorLayout, plan

SPEC = Spec(torch.bfloat16, (64, 48))


def serve(rank: int, pipe: Connection) -> None:
    sides = [(0, Flat()), (1, Shard(1))]
    source, target = [Layout({"w": TensorLayout(SPEC, Mesh((r,), (1,), ("x",)), (p,))}) for r, p in sides]
    made = plan(source, target, chunk_bytes=4096)
    weights = torch.arange(64 * 48, device="cuda", dtype=torch.float32).bfloat16()
    buffer = weights if rank == 0 else torch.zeros(64, 48, dtype=torch.bfloat16, device="cuda")
    transport = CudaIpcTransport(rank, TOKEN, exposed=[buffer] if rank else [])
    pipe.send(transport.address)
    transport.connect(pipe.recv())
    executor = Executor(made, rank, transport, {"w": buffer})
    for epoch in (1, 2):
        executor.run(epoch)
    pipe.send(torch.equal(buffer.flatten(), weights))
    pipe.recv()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_update_between_processes_with_a_gpu() -> None:
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for rank in (0, 1):
        pipes[rank], theirs = context.Pipe()
        context.Process(target=serve, args=(rank, theirs), daemon=True).start()
    addresses = {rank: pipe.recv() for rank, pipe in pipes.items()}
    for pipe in pipes.values():
        pipe.send(addresses)
    assert [pipe.recv() for pipe in pipes.values()] == [True, True]
    for pipe in pipes.values():
        pipe.send("stop")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ValueError, match="CudaIpcTransport: expected a GPU, got none"):
        CudaIpcTransport(0, TOKEN)
