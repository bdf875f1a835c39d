"""What adapters share, without a framework: against float64 and against what a framework's function would do."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from areal_core.integrations import _verl_advantages, _verl_losses, _verl_policy_losses
from areal_core.integrations._adapters import (
    NotOursError,
    Reduction,
    aggregate,
    cannot_score,
    carried_back,
    check_tokens,
    group_ids,
    k3_penalty,
    karmarkar_karp,
    live_mean,
)
from areal_core.integrations._patch import Original

LIVE = torch.tensor([[False, True, False, True, False], [False] * 5, [True] * 5])


def framework(strict: bool = False) -> tuple[Original, Counter[str]]:
    fallbacks: Counter[str] = Counter()
    return Original(lambda *args, **kwargs: "theirs", "seam", strict, fallbacks), fallbacks


def test_masked_tokens_take_what_follows() -> None:
    x = torch.arange(15.0).view(3, 5)
    assert carried_back(x, LIVE).tolist() == [[1, 1, 3, 3, 0], [0] * 5, [10, 11, 12, 13, 14]]


def test_groups_are_numbered_by_their_labels() -> None:
    assert group_ids(["b", "a", "b", 3, (1, 2), "a"]).tolist() == [0, 1, 0, 2, 3, 1]
    assert group_ids(torch.tensor([7, 7, 2])).tolist() == [0, 0, 1]


def test_what_is_no_plain_tensor_is_left_to_the_framework() -> None:
    class Sharded(torch.Tensor):
        pass

    logits, labels = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
    assert cannot_score(logits, labels) is None
    assert cannot_score(torch.nn.Parameter(logits), labels) is None
    for odd in ((logits.as_subclass(Sharded), labels), (logits, labels.as_subclass(Sharded))):
        assert cannot_score(*odd) == "logits that are no plain tensor"


@pytest.mark.parametrize(
    ("reduction", "weights"),
    [
        (Reduction("token_mean"), [1 / 7, 0, 1 / 7]),
        (Reduction("token_mean", 4.0), [1 / 4, 0, 1 / 4]),
        (Reduction("constant", torch.tensor(2), 3), [1 / 6, 0, 1 / 6]),
        (Reduction("sequence_mean_token_sum"), [1 / 2, 0, 1 / 2]),
        (Reduction("sequence_mean_token_mean"), [1 / 4, 0, 1 / 10]),
        (Reduction("sequence_mean_token_mean", 8), [1 / 16, 0, 1 / 40]),
    ],
)
def test_aggregation(reduction: Reduction, weights: list[float]) -> None:
    terms = torch.where(LIVE, torch.arange(1.0, 16.0).view(3, 5), math.nan).requires_grad_()
    loss = aggregate(terms, LIVE, reduction)
    gradient = torch.autograd.grad(loss, terms)[0]
    expected = torch.where(LIVE, torch.tensor(weights)[:, None], 0.0)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(loss, (expected * terms.nan_to_num()).sum())
    assert aggregate(terms, torch.zeros_like(LIVE), reduction) == 0
    assert float(live_mean(terms.detach(), LIVE)) == pytest.approx(float(terms.detach()[LIVE].mean()))


@pytest.mark.parametrize("gradient", ["k3", "k2"])
def test_k3_is_right_also_where_it_is_tiny(gradient: str) -> None:
    y = torch.tensor([-25.0, -12.0, -1.0, -1e-4, 0.0, 1e-6, 0.5, 2.0, 5.0, 25.0], dtype=torch.float64)
    leaf = torch.zeros(10).requires_grad_()
    value = k3_penalty(leaf, y.float(), cap=10.0, gradient=gradient)
    held = y.float().double().clamp(-20, 20)
    series = held**2 / 2 + held**3 / 6 + held**4 / 24
    truth = torch.where(held.abs() < 1e-3, series, held.exp() - 1 - held)
    torch.testing.assert_close(value.double(), truth.clamp(max=10), rtol=2e-6, atol=0)
    (found,) = torch.autograd.grad(value.sum(), leaf)
    inside = (y.abs() <= 20) & (truth <= 10)
    slope = -y if gradient == "k2" else torch.where(inside, -y.expm1(), 0.0)
    torch.testing.assert_close(found.double(), slope, rtol=1e-6, atol=1e-12)


def test_what_is_not_ours() -> None:
    x = torch.zeros(3, 5)
    check_tokens(LIVE.float(), x, x, x, x, strict=True)
    bad: list[tuple[Any, ...]] = [
        (LIVE[:2], x),
        (LIVE.float() * 0.5, x),
        (LIVE, x, x.clone().requires_grad_()),
        (LIVE, x, x, x, x - 1),
        (LIVE, x.flatten()),
    ]
    for arguments in bad:
        with pytest.raises(NotOursError):
            check_tokens(*arguments, strict=False)
    for arguments in ((LIVE, x.bfloat16()), (LIVE, x / 0), (torch.zeros_like(LIVE), x)):
        check_tokens(*arguments, strict=False)
        with pytest.raises(NotOursError, match="strict"):
            check_tokens(*arguments, strict=True)


def test_partitions_come_heaviest_first_or_from_the_framework() -> None:
    original, fallbacks = framework()
    assert karmarkar_karp([3, 1, 9, 4], 2, False, original=original) == [[2], [0, 1, 3]]
    for arguments in (([1, 2], 3, False), ([1, 2, 3], 2, True), ([1.5, 2], 1, False), ([-1, 2], 1, False)):
        assert karmarkar_karp(*arguments, original=original) == "theirs"
    assert sum(fallbacks.values()) == 4


class Config:
    """What verl's losses read of a configuration."""

    clip_ratio, clip_ratio_low, clip_ratio_high, tau_pos, tau_neg = 0.2, None, 0.3, 1.0, 1.05
    global_batch_info: dict[str, Any] = {"dp_size": 2, "batch_num_tokens": 14, "global_batch_size": 4}  # noqa: RUF012
    gamma = 0.9

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def test_verl_s_policy_loss_in_float64() -> None:
    g = torch.Generator().manual_seed(0)
    old, noise, advantages, weights = torch.randn(4, 3, 5, generator=g, dtype=torch.float64)
    weights = weights.exp()
    logprobs = (old + 0.4 * noise).requires_grad_()
    original, fallbacks = framework()
    loss, metrics = _verl_policy_losses.vanilla(
        old, logprobs, advantages, LIVE, "token-mean", Config(), weights, original=original
    )
    u = (logprobs - old).exp()
    terms = torch.minimum(u * advantages, u.clamp(0.8, 1.3) * advantages)
    terms = torch.where(advantages < 0, torch.maximum(terms, 3 * advantages), terms)
    expected = -(terms * weights)[LIVE].sum() / 14 * 2
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, logprobs, retain_graph=True)[0] for x in (loss, expected)))
    u, logprobs = u.detach(), logprobs.detach()
    clipped = ((u > 1.3) & (advantages > 0)) | ((u < 0.8) & (advantages < 0))
    assert metrics["actor/pg_clipfrac"] == pytest.approx(float(clipped[LIVE].double().mean()))
    assert metrics["actor/ppo_kl"] == pytest.approx(float((old - logprobs)[LIVE].mean()))
    assert not fallbacks
    assert _verl_losses.agg_loss(terms, LIVE, "no such mode", original=original) == "theirs"


def test_verl_s_estimators() -> None:
    original, fallbacks = framework()
    rewards = torch.tensor([[0.0, 0, 0, 2, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]])
    advantages, returns = _verl_advantages.grpo(rewards, LIVE, ["a", "b", "a"], 0.0, False, original=original)
    assert returns is advantages
    assert advantages.tolist() == [[0, 0.5, 0, 0.5, 0], [0] * 5, [-0.5] * 5]
    _, returns = _verl_advantages.reinforce_plus_plus(rewards, LIVE, Config(), original=original)
    torch.testing.assert_close(returns[0], torch.tensor([0, 1.8, 0, 2, 0]))
    assert not fallbacks
