"""Plans: every element arrives once, from a rank that has it, and no plan could send less."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_execution import execute, one, tensor

from areal_core import _C
from areal_core.reshard import (
    Box,
    Flat,
    Layout,
    Mesh,
    Placement,
    Plan,
    Ragged,
    RankPlan,
    Replicate,
    Shard,
    Spec,
    StridedShard,
    TensorLayout,
    Topology,
    plan,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: more threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def described(made: Plan) -> tuple[object, ...]:
    """Every choice of a plan."""

    def of_rank(rank: RankPlan) -> tuple[object, ...]:
        messages = [(m.source, m.target, m.phase, m.atoms, m.chunks) for m in (*rank.sends, *rank.receives)]
        return (rank.rank, messages, rank.local_copies)

    ranks = sorted({*made.source.ranks, *made.target.ranks})
    return made.digest, made.stats, made.lower_bound, [of_rank(made.rank(rank)) for rank in ranks]


# -- any layout to any layout -----------------------------------------------------------------------------------------

MESHES = [(1,), (2,), (3,), (4,), (5,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]


@st.composite
def placed(draw: st.DrawFn, spec: Spec, ranks: list[int], shape: tuple[int, ...]) -> TensorLayout:
    dims = len(spec.shape)
    placements: list[Placement] = [Replicate()] * len(shape)
    kind = draw(st.sampled_from(["shard", "strided", "flat", "ragged"]))
    along = draw(st.integers(0, len(shape) - 1))
    if kind == "flat":
        placements[along] = Flat()
    elif kind == "ragged" and dims:
        cuts = sorted(draw(st.lists(st.integers(0, spec.shape[0]), max_size=4)))
        boxes: list[list[Box]] = [[] for _ in range(shape[along])]
        for begin, end in itertools.pairwise([0, *cuts, spec.shape[0]]):
            owner, copy = (draw(st.integers(0, shape[along] - 1)) for _ in range(2))
            box = Box((begin, *(0 for _ in spec.shape[1:])), (end - begin, *spec.shape[1:]))
            boxes[owner].append(box)
            if copy != owner and end - begin > 1:  # a replica, of a part only
                boxes[copy].append(Box((begin + 1, *box.start[1:]), (end - begin - 1, *box.size[1:])))
        placements[along] = Ragged(tuple(map(tuple, boxes)))
    elif dims:
        choice = st.one_of(st.just(Replicate()), st.integers(0, dims - 1).map(Shard))
        placements = [draw(choice) for _ in shape]
        if kind == "strided":
            placements[0] = StridedShard(draw(st.integers(0, dims - 1)), draw(st.integers(1, 3)))
    names = tuple("abc"[: len(shape)])
    return TensorLayout(spec, Mesh(ranks, shape, names), tuple(placements))


@st.composite
def sides(draw: st.DrawFn) -> tuple[Layout, Layout]:
    size = st.sampled_from([0, 1, 2, 3, 5, 7, 8])
    dtypes = st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn])
    specs = [Spec(draw(dtypes), tuple(draw(st.lists(size, max_size=3)))) for _ in range(draw(st.integers(1, 4)))]
    layouts = []
    for _ in range(2):
        shape = draw(st.sampled_from(MESHES))
        ranks = draw(st.permutations(range(10)))[: math.prod(shape)]
        layouts.append(Layout({f"t{i}": draw(placed(spec, ranks, shape)) for i, spec in enumerate(specs)}))
    return layouts[0], layouts[1]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    slow = draw(st.dictionaries(st.integers(0, 9), st.sampled_from([10.0, 500.0]), max_size=2))
    return Topology(draw(st.sampled_from([1, 2, 4, 8])), 1000.0, draw(st.sampled_from([1000.0, 4000.0])), slow)


@settings(max_examples=200, deadline=None)
@given(sides(), topologies(), st.sampled_from([64, 100, 8 << 20]), st.booleans())
def test_every_element_arrives_once(
    layouts: tuple[Layout, Layout], topology: Topology, chunk_bytes: int, multicast: bool
) -> None:
    execute(*layouts, topology, chunk_bytes=chunk_bytes, multicast=multicast)


@settings(max_examples=40, deadline=None)
@given(sides(), topologies(), st.randoms(use_true_random=False))
def test_the_order_of_tensors_changes_nothing(
    layouts: tuple[Layout, Layout], topology: Topology, random: object
) -> None:
    def shuffled(layout: Layout) -> Layout:
        names = list(layout.tensors)
        random.shuffle(names)  # type: ignore[attr-defined]
        return Layout({name: layout.tensors[name] for name in names})

    options = {"chunk_bytes": 64, "multicast": False}
    first = Plan(*layouts, topology, **options)  # type: ignore[arg-type]
    again = Plan(*map(shuffled, layouts), topology, **options)  # type: ignore[arg-type,misc]
    assert described(first) == described(again)


def test_another_process_makes_the_same_plan() -> None:
    code = """
