"""Runs plans on element numbers, and checks all that a plan promises."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from oracle import held
from torch import Tensor

from areal_core.reshard import Box, Layout, Mesh, Message, Placement, Plan, Spec, TensorLayout, Topology, plan


def tensor(
    shape: tuple[int, ...],
    ranks: range | list[int],
    *placements: Placement,
    mesh: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> TensorLayout:
    mesh = mesh or (len(ranks),)
    return TensorLayout(Spec(dtype, shape), Mesh(ranks, mesh, tuple("abc"[: len(mesh)])), placements)


def one(*args: object, **kwargs: object) -> Layout:
    return Layout({"w": tensor(*args, **kwargs)})  # type: ignore[arg-type]


def part(flat: Tensor, box: Box, shape: tuple[int, ...]) -> Tensor:
    """A box of a flattened tensor, as a view."""
    return flat.reshape(shape)[tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))]


class Execution:
    """Runs a plan on element numbers; fails where it sends what a rank does not have or writes an element twice."""

    def __init__(self, made: Plan) -> None:
        self.source, self.target = made.source, made.target
        self.ranks = sorted({*made.source.ranks, *made.target.ranks})
        self.parts = {rank: made.rank(rank) for rank in self.ranks}
        self.has: dict[tuple[int, str], Tensor] = {}  # which elements
        self.got: dict[tuple[int, str], Tensor] = {}  # how often each
        self.wire_bytes = self.nic_bytes = self.local_bytes = 0
        self.sent: dict[int, int] = defaultdict(int)
        self.item = {name: t.spec.dtype.itemsize for name, t in made.target.tensors.items()}
        for name, t in made.source.tensors.items():
            for rank in t.mesh.ranks:
                self.has[rank, name] = self._count(t, rank) > 0
        for rank, part in self.parts.items():
            for atom in part.local_copies:
                self.local_bytes += self._copy(rank, rank, atom.tensor, atom.box)
        for phase in (0, 1):
            for message in [m for part in self.parts.values() for m in part.receives if m.phase == phase]:
                self._receive(message, made)
            if phase == 0:
                self.has = {key: got > 0 for key, got in self.got.items()}

    @staticmethod
    def _count(t: TensorLayout, rank: int) -> Tensor:
        """How often each element is in a rank's part: 0 or 1."""
        count = torch.zeros(math.prod(t.spec.shape), dtype=torch.int64)
        if rank in t.mesh.ranks:
            count[held(t, rank).flatten()] += 1
        return count

    def _copy(self, rank: int, holder: int, name: str, box: Box) -> int:
        shape = self.target.tensors[name].spec.shape
        has = self.has.get((holder, name))
        assert has is not None, f"rank {holder} does not hold {name}"
        assert bool(part(has, box, shape).all()), f"rank {holder} does not hold {name} {box}"
        got = self.got.setdefault((rank, name), torch.zeros(math.prod(shape), dtype=torch.int64))
        part(got, box, shape).add_(1)
        elements = math.prod(box.size)
        assert elements > 0, "an empty atom"
        return elements * self.item[name]

    def _receive(self, message: Message, made: Plan) -> None:
        sends = [m for m in self.parts[message.source].sends if (m.target, m.phase) == (message.target, message.phase)]
        (sent,) = sends
        assert (sent.bytes, sent.chunks, sent.atoms) == (message.bytes, message.chunks, message.atoms)
        atoms = sent.atoms
        sizes = [self._copy(sent.target, sent.source, atom.tensor, atom.box) for atom in atoms]
        assert sum(sizes) == sent.bytes > 0
        first = 0
        for number, chunk in enumerate(sent.chunks):
            assert (chunk.id, chunk.first_atom) == (number, first)
            first += chunk.atom_count
            assert sum(sizes[chunk.first_atom : first]) == chunk.bytes <= made.chunk_bytes
        assert first == len(atoms)
        self.wire_bytes += sent.bytes
        topology = made.topology
        if sent.source // topology.ranks_per_node != sent.target // topology.ranks_per_node:
            self.nic_bytes += sent.bytes
        if sent.phase == 0:
            self.sent[sent.source] += sent.bytes

    def check(self, made: Plan) -> None:
        for name, t in self.target.tensors.items():
            for rank in self.ranks:
                wanted = self._count(t, rank)
                assert torch.equal(self.got.get((rank, name), torch.zeros_like(wanted)), wanted)
        assert made.stats.wire_bytes == made.lower_bound.wire_bytes == self.wire_bytes
        assert made.stats.nic_bytes == self.nic_bytes >= made.lower_bound.nic_bytes
        assert made.stats.local_bytes == self.local_bytes
        assert {s.rank: s.bytes for s in made.stats.senders if s.bytes} == dict(self.sent)
        assert made.stats.messages == sum(len(part.receives) for part in self.parts.values())
        assert made.stats.messages == sum(len(part.sends) for part in self.parts.values())
        assert made.stats.seconds >= made.lower_bound.seconds * (1 - 1e-12)


def execute(source: Layout, target: Layout, topology: Topology | None = None, **options: object) -> Plan:
    """The plan, run and checked."""
    made = plan(source, target, topology or Topology(), **options)  # type: ignore[arg-type]
    Execution(made).check(made)
    return made
