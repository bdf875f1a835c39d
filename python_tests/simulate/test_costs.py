"""Costs and lengths by their formulas."""

from dataclasses import replace

import numpy as np
import pytest

from areal_core.reshard.models import load_model
from areal_core.simulate import Costs, SimulateConfig, simulate
from areal_core.simulate.config import LengthConfig, TrainConfig
from areal_core.simulate.costs import active_parameters, train_seconds
from areal_core.simulate.lengths import Lengths

MODEL = load_model("qwen2.5-1.5b")
PLAIN = TrainConfig(minibatches=1, tflops_per_gpu=100, step_overhead_s=0.0, proximal=False)


def seconds(lengths: list[int], train: TrainConfig, replicas: int = 1) -> float:
    return train_seconds(np.asarray(lengths), MODEL, train, replicas, np.random.default_rng(0))


def alone(length: int) -> float:
    """Forward and backward of one sequence: three times its products and its causal attention."""
    attention = 2 * MODEL.layers * MODEL.heads * MODEL.head_dim * length**2
    return 3 * (2 * active_parameters(MODEL) * length + attention) / 100e12


def test_a_batch_takes_the_time_of_its_operations() -> None:
    assert seconds([1000, 2000], PLAIN) == pytest.approx(alone(1000) + alone(2000))
    assert seconds([1000, 2000], replace(PLAIN, proximal=True)) == pytest.approx(4 / 3 * seconds([1000, 2000], PLAIN))
    assert seconds([1000], replace(PLAIN, gpus_per_replica=4)) == pytest.approx(alone(1000) / 4)
    assert seconds([10] * 8, replace(PLAIN, minibatches=4, step_overhead_s=2)) == pytest.approx(8 * alone(10) + 8)


def test_a_mini_batch_waits_for_its_slowest_replica() -> None:
    assert seconds([1000, 2000, 5000], PLAIN, replicas=3) == pytest.approx(alone(5000))
    longest_apart = [4000, 3000, 2000, 1000]  # dealt by length: 4000 + 1000 and 3000 + 2000
    assert seconds(longest_apart, PLAIN, replicas=2) == pytest.approx(alone(4000) + alone(1000))


def test_micro_batches_cost_their_overhead_and_the_way_through_the_pipeline() -> None:
    slow = replace(PLAIN, microbatch_overhead_s=1.0, max_tokens_per_microbatch=1000)
    assert seconds([500] * 4, slow) == pytest.approx(4 * alone(500) + 2)
    assert seconds([500] * 4, replace(slow, microbatching="fixed", microbatches=4)) == pytest.approx(4 * alone(500) + 4)
    staged = replace(slow, gpus_per_replica=3, pipeline_stages=3)
    assert seconds([500] * 4, staged) == pytest.approx(4 * alone(500) / 3 + 2 + 2 * (2 * alone(500) / 3 + 1))
    fixed = replace(staged, microbatching="fixed", microbatches=2)
    assert seconds([900, 100], fixed) == pytest.approx((3 * alone(900) + alone(100)) / 3 + 4)


def test_decoding_reads_weights_and_cache() -> None:
    config = SimulateConfig()
    one, two = (
        Costs.of(replace(config, generate=replace(config.generate, gpus_per_generator=gpus))).decode for gpus in (1, 2)
    )
    bandwidth = 3.35e12 * 0.7
    assert one.context_s == pytest.approx(28 * 1024 / bandwidth)
    assert one.step_s == pytest.approx(2e-3 + 2 * active_parameters(MODEL) / bandwidth)
    assert one.sequence_s == one.prompt_token_s == pytest.approx(2 * active_parameters(MODEL) / (989e12 * 0.5))
    assert two.context_s == pytest.approx(one.context_s / 2)
    assert two.step_s - 2e-3 == pytest.approx((one.step_s - 2e-3) / 2)


def test_recomputing_the_cache_takes_longer_than_keeping_it() -> None:
    config = SimulateConfig(steps=12, skip_steps=4)
    fast = replace(config, train=replace(config.train, tflops_per_gpu=1e6))
    slow_prompts = replace(fast, cluster=replace(config.cluster, compute_efficiency=0.02))
    keep = replace(slow_prompts, generate=replace(config.generate, on_update="keep"))
    assert simulate(slow_prompts).step_s > 1.03 * simulate(keep).step_s


def test_lengths_have_the_distribution_asked_for() -> None:
    rng = np.random.default_rng(0)
    drawn = Lengths(LengthConfig(mean=500, sigma=0.8), 100_000).draw(4000, 8, rng)
    assert drawn.mean() == pytest.approx(500, rel=0.03)
    assert np.log(drawn).std() == pytest.approx(0.8, rel=0.03)
    assert Lengths(LengthConfig(mean=500, sigma=2), 700).draw(500, 8, rng).max() == 700
    same = Lengths(LengthConfig(correlation=1.0), 100_000).draw(50, 8, rng)
    assert (same == same[:, :1]).all()
    half = np.log(Lengths(LengthConfig(correlation=0.5), 10**9).draw(4000, 2, rng))
    assert np.corrcoef(half.T)[0, 1] == pytest.approx(0.5, abs=0.05)
