"""verl's checkpoint engine with our backend: processes with FSDP2 trainers over gloo, and rollout workers."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from verl_workers import Cluster, Setup, full_weights

from areal_core.integrations.verl_weights import WeightBackend


@pytest.fixture(params=["fake", "verl"])
def real(request: pytest.FixtureRequest) -> bool:
    """Whether verl's own classes make the calls. They are imported by the workers alone: that takes a while."""
    if request.param == "verl" and importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed")
    return request.param == "verl"


def expected(step: int, setup: Setup, shards: bool) -> dict[str, torch.Tensor]:
    """What rollout workers must have, by verl's own rules: shards are exported in bfloat16, gathered tensors as is."""
    weights = full_weights(step, getattr(torch, setup.dtype))
    return {n: t.bfloat16() if shards and t.is_floating_point() else t for n, t in weights.items()}


def check(cluster: Cluster, step: int, shards: bool) -> None:
    want = expected(step, cluster.setup, shards)
    for held in cluster.loaded():
        assert list(held) == list(want)
        for name, tensor in held.items():
            assert tensor.dtype == want[name].dtype, name
            assert tensor.shape == want[name].shape, name
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), want[name].reshape(-1).view(torch.uint8)), name


def succeeded(results: list[Any]) -> list[Any]:
    failed = [value for status, value in results if status != "ok"]
    assert not failed, "\n".join(map(str, failed))
    return [value for _, value in results]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_syncs_bring_every_bit_of_every_version(real: bool, transport: str) -> None:
    setup = Setup(trainers=3, rollouts=2, real=real, dtype="float32", options={"transport": transport})
    with Cluster(setup) as cluster:
        cluster.skip_without_verl()
        for step in (1, 2, 3):
            cluster.train(step)
            metrics = succeeded(cluster.sync(step))[0]
            assert metrics["areal_core/shards"] == 1.0
            check(cluster, step, shards=True)
        assert all(names == list(full_weights(0, torch.float32)) for names in cluster.call(cluster.rollouts, "names"))
        assert cluster.call(cluster.rollouts, "cached")
        cluster.call(cluster.trainers, "grow")
        succeeded(cluster.sync(4))
        assert all(torch.equal(held["scale"], torch.ones(5).bfloat16()) for held in cluster.loaded())


def failures(results: list[Any]) -> list[str]:
    assert all(status not in ("ok", "Timeout") for status, _ in results), results
    return [f"{status}: {str(text).splitlines()[0]}" for status, text in results]


def test_a_failed_sync_fails_on_all_ranks_and_changes_nothing(real: bool) -> None:
    setup = Setup(trainers=2, rollouts=2, real=real)
    with Cluster(setup) as cluster:
        cluster.skip_without_verl()
        cluster.train(1)
        succeeded(cluster.sync(1))
        places = cluster.call(cluster.rollouts, "memory")

        cluster.train(2)
        told = failures(cluster.sync(2, rollout_step=3))  # ranks disagree on the version
        assert "expected version 3, got version 2" in told[2]
        check(cluster, 1, shards=True)

        cluster.call(cluster.trainers[1:], "fail_next")  # a trainer's export raises
        told = failures(cluster.sync(2))
        assert "the export failed" in told[1]
        check(cluster, 1, shards=True)

        succeeded(cluster.sync(2))  # the retry
        check(cluster, 2, shards=True)
        assert cluster.call(cluster.rollouts, "memory") == places

        cluster.train(3)
        cluster.connect()
        cluster.call(cluster.rollouts[1:], "die_before_commit")
        cluster.start_sync(3)
        told = failures([w.result() for w in (*cluster.trainers, *cluster.rollouts)])
        assert told[3].startswith("Dead")
        assert "PeerError" in told[0]
        cluster.rollouts.pop()  # verl's manager removes the replica, and the sync is made anew
        check(cluster, 2, shards=True)
        cluster.rollouts[0].start("cached")  # what has arrived is no version
        assert cluster.rollouts[0].result()[0] == "ClosedError"
        succeeded(cluster.sync(3))
        check(cluster, 3, shards=True)


