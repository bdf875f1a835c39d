"""A transport over a process group of torch.distributed: gloo, or NCCL between GPUs.

Chunks travel in rounds of `batch_isend_irecv`: in round r every message sends its chunk r, header and bytes as one
tensor. The next round is packed while one is under way, so two chunks per peer and direction are in memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from areal_core import _C
from areal_core.errors import CancelledError, DeadlineError, PeerError
from areal_core.reshard.transports import Transport

_ACKNOWLEDGED = 1
_TICK_S = 0.002  # torch.distributed counts whole milliseconds, so that its waits may end early


class _Stats(NamedTuple):
    epoch: int
    seconds: float
    sent_bytes: int
    received_bytes: int
    local_bytes: int
    direct_bytes: int
    staging_bytes: int
    sent_checksum: int
    received_checksum: int


class _Frame(NamedTuple):
    """A chunk in one of the two buffers of its message."""

    message: int
    chunk: int
    peer: int
    host: Tensor  # uint8 [header + bytes], pinned for NCCL
    device: Tensor  # the same memory for gloo


class ProcessGroupTransport(Transport):
    """Ranks of a process group that the caller has initialised.

    group: None is the default group. Gloo moves host memory; NCCL moves through staging memory on the current device.
    ranks: engine rank -> rank in the group; None: they are the same.

    Waits are those of torch.distributed: Ctrl-C and `cancel` act between rounds, and a timeout breaks the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, ranks: Mapping[int, int] | None = None) -> None:
        here = dist.get_rank(group)
        numbers = {i: i for i in range(dist.get_world_size(group))} if ranks is None else dict(ranks)
        own = [engine for engine, in_group in numbers.items() if in_group == here]
        if len(own) != 1:
            raise ValueError(f"ProcessGroupTransport: expected one engine rank for group rank {here}, got {own}")
        super().__init__(own[0], None)
        self._group = group
        self._peers = {engine: dist.get_global_rank(group, r) if group else r for engine, r in numbers.items()}
        uses_cuda = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if uses_cuda else torch.device("cpu")
        self._memory: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}
        self._cancelled = False

    @property
    def name(self) -> str:
        """What kind it is."""
        return f"process_group:{dist.get_backend(self._group)}"

    @property
    def staging_bytes(self) -> int:
        """Memory made for chunks so far, headers left out; on a device once more."""
        return sum(host.nbytes - _C.WIRE_HEADER_BYTES for host, _ in self._memory.values())

    def cancel(self) -> None:
        """End the update at its next round."""
        self._cancelled = True

    def run_update(self, executor: _C.Executor, epoch: int, buffers: _C.BoundBuffers, timeout: float) -> Any:
        """Move one update; see `Executor.run`, the caller."""
        start = time.perf_counter()
        update = _Update(self, executor, epoch, buffers, timeout)
        executor.begin(buffers)
        update.agree()
        executor.copy_locally(buffers)
        for phase in (0, 1):
            update.run_phase(phase)
        update.acknowledge()
        return _Stats(
            epoch, time.perf_counter() - start, update.sent_bytes, update.received_bytes, executor.local_bytes, 0,
            self.staging_bytes, update.sent_checksum % 2**64, update.received_checksum % 2**64,
        )  # fmt: skip

    def frame(self, kind: str, message: int, chunk: int, peer: int, chunk_bytes: int) -> _Frame:
        """Memory for a chunk: one of two buffers of its message, kept for the next update."""
        key = (kind, message, chunk % 2)
        size = _C.WIRE_HEADER_BYTES + chunk_bytes
        host, device = self._memory.get(key, (torch.empty(0), torch.empty(0)))
        if host.numel() < size:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            device = host if self._device.type == "cpu" else torch.empty_like(host, device=self._device)
            self._memory[key] = host, device
        return _Frame(message, chunk, peer, host[:size], device[:size])

    def exchange(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> list[Any]:
        """Start sending and receiving tensors of the transport's device, each with its engine rank."""
        if self._cancelled:
            raise CancelledError(f"rank {self.rank}: the transport was cancelled")
        operations = [dist.P2POp(dist.isend, t, self._peers[peer], self._group) for peer, t in sends]
        operations += [dist.P2POp(dist.irecv, t, self._peers[peer], self._group) for peer, t in receives]
        try:
            return dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise PeerError(f"rank {self.rank}: process group: lost a peer: {error}") from error

    def wait(self, works: list[Any], deadline: float) -> None:
        """Raises DeadlineError or PeerError."""
        for work in works:
            left = deadline - time.monotonic()
            try:
                work.wait(timedelta(seconds=max(left, 0.001)))
            except RuntimeError as error:
                if time.monotonic() >= deadline - _TICK_S:
                    raise DeadlineError(
                        f"rank {self.rank}: no progress of the process group in time: {error}"
                    ) from error
                raise PeerError(f"rank {self.rank}: process group: lost a peer: {error}") from error
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    @property
    def device(self) -> torch.device:
        """Where what `exchange` moves must lie."""
        return self._device


class _Update:
    """One update of one rank."""

    def __init__(
        self,
        transport: ProcessGroupTransport,
        executor: _C.Executor,
        epoch: int,
        buffers: _C.BoundBuffers,
        timeout: float,
    ) -> None:
        self._transport, self._executor, self._epoch, self._buffers = transport, executor, epoch, buffers
        self._deadline = time.monotonic() + timeout
        self._sends, self._receives = executor.sends, executor.receives
        self._senders = sorted({peer for peer, _, chunks in self._receives if chunks})
        self._receivers = sorted({peer for peer, _, chunks in self._sends if chunks})
        self.sent_bytes = self.received_bytes = self.sent_checksum = self.received_checksum = 0

    def agree(self) -> None:
        """Receivers tell their senders what they expect; senders compare. No byte moves before."""
        digest = self._executor.plan_digest
        expected = torch.tensor(
            [self._epoch, digest - 2**64 if digest >= 2**63 else digest], device=self._transport.device
        )
        got = {peer: torch.empty_like(expected) for peer in self._receivers}
        self._transport.wait(
            self._transport.exchange([(peer, expected) for peer in self._senders], list(got.items())), self._deadline
        )
        for peer, tensor in got.items():
            if not torch.equal(tensor, expected):
                epoch, plan = tensor.tolist()
                raise PeerError(
                    f"rank {self._transport.rank}: expected rank {peer} to receive epoch {self._epoch} of plan "
                    f"{digest}, got epoch {epoch} of plan {plan % 2**64}"
                )

    def acknowledge(self) -> None:
        """Receivers tell their senders that everything was used."""
        done = torch.full((1,), _ACKNOWLEDGED, device=self._transport.device)
        got = [(peer, torch.empty_like(done)) for peer in self._receivers]
        self._transport.wait(self._transport.exchange([(peer, done) for peer in self._senders], got), self._deadline)

    def run_phase(self, phase: int) -> None:
        """All rounds of a phase: one under way, the next one packed meanwhile."""
        counts = [len(chunks) for _, of, chunks in (*self._sends, *self._receives) if of == phase]
        packed = self._pack(phase, 0)
        for number in range(max(counts, default=0)):
            sends = packed
            receives = list(self._frames("receive", phase, number))
            works = self._transport.exchange(
                [(frame.peer, frame.device) for frame in sends], [(frame.peer, frame.device) for frame in receives]
            )
            packed = self._pack(phase, number + 1)
            self._transport.wait(works, self._deadline)
            self._unpack(receives)

    def _frames(self, kind: str, phase: int, number: int) -> Iterator[_Frame]:
        for message, (peer, of, chunks) in enumerate(self._sends if kind == "send" else self._receives):
            if of == phase and number < len(chunks):
                yield self._transport.frame(kind, message, number, peer, chunks[number])

    def _pack(self, phase: int, number: int) -> list[_Frame]:
        frames = list(self._frames("send", phase, number))
        for frame in frames:
            self.sent_checksum += self._executor.pack_frame(
                frame.message, frame.chunk, self._epoch, frame.host.data_ptr(), self._buffers
            )
            self.sent_bytes += frame.host.nbytes - _C.WIRE_HEADER_BYTES
            if frame.device is not frame.host:
                frame.device.copy_(frame.host, non_blocking=True)
        return frames

    def _unpack(self, frames: list[_Frame]) -> None:
        for frame in frames:
            if frame.device is not frame.host:
                frame.host.copy_(frame.device)
            self.received_checksum += self._executor.unpack_frame(
                frame.message, frame.chunk, self._epoch, frame.host.data_ptr(), self._buffers
            )
            self.received_bytes += frame.host.nbytes - _C.WIRE_HEADER_BYTES
