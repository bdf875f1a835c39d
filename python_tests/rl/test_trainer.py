from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from areal_core import ops
from areal_core.model import PackedDecoder
from areal_core.rl.config import (
    AdvantageConfig,
    Config,
    CriticConfig,
    GenerateConfig,
    LossConfig,
    RewardConfig,
    RolloutConfig,
    TeacherConfig,
    TrainConfig,
)
from areal_core.rl.data import Group
from areal_core.rl.trainer import Trainer

from .trajectories import make_groups, make_model, whole_sequence_logprobs

VERSION = 5
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


def make_config(**sections: Any) -> Config:
    train = TrainConfig(learning_rate=1e-3, lr_warmup_steps=0, minibatches=1, **sections.pop("train", {}))
    return Config(**{"rollout": RolloutConfig(eta=math.inf), "train": train, **sections})


def batch_of(seed: int = 0, sizes: tuple[int, ...] = (4, 3, 5, 2), **options: Any) -> list[Group]:
    return make_groups(np.random.default_rng(seed), list(sizes), version=VERSION, **options)


def with_exact_logprobs(model: PackedDecoder, groups: list[Group], temperature: float = 1.0) -> list[Group]:
    """The same responses as if `model` had just sampled them."""
    out = []
    for group in groups:
        trajectories = [
            replace(
                t,
                logprobs=whole_sequence_logprobs(model, t, temperature).detach().numpy(),
                versions=np.full(len(t.response_ids), VERSION, dtype=np.int64),
            )
            for t in group.trajectories
        ]
        out.append(replace(group, trajectories=tuple(trajectories)))
    return out


