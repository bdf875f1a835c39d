"""Who takes part in a sync of weights, and how members reach and talk to each other.

What members tell each other travels as small transfers of the resharding engine: authenticated, checksummed, bounded by
the deadline of the sync, and over at once when a member is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_core.errors import DeadlineError
from areal_core.reshard import Executor, Layout, Mesh, Replicate, Spec, TcpTransport, TensorLayout, plan
from areal_core.reshard.control import new_token

__all__ = ["Endpoint", "Group", "Link", "group_of", "node_name"]

MAX_CHUNK_BYTES = 8 << 20
MIN_CHUNK_BYTES = 4 << 10
_ROW_BYTES = 128
_STREAMS = 2


class Endpoint:
    """A port that is held for a rank that does not know its number yet.

    host: numeric address that the other members reach.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket: socket.socket | None = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((host, 0))
        self.host, self.port = host, int(self._socket.getsockname()[1])

    @property
    def address(self) -> str:
        """Where the transport will listen."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def listen(self, rank: int, token: bytes) -> TcpTransport:
        """Turn the port into the rank's transport."""
        self.close()
        return TcpTransport(rank, token, host=self.host, port=self.port, streams=_STREAMS)

    def close(self) -> None:
        """Give the port back."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@dataclass(frozen=True)
class Group:
    """Who takes part in one sync; equal on all members.

    Attributes:
        trainers: engine ranks by the trainers' own numbers; without shards only the first takes part.
        receivers: engine ranks.
        addresses: of every member, by engine rank.
        ranks_per_node: engine rank r is on node r // ranks_per_node.
        shards: whether each trainer sends what it holds, rather than the first one everything.
        chunk_bytes: most bytes that travel at once between two ranks.
        one_machine: whether all are on one machine, and may share memory.
        known: digest of the description that all members have already, "" for none.
        token: secret of this sync.
    """

    trainers: tuple[int, ...]
    receivers: tuple[int, ...]
    addresses: Mapping[int, str]
    ranks_per_node: int
    shards: bool
    chunk_bytes: int
    one_machine: bool
    known: str
    token: bytes = field(repr=False)

    @property
    def lead(self) -> int:
        """The member that decides: the first trainer."""
        return self.trainers[0]

    @property
    def members(self) -> tuple[int, ...]:
        """All that take part."""
        return (*(self.trainers if self.shards else self.trainers[:1]), *self.receivers)

    @property
    def multicast(self) -> bool:
        """Whether a version should cross to a node of several receivers once."""
        nodes = [rank // self.ranks_per_node for rank in self.receivers]
        return len(set(nodes)) < len(nodes) and not self.one_machine


def group_of(
    trainers: Sequence[Mapping[str, Any]], receivers: Sequence[Mapping[str, Any]], *, shards: bool, share_memory: bool
) -> Group:
    """Number the members by node: each gives its "node", "address", "bucket_bytes" and "known".

    Raises: ValueError for a bucket too small for the number of members.
    """
    everyone = [*trainers, *receivers]
    nodes: dict[str, list[int]] = {}
    for i, member in enumerate(everyone):
        nodes.setdefault(member["node"], []).append(i)
    width = max(map(len, nodes.values()))
    numbers = {i: n * width + k for n, node in enumerate(nodes.values()) for k, i in enumerate(node)}
    ranks = [numbers[i] for i in range(len(everyone))]
    # a rank holds two chunks for each peer and direction, and may hold two buckets
    bucket = min(member["bucket_bytes"] for member in everyone)
    chunk = min(MAX_CHUNK_BYTES, bucket // max(len(trainers) if shards else 1, len(receivers), 1))
    if chunk < MIN_CHUNK_BYTES:
        raise ValueError(
            f"weight sync: expected buckets of {MIN_CHUNK_BYTES} bytes for each of "
            f"{max(len(trainers), len(receivers))} peers, got {bucket} bytes"
        )
    known = {member["known"] for member in everyone}
    return Group(
        trainers=tuple(ranks[: len(trainers)]),
        receivers=tuple(ranks[len(trainers) :]),
        addresses={rank: member["address"] for rank, member in zip(ranks, everyone, strict=True)},
        ranks_per_node=width,
        shards=shards,
        chunk_bytes=chunk,
        one_machine=share_memory and len(nodes) == 1,
        known=known.pop() if len(known) == 1 else "",
        token=new_token(),
    )


class Link:
    """The members connected to each other, and what they tell each other through the lead."""

    def __init__(self, group: Group, rank: int, transport: TcpTransport) -> None:
        self.group, self.rank, self.transport = group, rank, transport
        self.is_lead = rank == group.lead
        self.deadline = 0.0
        self._epoch = 0
        self._others = [member for member in group.members if member != group.lead]

    def left(self) -> float:
        """Seconds. Raises DeadlineError when there are none."""
        left = self.deadline - time.monotonic()
        if left <= 0.0:
            raise DeadlineError(f"weight sync: rank {self.rank}: the members were not done in time")
        return left

    def next_epoch(self) -> int:
        """Every transfer of a sync has a number of its own."""
        self._epoch += 1
        return self._epoch

    def broadcast(self, said: bytes, size: int) -> bytes:
        """What the lead says, `size` bytes at most, without trailing zeros."""
        spec = Spec(torch.uint8, (size,))
        source = Layout({"said": TensorLayout(spec, _mesh([self.group.lead]), (Replicate(),))})
        target = Layout({"said": TensorLayout(spec, _mesh(self._others), (Replicate(),))})
        buffer = _bytes(said, size)
        self._run(source, target, {"said": buffer})
        return buffer.numpy().tobytes().rstrip(b"\0")

    def exchange(self, row: bytes) -> dict[int, bytes]:
        """Every member's row, once all have said theirs."""
        spec = Spec(torch.uint8, (_ROW_BYTES,))
        source = Layout({f"row{r}": TensorLayout(spec, _mesh([r]), (Replicate(),)) for r in self._others})
        target = Layout({n: TensorLayout(spec, _mesh([self.group.lead]), (Replicate(),)) for n in source.tensors})
        mine = {f"row{self.rank}": _bytes(row, _ROW_BYTES)}
        rows = {name: _bytes(b"", _ROW_BYTES) for name in target.tensors} if self.is_lead else mine
        self._run(source, target, rows)
        members = sorted(self.group.members)
        told = b"".join((rows | mine)[f"row{r}"].numpy().tobytes() for r in members) if self.is_lead else b""
        size = _ROW_BYTES * len(members)
        table = self.broadcast(told, size).ljust(size, b"\0")
        parts = [table[i * _ROW_BYTES : (i + 1) * _ROW_BYTES].rstrip(b"\0") for i in range(len(members))]
        return dict(zip(members, parts, strict=True))

    def _run(self, source: Layout, target: Layout, buffers: dict[str, Tensor]) -> None:
        made = plan(source, target)
        Executor(made, self.rank, self.transport, buffers, direct=False).run(self.next_epoch(), self.left())


def _mesh(ranks: Iterable[int]) -> Mesh:
    listed = list(ranks)
    return Mesh(listed, (len(listed),), ("rank",))


def _bytes(said: bytes, size: int) -> Tensor:
    if len(said) > size:
        raise ValueError(f"weight sync: expected at most {size} bytes, got {len(said)}")
    return torch.frombuffer(bytearray(said.ljust(size, b"\0")), dtype=torch.uint8)


def node_name() -> str:
    """Equal in processes that can share memory: of one boot of one machine, in one network namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    return "/".join(parts)
