from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_core.model import PackedDecoder
from areal_core.rl.config import (
    AdvantageConfig,
    Config,
    GenerateConfig,
    LossConfig,
    RolloutConfig,
    TrainConfig,
)
from areal_core.rl.data import Group
from areal_core.rl.trainer import Trainer

from .trainer_cases import VERSION, batch_of, make_config, step_gradient, trained, with_exact_logprobs
from .trajectories import make_model, whole_sequence_logprobs

UNCORRECTED = LossConfig(objective="reinforce", ratio_level="off", proximal="behavior")
METRICS = [
    "reward/mean",
    "reward/accuracy",
    "response/tokens_mean",
    "response/truncated_fraction",
    "loss/loss",
    "loss/entropy",
    "loss/ratio_mean",
    "loss/ratio_max",
    "loss/clip_fraction",
    "loss/kl_proximal_behavior",
    "loss/kl_current_proximal",
    "loss/kl_current_reference",
    "loss/behavior_weight_mean",
    "loss/behavior_weight_max",
    "loss/behavior_capped_fraction",
    "optim/learning_rate",
    "optim/grad_norm",
    "optim/updates",
    "staleness/mean",
    "staleness/max",
    "staleness/histogram",
    "tokens/trained",
    "count/groups",
    "count/excluded",
    "count/withheld_tokens",
    "count/zero_variance_groups",
    "count/nonfinite_updates",
    "time/pack_s",
    "time/proximal_s",
    "time/critic_s",
    "time/forward_backward_s",
    "time/optimizer_s",
]


