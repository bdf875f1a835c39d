"""Executors move what plans say: every element, bit for bit, over every transport."""

from __future__ import annotations

import math
import os
import threading

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import DTYPES, SIZES, meshes, placements
from transfers import KINDS, World, empty_bytes, in_threads

from areal_core.errors import CancelledError, DeadlineError, PeerError
from areal_core.reshard import (
    Executor,
    Flat,
    InprocGroup,
    InprocTransport,
    Layout,
    Mesh,
    Replicate,
    Shard,
    Spec,
    Storage,
    TensorLayout,
    Topology,
    plan,
)

BF16 = torch.bfloat16


def one_sided(specs: dict[str, Spec], first: int, parts: int, placement: Shard | Flat | Replicate) -> Layout:
    mesh = Mesh(range(first, first + parts), (parts,), ("x",))
    return Layout({name: TensorLayout(spec, mesh, (placement,)) for name, spec in specs.items()})


SMALL = {"a": Spec(BF16, (31, 10)), "b": Spec(torch.float32, (64, 3))}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """The same tensors in two layouts; ranks may be on both sides."""
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True))
    sides = []
    specs = {
        name: Spec(draw(st.sampled_from(DTYPES)), tuple(draw(st.lists(st.sampled_from(SIZES), max_size=3))))
        for name in names
    }
    for _ in range(2):
        mesh = draw(meshes(2))
        sides.append(Layout({n: TensorLayout(s, mesh, draw(placements(s.shape, mesh))) for n, s in specs.items()}))
    return sides[0], sides[1]


def fill(world: World, layout: Layout, memory: dict[int, dict[str, torch.Tensor]], salt: int) -> None:
    for rank, tensors in memory.items():
        for name, tensor in layout.tensors.items():
            if rank in tensor.mesh.ranks:
                part = oracle.bits(oracle.divide(content(tensor, salt), tensor, rank))
                tensors[name].view(-1).view(torch.uint8).copy_(part.view(-1))


def content(tensor: TensorLayout, salt: int) -> torch.Tensor:
    full = oracle.numbered(tensor.spec.shape, tensor.spec.dtype)
    raw = oracle.bits(full) ^ salt
    if tensor.spec.dtype == torch.bool:
        raw &= 1  # torch makes other bytes 1 when it concatenates
    return raw.flatten().view(tensor.spec.dtype).reshape(tensor.spec.shape)


def assert_targets(world: World, salt: int) -> None:
    for rank, tensors in world.targets.items():
        for name, tensor in world.plan.target.tensors.items():
            if rank in tensor.mesh.ranks:
                expected = oracle.bits(oracle.divide(content(tensor, salt), tensor, rank))
                assert torch.equal(oracle.bits(tensors[name]), expected), (name, rank)