import torch
from areal_core.reshard import *
def side(ranks, *placements):
    mesh = Mesh(ranks, (2, 3), ("dp", "tp"))
    return Layout({f"t{i}": TensorLayout(Spec(torch.bfloat16, (7, 10 + i % 3)), mesh, placements) for i in range(40)})
made = plan(side(range(6), Replicate(), Shard(0)), side(range(4, 10), Shard(1), Replicate()), chunk_bytes=64)
parts = [made.rank(r) for r in range(10)]
print(made.digest, [(m, m.atoms, m.chunks) for p in parts for m in p.sends], made.stats)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    here = io.StringIO()
    with contextlib.redirect_stdout(here):
        exec(code, {})
    assert run.stdout == here.getvalue() != ""


# -- small inputs that have broken others -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 7, 8, 9])
@pytest.mark.parametrize("placement", [Shard(0), Flat(), StridedShard(0, 2)])
def test_fewer_elements_than_ranks(n: int, placement: Placement) -> None:
    made = execute(one((n,), range(8), placement), one((n,), range(8, 11), Shard(0)))
    assert made.stats.wire_bytes == 2 * n


def test_scalars() -> None:
    source, target = (
        one((), range(4), Replicate(), dtype=torch.float32),
        one((), range(2, 8), Replicate(), dtype=torch.float32),
    )
    made = execute(source, target)
    assert (made.stats.wire_bytes, made.stats.local_bytes) == (16, 8)


def test_nothing_to_move() -> None:
    layout = one((4, 4), range(4), Shard(0))
    made = execute(layout, layout)
    assert made.stats.wire_bytes == made.stats.messages == 0
    assert (made.stats.seconds, made.lower_bound.seconds, made.stats.sender_max_over_mean) == (0, 0, 1)
    assert made.rank(0).sends == made.rank(0).receives == ()
    assert execute(Layout({}), Layout({})).stats.wire_bytes == 0


def test_more_than_two_to_the_31_elements() -> None:
    shape = (70_000, 80_000)
    made = plan(one(shape, range(2), Shard(0)), one(shape, range(2, 6), Shard(1)), chunk_bytes=64 << 20)
    assert made.stats.wire_bytes == made.lower_bound.wire_bytes == 2 * 70_000 * 80_000
    for rank in range(2, 6):
        atoms = [atom for message in made.rank(rank).receives for atom in message.atoms]
        assert sum(math.prod(atom.box.size) for atom in atoms) == 70_000 * 20_000
        assert all(chunk.bytes <= 64 << 20 for message in made.rank(rank).receives for chunk in message.chunks)
    rows = sorted(atom.box.start[0] for message in made.rank(2).receives for atom in message.atoms)
    assert rows[0] == 0
    assert len(set(rows)) == len(rows)


def test_sums_that_leave_64_bits_are_refused() -> None:
    shape = (2**51,)
    with pytest.raises(ValueError, match="at most 4e"):
        plan(one(shape, range(4), Shard(0)), one(shape, range(4, 2004), Replicate()))
    many = one((50_000,), range(50_000), Shard(0))
    with pytest.raises(ValueError, match="links of at most 9e"):
        plan(many, many, Topology(nic_bytes_per_s=1e14, intra_node_bytes_per_s=1e14))


def test_a_replica_takes_its_share() -> None:
    """One tensor dominates: it is divided among the replicas."""
    source = Layout({"big": tensor((1000, 64), range(4), Replicate()), "small": tensor((3,), range(4), Replicate())})
    target = Layout({"big": tensor((1000, 64), [9], Replicate()), "small": tensor((3,), [9], Replicate())})
    made = execute(source, target, Topology(ranks_per_node=1))
    assert made.stats.sender_max_over_mean <= 1.05
    loads = [sender.bytes for sender in made.stats.senders]
    assert max(loads) <= 1.05 * sum(loads) / 4


def test_a_slow_link_sends_less() -> None:
    source, target = one((1100, 64), range(2), Replicate()), one((1100, 64), [8], Replicate())
    made = execute(source, target, Topology(1, 1000.0, links={0: 100.0}))
    slow, fast = (sender.bytes for sender in made.stats.senders)
    assert slow == pytest.approx(fast / 10, rel=0.02)
    assert made.lower_bound.egress_seconds == pytest.approx(1100 * 64 * 2 / 1100)


def test_a_dead_replica_sends_nothing() -> None:
    source, target = one((64, 8), range(4), Replicate()), one((64, 8), [8, 9], Shard(0))
    made = execute(source, target, Topology(links={2: 0.0}))
    assert [sender.rank for sender in made.stats.senders] == [0, 1, 3]
    assert made.rank(2).sends == ()


def test_what_only_one_rank_has_bounds_the_time() -> None:
    source = Layout({"common": tensor((64, 8), range(4), Replicate()), "rare": tensor((64, 8), [0], Replicate())})
    target = Layout({name: tensor((64, 8), [8], Replicate()) for name in ("common", "rare")})
    made = execute(source, target, Topology(1, 1000.0))
    loads = {sender.rank: sender.bytes for sender in made.stats.senders}
    assert loads[0] == 1024  # the rare one and none of the common
    assert made.lower_bound.egress_seconds == pytest.approx(1.024)


