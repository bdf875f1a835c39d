"""Ctrl-C in every wait of an executor: a real SIGINT."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
import torch

from areal_core.reshard import (
    Executor,
    Flat,
    InprocGroup,
    InprocTransport,
    Layout,
    Mesh,
    ShmTransport,
    Spec,
    TcpTransport,
    TensorLayout,
    plan,
)

TOKEN = b"the token of a test run"
SIZE = 1 << 20


def layout(rank: int) -> Layout:
    return Layout({"w": TensorLayout(Spec(torch.uint8, (SIZE,)), Mesh((rank,), (1,), ("x",)), (Flat(),))})


def executor(rank: int, threads: int = 1) -> Executor:
    """Its peer never does anything."""
    transport = InprocTransport(InprocGroup([0, 1]), rank)
    memory = {"w": torch.zeros(SIZE, dtype=torch.uint8)}
    return Executor(plan(layout(0), layout(1)), rank, transport, memory, threads=threads)


WAITS = {
    "grant": lambda: executor(0).send(1),
    "chunk": lambda: executor(1).receive(1),
    "chunk, several threads": lambda: executor(1, threads=3).receive(1),
    "connection": lambda: TcpTransport(0, TOKEN).connect({1: "127.0.0.1:1"}),
    "acceptance": lambda: ShmTransport(1, TOKEN).connect({0: "@nobody"}),
}


def send_when_waiting(main: int) -> None:
    """SIGINT once the main thread has let go of the GIL in the engine."""
    while sys._current_frames()[main].f_code.co_name not in ("run", "run_update", "connect"):
        time.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_wait(wait: str) -> None:
    call = WAITS[wait]
    sender = threading.Thread(target=send_when_waiting, args=(threading.get_ident(),))
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (the signal may come at once)
        sender.start()
        call()
    sender.join()
