"""What plans are kept by, topologies, and plans of a real model."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import weakref

import pytest
import torch

from areal_core.reshard import Layout, Mesh, Plan, Replicate, Shard, Spec, TensorLayout, Topology, parse_rate, plan
from areal_core.reshard.parallel import Parallel
from areal_core.reshard.plan import CACHED_PLANS


def layout(rows: int = 8, first_rank: int = 0, ranks: int = 2, dim: int = 0, name: str = "w") -> Layout:
    mesh = Mesh(range(first_rank, first_rank + ranks), (ranks,), ("tp",))
    return Layout({name: TensorLayout(Spec(torch.float32, (rows, 6)), mesh, (Shard(dim),))})


def staged(stages: int) -> Layout:
    """Four layers over pipeline stages of one rank each."""
    meshes = [Mesh([rank], (1,), ("pp",)) for rank in range(stages)]
    spec = Spec(torch.float32, (4, 6))
    return Layout({f"layer{i}": TensorLayout(spec, meshes[i * stages // 4], (Replicate(),)) for i in range(4)})


def test_equal_questions_get_the_same_plan() -> None:
    made = plan(layout(), layout(first_rank=4))
    assert plan(layout(), layout(first_rank=4), Topology(links={}), chunk_bytes=8 << 20) is made


@pytest.mark.parametrize(
    "other",
    [
        lambda: plan(layout(rows=9), layout(rows=9, first_rank=4)),
        lambda: plan(layout(name="v"), layout(name="v", first_rank=4)),
        lambda: plan(layout(), layout(first_rank=5)),
        lambda: plan(layout(), layout(first_rank=4, ranks=3)),
        lambda: plan(layout(), layout(first_rank=4, dim=1)),
        lambda: plan(layout(dim=1), layout(first_rank=4)),
        lambda: plan(layout(), layout(first_rank=4), Topology(ranks_per_node=4)),
        lambda: plan(layout(), layout(first_rank=4), Topology(nic_bytes_per_s=1e9)),
        lambda: plan(layout(), layout(first_rank=4), Topology(intra_node_bytes_per_s=1e9)),
        lambda: plan(layout(), layout(first_rank=4), Topology(links={1: 1e9})),
        lambda: plan(layout(), layout(first_rank=4), chunk_bytes=1 << 20),
        lambda: plan(layout(), layout(first_rank=4), multicast=True),
    ],
)
def test_a_second_key_does_not_get_the_first_keys_plan(other: object) -> None:
    first = plan(layout(), layout(first_rank=4))
    second = other()  # type: ignore[operator]
    assert second is not first
    assert second.digest != first.digest
    fresh = Plan(
        second.source, second.target, second.topology, chunk_bytes=second.chunk_bytes, multicast=second.multicast
    )
    assert (fresh.digest, fresh.stats) == (second.digest, second.stats)


@pytest.mark.parametrize("options", [{"chunk_bytes": 8e6}, {"chunk_bytes": "64"}, {"multicast": "no"}])
def test_options_of_another_type_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=r"plan: expected (chunk_bytes|multicast) of type (int|bool), got"):
        plan(layout(), layout(first_rank=4), **options)  # type: ignore[arg-type]


def test_new_pipeline_stages_make_a_new_plan() -> None:
    target = Layout(
        {name: dataclasses.replace(t, mesh=Mesh([9], (1,), ("tp",))) for name, t in staged(1).tensors.items()}
    )
    for stages in (2, 4, 2):
        made = plan(staged(stages), target)
        assert [message.source for message in made.rank(9).receives] == list(range(stages))


def test_the_cache_is_bounded() -> None:
    first = weakref.ref(plan(layout(rows=1000), layout(rows=1000, first_rank=4)))
    assert first() is not None
    for rows in range(1, CACHED_PLANS + 1):
        plan(layout(rows=rows), layout(rows=rows, first_rank=4))
    gc.collect()
    assert first() is None


@pytest.mark.parametrize(
    ("text", "rate"),
    [("50GB/s", 50e9), ("400Gb/s", 50e9), ("1 GiB/s", 2**30), ("12.5kB/s", 12500), ("8bit/s", 1), ("1e9B/s", 1e9)],
)
def test_rates_are_parsed(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "50", "50GB", "GB/s", "-1GB/s", "nanGB/s", "50 XB/s", "1GB/s2"])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="parse_rate: expected a rate such as 50GB/s"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node >= 1, got 0"),
        ({"nic_bytes_per_s": 0.0}, "nic_bytes_per_s in"),
        ({"nic_bytes_per_s": float("nan")}, "nic_bytes_per_s in"),
        ({"intra_node_bytes_per_s": 1e15}, "intra_node_bytes_per_s in"),
        ({"links": {0: -1.0}}, "bytes_per_s of a link in"),
        ({"links": {-1: 1e9}}, "links of ranks >= 0, got rank -1"),
        ({"links": {0: 1e-9}}, "bytes_per_s of a link in"),
        ({"links": {0: float("inf")}}, "bytes_per_s of a link in"),
        ({"links": {2**31: 1e9}}, "links of ranks below"),
        ({"ranks_per_node": 2**31}, "ranks_per_node below"),
    ],
)
def test_topologies_are_checked(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Topology(**options)  # type: ignore[arg-type]


def test_topologies_are_values() -> None:
    links = {3: 0.0, 1: 1e9}
    topology = Topology(links=links)
    again = pickle.loads(pickle.dumps(topology))
    assert again == topology == Topology(links={1: 1e9, 3: 0.0})
    assert hash(again) == hash(topology)
    links[1] = 5.0
    assert topology.links[1] == 1e9
    assert topology != Topology()


@pytest.mark.parametrize(
    ("source", "target"),
    [("fsdp:dp4,replicas4", "vllm:tp2,replicas4"), ("megatron:pp3,tp2,dp2", "fsdp:5"), ("fsdp:7", "megatron:tp2,dp3")],
)
def test_a_real_model(source: str, target: str) -> None:
    trainer = Parallel.parse(source).name_map("qwen2.5-0.5b").layout
    generator = Parallel.parse(target).name_map("qwen2.5-0.5b", first_rank=len(trainer.ranks)).layout
    made = plan(trainer, generator)
    assert made.stats.wire_bytes == made.lower_bound.wire_bytes
    assert made.stats.sender_max_over_mean <= 1.05
    assert made.stats.seconds <= 1.05 * made.lower_bound.seconds
    received = {rank: made.rank(rank).receives for rank in generator.ranks}
    assert sum(m.bytes for messages in received.values() for m in messages) == made.stats.wire_bytes
    for rank in trainer.ranks:
        for sent in made.rank(rank).sends:
            (got,) = [m for m in received[sent.target] if m.source == rank]
            assert (got.atoms, got.chunks) == (sent.atoms, sent.chunks)
