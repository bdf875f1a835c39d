"""VersionStore between processes: one version in every tensor, whoever dies when."""

from __future__ import annotations

import fcntl
import gc
import mmap
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

import pytest
import torch

from areal_core.errors import DeadlineError
from areal_core.reshard import VersionStore

SIZES = [0, 1, 31, 1021, 4099, 20011]
CHUNK_BYTES = 4096
PATIENCE_S = 60.0


def weights(version: int) -> dict[str, torch.Tensor]:
    """Tensors whose every element is the version number."""
    return {f"layers.{n}.weight": torch.full((n,), version, dtype=torch.int32) for n in SIZES}


def foreign_elements(tensors: dict[str, torch.Tensor], version: int) -> int:
    return sum(int((t != version).sum()) for t in tensors.values())


@pytest.fixture
def store() -> Iterator[VersionStore]:
    with VersionStore.create(weights(0), chunk_bytes=CHUNK_BYTES) as store:
        store.publish(weights(1), 1)
        yield store


@pytest.fixture(scope="module")
def context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["areal_core.reshard"])
    return context


class Child:
    """A process running target(pipe, *args); the pipe carries what the test and it tell each other."""

    def __init__(self, context: Any, target: Callable[..., None], *args: object) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        assert self.pipe.poll(PATIENCE_S), "the child says nothing"
        return self.pipe.recv()

    def join(self, exit_code: int) -> None:
        self.process.join(PATIENCE_S)
        assert self.process.exitcode == exit_code
        self.process.close()
        self.pipe.close()


def read_until(pipe: Connection, store: VersionStore, last: int) -> None:
    foreign = backwards = pins = seen = 0
    pipe.send("ready")
    while seen < last:
        with store.pin(PATIENCE_S) as snapshot:
            backwards += snapshot.version < seen
            seen = snapshot.version
            foreign += foreign_elements(snapshot.tensors, seen)
            pins += 1
    pipe.send((foreign, backwards, pins))


def test_processes_hammering_see_one_version_in_every_tensor(store: VersionStore, context: Any) -> None:
    last = 100
    readers = [Child(context, read_until, store, last) for _ in range(2)]
    for reader in readers:
        reader.receive()
    for version in range(2, last + 1):
        store.publish(weights(version), version, timeout=PATIENCE_S)
    for reader in readers:
        foreign, backwards, pins = reader.receive()
        assert (foreign, backwards) == (0, 0)
        assert pins > 0
        reader.join(0)


def read_from_descriptor(pipe: Connection, descriptor: Any) -> None:
    fd = descriptor.detach()
    with VersionStore.attach(fd) as store:
        os.close(fd)
        version = store.wait(2, PATIENCE_S)
        with store.pin() as snapshot:
            pipe.send((version, snapshot.version, foreign_elements(snapshot.tensors, 2), snapshot.checksum()))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_child_attaches_by_descriptor_and_waits_for_a_version(store: VersionStore, method: str) -> None:
    child = Child(multiprocessing.get_context(method), read_from_descriptor, DupFd(store.fileno()))
    store.publish(weights(2), 2)
    with store.pin() as snapshot:
        assert child.receive() == (2, 2, 0, snapshot.checksum())
    child.join(0)


def test_a_descriptor_may_travel_over_a_socket(store: VersionStore) -> None:
    left, right = socket.socketpair()
    with left, right:
        socket.send_fds(left, [b"store"], [store.fileno()])
        _, [fd], _, _ = socket.recv_fds(right, 16, 1)
    with VersionStore.attach(fd) as attached:
        os.close(fd)
        with attached.pin() as snapshot:
            assert foreign_elements(snapshot.tensors, 1) == 0


def publish_partly_and_die(pipe: Connection, store: VersionStore, chunks: int) -> None:
    new = weights(1000)
    publication = store._open().begin(1000, False, PATIENCE_S)
    publication.write([new[name].data_ptr() for name in store.specs], 0, chunks)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_killed_writer_leaves_the_old_version_and_its_seat(store: VersionStore, context: Any, part: float) -> None:
    chunks = store._open().chunks
    assert chunks > 10
    descriptors = len(os.listdir("/proc/self/fd"))
    Child(context, publish_partly_and_die, store, int(part * chunks)).join(-signal.SIGKILL)
    assert store.version() == 1
    with store.pin() as snapshot:
        assert foreign_elements(snapshot.tensors, 1) == 0
        snapshot.checksum()
    store.publish(weights(2), 2, timeout=0.0)
    with store.pin() as snapshot:
        assert (snapshot.version, foreign_elements(snapshot.tensors, 2)) == (2, 0)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def publish_and_leave(pipe: Connection, store: VersionStore, version: int) -> None:
    store.publish(weights(version), version)
    pipe.send(store.version())


def test_another_process_continues_publishing(store: VersionStore, context: Any) -> None:
    child = Child(context, publish_and_leave, store, 5)
    assert child.receive() == 5
    child.join(0)
    with pytest.raises(ValueError, match="expected version > 5"):
        store.publish(weights(5), 5)
    store.publish(weights(6), 6)
    with store.pin() as snapshot:
        assert foreign_elements(snapshot.tensors, 6) == 0


def pin_and_stay(pipe: Connection, store: VersionStore) -> None:
    with store.pin() as snapshot:
        pipe.send(snapshot.version)
        pipe.recv()


