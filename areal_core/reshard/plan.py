"""Who sends which bytes to whom: a pure function of two layouts and a topology.

Every rank makes the same plan from the same layouts, compares its digest with the others', and asks for its own part::

    made = plan(trainer, generator, Topology(nic_bytes_per_s=50e9))
    made.stats.wire_bytes == made.lower_bound.wire_bytes  # nothing crosses the wire that need not
    made.rank(3).receives[0].atoms  # boxes of canonical tensors, in wire order

Bytes that a rank holds already are copied locally. Of several replicas the flow chooses senders so that the most loaded
one is as light as possible; `lower_bound.egress_seconds` is its proof. `multicast=True` sends what several ranks of a
node need over the NICs once: each gets a stripe and passes it on within the node (phase 1).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from areal_core import _C
from areal_core.reshard.layout import Layout
from areal_core.reshard.placements import Box, check_int
from areal_core.reshard.topology import Topology

DEFAULT_CHUNK_BYTES = 8 << 20
CACHED_PLANS = 8

_DEFAULT_TOPOLOGY = Topology()


class Atom(NamedTuple):
    """A box of one canonical tensor that goes from one rank to one other."""

    tensor: str
    box: Box


class Chunk(NamedTuple):
    """What travels at once: `atom_count` atoms from `first_atom` on, back to back, each row-major."""

    id: int
    bytes: int
    first_atom: int
    atom_count: int


class SenderLoad(NamedTuple):
    """What a rank that could send sends in phase 0."""

    rank: int
    bytes: int
    nic_bytes: int  # of these, to other nodes


class LowerBound(NamedTuple):
    """What no plan can beat in which every node gets its bytes from their holders; seconds under the topology."""

    wire_bytes: int  # bytes that target ranks need and do not hold
    nic_bytes: int  # of these, with no holder on the node (multicast: counted once for the node)
    ingress_seconds: float  # the most loaded target rank
    node_seconds: float  # the most loaded node's ingress
    egress_seconds: float  # the tightest set of holders: the flow's minimum cut
    seconds: float  # the largest of them


class PlanStats(NamedTuple):
    """What the plan costs."""

    wire_bytes: int  # between ranks, both phases
    nic_bytes: int  # of these, between nodes
    local_bytes: int
    messages: int
    max_received_bytes: int  # by one rank, both phases
    senders: tuple[SenderLoad, ...]  # every rank that could send anything, ascending
    sender_max_over_mean: float  # of bytes / bandwidth in phase 0, among ranks that can take over from each other
    seconds: float  # estimated: every link at its rate, phase 1 after phase 0
    unused_source_tensors: int  # in the source, not in the target


class Message:
    """All that goes from one rank to another in one phase."""

    def __init__(self, native: _C.Message, names: tuple[str, ...]) -> None:
        """Private: use `Plan.rank`."""
        self._native, self._names = native, names
        self.source: int = native.source
        self.target: int = native.target
        self.phase: int = native.phase
        self.bytes: int = native.bytes

    @property
    def atoms(self) -> list[Atom]:
        """In the order of the wire."""
        return _atoms(self._native.atoms, self._names)

    @property
    def chunks(self) -> list[Chunk]:
        """In the order of the wire."""
        return [Chunk(*chunk) for chunk in self._native.chunks]

    def __repr__(self) -> str:
        return f"Message({self.source} -> {self.target}, phase {self.phase}, {self.bytes} bytes)"


class RankPlan:
    """One rank's part: messages sorted by (phase, peer)."""

    def __init__(self, native: _C.RankPlan, names: tuple[str, ...]) -> None:
        """Private: use `Plan.rank`."""
        self._native, self._names = native, names
        self.rank: int = native.rank
        self.sends = tuple(Message(message, names) for message in native.sends)
        self.receives = tuple(Message(message, names) for message in native.receives)

    @property
    def local_copies(self) -> list[Atom]:
        """What the rank holds as a source and needs as a target."""
        return _atoms(self._native.local_copies, self._names)

    def __repr__(self) -> str:
        sent, received = (sum(m.bytes for m in messages) for messages in (self.sends, self.receives))
        return f"RankPlan(rank {self.rank}: sends {sent} bytes, receives {received})"


class Plan:
    """A transfer from the source's ranks to the target's; see `plan`. Immutable; safe to share between threads."""

    def __init__(
        self, source: Layout, target: Layout, topology: Topology, *, chunk_bytes: int, multicast: bool
    ) -> None:
        """Without the cache: use `plan`."""
        self.source, self.target, self.topology = source, target, topology
        self.chunk_bytes, self.multicast = chunk_bytes, multicast
        self.native = _C.Plan(source.native, target.native, topology.native, chunk_bytes, multicast)
        self.stats = _stats(self.native.stats)
        bound = self.native.lower_bound
        self.lower_bound = LowerBound(*(getattr(bound, name) for name in LowerBound._fields))
        self._names = tuple(target.tensors)

    @property
    def digest(self) -> int:
        """Covers both layouts, topology, options and every choice: equal on all ranks, compared before data moves."""
        return self.native.digest

    def rank(self, rank: int) -> RankPlan:
        """What one rank sends, receives and copies. Made when asked.

        Raises: ValueError for a rank of neither layout.
        """
        return RankPlan(self.native.rank(rank), self._names)

    def __repr__(self) -> str:
        return (
            f"Plan({self.stats.wire_bytes} wire bytes in {self.stats.messages} messages, "
            f"{self.stats.seconds:.3g} s, bound {self.lower_bound.seconds:.3g} s, digest={self.digest:016x})"
        )


@dataclass(frozen=True)
class _Key:
    """All that a plan depends on."""

    source_digest: int
    target_digest: int
    topology: Topology
    chunk_bytes: int
    multicast: bool
    source: Layout = field(compare=False)
    target: Layout = field(compare=False)


@functools.lru_cache(maxsize=CACHED_PLANS)
def _cached_plan(key: _Key) -> Plan:
    return Plan(key.source, key.target, key.topology, chunk_bytes=key.chunk_bytes, multicast=key.multicast)


def plan(
    source: Layout,
    target: Layout,
    topology: Topology = _DEFAULT_TOPOLOGY,
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    multicast: bool = False,
) -> Plan:
    """The plan that brings the target's tensors from where the source holds them.

    source, target: layouts of the same canonical tensors; the source may have more.
    chunk_bytes: most bytes that travel at once (4-64 MiB).
    multicast: where several ranks of a node need the same, send it to the node once.

    Deterministic: equal in every process, whatever the order of the layouts' tensors. The last CACHED_PLANS plans are
    kept by all that they depend on (digests of both layouts, topology, options) and returned again.

    Raises: ValueError naming the tensor that the source lacks, that differs in dtype or shape, or of which some box has
    no reachable holder; the target rank that needs bytes and cannot be reached.
    """
    check_int("plan", "chunk_bytes", chunk_bytes)
    if not isinstance(multicast, bool):
        raise TypeError(f"plan: expected multicast of type bool, got {type(multicast).__name__}")
    key = _Key(source.digest, target.digest, topology, chunk_bytes, multicast, source, target)
    return _cached_plan(key)


def _stats(native: _C.PlanStats) -> PlanStats:
    values: dict[str, Any] = {name: getattr(native, name) for name in PlanStats._fields}
    return PlanStats(**values | {"senders": tuple(SenderLoad(*sender) for sender in native.senders)})


def _atoms(tuples: list[tuple[int, int, list[int], list[int]]], names: tuple[str, ...]) -> list[Atom]:
    return [Atom(names[target], Box(tuple(start), tuple(size))) for _, target, start, size in tuples]
