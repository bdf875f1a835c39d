"""Peers in processes of their own: one that is killed is a typed error; updates of new processes are none the worse."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import oracle
import pytest
import torch
from transfers import TOKEN

from areal_core.errors import DeadlineError, PeerError
from areal_core.reshard import (
    Executor,
    Flat,
    Layout,
    Mesh,
    Shard,
    SharedTensors,
    ShmTransport,
    Spec,
    TcpTransport,
    TensorLayout,
    plan,
)

SPECS = {"w": Spec(torch.bfloat16, (960, 128))}
CHUNK_BYTES = 4096
CONTEXT = multiprocessing.get_context("forkserver")  # a process that has no threads yet
CONTEXT.set_forkserver_preload(["areal_core.reshard", "oracle", "transfers"])


def layouts() -> tuple[Layout, Layout]:
    trainer = Mesh((0,), (1,), ("x",))
    generators = Mesh((1, 2), (2,), ("x",))
    return (
        Layout({n: TensorLayout(s, trainer, (Flat(),)) for n, s in SPECS.items()}),
        Layout({n: TensorLayout(s, generators, (Shard(1),)) for n, s in SPECS.items()}),
    )


def numbered(salt: int) -> torch.Tensor:
    raw = oracle.bits(oracle.numbered(SPECS["w"].shape, torch.bfloat16)) ^ salt
    return raw.flatten().view(torch.bfloat16).reshape(SPECS["w"].shape)


def part(rank: int) -> list[int]:
    """The bytes that rank 1 or 2 shall have."""
    columns: list[int] = oracle.bits(numbered(1)[:, 64 * (rank - 1) : 64 * rank].contiguous()).flatten().tolist()
    return columns


def serve(rank: int, kind: str, pipe: Connection, die_at_bytes: int | None) -> None:
    """A rank that takes updates as it is told; with die_at_bytes it kills itself when that much is done."""
    torch.set_num_threads(1)
    made = plan(*layouts(), chunk_bytes=CHUNK_BYTES)
    shared = SharedTensors(made.target.buffers(rank)) if rank else None
    buffers: Any = shared.tensors if shared else {"w": numbered(1).flatten()}
    exposed = shared.exposed if shared and kind == "shm" else []
    transport = TcpTransport(rank, TOKEN) if kind == "tcp" else ShmTransport(rank, TOKEN, exposed=exposed)
    pipe.send(transport.address)
    transport.connect(pipe.recv(), 30.0)
    executor = Executor(made, rank, transport, buffers)
    if die_at_bytes is not None:
        watch(executor, die_at_bytes)
    try:
        executor.run(1, 30.0)
        if die_at_bytes is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.send("done" if rank == 0 else oracle.bits(buffers["w"]).flatten().tolist())
    except (PeerError, DeadlineError) as error:
        pipe.send(error)
    pipe.recv()


def watch(executor: Executor, die_at_bytes: int) -> None:
    """SIGKILL for this process once so much is done."""

    def look() -> None:
        while executor.progress.done_bytes < die_at_bytes:
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=look, daemon=True).start()


def update(kind: str, victim: int | None, die_at_bytes: int) -> dict[int, Any]:
    """One update of three processes; what each says at its end, nothing of one that was killed."""
    pipes: dict[int, Connection] = {}
    processes = {}
    for rank in range(3):
        pipes[rank], theirs = CONTEXT.Pipe()
        died = die_at_bytes if rank == victim else None
        processes[rank] = CONTEXT.Process(target=serve, args=(rank, kind, theirs, died))
        processes[rank].start()
        theirs.close()
    addresses = {rank: pipe.recv() for rank, pipe in pipes.items()}
    for pipe in pipes.values():
        pipe.send(addresses)
    said: dict[int, Any] = {}
    for rank, pipe in pipes.items():
        try:
            said[rank] = pipe.recv()
        except EOFError:
            assert rank == victim
    for rank, pipe in pipes.items():
        if rank != victim:
            pipe.send("stop")
        processes[rank].join()
        pipe.close()
    return said


@pytest.mark.parametrize("kind", ["shm", "shm_staged", "tcp"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_peer_is_an_error_that_names_it(kind: str, victim: int) -> None:
    said = update(kind, victim, CHUNK_BYTES)
    assert said.keys() == {0, 1, 2} - {victim}
    for rank, what in said.items():
        # Whoever had all it needed from the victim is done and right; the others know whom they lost.
        if isinstance(what, PeerError):
            assert "lost rank" in str(what)
        elif rank == 0:
            assert what == "done"
        else:
            assert what == part(rank)


@pytest.mark.parametrize("kind", ["shm", "shm_staged", "tcp"])
def test_an_update_between_processes(kind: str) -> None:
    said = update(kind, None, 0)
    assert said[0] == "done"
    for rank in (1, 2):
        assert said[rank] == part(rank)
