"""Every estimator, reward shaping and loss that a configuration can name, in a training step."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from areal_core import ops
from areal_core.rl.config import (
    AdvantageConfig,
    CriticConfig,
    GenerateConfig,
    LossConfig,
    RewardConfig,
    TeacherConfig,
)
from areal_core.rl.data import Group
from areal_core.rl.trainer import Trainer

from .trainer_cases import VERSION, batch_of, make_config, step_gradient, trained, with_exact_logprobs
from .trajectories import make_model, whole_sequence_logprobs


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


def test_whitened_advantages_leave_the_returns_of_the_critic_alone() -> None:
    """Whitening scales what the policy sees; the critic still learns the rewards, here with an error that shrinks."""
    groups = batch_of(sizes=(4,) * 6)

    def critic_losses(**options: Any) -> list[float]:
        advantage = AdvantageConfig(name="orz", options=options)
        critic = CriticConfig(learning_rate=1e-2, clip=None, warmup_steps=5)
        trainer = Trainer(make_model(), make_config(advantage=advantage, critic=critic))
        return [trainer.step(groups, VERSION)[0]["critic/loss"] for _ in range(5)]

    assert critic_losses(whiten=True) == critic_losses()
