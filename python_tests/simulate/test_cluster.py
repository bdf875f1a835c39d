"""What must hold of every simulated cluster, and the limits that are known by formula."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.errors import ConfigError
from areal_core.rl.config_file import load_settings
from areal_core.simulate import Costs, SimulateConfig, Simulation, simulate
from areal_core.simulate.costs import DecodeCost

SMALL = (
    "cluster.gpus=6",
    "rollout.group_size=3",
    "rollout.batch_groups=5",
    "lengths.mean=40",
    "steps=12",
    "skip_steps=3",
)
FREE = DecodeCost(step_s=1e-9, sequence_s=0.0, context_s=0.0, prompt_token_s=0.0)


def configured(*overrides: str) -> SimulateConfig:
    base = ("lengths.prompt=16", "generate.max_new_tokens=100", "train.minibatches=2", *SMALL)
    return load_settings(SimulateConfig, None, (*base, *overrides))


def costs(
    decode: DecodeCost, train_s: float, publish_s: float = 0.0, pause_s: float = 0.0, other_s: float = 0.0
) -> Costs:
    return Costs(decode, lambda lengths, rng: train_s, publish_s, pause_s, other_s)


@st.composite
def configurations(draw: st.DrawFn) -> SimulateConfig:
    eta = draw(st.sampled_from([0, 1, 3, math.inf]))
    depth = draw(st.sampled_from([0, 1, 2, 5]))
    how = draw(st.sampled_from(["recompute", "keep", "finish", "drain"]))
    return configured(
        f"rollout.eta={eta}",
        f"rollout.pipeline_depth={depth}",
        f"rollout.group_size={draw(st.integers(1, 4))}",
        f"rollout.batch_groups={draw(st.integers(2, 6))}",
        f"generate.on_update={how}",
        f"generate.dispatch={draw(st.sampled_from(['sample', 'group']))}",
        f"generate.max_slots={draw(st.sampled_from([1, 3, 50]))}",
        f"cluster.gpus={draw(st.integers(2, 7))}",
        f"cluster.generator_share={draw(st.sampled_from([0.2, 0.5, 0.8]))}",
        f"lengths.sigma={draw(st.sampled_from([0, 0.5, 2]))}",
        f"lengths.correlation={draw(st.sampled_from([0, 0.5, 1]))}",
        f"seed={draw(st.integers(0, 99))}",
    )


@st.composite
def any_costs(draw: st.DrawFn) -> Costs:
    time = st.sampled_from([0.0, 0.01, 0.5, 10.0])
    decode = DecodeCost(draw(st.sampled_from([0.001, 0.1])), draw(time) / 100, draw(time) / 1e4, draw(time) / 100)
    return costs(decode, draw(time), draw(time), draw(time), draw(time))


@settings(max_examples=40, deadline=None)
@given(configurations(), any_costs())
def test_nothing_is_lost_and_no_token_is_too_old(config: SimulateConfig, expensive: Costs) -> None:
    result = simulate(config, expensive)
    batch = config.rollout.batch_groups
    assert result.submitted_groups == result.trained_groups + result.pending_groups
    assert result.submitted_groups == (len(result.steps) + config.rollout.batches_ahead + 1) * batch
    assert 0 <= result.finished_groups <= result.pending_groups
    before = 0.0
    for step in result.steps:
        assert step.ages.size - 1 <= config.rollout.eta
        responses = step.tokens - config.lengths.prompt * batch * config.rollout.group_size
        assert step.ages.sum() == responses, "every token of a batch has exactly one age"
        assert step.began == before <= step.batch_at <= step.trained_at <= step.published_at
        assert step.waited >= -1e-9
        assert -1e-9 <= step.generator_idle <= 1 + 1e-9
        before = step.published_at
    generated = sum(step.generated_tokens for step in result.steps)
    assert generated >= sum(int(step.ages.sum()) for step in result.steps)


@settings(max_examples=12, deadline=None)
@given(configurations())
def test_equal_seeds_give_equal_runs(config: SimulateConfig) -> None:
    first, second, other = (simulate(c).to_dict() for c in (config, config, replace(config, seed=config.seed + 1)))
    assert first == second
    if config.lengths.sigma > 0:
        assert first["hours"] != other["hours"]


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_equal_lengths_and_eta_0_give_the_synchronous_formula(eta: int) -> None:
    config = configured(
        "lengths.sigma=0", f"rollout.eta={eta}", "rollout.batch_groups=4", "cluster.generator_share=0.5"
    )
    decode = DecodeCost(step_s=0.01, sequence_s=0.002, context_s=1e-5, prompt_token_s=1e-4)
    result = simulate(config, costs(decode, train_s=2.0, publish_s=0.3, pause_s=0.2))
    batch = 4 * 3 // 3  # 12 samples over three generators
    tokens = 40
    generating = tokens * (0.01 + batch * 0.002) + 1e-5 * batch * (16 * tokens + tokens * tokens / 2)
    prompts = 16 * 1e-4 * batch  # its four samples are of different groups
    if eta == 0:
        assert result.step_s == pytest.approx(0.2 + prompts + generating + 2.0 + 0.3, rel=1e-6)
        assert result.trainer_idle == pytest.approx((0.2 + prompts + generating) / result.step_s, rel=1e-6)
    else:
        assert result.step_s < 0.2 + prompts + generating + 2.0 + 0.3


def test_infinitely_fast_generation_leaves_the_time_of_the_trainer() -> None:
    for eta in (0, 2):
        result = simulate(configured(f"rollout.eta={eta}"), costs(FREE, 2.0, publish_s=0.5, other_s=0.25))
        assert result.step_s == pytest.approx(2.75, abs=1e-5)
        assert result.trainer_idle == pytest.approx(0, abs=1e-6)


def test_infinitely_fast_training_leaves_the_time_of_generation() -> None:
    """With a full pipeline no slot is ever empty, so that tokens per second are those of the engines."""
    decode = DecodeCost(step_s=0.01, sequence_s=0.0, context_s=0.0, prompt_token_s=0.0)
    overrides = ("rollout.eta=4", "rollout.pipeline_depth=4", "generate.max_slots=5", "lengths.sigma=0.3", "steps=60")
    config = configured(*overrides, "skip_steps=20", "cluster.generator_share=0.5")
    result = simulate(config, costs(decode, train_s=0.0))
    assert result.generated_per_s == pytest.approx(3 * 5 / 0.01, rel=0.02)
    assert result.generator_idle < 0.02


def seconds(*overrides: str, train_s: float = 1.0, step_s: float = 0.02, pause_s: float = 0.0) -> float:
    decode = DecodeCost(step_s=step_s, sequence_s=0.001, context_s=1e-6, prompt_token_s=1e-6)
    config = configured("steps=40", "skip_steps=10", "lengths.sigma=1", *overrides)
    return simulate(config, costs(decode, train_s, pause_s=pause_s)).step_s


def test_more_of_what_helps_is_never_slower() -> None:
    """On the same responses; a per cent of slack for which sample lands where."""
    by_eta = [seconds(f"rollout.eta={eta}") for eta in (0, 1, 2, 4)]
    by_gpus = [seconds(f"cluster.gpus={gpus}", train_s=0.0) for gpus in (3, 6, 12, 24)]
    by_step = [seconds(step_s=step_s, train_s=0.0) for step_s in (0.08, 0.04, 0.02, 0.01)]
    by_training = [seconds(train_s=train_s) for train_s in (4.0, 2.0, 1.0, 0.0)]
    by_slots = [seconds(f"generate.max_slots={slots}", train_s=0.0) for slots in (1, 2, 4, 16)]
    by_pause = [seconds(pause_s=pause_s, train_s=0.0) for pause_s in (1.0, 0.3, 0.0)]
    for series in (by_eta, by_gpus, by_step, by_training, by_slots, by_pause):
        assert all(later <= earlier * 1.01 for earlier, later in itertools.pairwise(series)), series
        assert series[-1] < series[0]


def test_a_generator_that_drains_never_mixes_versions_and_is_slower() -> None:
    drained, recomputed = (
        simulate(
            configured(f"generate.on_update={how}", "lengths.sigma=1", "steps=40"),
            costs(DecodeCost(0.02, 0.001, 0.0, 0.0), train_s=0.1),
        )
        for how in ("drain", "recompute")
    )
    assert drained.step_s > recomputed.step_s * 1.05
    assert all(step.interrupted == 0 for step in drained.steps)
    assert any(step.interrupted > 0 for step in recomputed.steps)
    assert drained.mean_age > recomputed.mean_age


def test_a_colocated_system_trains_on_all_gpus_in_turns() -> None:
    split = configured("rollout.eta=0", "cluster.generator_share=0.5", "update.publish_s=0", "update.pause_s=0")
    shared = replace(split, cluster=replace(split.cluster, colocated=True))
    assert (shared.generators, shared.replicas, split.generators, split.replicas) == (6, 6, 3, 3)
    assert simulate(shared).train_s < simulate(split).train_s
    longer = replace(shared, update=replace(shared.update, switch_s=shared.update.switch_s + 3))
    assert simulate(longer).step_s == pytest.approx(simulate(shared).step_s + 6)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("rollout.etta=1", "rollout.etta: unknown key; did you mean rollout.eta?"),
        ("gpus=1", "gpus: unknown key"),
        ("cluster.generator_share=1", "cluster.generator_share: expected in (0, 1), got 1.0"),
        ("cluster.gpus=1", "generate.gpus_per_generator: expected at most the 0 GPUs"),
        ("cluster.colocated=true", "rollout.eta: expected 0 with cluster.colocated, got 4.0"),
        ("lengths.run=x", "lengths.mean: expected 6000.0 with lengths.run, got 40.0"),
        ("train.gpus_per_replica=5", "train.gpus_per_replica: expected at most the 2 GPUs"),
        ("train.pipeline_stages=2", "train.pipeline_stages: expected a divisor"),
        ("generate.on_update=stop", "generate.on_update: expected one of recompute, keep, finish, drain"),
        ("skip_steps=12", "skip_steps: expected 0 to 11"),
        ("rollout.eta=inf", None),
        ("train.minibatches=16", "train.minibatches: expected at most 15, got 16"),
    ],
)
def test_settings_are_checked(override: str, text: str | None) -> None:
    if text is None:
        configured(override)
        return
    with pytest.raises(ConfigError) as caught:
        configured(override)
    assert str(caught.value).startswith(text)


def result_of(**changes: Any) -> Simulation:
    return simulate(configured(*(f"{key}={value}" for key, value in changes.items())))


def test_the_figures_agree_with_the_steps() -> None:
    result = result_of(seed=3)
    figures = result.to_dict()
    steady = result.steps[3:]
    spent = steady[-1].published_at - steady[0].began
    assert figures["tokens_per_s"] == pytest.approx(sum(step.tokens for step in steady) / spent)
    assert figures["step_s"] == pytest.approx(spent / 9)
    assert sum(figures["ages"]) == pytest.approx(1)
    assert figures["hours"] == pytest.approx(result.steps[-1].published_at / 3600)
    assert figures["mean_age"] == pytest.approx(np.average(np.arange(len(figures["ages"])), weights=figures["ages"]))