@pytest.mark.parametrize("kind", KINDS)
@given(pair=pairs(), chunk_bytes=st.sampled_from([4096, 1 << 20]))
@settings(max_examples=20, deadline=None)
def test_every_element_arrives(kind: str, pair: tuple[Layout, Layout], chunk_bytes: int) -> None:
    world = World(plan(*pair, chunk_bytes=chunk_bytes), kind)
    for epoch in (1, 2):
        fill(world, world.plan.source, world.sources, epoch)
        stats = world.run(epoch)
        assert_targets(world, epoch)
        assert sum(s.sent_bytes for s in stats.values()) == world.plan.stats.wire_bytes
        assert sum(s.received_bytes for s in stats.values()) == world.plan.lower_bound.wire_bytes
        assert sum(s.local_bytes for s in stats.values()) == world.plan.stats.local_bytes
        checksums = [sum(getattr(s, f) for s in stats.values()) for f in ("sent_checksum", "received_checksum")]
        assert checksums[0] % 2**64 == checksums[1] % 2**64
    world.close()


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_zeroed_and_neighbours_stay(kind: str) -> None:
    spec = Spec(BF16, (10, 6))
    padded = Storage(buffer="padded", buffer_shape=(8, 9), offset=9, strides=(9, 1))
    target = Layout({"w": TensorLayout(spec, Mesh((1, 2), (2,), ("x",)), (Shard(0),), padded)})
    world = World(plan(one_sided({"w": spec}, 0, 1, Replicate()), target), kind)
    fill(world, world.plan.source, world.sources, 7)
    world.run(1)
    full = content(world.plan.source.tensors["w"], 7)
    for rank in (1, 2):
        got = world.targets[rank]["padded"]
        expected = torch.zeros(8, 9, dtype=BF16)
        expected[1:6, :6] = full[5 * (rank - 1) : 5 * rank]
        assert torch.equal(oracle.bits(got), oracle.bits(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_a_node_complete_each_other(kind: str) -> None:
    """Multicast: each gets a stripe from another node and passes it on, while the others pass on theirs."""
    specs = {"a": Spec(BF16, (64, 96)), "b": Spec(torch.uint8, (1000,))}
    made = plan(
        one_sided(specs, 0, 2, Flat()),
        one_sided(specs, 4, 3, Replicate()),
        Topology(ranks_per_node=4),
        chunk_bytes=4096,
        multicast=True,
    )
    assert any(message.phase == 1 for message in made.rank(4).receives)
    world = World(made, kind, threads=2)
    for epoch in range(1, 6):
        world.wipe()
        fill(world, made.source, world.sources, epoch)
        world.run(epoch)
        assert_targets(world, epoch)


def test_other_memory_may_be_bound_for_every_update() -> None:
    """Two arenas, exposed one behind the other: updates alternate between them."""
    made = plan(one_sided(SMALL, 0, 1, Flat()), one_sided(SMALL, 1, 1, Flat()))
    arenas = [{name: empty_bytes(spec) for name, spec in sorted(made.target.buffers(1).items())} for _ in range(2)]
    group = InprocGroup([0, 1])
    source = {name: empty_bytes(spec) for name, spec in made.source.buffers(0).items()}
    sender = Executor(made, 0, InprocTransport(group, 0), source)
    exposed = [tensor for arena in arenas for tensor in arena.values()]
    receiver = Executor(made, 1, InprocTransport(group, 1, exposed), arenas[0])
    for epoch in range(1, 6):
        for i, tensor in enumerate(source.values()):
            tensor.fill_(epoch + i)
        arena = arenas[epoch % 2]
        first = len(arena) * (epoch % 2)
        stats = in_threads(
            [0, 1],
            lambda r, e=epoch, a=arena, f=first: (  # type: ignore[misc]
                sender.send(e) if r == 0 else receiver.run(e, target=a, first_exposed=f)
            ),
        )
        assert stats[0].direct_bytes == stats[0].sent_bytes == made.stats.wire_bytes
        assert all(torch.equal(arena[name], source[name]) for name in source)
        assert not any(torch.equal(arenas[1 - epoch % 2][name], source[name]) for name in source)


def test_strided_tensors_go_through_a_host_copy() -> None:
    made = plan(one_sided(SMALL, 0, 1, Flat()), one_sided(SMALL, 0, 1, Flat()))
    source = {
        n: torch.arange(math.prod(s.shape)).to(s.dtype).reshape(-1, 1).repeat(1, 2)[:, 0] for n, s in SMALL.items()
    }
    wide = {n: torch.zeros(math.prod(s.shape), 3, dtype=s.dtype) for n, s in SMALL.items()}
    executor = Executor(made, 0, source=source, target={n: t[:, 1] for n, t in wide.items()})
    for epoch in (1, 2):
        for tensor in source.values():
            tensor.copy_(torch.arange(len(tensor)) + epoch)
        executor.run(epoch)
        for name, tensor in wide.items():
            assert torch.equal(tensor[:, 1], source[name])
            assert not tensor[:, (0, 2)].any()


def test_autograd_learns_that_targets_changed() -> None:
    made = plan(one_sided(SMALL, 0, 1, Flat()), one_sided(SMALL, 0, 1, Flat()))
    buffers = {n: torch.ones(math.prod(s.shape), dtype=s.dtype) for n, s in SMALL.items()}
    target = {n: torch.zeros(math.prod(s.shape), dtype=s.dtype, requires_grad=True) for n, s in SMALL.items()}
    loss = (target["b"] ** 2).sum()
    Executor(made, 0, source=buffers, target=target).run(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_does_not_fit_is_named() -> None:
    made = plan(one_sided(SMALL, 0, 1, Flat()), one_sided(SMALL, 1, 1, Flat()))
    good = {n: empty_bytes(s) for n, s in made.source.buffers(0).items()}
    transport = InprocTransport(InprocGroup([0, 1]), 0)
    with pytest.raises(ValueError, match="Executor: source: tensor 'b': expected, got no tensor of that name"):
        Executor(made, 0, transport, {"a": good["a"]})
    with pytest.raises(ValueError, match=r"tensor 'a': expected dtype = torch.bfloat16, got torch.float32"):
        Executor(made, 0, transport, good | {"a": good["a"].float()})
    with pytest.raises(ValueError, match="rank 0: expected source tensors, got none"):
        Executor(made, 0, transport)
    with pytest.raises(ValueError, match="expected the transport of rank 1, got that of rank 0"):
        Executor(made, 1, transport, good)
    with pytest.raises(ValueError, match=r"Executor.receive: expected a rank of the target, got 0"):
        Executor(made, 0, transport, good).receive(1)
    with pytest.raises(ValueError, match="expected a transport for the messages of rank 0"):
        Executor(made, 0, None, good).run(1)
    both = plan(one_sided(SMALL, 0, 1, Flat()), one_sided(SMALL, 0, 2, Flat()))
    with pytest.raises(ValueError, match=r"rank 0 is on both sides: expected source= and target=, got buffers"):
        Executor(both, 0, transport, good)


@pytest.mark.parametrize("kind", KINDS)
def test_waits_end_by_deadline_cancellation_and_loss(kind: str) -> None:
    made = plan(one_sided(SMALL, 0, 1, Flat()), one_sided(SMALL, 1, 1, Flat()), chunk_bytes=4096)
    world = World(made, kind)
    with pytest.raises(DeadlineError, match=r"rank 0: no grant from rank 1 within 0.05 s"):
        world.executors[0].send(1, 0.05)
    with pytest.raises(PeerError, match="rank 1: lost rank 0"):
        world.executors[1].receive(1)
    world.connect()
    cancelled = threading.Thread(target=world.executors[1].cancel)
    cancelled.start()
    with pytest.raises(CancelledError):
        world.executors[1].receive(1, 60.0)
    cancelled.join()
    with pytest.raises(PeerError, match="rank 0: lost rank 1"):
        world.executors[0].send(1)
    world.connect()
    with pytest.raises(PeerError, match=r"expected rank 1 to receive epoch 1 of plan|rank 1: lost rank 0"):
        in_threads(
            [0, 1], lambda rank: world.executors[rank].run(1 + rank, 10.0) if rank else world.executors[0].run(1)
        )
    world.connect()
    fill(world, made.source, world.sources, 3)
    world.run(2)
    assert_targets(world, 3)
    progress = world.executors[1].progress
    assert progress.done_bytes == progress.total_bytes == made.stats.wire_bytes


@pytest.mark.parametrize("kind", ["shm", "shm_staged", "tcp"])
def test_many_updates_take_no_memory_and_no_descriptors(kind: str) -> None:
    specs = {"w": Spec(BF16, (256, 256))}
    world = World(plan(one_sided(specs, 0, 2, Shard(1)), one_sided(specs, 2, 2, Shard(0)), chunk_bytes=8192), kind)

    def use() -> tuple[int, int]:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE"), len(os.listdir("/proc/self/fd"))

    for epoch in range(50):
        world.run(epoch)
    before = use()
    for epoch in range(50, 1050 if kind == "tcp" else 300):
        stats = world.run(epoch)
    after = use()
    assert after[1] == before[1]
    assert after[0] - before[0] < 2 << 20
    assert all(s.peak_staging_bytes <= 2 * 2 * 8192 for s in stats.values())


def test_reading_back_what_peers_wrote_changes_nothing_else() -> None:
    made = plan(one_sided(SMALL, 0, 1, Flat()), one_sided(SMALL, 1, 1, Flat()))
    world = World(made, "inproc", read_back=True, threads=2)
    fill(world, made.source, world.sources, 5)
    world.run(1)
    assert_targets(world, 5)
    with pytest.raises(ValueError, match="expected threads >= 1, got 0"):
        Executor(made, 0, world.transports[0], source=world.sources[0], threads=0)