def trained(config: Config, *batches: list[Group]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Weights after training from the same start, and the metrics of the last step."""
    trainer = Trainer(make_model(), config)
    metrics: dict[str, Any] = {}
    for number, batch in enumerate(batches):
        metrics, _ = trainer.step(batch, VERSION + number)
    return trainer.model.weights.detach(), metrics


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


def step_gradient(
    config: Config, groups: list[Group], monkeypatch: pytest.MonkeyPatch, reference: PackedDecoder | None = None
) -> torch.Tensor:
    """The gradient that reaches the optimizer, before clipping."""
    trainer = Trainer(make_model(), config, reference=reference)
    seen: list[torch.Tensor] = []
    update = trainer._update

    def spy(rate: float) -> float:
        seen.append(trainer.model.weights.grad.clone())
        return update(rate)

    monkeypatch.setattr(trainer, "_update", spy)
    trainer.step(groups, VERSION)
    (gradient,) = seen
    return gradient


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


def with_greedy(groups: list[Group]) -> list[Group]:
    return [replace(g, greedy=replace(g.trajectories[0], reward=0.25)) for g in groups]


@pytest.mark.parametrize("name", ops.estimators())
def test_every_estimator_trains_by_its_name(name: str) -> None:
    config = make_config(advantage=AdvantageConfig(name=name))
    weights, metrics = trained(config, with_greedy(batch_of()), with_greedy(batch_of(1)))
    assert metrics["optim/updates"] == 1
    assert bool(weights.isfinite().all())
    assert not torch.equal(weights, make_model().weights.detach())
    assert ("critic/loss" in metrics) == (name in ("ppo", "orz"))


@pytest.mark.parametrize("name", ["reinforce", "reinforce_kl", "reinforce_pp", "rloo", "remax", "ppo", "grpo_r1"])
def test_beta_pulls_towards_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the policy as its own reference beta changes nothing; with another reference it does."""
    groups = with_greedy(with_exact_logprobs(make_model(), batch_of(sizes=(3,) * 6)))
    config = make_config(advantage=AdvantageConfig(name=name, drop_zero_variance=False))
    pulled = replace(config, advantage=replace(config.advantage, beta=0.5))

    free = step_gradient(config, groups, monkeypatch)
    scale = float(free.abs().max())
    same = step_gradient(pulled, groups, monkeypatch, make_model())
    torch.testing.assert_close(same, free, rtol=0, atol=1e-4 * scale)
    other = step_gradient(pulled, groups, monkeypatch, make_model(seed=1))
    assert float((other - free).abs().max()) > 0.01 * scale


def test_kl_in_the_loss_reads_the_reference() -> None:
    groups = with_exact_logprobs(make_model(), batch_of(sizes=(3,) * 6))
    config = make_config(loss=LossConfig(kl_coef=0.1))
    trainer = Trainer(make_model(), config, reference=make_model(seed=1))
    metrics, _ = trainer.step(groups, VERSION)
    assert metrics["loss/kl_current_reference"] > 0.01


def test_a_critic_learns_the_returns_and_moves_the_policy_after_its_warm_up() -> None:
    groups = batch_of(sizes=(4,) * 6)
    config = make_config(
        advantage=AdvantageConfig(name="ppo", lam=0.9),
        critic=CriticConfig(learning_rate=1e-2, clip=None, warmup_steps=30),
    )
    trainer = Trainer(make_model(), config)
    start = trainer.model.weights.detach().clone()
    losses = [trainer.step(groups, VERSION)[0]["critic/loss"] for _ in range(30)]
    assert torch.equal(trainer.model.weights, start)
    assert losses[-1] < losses[0] / 2
    metrics, _ = trainer.step(groups, VERSION)
    assert metrics["optim/updates"] == 1
    assert not torch.equal(trainer.model.weights, start)


def test_a_resumed_critic_continues_bit_for_bit() -> None:
    config = make_config(advantage=AdvantageConfig(name="ppo"))
    first, second = Trainer(make_model(), config), Trainer(make_model(), config)
    first.step(batch_of(), VERSION)
    with torch.no_grad():
        second.model.weights.copy_(first.model.weights)
    second.load_state_dict(deepcopy(first.state_dict()))
    for trainer in (first, second):
        trainer.step(batch_of(1), VERSION + 1)
    assert torch.equal(first.model.weights, second.model.weights)


def test_the_greedy_response_is_the_baseline_of_remax() -> None:
    groups = with_greedy(batch_of())
    trainer = Trainer(make_model(), make_config(advantage=AdvantageConfig(name="remax")))
    _, advantages = trainer.step(groups, VERSION)
    for group in groups:
        for t in group.trajectories:
            assert advantages[(t.group_id, t.sample_index)] == pytest.approx(t.reward - 0.25)


@pytest.mark.parametrize(
    "loss",
    [
        {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        {"objective": "sapo", "aggregation": "sequence_mean_token_mean"},
        {"objective": "gmpo", "ratio_level": "sequence"},
        {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean_token_mean"},
        {"aggregation": "constant"},
        {"proximal": "loglinear"},
        {"behavior_mode": "icepop", "behavior_low": 0.5},
        {"behavior_level": "geometric", "behavior_mode": "mask"},
    ],
)
def test_any_split_into_microbatches_gives_the_same_update(loss: dict[str, Any]) -> None:
    config = make_config(loss=LossConfig(**loss))
    whole, _ = trained(config, batch_of(sizes=(4,) * 5))
    split, _ = trained(
        replace(config, train=replace(config.train, max_tokens_per_microbatch=30)), batch_of(sizes=(4,) * 5)
    )
    torch.testing.assert_close(split, whole, rtol=0, atol=2e-6)


def test_rewards_are_shaped_before_the_estimator() -> None:
    config = make_config(
        advantage=AdvantageConfig(name="reinforce"),
        reward=RewardConfig(scaling=2.0, bias=-1.0, max_tokens=8, overlong_buffer=4, overlong_penalty=0.5),
    )
    groups = batch_of()
    _, advantages = Trainer(make_model(), config).step(groups, VERSION)
    for group in groups:
        for t in group.trajectories:
            penalty = min(max((4 - len(t.response_ids)) / 4, -1.0), 0.0)
            expected = 2 * t.reward - 1 + 0.5 * penalty
            assert advantages[(t.group_id, t.sample_index)] == pytest.approx(expected, abs=1e-6)


def test_the_kl_coefficient_follows_its_target_and_survives_a_resume() -> None:
    config = make_config(
        advantage=AdvantageConfig(name="reinforce_kl"), reward=RewardConfig(kl_coef=0.1, kl_target=1e-3, kl_horizon=10)
    )
    trainer = Trainer(make_model(), config, reference=make_model(seed=1))
    coefs = [trainer.step(batch_of(), VERSION)[0]["reward/kl_coef"] for _ in range(3)]
    assert coefs == pytest.approx([0.1, 0.12, 0.144])
    resumed = Trainer(make_model(), config, reference=make_model(seed=1))
    resumed.load_state_dict(trainer.state_dict())
    assert resumed.step(batch_of(), VERSION)[0]["reward/kl_coef"] == pytest.approx(0.1728)


def test_a_teacher_is_distilled_into_the_policy() -> None:
    """With advantages of 0 the update follows the teacher alone, and moves the policy towards it."""
    groups = with_exact_logprobs(make_model(), batch_of(sizes=(4,) * 8))
    config = make_config(
        loss=LossConfig(objective="reinforce", distill_coef=1.0),
        advantage=AdvantageConfig(name="dr_grpo", drop_zero_variance=False),
        reward=RewardConfig(scaling=0.0),
        teacher=TeacherConfig("elsewhere"),
    )
    teacher = make_model(seed=1)
    trainer = Trainer(make_model(), config, teacher=teacher)

    @torch.no_grad()
    def gap() -> float:
        return sum(
            float((whole_sequence_logprobs(trainer.model, t) - whole_sequence_logprobs(teacher, t)).square().sum())
            for g in groups
            for t in g.trajectories
        )

    before = gap()
    for _ in range(5):
        trainer.step(groups, VERSION)
    assert gap() < before


def test_m2po_leaves_the_largest_ratios_out() -> None:
    groups = batch_of(sizes=(4,) * 5)  # behaviour logprobs far from the policy's
    computed = GenerateConfig(top_k=1)  # only tells the trainer to compute proximal logprobs of every token
    kept, _ = trained(make_config(loss=LossConfig(m2po_threshold=1e6), generate=computed), groups)
    plain, _ = trained(make_config(generate=computed), groups)
    none, _ = trained(make_config(loss=LossConfig(m2po_threshold=1e-12), generate=computed), groups)
    assert torch.equal(kept, plain)
    assert torch.equal(none, make_model().weights.detach())


@pytest.mark.parametrize("loss", [LossConfig(), LossConfig(kl_coef=0.1), LossConfig(entropy_coef=0.1)])
def test_groups_of_equal_rewards_train_where_the_loss_has_more_than_advantages(loss: LossConfig) -> None:
    groups = [
        replace(g, trajectories=tuple(replace(t, reward=1.0) for t in g.trajectories)) for g in batch_of(sizes=(3, 2))
    ]
    trainer = Trainer(make_model(), make_config(loss=loss), reference=make_model(seed=1) if loss.kl_coef else None)
    metrics, _ = trainer.step(groups, VERSION)
    assert metrics["optim/updates"] == (0 if loss == LossConfig() else 1)
