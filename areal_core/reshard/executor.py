"""One rank's part of a plan, carried out update after update.

::

    executor = Executor(plan, rank, transport, model_buffers)
    for epoch in count(1):
        executor.send(epoch)  # on a trainer; executor.receive(epoch) on a generator

What is to be copied where is worked out once. A receiver's memory is not touched before its `receive` of that epoch
has begun, and a sender returns when its receivers have used all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from areal_core import _C
from areal_core.reshard.arena import ArenaTensors, is_plain
from areal_core.reshard.plan import Plan
from areal_core.reshard.spec import Spec, dtype_of
from areal_core.reshard.transports import Transport

DEFAULT_TIMEOUT_S = 300.0


class TransferStats(NamedTuple):
    """What one rank did in one update."""

    epoch: int
    seconds: float
    bytes: int  # sent, received and copied locally
    bytes_per_s: float
    sent_bytes: int
    received_bytes: int
    local_bytes: int
    direct_bytes: int  # of those sent: written straight into the peers' memory
    wire_bytes: int  # of the whole plan, between ranks
    bound_bytes: int  # what no plan can beat
    peak_staging_bytes: int  # memory of this rank's endpoint for chunks: at most two per peer and direction
    sent_checksum: int  # sums of the chunks' XXH3-64, modulo 2^64: over all ranks both are equal
    received_checksum: int


class Progress(NamedTuple):
    """How far an update is."""

    done_bytes: int
    total_bytes: int


class _Side:
    """The buffers of a rank on one side, as the engine wants them."""

    def __init__(self, side: str, rows: list[tuple[str, str, int, list[int]]], takes: Callable[[Tensor], bool]) -> None:
        specs = {name: Spec(dtype_of("Executor", name, dtype, size), tuple(shape)) for name, dtype, size, shape in rows}
        self.side, self._takes = side, takes
        self.layout = ArenaTensors(specs, [])
        self.given: Mapping[str, Tensor] | None = None
        self.tensors: list[Tensor] = []
        self.host: list[Tensor] = []

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Check the tensors, and make host copies of those that are not plain host memory."""
        self.tensors = self.layout.in_order(f"Executor: {self.side}", tensors)
        kept = self.host if len(self.host) == len(self.tensors) else [None] * len(self.tensors)
        self.host = [
            tensor if self._takes(tensor) else _host_memory(tensor, old)
            for tensor, old in zip(self.tensors, kept, strict=True)
        ]
        self.given = tensors

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Address and bytes of each buffer."""
        return [(tensor.data_ptr(), tensor.nbytes) for tensor in self.host]

    @property
    def staged(self) -> list[tuple[Tensor, Tensor]]:
        """Those that have a host copy, and it."""
        return [(tensor, host) for tensor, host in zip(self.tensors, self.host, strict=True) if host is not tensor]


class Executor:
    """Moves the tensors of one rank.

    plan: the same on every rank (digests are compared before a byte moves).
    rank: the caller's number in the plan's layouts.
    transport: this rank's endpoint, connected to its peers and used by nobody else; None for a rank that only copies
        locally.
    buffers: name -> tensor, exactly `Layout.buffers(rank)`, for a rank of one side. A rank that trains and generates
        gives `source` and `target` instead. Contiguous host tensors are used in place; others (on a device, strided)
        through a host copy of their size, made once.
    first_exposed: position of the target's first buffer among those that the transport exposes: peers write there, so
        it must be the memory that `target` names. A buffer of another size is refused before anything is written.
    threads: threads that copy, for each of sending and receiving.
    read_back: hash again what peers have written directly into this rank's memory: a second pass over it.
    direct: write into memory that peers expose; False: always through staging buffers.

    Raises: ValueError naming the tensor that is missing or does not fit.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        transport: Transport | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        *,
        source: Mapping[str, Tensor] | None = None,
        target: Mapping[str, Tensor] | None = None,
        first_exposed: int = 0,
        threads: int = 1,
        read_back: bool = False,
        direct: bool = True,
    ) -> None:
        native_transport = None if transport is None else transport.native
        self.native = _C.Executor(plan.native, rank, native_transport, threads, read_back, direct)
        self.plan, self.rank, self._transport = plan, rank, transport
        takes = is_plain if transport is None else transport.takes
        self._source = _Side("source", self.native.source_buffers, takes)
        self._target = _Side("target", self.native.target_buffers, takes)
        self._is_source, self._is_target = rank in plan.source.ranks, rank in plan.target.ranks
        if buffers is not None:
            if self._is_source and self._is_target:
                raise ValueError(f"Executor: rank {rank} is on both sides: expected source= and target=, got buffers")
            source, target = (buffers, target) if self._is_source else (source, buffers)
        self._bind(source, target)
        self._first_exposed = first_exposed

    def run(
        self,
        epoch: int,
        timeout: float = DEFAULT_TIMEOUT_S,
        *,
        source: Mapping[str, Tensor] | None = None,
        target: Mapping[str, Tensor] | None = None,
        first_exposed: int | None = None,
    ) -> TransferStats:
        """Move one update: every rank of the plan calls this (or `send`, `receive`) with the same epoch.

        timeout: seconds from now on after which no wait goes on; bytes that keep coming are not cut off.
        source, target, first_exposed: other memory than that of the last update, such as the other arena.

        The GIL is released; Ctrl-C ends the call. Padding in target buffers is zeroed. Bytes move as they are.

        Raises: ValueError naming a tensor that does not fit, before anything moves; DeadlineError, PeerError (a peer
        gone, or at another epoch or plan), CorruptedError (a checksum or header that does not fit), CancelledError.
        After any of these the targets hold no version and the transport is of no more use; over a new one the same
        update may be tried again.
        """
        self._bind(source, target)
        if first_exposed is not None:
            self._first_exposed = first_exposed
        for tensor, host in self._source.staged:
            host.copy_(tensor.detach())
        bound = _C.BoundBuffers(self._source.ranges, self._target.ranges, self._first_exposed)
        if self._transport is None:
            stats = self.native.run(epoch, bound, timeout)
        else:
            stats = self._transport.run_update(self.native, epoch, bound, timeout)
        for tensor, host in self._target.staged:
            tensor.detach().copy_(host)
        torch.autograd.graph.increment_version(self._target.tensors)
        return self._stats(stats)

    def send(self, epoch: int, timeout: float = DEFAULT_TIMEOUT_S) -> TransferStats:
        """`run` of a rank that holds source tensors. Returns when its receivers have used everything."""
        if not self._is_source:
            raise ValueError(f"Executor.send: expected a rank of the source, got {self.rank}")
        return self.run(epoch, timeout)

    def receive(self, epoch: int, timeout: float = DEFAULT_TIMEOUT_S) -> TransferStats:
        """`run` of a rank that wants target tensors. Returns when they are complete and their checksums fit."""
        if not self._is_target:
            raise ValueError(f"Executor.receive: expected a rank of the target, got {self.rank}")
        return self.run(epoch, timeout)

    def cancel(self) -> None:
        """From any thread: end the update under way with CancelledError, and every later one. Peers see it."""
        self.native.cancel()
        if self._transport is not None:
            self._transport.cancel()

    @property
    def progress(self) -> Progress:
        """Of the update under way, or the last. From any thread, at any rate."""
        return Progress(self.native.done_bytes, self.native.total_bytes)

    def _bind(self, source: Mapping[str, Tensor] | None, target: Mapping[str, Tensor] | None) -> None:
        for side, tensors in ((self._source, source), (self._target, target)):
            if tensors is not None:
                side.bind(tensors)
            elif side.given is None and side.layout.specs:
                raise ValueError(f"Executor: rank {self.rank}: expected {side.side} tensors, got none")

    def _stats(self, stats: _C.TransferStats) -> TransferStats:
        moved = stats.sent_bytes + stats.received_bytes + stats.local_bytes
        return TransferStats(
            epoch=stats.epoch,
            seconds=stats.seconds,
            bytes=moved,
            bytes_per_s=moved / max(stats.seconds, 1e-9),
            sent_bytes=stats.sent_bytes,
            received_bytes=stats.received_bytes,
            local_bytes=stats.local_bytes,
            direct_bytes=stats.direct_bytes,
            wire_bytes=self.plan.stats.wire_bytes,
            bound_bytes=self.plan.lower_bound.wire_bytes,
            peak_staging_bytes=stats.staging_bytes,
            sent_checksum=stats.sent_checksum,
            received_checksum=stats.received_checksum,
        )


def _host_memory(tensor: Tensor, kept: Tensor | None) -> Tensor:
    """Memory of the host to copy the tensor to."""
    if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype and is_plain(kept):
        return kept
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