def plain_gradient(config: Config, groups: list[Group], eta: float = math.inf) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of one mini-batch by the textbook, sequence by sequence in double precision."""
    model = make_model().double()
    terms = []
    for group in groups:
        usable = [t for t in group.trajectories if not t.failed]
        rewards = np.array([t.reward for t in usable])
        if np.ptp(rewards) == 0:
            continue
        for t, advantage in zip(usable, (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6), strict=True):
            logprobs = whole_sequence_logprobs(model, t, config.generate.temperature)
            behavior = torch.from_numpy(t.logprobs).double()
            fixed = logprobs.detach()
            if config.loss.objective == "reinforce":
                objective = logprobs * advantage
            else:
                proximal = fixed if config.loss.decoupled else behavior
                ratio = (logprobs - proximal).exp()
                clipped = ratio.clamp(1 - config.loss.clip_low, 1 + config.loss.clip_low)
                objective = torch.minimum(ratio * advantage, clipped * advantage)
                if config.loss.decoupled:
                    objective = objective * (proximal - behavior).exp().clamp(max=config.loss.behavior_cap)
            terms.append(-objective[torch.from_numpy(VERSION - t.versions <= eta)])
    loss = torch.cat(terms).mean()
    loss.backward()
    return loss.detach(), model.weights.grad


@pytest.mark.parametrize("loss", [LossConfig(), LossConfig(proximal="behavior"), UNCORRECTED])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_is_that_of_the_textbook(
    loss: LossConfig, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(loss=loss, generate=GenerateConfig(temperature=temperature))
    groups = batch_of()
    _, expected = plain_gradient(config, groups)
    found = step_gradient(config, groups, monkeypatch)
    assert (found.double() - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("cap", [18, 40])
def test_the_cut_into_microbatches_does_not_change_the_step(cap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = batch_of()
    whole, cut = make_config(), make_config(train={"max_tokens_per_microbatch": cap})
    of_whole, of_cut = (step_gradient(config, groups, monkeypatch) for config in (whole, cut))
    assert (of_whole - of_cut).norm() <= 1e-5 * of_whole.norm()
    metrics = [trained(config, groups)[1] for config in (whole, cut)]
    for name in METRICS:
        if not name.startswith("time/"):
            assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-4, abs=1e-6), name


def test_old_tokens_are_withheld_but_their_reward_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = batch_of(max_age=3)
    config = replace(make_config(), rollout=RolloutConfig(eta=1))
    _, expected = plain_gradient(config, groups, eta=1)
    found = step_gradient(config, groups, monkeypatch)
    assert (found.double() - expected).norm() <= 1e-5 * expected.norm()
    old = sum(int((VERSION - t.versions > 1).sum()) for g in groups for t in g.trajectories)
    assert trained(config, groups)[1]["count/withheld_tokens"] == old > 0


def test_failed_samples_leave_their_siblings_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = batch_of()
    failed = replace(groups[0].trajectories[1], reward=math.nan)
    groups[0] = replace(groups[0], trajectories=(groups[0].trajectories[0], failed, *groups[0].trajectories[2:]))
    config = make_config()
    _, expected = plain_gradient(config, groups)
    found = step_gradient(config, groups, monkeypatch)
    assert (found.double() - expected).norm() <= 1e-5 * expected.norm()
    trainer = Trainer(make_model(), config)
    metrics, advantages = trainer.step(groups, VERSION)
    assert metrics["count/excluded"] == 1
    assert (100, 1) not in advantages


def test_metrics_report_the_loss_and_the_advantages(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, config = batch_of(), make_config()
    loss, gradient = plain_gradient(config, groups)
    trainer = Trainer(make_model(), config)
    metrics, advantages = trainer.step(groups, VERSION)
    assert sorted(metrics) == sorted(METRICS)
    assert metrics["loss/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["optim/grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-4)
    rewards = np.array([t.reward for t in groups[2].trajectories])
    for t in groups[2].trajectories:
        expected = (t.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        assert advantages[t.group_id, t.sample_index] == pytest.approx(expected, rel=1e-5)
    ages = np.concatenate([VERSION - t.versions for g in groups for t in g.trajectories])
    assert metrics["staleness/histogram"] == np.bincount(ages).tolist()
    assert metrics["staleness/mean"] == pytest.approx(ages.mean())
    assert metrics["tokens/trained"] == len(ages)
    assert metrics["loss/ratio_mean"] == pytest.approx(1.0, abs=1e-6)


def count_forwards(trainer: Trainer) -> list[int]:
    packed: list[int] = []
    trainer.model.register_forward_pre_hook(lambda _, arguments: packed.append(len(arguments[0])))
    return packed


def test_proximal_logprobs_are_computed_only_where_they_are_not_known() -> None:
    groups = batch_of(sizes=(2,) * 8)
    fresh = with_exact_logprobs(make_model(), groups)
    four = replace(make_config().train, minibatches=4)
    for batch, changes, forwards in (
        (fresh, {}, 4),
        (groups, {}, 5),
        (groups, {"loss": LossConfig(proximal="behavior")}, 4),
        (groups, {"loss": UNCORRECTED}, 4),
        (fresh, {"generate": GenerateConfig(top_p=0.9)}, 5),
        (fresh, {"generate": GenerateConfig(top_k=5)}, 5),
        (groups, {"train": replace(four, minibatches=1)}, 1),
    ):
        trainer = Trainer(make_model(), replace(make_config(), **{"train": four, **changes}))
        packed = count_forwards(trainer)
        trainer.step(batch, VERSION)
        assert len(packed) == forwards, changes


@pytest.mark.parametrize("temperature", [1.0, 1.3])
def test_known_proximal_logprobs_equal_computed_ones(temperature: float) -> None:
    groups = with_exact_logprobs(make_model(), batch_of(sizes=(3,) * 8), temperature)
    config = make_config(generate=GenerateConfig(temperature=temperature))
    config = replace(config, train=replace(config.train, minibatches=4, learning_rate=1e-2))
    computed = replace(config, generate=replace(config.generate, top_k=1))  # only tells the trainer not to trust them
    known_weights, known = trained(config, groups)
    computed_weights, recomputed = trained(computed, groups)
    assert known["loss/kl_current_proximal"] > 1e-4
    assert known["loss/kl_current_proximal"] == pytest.approx(recomputed["loss/kl_current_proximal"], rel=1e-2)
    torch.testing.assert_close(known_weights, computed_weights, rtol=0, atol=1e-4)


def test_proximal_is_the_policy_before_the_step() -> None:
    """With behaviour = the policy before the step, recomputed weights are 1 and ratios move with the mini-batches."""
    groups = with_exact_logprobs(make_model(), batch_of(sizes=(3,) * 8))
    config = make_config(generate=GenerateConfig(top_k=1))
    config = replace(config, train=replace(config.train, minibatches=4, learning_rate=1e-2))
    _, metrics = trained(config, groups)
    assert metrics["loss/behavior_weight_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["loss/ratio_max"] > 1.01


def test_groups_of_equal_rewards_are_dropped_unless_asked_for() -> None:
    groups = [
        replace(g, trajectories=tuple(replace(t, reward=1.0) for t in g.trajectories)) for g in batch_of(sizes=(3, 2))
    ]
    start = make_model().weights.detach()
    weights, metrics = trained(make_config(), groups)
    assert torch.equal(weights, start)
    assert (metrics["count/zero_variance_groups"], metrics["tokens/trained"], metrics["optim/updates"]) == (2, 0, 0)
    _, metrics = trained(make_config(advantage=AdvantageConfig(drop_zero_variance=False)), groups)
    assert metrics["tokens/trained"] == sum(len(t.response_ids) for g in groups for t in g.trajectories)


def test_an_empty_batch_changes_nothing() -> None:
    start = make_model().weights.detach()
    weights, metrics = trained(make_config(), [])
    assert torch.equal(weights, start)
    assert sorted(metrics) == sorted(METRICS)


def test_a_step_is_deterministic() -> None:
    config = replace(make_config(), train=replace(make_config().train, minibatches=3))
    first, second = (trained(config, batch_of(), batch_of(1))[0] for _ in range(2))
    assert torch.equal(first, second)
    other, _ = trained(replace(config, seed=1), batch_of(), batch_of(1))
    assert not torch.equal(first, other)


def test_a_resumed_trainer_goes_on_bit_for_bit() -> None:
    config = replace(make_config(), train=replace(make_config().train, minibatches=3, lr_warmup_steps=4))
    straight, _ = trained(config, batch_of(), batch_of(1), batch_of(2))
    before = Trainer(make_model(), config)
    before.step(batch_of(), VERSION)
    state, weights = before.state_dict(), before.model.weights.detach().clone()
    after = Trainer(PackedDecoder(before.model.config, weights), config)
    after.load_state_dict(state)
    after.step(batch_of(1), VERSION + 1)
    after.step(batch_of(2), VERSION + 2)
    assert torch.equal(after.model.weights, straight)


def test_the_learning_rate_warms_up() -> None:
    config = replace(make_config(), train=TrainConfig(learning_rate=1e-3, lr_warmup_steps=4))
    trainer = Trainer(make_model(), config)
    rates = [trainer.step(batch_of(seed), VERSION)[0]["optim/learning_rate"] for seed in range(6)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


def test_the_gradient_is_clipped() -> None:
    config = make_config()
    tight = replace(config, train=replace(config.train, grad_clip=1e-9))
    start = make_model().weights.detach()
    # AdamW is blind to the scale of gradients, except where they fall below its epsilon.
    free, clipped = ((trained(c, batch_of())[0] - start).abs().max() for c in (config, tight))
    assert free > 5e-4
    assert clipped < 2e-4
    assert trained(tight, batch_of())[1]["optim/grad_norm"] > 1e-3


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone() -> None:
    groups = batch_of()
    broken = replace(groups[0].trajectories[0], logprobs=np.full_like(groups[0].trajectories[0].logprobs, math.nan))
    groups[0] = replace(groups[0], trajectories=(broken, *groups[0].trajectories[1:]))
    weights, metrics = trained(make_config(), groups)
    assert torch.equal(weights, make_model().weights)
    assert (metrics["count/nonfinite_updates"], metrics["optim/updates"], metrics["optim/grad_norm"]) == (1, 0, 0)


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="behavior_cap"):
        Trainer(make_model(), make_config(loss=LossConfig(behavior_mode="mask", behavior_cap=None)))


class SpanLog:
    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []

    @contextmanager
    def span(self, name: str, track: str = "loop") -> Iterator[None]:
        yield
        self.spans.append((name, track))


def test_phases_are_traced_and_timed() -> None:
    log = SpanLog()
    config = replace(make_config(), train=replace(make_config().train, minibatches=2))
    metrics, _ = Trainer(make_model(), config, log).step(batch_of(), VERSION)
    phases = ["pack", "proximal", "pack", *["pack", "forward_backward", "optimizer"] * 2]
    assert log.spans == [(phase, "trainer") for phase in phases]
    assert all(metrics[f"time/{phase}_s"] > 0 for phase in set(phases))
