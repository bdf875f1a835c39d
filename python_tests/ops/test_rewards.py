"""Reward shaping: each step against its definition, and what they refuse."""

import math
from typing import Any

import pytest
import torch
from op_checks import assert_near, assert_same_bits

from areal_core import ops

REWARDS = torch.tensor([1.0, -0.5, math.nan, 20.0])


def test_the_two_orders_of_scaling() -> None:
    first = ops.scale_rewards(torch.tensor([1.0, 3.0]), scaling=2.0, bias=0.5)
    assert first.tolist() == [2.5, 6.5]
    assert ops.scale_rewards(torch.tensor([1.0, 3.0]), scaling=2.0, bias=0.5, order="bias_first").tolist() == [3.0, 7.0]
    assert ops.scale_rewards(torch.tensor([1, 0])).dtype == torch.float32
    with pytest.raises(ValueError, match=r"order in .*'scale_first'.*, got 'both'"):
        ops.scale_rewards(REWARDS, order="both")


def test_overlong_penalty_is_that_of_dapo() -> None:
    lengths = torch.tensor([0, 60, 80, 90, 100, 101, 10**6])
    penalty = ops.soft_overlong_penalty(lengths, 100, 20)
    assert penalty.tolist() == [0.0, 0.0, 0.0, -0.5, -1.0, -1.0, -1.0]
    assert not penalty.signbit()[:2].any()
    with pytest.raises(ValueError, match=r"buffer_tokens in \(0, max_tokens = 10\], got 11"):
        ops.soft_overlong_penalty(lengths, 10, 11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_kl_penalties(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logprobs, ref = -torch.rand(2, 50, dtype=dtype)
    d = (logprobs - ref).double()
    bound = 1e-6 if dtype == torch.float32 else 1e-14
    for estimator, truth in (("k1", d), ("k2", d * d / 2), ("k3", (-d).exp() - 1 + d)):
        out = ops.kl_penalty(logprobs, ref, estimator=estimator)
        assert out.dtype == dtype
        assert_near(out, truth, absolute=bound, relative=bound)
    with pytest.raises(ValueError, match=r"estimator in .*, got 'k4'"):
        ops.kl_penalty(logprobs, ref, estimator="k4")
    with pytest.raises(ValueError, match=r"ref_logprobs of shape \[50\], got \[49\]"):
        ops.kl_penalty(logprobs, ref[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_kl_of_extreme_and_masked_tokens(dtype: torch.dtype) -> None:
    logprobs = torch.tensor([[-1e4, -math.inf], [math.nan, -1.0]], dtype=dtype)
    ref = torch.tensor([[-1.0, -math.inf], [math.inf, -1e4]], dtype=dtype)
    mask = torch.tensor([[True, True], [False, True]])
    assert ops.kl_penalty(logprobs, ref, loss_mask=mask).tolist() == [[-20.0, 0.0], [0.0, 20.0]]
    assert ops.kl_penalty(logprobs, ref).isnan().sum() == 1


def test_shaping_is_the_composition_of_its_steps() -> None:
    torch.manual_seed(0)
    mask = torch.rand(4, 30) < 0.8
    logprobs, ref = -torch.rand(2, 4, 30)
    process = torch.randn(4, 30)
    config = ops.RewardConfig(
        scaling=2.0,
        bias=-1.0,
        clip=(-1.5, 5.0),
        max_tokens=25,
        overlong_buffer=10,
        overlong_penalty=0.5,
        kl_coef=0.3,
        kl_estimator="k3",
    )
    shaped = ops.shape_rewards(
        REWARDS, config, loss_mask=mask, token_rewards=process, logprobs=logprobs, ref_logprobs=ref
    )
    scaled = ops.scale_rewards(REWARDS, scaling=2.0, bias=-1.0).clamp(-1.5, 5.0)
    expected = scaled + 0.5 * ops.soft_overlong_penalty(mask.sum(dim=1), 25, 10)
    assert torch.equal(shaped.rewards.nan_to_num(99), expected.nan_to_num(99))
    kl = ops.kl_penalty(logprobs, ref, loss_mask=mask, estimator="k3")
    assert shaped.token_rewards is not None
    assert_near(shaped.token_rewards, torch.where(mask, process - 0.3 * kl, 0.0), absolute=1e-6, relative=0)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_masked_tokens_have_no_reward(kl_coef: float) -> None:
    mask, rewards = torch.tensor([True, False, True]), torch.tensor([1.0, math.nan, 2.0])
    policies = {"logprobs": rewards, "ref_logprobs": rewards} if kl_coef else {}
    config = ops.RewardConfig(kl_coef=kl_coef)
    shaped = ops.shape_rewards(REWARDS, config, loss_mask=mask, token_rewards=rewards, **policies)
    assert shaped.token_rewards is not None
    assert shaped.token_rewards.tolist() == [1.0, 0.0, 2.0]
    with pytest.raises(ValueError, match=r"expected .* of shape \[[23]\], got \[[23]\]"):
        ops.shape_rewards(REWARDS, config, loss_mask=mask, token_rewards=rewards[:2], **policies)


def test_shaping_by_default_does_nothing() -> None:
    shaped = ops.shape_rewards(REWARDS, ops.RewardConfig())
    assert_same_bits(shaped.rewards, REWARDS)
    assert shaped.token_rewards is None


def test_kl_in_the_reward_is_beta_of_the_estimators() -> None:
    """Taking the KL off first and giving beta to compute_advantages are two ways to the same numbers."""
    torch.manual_seed(0)
    batch: dict[str, Any] = {
        "rewards": torch.rand(4).double(),
        "group_ids": torch.tensor([0, 0, 1, 1]),
        "loss_mask": torch.rand(4, 20) < 0.7,
        "logprobs": -torch.rand(4, 20).double(),
    }
    ref = -torch.rand(4, 20).double()
    policies = {"logprobs": batch["logprobs"], "ref_logprobs": ref}
    shaped = ops.shape_rewards(
        batch["rewards"], ops.RewardConfig(kl_coef=0.2), loss_mask=batch["loss_mask"], **policies
    )
    for name in ("reinforce", "rloo", "reinforce_kl", "reinforce_pp"):
        with_beta = ops.compute_advantages(name, **batch, ref_logprobs=ref, beta=0.2)
        with_shaping = ops.compute_advantages(name, **batch, token_rewards=shaped.token_rewards)
        assert_near(with_shaping, with_beta, absolute=1e-12, relative=1e-12)


def test_adaptive_coefficient_follows_its_target() -> None:
    controller = ops.AdaptiveKL(coef=0.1, target=6.0, horizon=1000.0)
    assert controller.update(6.0, 100).coef == 0.1
    assert controller.update(6.6, 100).coef == pytest.approx(0.1 * 1.01)
    assert controller.update(1e9, 100).coef == pytest.approx(0.1 * 1.02)
    assert controller.update(0.0, 10**9).coef == pytest.approx(0.08)
    with pytest.raises(ValueError, match="kl a number"):
        controller.update(math.nan, 1)
    with pytest.raises(ValueError, match="samples >= 0, got -1"):
        controller.update(1.0, -1)
    with pytest.raises(ValueError, match="horizon > 0 and finite"):
        ops.AdaptiveKL(coef=0.1, target=6.0, horizon=0.0)


def test_groups_without_signal_are_dropped() -> None:
    nan = math.nan
    rewards = torch.tensor([1, 0, 0.1, 0.1, 1, nan, 1, 0, nan, nan, 2, 2, 3])
    ids = torch.tensor([9, 9, 4, 4, 7, 7, 5, 5, 5, 3, 2**40, 2**40, 2**40])
    kept = ops.filter_groups(rewards, ids)
    assert kept.mask.tolist() == [True, True, False, False, False, False, True, True, False, False, True, True, True]
    assert kept.group_ids.tolist() == [5, 9, 2**40]
    whole = ops.filter_groups(rewards, ids.int().where(ids < 100, 100), min_samples=3)
    assert whole.group_ids.tolist() == [100]
    assert whole.mask.tolist() == [False] * 10 + [True] * 3
    advantages = ops.compute_advantages("dr_grpo", rewards=rewards, group_ids=ids, cu_seqlens=torch.arange(14))
    assert not advantages[~kept.mask].any()
    empty = ops.filter_groups(torch.zeros(0), torch.zeros(0).long())
    assert empty.mask.shape == empty.group_ids.shape == (0,)
    with pytest.raises(ValueError, match="min_samples >= 2, got 1"):
        ops.filter_groups(rewards, ids, min_samples=1)
    with pytest.raises(TypeError, match="group_ids of an integer dtype"):
        ops.filter_groups(rewards, ids.float())


def test_turns_end_at_their_last_live_token() -> None:
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 0])
    ends = ops.turn_ends(mask, torch.tensor([0, 5, 5, 9]))
    assert ends.int().tolist() == [0, 0, 1, 0, 1, 0, 1, 0, 0]
    rewards = torch.zeros(9)
    rewards[ends] = torch.tensor([1.0, 2.0, 4.0])
    returns = ops.discounted_returns(rewards, torch.tensor([0, 5, 5, 9]), loss_mask=mask)
    assert returns.tolist() == [0, 3, 3, 0, 2, 4, 4, 0, 0]
    assert ops.turn_ends(mask.reshape(3, 3)).int().tolist() == [[0, 0, 1], [0, 0, 1], [1, 0, 0]]
    assert ops.turn_ends(torch.zeros(0), torch.zeros(1).long()).shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": "x"}, "order in"),
        ({"kl_estimator": "k9"}, "kl_estimator in .*, got 'k9'"),
        ({"scaling": math.nan}, "scaling finite"),
        ({"kl_coef": -1.0}, "kl_coef >= 0"),
        ({"clip": (1.0, 0.0)}, "clip .low, high. with low <= high"),
        ({"clip": (0.0, 1.0, 2.0)}, "clip .low, high. with low <= high"),
        ({"overlong_buffer": -1}, "overlong_buffer >= 0"),
        ({"overlong_buffer": 10, "max_tokens": 5}, "max_tokens >= overlong_buffer = 10, got 5"),
        ({"max_tokens": 5}, "overlong_buffer > 0 with max_tokens"),
    ],
)
def test_bad_configs_name_themselves(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="RewardConfig: expected " + message):
        ops.RewardConfig(**change)


def test_missing_and_ignored_inputs_are_named() -> None:
    with pytest.raises(ValueError, match=r"logprobs and ref_logprobs with kl_coef = 0\.1"):
        ops.shape_rewards(REWARDS, ops.RewardConfig(kl_coef=0.1))
    with pytest.raises(ValueError, match="ref_logprobs = None with kl_coef = 0"):
        ops.shape_rewards(REWARDS, ops.RewardConfig(), ref_logprobs=torch.zeros(3))
    with pytest.raises(ValueError, match="expected cu_seqlens, or padded"):
        ops.shape_rewards(REWARDS, ops.RewardConfig(max_tokens=9, overlong_buffer=3))
