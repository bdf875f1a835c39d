"""Processes that publish and receive, and die when told to: what crash tests and the crash bench have in common.

A page of the victim's memory is made inaccessible just before the update, so that the process dies at the very
instruction that touches that chunk.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_core.errors import ArealError
from areal_core.reshard import VersionStore
from areal_core.reshard.layout import Layout, TensorLayout
from areal_core.reshard.placements import Mesh, Shard
from areal_core.reshard.plan import Plan, plan
from areal_core.reshard.publish import Update, WeightSender
from areal_core.reshard.receive import WeightReceiver
from areal_core.reshard.spec import Spec

FORK = multiprocessing.get_context("fork")
TOKEN = b"a token for the tests"
ROWS, COLUMNS = 64, 2 * mmap.PAGESIZE // 4  # a target's row is a page, a source's two
CHUNK_BYTES = 4 * mmap.PAGESIZE
SENDERS, RECEIVERS = (0, 1), (2, 3)
CHUNKS = ROWS // 2 * mmap.PAGESIZE // CHUNK_BYTES  # of each of the four messages


def chunks_of(rank: int) -> int:
    """How many chunks a rank sends to one receiver at a time, or receives from both senders."""
    return 2 * CHUNKS if rank in RECEIVERS else CHUNKS


def make_plan() -> Plan:
    """Rows over two senders -> columns over two receivers."""
    spec = Spec(torch.int32, (ROWS, COLUMNS))
    sides = [
        Layout({"w": TensorLayout(spec, Mesh(ranks, (2,), ("x",)), (Shard(dim),))})
        for dim, ranks in ((0, SENDERS), (1, RECEIVERS))
    ]
    return plan(*sides, chunk_bytes=CHUNK_BYTES)


def whole(version: int) -> Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.int32).view(ROWS, COLUMNS) + 1_000_000 * version


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _kill_this_process(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def forbid_page(address: int, death: int) -> None:
    """The next access to the page ends this process, by SIGSEGV or by the SIGKILL that it then sends itself."""
    faulthandler.disable()
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    libc = ctypes.CDLL(None, use_errno=True)
    if death == signal.SIGKILL:
        libc.signal(signal.SIGSEGV, _kill_this_process)  # from any thread, which a handler of Python's is not
    assert libc.mprotect(ctypes.c_void_p(address & -mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0


def resources() -> tuple[int, int]:
    """Descriptors, and mappings of shared memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("memfd:" in line for line in maps)


