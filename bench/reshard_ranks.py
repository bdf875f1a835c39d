"""One process per rank, each with one thread: runs a provider's rounds on all of them at once.

A provider is a class made in every rank's process with (case, rank, weights, own parts, targets, options); its run()
does one transfer, and close() ends it. The parent calls `Ranks.round`, which returns when the last rank is done.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from reshard_weights import Case, Shapes, Weights, first_difference
from torch import Tensor

PRELOAD = ["reshard_baselines", "reshard_engine"]
# What torch would import in every process when it first redistributes or saves; it takes seconds.
PRELOAD_FOR_DTENSOR = ["torch.distributed.checkpoint", "torch._decomp", "torch._higher_order_ops.invoke_subgraph"]


@dataclass
class RankContext:
    """What a provider works with: sources and targets are this rank's parts, empty where it is not on that side."""

    case: Case
    rank: int
    shapes: Shapes
    sources: dict[str, Tensor]
    targets: dict[str, Tensor]
    folder: str


class Provider(Protocol):
    """One way to move the weights."""

    def run(self) -> Mapping[str, float]:
        """One transfer; returns figures of its own."""

    def targets(self) -> Mapping[str, Tensor]:
        """What this rank holds now of the target side."""

    def close(self) -> None:
        """Give everything back."""


class Ranks:
    """The processes of a case."""

    def __init__(self, case: Case, shapes: Shapes, folder: str, *, with_dtensor: bool) -> None:
        self.case = case
        context = multiprocessing.get_context("forkserver")  # whose first process imports torch once for all
        context.set_forkserver_preload(PRELOAD + (PRELOAD_FOR_DTENSOR if with_dtensor else []))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in case.ranks:
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(case, rank, dict(shapes), folder, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self._all("hello")

    def load(self, provider: type[Provider]) -> None:
        """Make the provider in every rank, instead of the one before."""
        self._all("load", provider)

    def round(self) -> list[Mapping[str, float]]:
        """One transfer by all ranks; their figures."""
        return self._all("run")

    def check(self) -> None:
        """Raise AssertionError unless every target rank holds what it should, bit for bit, then overwrite it."""
        for rank, difference in zip(self.case.ranks, self._all("check"), strict=True):
            assert not difference, f"rank {rank}: {difference} differ"

    def close(self) -> None:
        """End the processes."""
        self._all("stop")
        for process in self._processes:
            process.join()

    def _all(self, command: str, argument: Any = None) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((command, argument))
        replies = [pipe.recv() for pipe in self._pipes]
        for rank, (ok, reply) in zip(self.case.ranks, replies, strict=True):
            if not ok:
                raise RuntimeError(f"rank {rank}: {reply}")
        return [reply for _, reply in replies]


def serve(case: Case, rank: int, shapes: Shapes, folder: str, port: int, pipe: Connection) -> None:
    """The process of a rank: does what the parent says until told to stop."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(case.ranks))
    weights = Weights(shapes)
    sources = weights.parts(case.source, rank) if rank in case.source.ranks else {}
    targets = {}
    if rank in case.target.ranks:
        targets = {name: torch.zeros_like(part) for name, part in weights.parts(case.target, rank).items()}
    context = RankContext(case, rank, shapes, sources, targets, folder)
    provider: Provider | None = None
    while True:
        command, argument = pipe.recv()
        try:
            reply: Any = None
            if command == "load":
                if provider is not None:
                    provider.close()
                provider = argument(context)
            elif command == "run":
                assert provider is not None
                cpu = time.process_time()
                reply = {**provider.run(), "cpu_s": time.process_time() - cpu}
            elif command == "check" and rank in case.target.ranks:
                assert provider is not None
                reply = first_difference(weights, case.target, rank, provider.targets())
            elif command == "stop":
                if provider is not None:
                    provider.close()
                dist.destroy_process_group()
            pipe.send((True, reply))
        except Exception:
            pipe.send((False, traceback.format_exc()))
        if command == "stop":
            return
