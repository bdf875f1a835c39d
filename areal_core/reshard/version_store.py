"""Publication of weights to the other processes of a machine, through shared memory.

The trainer creates a `VersionStore` from its tensors and publishes; generators attach to it and read::

    store = VersionStore.create(model.state_dict())
    process = spawn_context.Process(target=generate, args=(store,))  # a store travels to a child by itself
    store.publish(model.state_dict(), version=7)

    def generate(store):
        store.wait(7, timeout=60.0)
        with store.pin() as snapshot:
            model.load_state_dict(snapshot.tensors)

A reader sees one version in every tensor, bit for bit as published, whichever process dies at whichever moment. The
protocol and its memory ordering are described in csrc/reshard/version_store.h.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from multiprocessing import reduction
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_core import _C
from areal_core.errors import ClosedError
from areal_core.reshard.arena import ArenaTensors, is_plain
from areal_core.reshard.draft import Draft
from areal_core.reshard.spec import Spec, dtype_name, dtype_of
from areal_core.reshard.transports import ExposedBuffer

DEFAULT_CHUNK_BYTES = 4 << 20
DEFAULT_TIMEOUT_S = 60.0


class PublishStats(NamedTuple):
    """What one publication did: bytes are payload, seconds are wall time."""

    version: int
    bytes: int
    seconds: float  # from the call to the moment readers see the version
    bytes_per_s: float  # over the seconds spent copying
    wait_seconds: float  # of these, spent waiting for readers to release the arena (or for another writer)
    bound_bytes: int  # what no plan can beat: bytes / bound_bytes is the overhead of the plan


class Snapshot:
    """One version, pinned: it is not overwritten until `release`, or the end of the `with` block.

    `tensors` are views of shared memory that cost no copy. They are read-only: the memory is mapped that way, and a
    write to one (`tensor.add_(1)`) ends the process with a segmentation fault rather than change the weights of
    every reader. They may be touched after the release, even after the store is closed, without harm to the process,
    but a later publication then overwrites them: copy what must outlast the pin. Without a release the version stays
    pinned as long as the snapshot or a tensor of it lives.

    A pin belongs to the process that took it; a forked child must take its own.
    """

    def __init__(self, pin: _C.Pin, layout: ArenaTensors) -> None:
        """Private: use `VersionStore.pin`."""
        self._pin = pin
        self._layout = layout
        self._tensors: dict[str, Tensor] | None = None
        self._released = False
        self.version = pin.version

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, as read-only views. Raises ClosedError after `release`."""
        self._check_pinned("tensors")
        if self._tensors is None:
            self._tensors = self._layout.views(self._pin.arena())
        return dict(self._tensors)

    @property
    def has_checksums(self) -> bool:
        """Whether checksums of the contents were taken when they were written: `publish` does, `Draft.seal` does.

        A version that arrived at a `WeightReceiver` has them with `DataPlaneOptions(seal=True)`.
        """
        self._check_pinned("has_checksums")
        return self._pin.has_checksums

    def copy_into(self, targets: Mapping[str, Tensor], *, verify: bool = True) -> None:
        """Copy every tensor to one of the caller's own, comparing all bytes with their checksums on the way.

        As fast as copying without the comparison. The GIL is released.
        targets: exactly the names, dtypes and shapes of the store; any strides, any device. Autograd learns that they
            changed, but records nothing.
        verify: False: compare nothing, which is all that can be had of a version without checksums.

        Raises: ValueError naming the tensor that does not fit, or when there are no checksums to compare with, before
        anything is copied; CorruptedError naming the tensor that was damaged, when all has been copied: the targets are
        then not to be used; ClosedError.
        """
        self._check_pinned("copy_into")
        ordered = self._layout.in_order("Snapshot.copy_into", targets)
        addresses = [t.data_ptr() if is_plain(t) else 0 for t in ordered]
        if 0 in addresses:
            if verify:
                self._pin.verify()
            for view, target in zip(self.tensors.values(), ordered, strict=True):
                if not is_plain(target):
                    target.detach().copy_(view)
        self._pin.copy_to(addresses, verify)
        torch.autograd.graph.increment_version(ordered)

    def checksum(self, *, verify: bool = True) -> int:
        """The digest of the contents, equal for equal contents.

        verify: read all bytes and compare them with the checksums taken when they were written.

        Raises: ValueError when the version carries no checksums (`has_checksums`); CorruptedError naming the first
        tensor that differs; ClosedError after `release`.
        """
        self._check_pinned("checksum")
        if verify:
            self._pin.verify()
        return self._pin.content_digest

    def release(self) -> None:
        """Let the writer overwrite this version. Releasing again does nothing."""
        self._released = True
        self._tensors = None
        self._pin.release()

    def _check_pinned(self, use: str) -> None:
        if self._released:
            raise ClosedError(f"Snapshot.{use}: expected a pinned snapshot, got version {self.version} released")

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class VersionStore:
    """A handle on shared memory that holds the active version of a set of tensors, and room for the next.

    One process publishes at a time, any number reads (up to 64 pins at once). Every method may be called from several
    threads. A handle pickles to another process of this machine (multiprocessing, any start method), and
    `fileno` may be sent over a Unix socket instead, for `attach`. The memory goes when the last handle, snapshot and
    tensor of all processes is gone.
    """

    def __init__(self, native: _C.VersionStore) -> None:
        """Private: use `create` or `attach`."""
        self._native: _C.VersionStore | None = native
        specs = {
            name: Spec(dtype_of("VersionStore", name, dtype, item_bytes), tuple(shape))
            for name, dtype, item_bytes, shape in native.specs
        }
        self._layout = ArenaTensors(specs, native.offsets_bytes)

    @classmethod
    def create(cls, tensors: Mapping[str, Tensor | Spec], *, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> VersionStore:
        """A store for tensors of these names, dtypes and shapes, with no version in it yet.

        Takes twice the tensors' size of memory at once, and never more.
        chunk_bytes: bytes that one thread copies at a time, a multiple of 64 up to 64 MiB.

        Raises: ValueError for a quantized dtype, a broken spec, or when the memory is not to be had.
        """
        specs = {name: Spec.of(value) for name, value in tensors.items()}
        for name, spec in specs.items():
            dtype_of("VersionStore", name, dtype_name(spec.dtype), spec.dtype.itemsize)
        rows = [(name, dtype_name(s.dtype), s.dtype.itemsize, list(s.shape)) for name, s in specs.items()]
        return cls(_C.VersionStore.create(rows, chunk_bytes))

    @classmethod
    def attach(cls, fd: int) -> VersionStore:
        """The store behind a descriptor that came from another process's `fileno`.

        The descriptor is duplicated: the caller still closes its own.

        Raises: ValueError, saying why, when fd is no version store or was damaged, or comes from another pid namespace.
        """
        return cls(_C.VersionStore.attach(fd))

    def fileno(self) -> int:
        """The descriptor of the shared memory; it stays the store's."""
        return self._open().fd

    @property
    def specs(self) -> dict[str, Spec]:
        """What the store holds, sorted by name."""
        return dict(self._layout.specs)

    @property
    def digest(self) -> int:
        """Equal on two stores exactly when names, dtypes, shapes, offsets and chunks are (up to hash collisions)."""
        return self._open().digest

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        version: int,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        allow_rollback: bool = False,
        verify: bool = False,
    ) -> PublishStats:
        """Copy the tensors and make them the active version.

        tensors: exactly the names, dtypes and shapes of the store; any strides, any device. They must not change
            during the call. Bytes are copied as they are (NaN payloads too).
        version: int >= 0, above the current one unless allow_rollback (a run resumed from an earlier checkpoint).
        timeout: seconds to wait for readers that still pin the version before the current one.
        verify: read everything again before readers may see it (a second pass over memory).

        Readers go on with the old version meanwhile; whatever fails, it stays active. The GIL is released.

        Raises: ValueError naming the tensor (or version) that does not fit; DeadlineError naming the processes whose
        pins were waited for; CorruptedError (verify) when memory does not hold what was written; ClosedError.
        """
        native = self._open()
        sources = self._layout.in_order("VersionStore.publish", tensors)
        start = time.perf_counter()
        with Draft(native, self._layout, version, allow_rollback, timeout) as draft:
            begun = time.perf_counter()
            draft.copy_in_order(sources)
            draft.commit(verify=verify)
        end = time.perf_counter()
        payload = native.payload_bytes
        return PublishStats(
            version, payload, end - start, payload / max(end - begun, 1e-9), begun - start, native.bound_bytes
        )

    def draft(self, version: int, *, timeout: float = DEFAULT_TIMEOUT_S, allow_rollback: bool = False) -> Draft:
        """Begin a version that something else than `publish` fills: its tensors, writable, in the inactive arena.

        Arguments and errors are those of `publish`. While the draft is open no other process publishes.
        """
        return Draft(self._open(), self._layout, version, allow_rollback, timeout)

    def exposed(self) -> list[ExposedBuffer]:
        """Every tensor of both arenas, for a transport whose peers write them directly.

        Those of arena 0 first, each in the order of `specs`.
        """
        native = self._open()
        sizes = [torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in self._layout.specs.values()]
        return [
            ExposedBuffer(native.fd, native.arena_offset_bytes(arena) + offset, size)
            for arena in (0, 1)
            for offset, size in zip(self._layout.offsets_bytes, sizes, strict=True)
        ]

    def version(self) -> int:
        """The active version, -1 before the first. Costs less than a microsecond: poll as often as you like."""
        return self._open().version()

    def wait(self, version: int, timeout: float = DEFAULT_TIMEOUT_S) -> int:
        """Wait until `version()` is at least this; returns it. Raises DeadlineError; Ctrl-C ends the wait."""
        return self._open().wait(version, timeout)

    def pin(self, timeout: float = DEFAULT_TIMEOUT_S) -> Snapshot:
        """Hold on to the active version (waiting for the first): `with store.pin() as snapshot: ...`.

        timeout: seconds to wait for a first version or a free slot; then DeadlineError.
        """
        return Snapshot(self._open().pin(timeout), self._layout)

    def close(self) -> None:
        """Give the descriptor back. Snapshots and tensors in use keep the memory; closing again does nothing."""
        self._native = None

    def __enter__(self) -> VersionStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        """Only multiprocessing pickles a store: the descriptor travels beside the bytes."""
        return _attach_and_close, (reduction.DupFd(self.fileno()),)

    def _open(self) -> _C.VersionStore:
        if self._native is None:
            raise ClosedError("VersionStore: expected an open store, got a closed one")
        return self._native


def _attach_and_close(received: Any) -> VersionStore:
    fd = received.detach()
    try:
        return VersionStore.attach(fd)
    finally:
        os.close(fd)