def test_a_killed_sender_ends_the_sync(real: bool) -> None:
    with Cluster(Setup(trainers=3, rollouts=1, real=real, options={"transport": "tcp"})) as cluster:
        cluster.skip_without_verl()
        cluster.train(1)
        succeeded(cluster.sync(1))
        cluster.train(2)
        cluster.connect()
        cluster.call(cluster.trainers[1:2], "die_next")
        cluster.start_sync(2)
        told = failures([w.result() for w in (*cluster.trainers, *cluster.rollouts)])
        assert told[1].startswith("Dead")
        assert all("PeerError" in told[i] for i in (0, 3))
        check(cluster, 1, shards=True)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(hands_over=False, dtype="float32"),
        Setup(options={"shards": False}, dtype="float32"),
        Setup(options={"rollout_dtype": "float32"}, trainers=1),
    ],
    ids=["without the engine", "as configured", "cast"],
)
def test_gathered_tensors_come_from_the_first_trainer(setup: Setup) -> None:
    with Cluster(setup) as cluster:
        for step in (1, 2):
            cluster.train(step)
            metrics = succeeded(cluster.sync(step))
            assert metrics[0]["areal_core/shards"] == 0.0
        want = full_weights(2, getattr(torch, setup.dtype))
        for held in cluster.loaded():
            assert list(held) == list(want)
            for name, tensor in held.items():
                dtype = torch.float32 if want[name].is_floating_point() else torch.int64
                assert tensor.dtype == dtype
                assert torch.equal(tensor, want[name].to(dtype)), name


def test_replicas_of_a_node_get_each_byte_over_the_network_once() -> None:
    setup = Setup(trainers=2, rollouts=4, fake_nodes=True, bucket_bytes=1 << 15)
    with Cluster(setup) as cluster:
        cluster.train(1)
        metrics = succeeded(cluster.sync(None))[0]
        check(cluster, 1, shards=True)
        size = sum(t.nbytes for t in expected(1, setup, shards=True).values())
        assert metrics["areal_core/wire_bytes"] == 4 * size
        assert metrics["areal_core/nic_bytes"] == 2 * size
        assert metrics["areal_core/staging_bytes"] <= 2 * setup.bucket_bytes


def member(node: str = "a", **changes: Any) -> dict[str, Any]:
    row = {"backend": "areal_core", "node": node, "address": "127.0.0.1:1", "bucket_bytes": 1 << 20, "known": ""}
    return row | {"rank": None, "shards": False, "transport": "auto"} | changes


def test_ranks_of_a_node_are_neighbours_and_share_the_bucket() -> None:
    rows = [member("a", rank=0, shards=True), member("b", rank=1, shards=True), *(member(n) for n in "bcca")]
    trainers, rollouts = WeightBackend.build_topology(2, 4, rows)
    group = trainers["group"][0]
    assert rollouts["group"] == [group] * 4
    assert (trainers["rank"], rollouts["rank"]) == ([0, 2], [3, 4, 5, 1])
    assert (group.ranks_per_node, group.shards, group.multicast, group.one_machine) == (2, True, True, False)
    assert group.chunk_bytes == (1 << 20) // 4
    _, rollouts = WeightBackend.build_topology(1, 4, [member(), *[member()] * 4])
    assert rollouts["group"][0].one_machine
    assert len(group.token) >= 16
    assert repr(group.token) not in repr(group)
    assert group.token != rollouts["group"][0].token


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([member()], "expected metadata of 1 trainers and 1 rollout ranks"),
        ([member(), None], "expected all ranks to use this backend"),
        ([member(), member(transport="tcp")], "expected the same transport"),
        ([member(transport="shm"), member("b", transport="shm")], "expected all ranks on one machine"),
        ([member(shards=True, rank=1), member()], "in the order of their torch.distributed ranks"),
        ([member(), member(bucket_bytes=100)], "expected buckets of 4096 bytes"),
    ],
)
def test_a_topology_that_does_not_fit_is_refused(rows: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightBackend.build_topology(1, 1, rows)


@pytest.mark.parametrize(
    "options", [{"transport": "udp"}, {"timeout_s": 0}, {"rollout_dtype": "int8"}, {"rollout_dtype": "bf17"}]
)
def test_an_option_that_is_not_understood_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"expected {next(iter(options))}"):
        WeightBackend(1 << 20, **options)
    with pytest.raises(TypeError, match="bucket_sise"):
        WeightBackend(1 << 20, bucket_sise=1)  # type: ignore[call-arg]
