"""One rank's connections and executor for the updates of a plan: what moves the bytes under publish and receive.

It lives as long as nothing goes wrong: after a failure or a cancelled update its peers have seen it gone, and all ranks
make new ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Event

from torch import Tensor

from areal_core.errors import CancelledError
from areal_core.reshard.control import MIN_TOKEN_BYTES
from areal_core.reshard.control_messages import Prepare
from areal_core.reshard.draft import Draft
from areal_core.reshard.executor import Executor
from areal_core.reshard.member import Transferred
from areal_core.reshard.plan import Plan
from areal_core.reshard.transports import ShmTransport, TcpTransport
from areal_core.reshard.version_store import VersionStore

__all__ = ["DEFAULT_OPTIONS", "DataPlane", "DataPlaneOptions", "check_member"]


@dataclass(frozen=True)
class DataPlaneOptions:
    """How a rank moves bytes.

    Attributes:
        threads: that copy, for each of sending and receiving.
        read_back: hash again what peers have written straight into this rank's memory: a second pass over it.
        seal: take checksums of every version that arrives, so that its readers can verify it: a pass over all of it
            before it is shown. Chunks have checksums of their own, taken on the way, with it and without.
        host: numeric address to listen at (tcp).
        streams: connections per pair of ranks (tcp), the same on every rank.
    """

    threads: int = 1
    read_back: bool = False
    seal: bool = False
    host: str = "127.0.0.1"
    streams: int = 2


DEFAULT_OPTIONS = DataPlaneOptions()


def check_member(call: str, plan: Plan, rank: int, ranks: Sequence[int], token: bytes, transport: str) -> None:
    """Raise ValueError for what would be found out only in a thread of the member."""
    if both := sorted(set(plan.source.ranks) & set(plan.target.ranks)):
        raise ValueError(
            f"{call}: expected trainer and generator ranks that are processes of their own, got rank {both[0]} on both "
            "sides of the plan (number the generator's ranks behind the trainer's, or move the bytes with an Executor)"
        )
    if rank not in ranks:
        raise ValueError(f"{call}: expected one of the ranks {ranks[0]} to {ranks[-1]}, got rank {rank}")
    if transport not in ("shm", "tcp"):
        raise ValueError(f"{call}: expected transport 'shm' or 'tcp', got {transport!r}")
    if len(token) < MIN_TOKEN_BYTES:
        raise ValueError(f"{call}: expected a token of at least {MIN_TOKEN_BYTES} bytes, got {len(token)}")


class DataPlane:
    """Made with the tensors of a source rank, or with the store of a target rank."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        token: bytes,
        transport: str,
        options: DataPlaneOptions,
        *,
        sources: Mapping[str, Tensor] | None = None,
        store: VersionStore | None = None,
    ) -> None:
        self._plan, self._rank, self._options = plan, rank, options
        self._sources = sources
        self._transport: TcpTransport | ShmTransport
        if transport == "tcp":
            self._transport = TcpTransport(rank, token, host=options.host, streams=options.streams)
        else:
            self._transport = ShmTransport(rank, token, exposed=store.exposed() if store is not None else ())
        self._executor: Executor | None = self._make_executor() if sources is not None else None
        self._cancelled = False
        self._connected = False

    @property
    def address(self) -> str:
        """Where peers find it."""
        return self._transport.address

    def run(self, order: Prepare, cancelled: Event, deadline: float, *, draft: Draft | None = None) -> Transferred:
        """This rank's share of one update; target ranks give the draft that it fills."""
        if self._executor is None:  # its memory is known only now
            self._executor = self._make_executor(draft)
        if not self._connected:
            part = self._plan.native.rank(self._rank)
            peers = {self._rank} | {m.target for m in part.sends} | {m.source for m in part.receives}
            addresses = {rank: address for rank, address in order.addresses if rank in peers}
            self._transport.connect(addresses, max(deadline - time.monotonic(), 0.0))
            self._connected = True
        if cancelled.is_set() or self._cancelled:
            raise CancelledError("transfer: aborted before it began")
        left = max(deadline - time.monotonic(), 0.0)
        if draft is None:
            stats = self._executor.run(order.epoch, left)
        else:
            first = draft.arena * len(draft.tensors)
            stats = self._executor.run(order.epoch, left, target=draft.tensors, first_exposed=first)
        return Transferred(stats.received_checksum, stats.sent_bytes, stats.received_bytes, stats.peak_staging_bytes)

    def bytes(self) -> tuple[int, int]:
        """Done, and to be done, of the update under way."""
        if self._executor is None:
            return 0, 0
        return self._executor.progress.done_bytes, self._executor.progress.total_bytes

    def cancel(self) -> None:
        """Make `run` end, now and later."""
        self._cancelled = True
        if self._executor is not None:
            self._executor.cancel()
        self._transport.cancel()

    def close(self) -> None:
        """End the connections."""
        self.cancel()
        self._executor = None
        self._transport.close()

    def _make_executor(self, draft: Draft | None = None) -> Executor:
        return Executor(
            self._plan,
            self._rank,
            self._transport,
            source=self._sources,
            target=draft.tensors if draft is not None else None,
            threads=self._options.threads,
            read_back=self._options.read_back,
        )