def test_neighbours_send_before_the_nic_does() -> None:
    source, target = one((64, 8), [0, 8, 16], Replicate()), one((64, 8), [1, 2], Shard(0))
    made = execute(source, target, Topology(8, 1000.0, 100_000.0))
    assert made.lower_bound.nic_bytes == 0
    # What rank 0 has no time for in the least possible time, 1024 / (2000 + 100000) s, comes over the NICs.
    assert made.stats.nic_bytes <= 1024 * 2000 / 102_000 + 8
    assert made.rank(1).receives[0].source == 0


def test_kv_heads_fewer_than_ranks() -> None:
    """Four heads over eight ranks: two ranks hold each."""
    source = one((4 * 128, 32), range(4), Shard(0))
    target = one((4 * 128, 32), range(8, 16), Shard(0), Replicate(), mesh=(4, 2))
    made = execute(source, target)
    assert made.stats.wire_bytes == 2 * 2 * 4 * 128 * 32
    once = execute(source, target, multicast=True)
    assert once.stats.nic_bytes == once.lower_bound.nic_bytes == 2 * 4 * 128 * 32
    assert once.stats.wire_bytes == made.stats.wire_bytes


def test_multicast_crosses_each_nic_once() -> None:
    shape = (2051, 256)  # 512 KiB from each holder: striped over the eight ranks of each node
    source, target = one(shape, range(2), Shard(0)), one(shape, range(8, 24), Replicate())
    made = execute(source, target, multicast=True)
    assert made.stats.nic_bytes == made.lower_bound.nic_bytes == 2 * 2 * 2051 * 256
    received = [sum(m.bytes for m in made.rank(r).receives if m.phase == 0) for r in range(8, 24)]
    assert max(received) - min(received) <= 2 * 512
    striped = [m for rank in range(8, 24) for m in made.rank(rank).receives]
    assert all(atom.box.size[1] == 256 for m in striped for atom in m.atoms)  # whole rows
    assert all(len(m.atoms) == 1 for m in striped if m.phase == 0)
    assert made.stats.seconds < plan(source, target).stats.seconds


def test_shared_scales() -> None:
    """Ragged boxes that shards share: each gets the whole block."""
    boxes = Ragged((((Box((0, 0), (2, 3)),)), ((Box((1, 0), (2, 3)),))))
    execute(one((3, 3), range(2), Shard(1), dtype=torch.float32), one((3, 3), range(4, 6), boxes, dtype=torch.float32))


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_refusals_name_the_tensor() -> None:
    w = tensor((4,), range(2), Shard(0))
    with pytest.raises(ValueError, match=r"tensor 'v': expected in the source"):
        plan(Layout({"w": w}), Layout({"v": w, "w": w}))
    with pytest.raises(ValueError, match=r"tensor 'w': expected the target's shape \[5\], got \[4\]"):
        plan(Layout({"w": w}), one((5,), range(2), Shard(0)))
    with pytest.raises(ValueError, match=r"tensor 'w': expected the target's dtype float32 of 4 bytes, got bfloat16"):
        plan(Layout({"w": w}), one((4,), range(2), Shard(0), dtype=torch.float32))
    with pytest.raises(ValueError, match=r"reachable holder of tensor 'w' \[0:2\], got none"):
        plan(Layout({"w": w}), one((4,), [7], Replicate()), Topology(links={0: 0.0}))
    with pytest.raises(ValueError, match=r"link of rank 7, which needs what others hold, got 0"):
        plan(Layout({"w": w}), one((4,), [7], Replicate()), Topology(links={7: 0.0}))
    part = Ragged((((Box((0,), (3,)),)),))
    with pytest.raises(ValueError, match=r"tensor 'w': expected a holder of \[3:4\] in the source, got none"):
        plan(one((4,), [0], part), one((4,), [1], Replicate()))
    with pytest.raises(ValueError, match=r"chunk_bytes in \[64, 1073741824\], got 63"):
        plan(Layout({"w": w}), Layout({"w": w}), chunk_bytes=63)
    with pytest.raises(ValueError, match="rank of the source's or the target's layout, got 9"):
        plan(Layout({"w": w}), Layout({"w": w})).rank(9)


def test_a_dead_rank_keeps_what_it_holds() -> None:
    w = one((4,), range(2), Shard(0))
    assert execute(w, w, Topology(links={0: 0.0})).stats.local_bytes == 8


def test_source_tensors_may_be_more() -> None:
    w = tensor((4,), range(2), Shard(0))
    assert execute(Layout({"a": w, "w": w, "z": w}), Layout({"w": w})).stats.unused_source_tensors == 2


def test_the_native_plan_outlives_its_layouts() -> None:
    made = _C.Plan(
        one((4,), range(2), Shard(0)).native, one((4,), [2], Replicate()).native, Topology().native, 64, False
    )
    messages = made.rank(2).receives
    assert [message.bytes for message in messages] == [4, 4]
