"""Ranks of a plan as threads of this process, over any transport, with memory of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from areal_core.reshard import Layout, Spec
from areal_core.reshard.executor import Executor, TransferStats
from areal_core.reshard.plan import Plan
from areal_core.reshard.transports import (
    InprocGroup,
    InprocTransport,
    SharedTensors,
    ShmTransport,
    TcpTransport,
    Transport,
)

TOKEN = b"the token of a test run"
KINDS = ["inproc", "inproc_staged", "shm", "shm_staged", "tcp"]
T = TypeVar("T")


def in_threads(ranks: Sequence[int], fn: Callable[[int], T]) -> dict[int, T]:
    """fn(rank) of every rank, each in a thread; raises the first error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = fn(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def empty_bytes(spec: Spec) -> Tensor:
    """Memory full of garbage."""
    count = torch.Size(spec.shape).numel() * spec.dtype.itemsize
    return torch.full((count,), 0xCD, dtype=torch.uint8).view(spec.dtype).reshape(spec.shape)


class World:
    """All ranks of a plan: their memory, transports and executors."""

    def __init__(self, plan: Plan, kind: str, **options: object) -> None:
        self.plan, self.kind, self.options = plan, kind, options
        self.ranks = sorted({*plan.source.ranks, *plan.target.ranks})
        self.sources = {r: self._memory(plan.source, r) for r in plan.source.ranks}
        self.shared = {r: SharedTensors(plan.target.buffers(r)) for r in plan.target.ranks}
        self.targets = {r: shared.tensors for r, shared in self.shared.items()}
        self.wipe()
        self.connect()

    @staticmethod
    def _memory(layout: Layout, rank: int) -> dict[str, Tensor]:
        return {name: empty_bytes(spec) for name, spec in layout.buffers(rank).items()}

    def wipe(self) -> None:
        """Garbage in all targets."""
        for tensors in self.targets.values():
            for name, tensor in tensors.items():
                tensor.copy_(empty_bytes(Spec(tensor.dtype, tuple(tensor.shape)))) if tensor.numel() else name

    def connect(self) -> None:
        """New transports and executors."""
        self.transports = make_transports(self.kind, self.ranks, self.shared)
        self.executors = {r: self.executor(r) for r in self.ranks}

    def executor(self, rank: int) -> Executor:
        return Executor(
            self.plan,
            rank,
            self.transports[rank],
            source=self.sources.get(rank),
            target=self.targets.get(rank),
            **self.options,  # type: ignore[arg-type]
        )

    def run(self, epoch: int, timeout: float = 30.0) -> dict[int, TransferStats]:
        return in_threads(self.ranks, lambda rank: self.executors[rank].run(epoch, timeout))

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()
        self.executors.clear()


def make_transports(kind: str, ranks: Sequence[int], shared: dict[int, SharedTensors]) -> dict[int, Transport]:
    """Connected endpoints of all ranks."""
    if kind.startswith("inproc"):
        group = InprocGroup(ranks)
        exposed = {} if kind.endswith("staged") else {r: list(s.tensors.values()) for r, s in shared.items()}
        return {r: InprocTransport(group, r, exposed.get(r, [])) for r in ranks}
    sockets: dict[int, ShmTransport | TcpTransport] = {}
    for rank in ranks:
        if kind == "tcp":
            sockets[rank] = TcpTransport(rank, TOKEN)
        else:
            exposes = kind == "shm" and rank in shared
            sockets[rank] = ShmTransport(rank, TOKEN, exposed=shared[rank].exposed if exposes else [])
    addresses = {rank: socket.address for rank, socket in sockets.items()}
    in_threads(ranks, lambda rank: sockets[rank].connect(addresses, 30.0))
    return dict(sockets)
