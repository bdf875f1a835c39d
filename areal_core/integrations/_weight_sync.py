"""Weights from the ranks that train to ranks that each want all of them: one version at a time, whole or not at all.

Independent of a framework. Every member of a sync is told of the others by whoever started them, and runs the same
steps:

    hello        lead -> all   which version, and which tensors laid out how; ValueError for who expected another
    plan         all -> lead   the plan's digest, and where to reach the rank's shared memory
    transfer                   shard to shard, into memory that nobody reads yet
    complete     all -> lead   every byte is here and its checksum fits
    commit       lead -> all   the version counts
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from areal_core.errors import ClosedError
from areal_core.integrations._weight_group import Endpoint, Group, Link
from areal_core.reshard import (
    Executor,
    Layout,
    Mesh,
    Plan,
    Replicate,
    SharedTensors,
    ShmTransport,
    Spec,
    TensorLayout,
    Topology,
    TransferStats,
    Transport,
    plan,
)

__all__ = ["Description", "Sync", "describe"]

_HELLO_BYTES = 256


@dataclass(frozen=True)
class Description:
    """What is sent: names in the order of the trainer, and their layout on the trainers."""

    names: tuple[str, ...]
    layout: Layout
    text: bytes
    digest: str


def describe(tensors: Mapping[str, TensorLayout]) -> Description:
    """The description of tensors in the order in which receivers shall get them."""
    layout = Layout(tensors)
    text = json.dumps({"names": list(tensors), "layout": layout.to_json()}).encode()
    return Description(tuple(tensors), layout, text, _digest(text))


def _read_description(text: bytes) -> Description:
    read = json.loads(text)
    layout = Layout.from_json(read["layout"])
    names = tuple(read["names"])
    if sorted(names) != list(layout.tensors):
        raise ValueError("weight sync: expected the names of the layout in the trainer's order, got others")
    return Description(names, layout, text, _digest(text))


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()


class Sync:
    """One member's share of syncs. What it has received, and knows of the tensors, stays from one to the next."""

    def __init__(self) -> None:
        self.description: Description | None = None
        self.version: int | None = None  # of `tensors`, once committed
        self.has_version = False
        self._memory: SharedTensors | None = None
        self._group: Group | None = None
        self._rank = -1
        self._link: Link | None = None
        self._data: Transport | None = None

    def connect(self, group: Group, rank: int, endpoint: Endpoint, timeout: float) -> None:
        """Connect to the others, who must all do so."""
        self.close()
        self._group, self._rank = group, rank
        transport = endpoint.listen(rank, group.token)
        self._link = Link(group, rank, transport)
        transport.connect({member: group.addresses[member] for member in group.members}, timeout)

    def run(
        self,
        version: int | None,
        timeout: float,
        *,
        source: Mapping[str, Tensor] | None = None,
        description: Description | None = None,
    ) -> tuple[TransferStats, Plan]:
        """Move one version; all members call this, trainers with what they hold.

        Raises: DeadlineError, PeerError, CorruptedError, ValueError. The sync is then over for all members: no one has
        the version, `tensors` are of no use, and another `connect` starts anew. An exception is the moment in which the
        lead tells members that the version counts: should one die then, the others have it.
        """
        if self._group is None or self._link is None:
            raise ClosedError("weight sync: expected connected members, got none: build the process group first")
        link = self._link
        link.deadline = time.monotonic() + timeout
        try:
            described = self._hello(link, version, description)
            return self._transfer(link, version, described, source)
        except BaseException:
            self.close()
            raise

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The last version received, in the trainer's order. The memory is written by the next sync.

        Raises: ClosedError when there is none, or a sync has failed since.
        """
        if not self.has_version or self._memory is None or self.description is None:
            raise ClosedError(
                "weight sync: expected a whole version, got none: the last sync failed, or there was none"
            )
        memory = self._memory.tensors
        return ((name, memory[name]) for name in self.description.names)

    def close(self) -> None:
        """End the connections; members that still wait for this one fail."""
        for transport in (self._data, self._link.transport if self._link is not None else None):
            if transport is not None:
                transport.cancel()
                transport.close()
        self._link = self._data = self._group = None

    def cancel(self) -> None:
        """From any thread: end the sync under way."""
        link, data = self._link, self._data
        for transport in (data, link.transport if link is not None else None):
            if transport is not None:
                transport.cancel()

    def _hello(self, link: Link, version: int | None, mine: Description | None) -> Description:
        group = link.group
        said = b""
        if mine is not None and link.is_lead:
            size = 0 if mine.digest == group.known else len(mine.text)
            said = json.dumps({"version": version, "digest": mine.digest, "size": size}).encode()
        hello = json.loads(link.broadcast(said, _HELLO_BYTES))
        if hello["version"] != version:
            raise ValueError(f"weight sync: expected version {version}, got version {hello['version']} of the trainer")
        if hello["size"]:
            text = link.broadcast(mine.text if mine is not None else b"", hello["size"])
            if self.description is None or self.description.digest != hello["digest"]:
                self.description = _read_description(text)
        described = mine or self.description
        if described is None or described.digest != hello["digest"]:
            raise ValueError("weight sync: expected the tensors and layout of the first trainer, got others here")
        self.description = described
        return described

    def _transfer(
        self, link: Link, version: int | None, described: Description, source: Mapping[str, Tensor] | None
    ) -> tuple[TransferStats, Plan]:
        made = _plan(described, link.group)
        target = self._target(made)
        rows = link.exchange(self._row(link.group, made))
        if {row.split(b" ")[0] for row in rows.values()} != {rows[link.rank].split(b" ")[0]}:
            raise ValueError("weight sync: expected the same plan on all members, got several")
        if self._data is not None:
            addresses = {rank: row.split(b" ")[1].decode() for rank, row in rows.items()}
            self._data.connect(addresses, link.left())  # type: ignore[attr-defined]
        transport = self._data if self._data is not None else link.transport
        executor = Executor(made, self._rank, transport, source=source, target=target)
        stats = executor.run(link.next_epoch(), link.left())
        link.exchange(b"complete")
        self.version, self.has_version = version, target is not None
        return stats, made

    def _target(self, made: Plan) -> dict[str, Tensor] | None:
        """Memory to receive into; that of the last sync, if it was of the same tensors."""
        self.version, self.has_version = None, False
        if self._rank not in made.target.ranks:
            return None
        specs = made.target.buffers(self._rank)
        if self._memory is None or {n: Spec.of(t) for n, t in self._memory.tensors.items()} != specs:
            self._memory = None  # before the next one is made
            self._memory = SharedTensors(specs)
        return self._memory.tensors

    def _row(self, group: Group, made: Plan) -> bytes:
        """The plan's digest and, on one machine, where the rank's memory is reached."""
        address = ""
        if group.one_machine:
            exposed = self._memory.exposed if self._rank in made.target.ranks and self._memory is not None else ()
            self._data = shared = ShmTransport(self._rank, group.token, exposed=exposed)
            address = shared.address
        return f"{made.digest:016x} {address}".encode()


def _plan(described: Description, group: Group) -> Plan:
    mesh = Mesh(group.receivers, (len(group.receivers),), ("replica",))
    target = Layout({name: TensorLayout(x.spec, mesh, (Replicate(),)) for name, x in described.layout.tensors.items()})
    topology = Topology(ranks_per_node=group.ranks_per_node)
    return plan(described.layout, target, topology, chunk_bytes=group.chunk_bytes, multicast=group.multicast)