def test_a_living_readers_pin_is_waited_for_and_a_dead_ones_reclaimed(store: VersionStore, context: Any) -> None:
    reader = Child(context, pin_and_stay, store)
    assert reader.receive() == 1
    store.publish(weights(2), 2)
    with pytest.raises(DeadlineError, match=rf"pins on version 1 .*pid {reader.process.pid}"):
        store.publish(weights(3), 3, timeout=0.01)
    os.kill(reader.process.pid, signal.SIGKILL)
    store.publish(weights(3), 3, timeout=PATIENCE_S)  # sees the death whether or not the zombie has been reaped
    reader.join(-signal.SIGKILL)
    with store.pin() as snapshot:
        assert foreign_elements(snapshot.tensors, 3) == 0


def test_a_publication_waits_for_a_thread_that_reads_and_then_goes_on(store: VersionStore) -> None:
    snapshot = store.pin()
    store.publish(weights(2), 2)
    started, done = threading.Event(), threading.Event()

    def publish() -> None:
        started.set()
        store.publish(weights(3), 3, timeout=PATIENCE_S)
        done.set()

    thread = threading.Thread(target=publish)
    thread.start()
    assert started.wait(PATIENCE_S)
    assert foreign_elements(snapshot.tensors, 1) == 0
    assert not done.is_set()
    snapshot.release()
    assert store.wait(3, PATIENCE_S) == 3
    thread.join(PATIENCE_S)
    assert done.is_set()


class InterruptionError(Exception):
    pass


def test_a_signal_ends_a_wait(store: VersionStore) -> None:
    def interrupt(_: int, frame: Any) -> None:
        if frame.f_code is VersionStore.wait.__code__:  # elsewhere the next tick will do
            raise InterruptionError

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        with pytest.raises(InterruptionError):
            store.wait(99, PATIENCE_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_a_thousand_updates_leave_memory_and_descriptors_flat(store: VersionStore) -> None:
    tensors = weights(7) | {"layers.31.weight": torch.full((62,), 7, dtype=torch.int32)[::2]}

    def update(version: int) -> None:
        store.publish(tensors, version)
        with VersionStore.attach(store.fileno()) as attached, attached.pin() as snapshot:
            assert snapshot.version == version
            snapshot.checksum()

    for version in range(2, 52):
        update(version)
    gc.collect()
    memory, descriptors = resident_bytes(), len(os.listdir("/proc/self/fd"))
    for version in range(52, 1052):
        update(version)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert resident_bytes() - memory < 1 << 20, "a leak of a kilobyte an update"


def test_closing_gives_all_descriptors_and_mappings_back() -> None:
    def mappings() -> int:
        with open("/proc/self/maps") as file:
            return sum("areal-version-store" in line for line in file)

    gc.collect()
    descriptors, mapped = len(os.listdir("/proc/self/fd")), mappings()
    store = VersionStore.create(weights(0))
    store.publish(weights(1), 1)
    tensor = store.pin().tensors["layers.31.weight"]
    store.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert int(tensor.sum()) == 31
    del tensor
    gc.collect()
    assert mappings() == mapped


def foreign_descriptors() -> list[tuple[str, Callable[[], int]]]:
    def truncated_copy() -> int:
        with VersionStore.create(weights(0)) as store:
            content = os.pread(store.fileno(), os.fstat(store.fileno()).st_size, 0)
        return sealed_memfd(content[: len(content) // 2])

    def damaged_copy() -> int:
        with VersionStore.create(weights(0)) as store:
            content = bytearray(os.pread(store.fileno(), os.fstat(store.fileno()).st_size, 0))
        content[content.index(b"int32")] ^= 1
        return sealed_memfd(bytes(content))

    return [
        ("an open descriptor", lambda: 10**6),
        ("a memfd of sealed size", lambda: os.open("/dev/null", os.O_RDONLY)),
        ("a memfd of sealed size", lambda: os.open(__file__, os.O_RDONLY)),
        ("a memfd of sealed size", lambda: os.memfd_create("other", os.MFD_ALLOW_SEALING)),
        ("got 3 bytes", lambda: sealed_memfd(b"abc")),
        ("shared memory of a version store", lambda: sealed_memfd(b"\0" * (1 << 20))),
        ("expected a store of", truncated_copy),
        ("expected plan digest", damaged_copy),
    ]


def sealed_memfd(content: bytes) -> int:
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


@pytest.mark.parametrize(("message", "open_fd"), foreign_descriptors())
def test_foreign_and_damaged_descriptors_are_refused_with_a_reason(message: str, open_fd: Callable[[], int]) -> None:
    fd = open_fd()
    try:
        with pytest.raises(ValueError, match=message):
            VersionStore.attach(fd)
    finally:
        if fd != 10**6:
            os.close(fd)


def write_to_a_view(pipe: Connection, store: VersionStore) -> None:
    with store.pin() as snapshot:
        pipe.send("pinned")
        snapshot.tensors["layers.31.weight"].add_(1)


def test_a_write_to_a_view_ends_the_writer_of_it_and_harms_nobody(store: VersionStore, context: Any) -> None:
    child = Child(context, write_to_a_view, store)
    assert child.receive() == "pinned"
    child.join(-signal.SIGSEGV)
    with store.pin() as snapshot:
        assert foreign_elements(snapshot.tensors, 1) == 0
        snapshot.checksum()