def send(rank: int, address: str, transport: str, death: int, pipe: Connection) -> None:
    """A sender's process: publishes what it is told to, with a chunk that kills it where that is asked for."""
    torch.set_num_threads(1)  # those of the parent are not in a forked child
    weights = torch.frombuffer(mmap.mmap(-1, ROWS // 2 * COLUMNS * 4), dtype=torch.int32).view(ROWS // 2, COLUMNS)
    with WeightSender(
        make_plan(), rank, {"w": weights}, coordinator=address, token=TOKEN, transport=transport
    ) as sender:
        update: Update | None = None
        while True:
            version, fatal_chunk = pipe.recv()
            if update is not None and sender._part._sending is update:  # it has not yet heard of the end of this one
                with contextlib.suppress(ArealError):
                    update.wait(20.0)
            weights.copy_(whole(version)[rank * ROWS // 2 : (rank + 1) * ROWS // 2])
            if fatal_chunk is not None:
                forbid_page(weights.data_ptr() + fatal_chunk * ROWS // 2 // CHUNKS * COLUMNS * 4, death)
            update, outcome = sender.publish(version, timeout=20.0), "done"
            while not update.done() and not pipe.poll(0.005):
                pass
            try:
                update.wait(0.0)
            except ArealError as error:
                outcome = f"{type(error).__name__}: {error}"
            pipe.send((version, outcome, resources()))


def receive(rank: int, address: str, transport: str, death: int, pipe: Connection, store: VersionStore) -> None:
    """A receiver's process."""
    torch.set_num_threads(1)
    with WeightReceiver(make_plan(), rank, coordinator=address, token=TOKEN, transport=transport, store=store):
        while True:
            fatal_chunk = pipe.recv()
            if fatal_chunk is not None:
                with store.draft(10**6) as draft:
                    target = draft.tensors["w"].data_ptr()
                forbid_page(target + fatal_chunk * ROWS // 2 // CHUNKS * mmap.PAGESIZE, death)
            pipe.send(resources())


class Cast:
    """A process for each rank; the receivers' stores are this process's too.

    `death` is the signal that ends a victim at a chunk: SIGSEGV or SIGKILL.
    """

    def __init__(self, address: str, transport: str, death: int = signal.SIGSEGV) -> None:
        self.address, self.transport, self.death = address, transport, death
        specs = {"w": Spec(torch.int32, (ROWS, COLUMNS // 2))}
        self.stores = {rank: VersionStore.create(specs) for rank in RECEIVERS}
        self.processes: dict[int, Any] = {}
        self.pipes: dict[int, Connection] = {}
        for rank in (*SENDERS, *RECEIVERS):
            self.start(rank)

    def start(self, rank: int) -> None:
        self.pipes[rank], theirs = FORK.Pipe()
        common = (rank, self.address, self.transport, self.death, theirs)
        target, args = (send, common) if rank in SENDERS else (receive, (*common, self.stores[rank]))
        self.processes[rank] = FORK.Process(target=target, args=args, daemon=True)
        self.processes[rank].start()
        theirs.close()

    def begin(self, version: int, fatal: tuple[int, int] | None = None) -> None:
        """Tell all senders to publish; fatal: (rank, chunk) that kills it."""
        if fatal is not None and fatal[0] in RECEIVERS:
            self.ask(fatal[0], fatal[1])
        for rank in SENDERS:
            self.pipes[rank].send((version, fatal[1] if fatal is not None and rank == fatal[0] else None))

    def ends(self, version: int) -> dict[int, tuple[str, tuple[int, int]]]:
        """What the senders that live say of it."""
        replies = {}
        for rank in SENDERS:
            said, outcome, held = -1, "died", (0, 0)
            try:
                while said != version:
                    said, outcome, held = self.pipes[rank].recv()
            except (EOFError, OSError):
                outcome = "died"
            replies[rank] = (outcome, held)
        return replies

    def update(self, version: int) -> dict[int, tuple[str, tuple[int, int]]]:
        """An update that succeeds, perhaps when an earlier death has been seen; what the senders say of it."""
        for _ in range(3):
            self.begin(version)
            ends = self.ends(version)
            if [end for end, _ in ends.values()] == ["done"] * len(SENDERS):
                return ends
        raise AssertionError(f"expected version {version} published, got {ends}")

    def ask(self, rank: int, fatal_chunk: int | None = None) -> tuple[int, int]:
        """A receiver's resources."""
        self.pipes[rank].send(fatal_chunk)
        answer: tuple[int, int] = self.pipes[rank].recv()
        return answer

    def bury(self, rank: int, status: int) -> None:
        """Wait for the end of a victim, and start another in its place."""
        process = self.processes[rank]
        process.join(30.0)
        assert process.exitcode == status, f"rank {rank}: expected the end by {-status}, got {process.exitcode}"
        process.close()
        self.pipes[rank].close()
        self.start(rank)

    def expect(self, *versions: int) -> int:
        """Every receiver serves one of these, whole; which."""
        seen = set()
        for rank, store in self.stores.items():
            with store.pin(timeout=5.0) as snapshot:
                half = COLUMNS // 2
                part = whole(snapshot.version)[:, (rank - 2) * half : (rank - 1) * half]
                assert torch.equal(snapshot.tensors["w"], part), f"rank {rank}, version {snapshot.version}"
                seen.add(int(snapshot.version))
        assert seen <= set(versions), f"expected {versions}, got {seen}"
        return max(seen)

    def close(self) -> None:
        for rank, process in self.processes.items():
            process.kill()
            process.join()
            process.close()
            self.pipes[rank].close()
        for store in self.stores.values():
            store.close()
