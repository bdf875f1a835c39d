"""The parts that estimators are declared from, each by itself, and the declarations and inputs that are refused."""

import math
from typing import Any

import pytest
import torch
from estimator_cases import WITH_KL, estimate, make_batch, used_by
from op_checks import ISAS, assert_near, assert_same_bits
from torch import Tensor

from areal_core import _C, ops


def test_leave_one_out_std_is_that_of_the_others() -> None:
    rewards = [1.0, 0.5, -2.0, 3.0, 0.25]
    one_token = {"group_ids": torch.zeros(5).long(), "cu_seqlens": torch.arange(6)}
    options = {"std_level": "group", "leave_one_out_std": True, "eps": 1e-3}
    for ddof in (0, 1):
        out = ops.compute_advantages("rloo", rewards=torch.tensor(rewards).double(), **one_token, **options, ddof=ddof)
        for i, advantage in enumerate(out.tolist()):
            others = torch.tensor(rewards[:i] + rewards[i + 1 :], dtype=torch.float64)
            expected = (rewards[i] - others.mean()) / (others.std(correction=ddof) + 1e-3)
            assert advantage == pytest.approx(float(expected), rel=1e-12)


def test_leave_one_out_std_of_equal_others_divides_by_nothing() -> None:
    options = {"std_level": "group", "leave_one_out_std": True}
    low, high = 0.1463909149169922, 0.3328835368156433  # whose sums of squares are not quite those of equal numbers
    for rewards, expected in (
        ([1.1, 0.1, 0.1, 0.1], [1.0, None, None, None]),
        ([low, *[high] * 4], [low - high, None, None, None, None]),
        ([low, *[1.0] * 6], [low - 1.0, *[None] * 6]),
        ([0.1, 0.7], [-0.6, 0.6]),
    ):
        out = ops.compute_advantages(
            "rloo",
            rewards=torch.tensor(rewards, dtype=torch.float64),
            group_ids=torch.zeros(len(rewards)).long(),
            cu_seqlens=torch.arange(len(rewards) + 1),
            **options,
        )
        for advantage, wanted in zip(out.tolist(), expected, strict=True):
            assert abs(advantage) < 10
            assert wanted is None or advantage == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize("level", ["group", "batch"])
@pytest.mark.parametrize("whiten", [False, True])
def test_float32_rewards_near_1000_keep_their_spread(level: str, whiten: bool) -> None:
    """A one-pass float32 variance of these is NaN, and a float32 mean costs the digits that count."""
    torch.manual_seed(0)
    rewards = 1000 + 0.1 * torch.randn(64)
    cu_seqlens, ids = torch.arange(65), torch.zeros(64).long()
    if whiten:
        out = ops.compute_advantages("reinforce_pp", rewards=rewards, cu_seqlens=cu_seqlens, eps=0.0)
    else:
        options = {"mean_level": level, "std_level": level, "eps": 0.0}
        out = ops.compute_advantages("grpo_r1", rewards=rewards, group_ids=ids, cu_seqlens=cu_seqlens, **options)
    wide = rewards.double()
    assert out.dtype == torch.float32
    assert_near(out, (wide - wide.mean()) / wide.std(), absolute=1e-6, relative=1e-6)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_whitening_keeps_the_kl_of_float32_tokens_whose_rewards_are_near_1000(name: str) -> None:
    """As float32 numbers near 1000 the tokens of a sequence would lose most of the KL between them."""
    torch.manual_seed(0)
    logprobs = -torch.rand(64, 50)
    inputs = {"rewards": 1000 + 0.1 * torch.randn(64), "logprobs": logprobs, "ref_logprobs": logprobs - 0.1}
    inputs["ref_logprobs"] += 0.1 * torch.randn(64, 50)
    ids = torch.arange(64) // 8
    out = ops.compute_advantages(name, **inputs, group_ids=ids, beta=0.05)
    wide = ops.compute_advantages(name, **{k: x.double() for k, x in inputs.items()}, group_ids=ids, beta=0.05)
    assert_near(out, wide, absolute=5e-6, relative=1e-5)


def test_terminal_rewards_land_on_the_last_live_token() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    placed = ops.discounted_returns(
        torch.zeros(3, 4), gamma=0.0, loss_mask=mask, terminal_rewards=torch.tensor([1.0, 2.0, 3.0])
    )
    assert placed.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, 0]]


def test_gdpo_adds_up_scores_and_fails_a_sample_in_all_rewards() -> None:
    batch = make_batch()
    rewards = torch.rand(12, 3, dtype=torch.float64)
    rewards[4, 1] = math.nan
    used = {key: batch[key] for key in ("cu_seqlens", "group_ids", "loss_mask")}
    out = ops.compute_advantages("gdpo", rewards=rewards, **used)
    rewards[4] = math.nan
    parts = [ops.compute_advantages("grpo_r1", rewards=rewards[:, i], **used) for i in range(3)]
    assert_near(out, sum(parts), absolute=1e-14, relative=1e-14)
    one = ops.compute_advantages("gdpo", rewards=rewards[:, :1], **used)
    assert_same_bits(one, parts[0])
    with pytest.raises(ValueError, match=r"rewards of shape \[S, R\], got \[12\]"):
        ops.compute_advantages("gdpo", rewards=rewards[:, 0], **used)
    with pytest.raises(ValueError, match=r"rewards of shape \[S\], got \[12, 3\]"):
        ops.compute_advantages("dr_grpo", rewards=rewards, **used)


@pytest.mark.parametrize("name", ["reinforce_kl", "ppo", "reinforce", "rloo", "dr_grpo"])
def test_token_rewards_are_discounted_or_added_up(name: str) -> None:
    """A token reward on the last live token is part of the reward of the sequence."""
    batch = make_batch()
    batch["rewards"][10] = 0.5
    bonus = torch.rand(12, dtype=torch.float64)
    token_rewards = torch.full(batch["loss_mask"].shape, math.nan, dtype=torch.float64)
    token_rewards[batch["loss_mask"]] = 0.0
    for s, (begin, end) in enumerate(zip(batch["cu_seqlens"], batch["cu_seqlens"][1:], strict=False)):
        live = batch["loss_mask"][begin:end].nonzero().flatten()
        if len(live):
            token_rewards[begin + live[-1]] = bonus[s]
    # A sequence without tokens gets none: its reward must not grow in the comparison either.
    has_tokens = torch.tensor([bool(batch["loss_mask"][b:e].any()) for b, e in zip(*bounds(batch), strict=True)])
    added = {**batch, "rewards": batch["rewards"] + bonus * has_tokens}
    options = {"gamma": 0.9, "lam": 0.8} if name == "ppo" else {}
    ours = estimate(name, batch, token_rewards=token_rewards, **options)
    assert_near(ours, estimate(name, added, **options), absolute=1e-13, relative=1e-13)


def bounds(batch: dict[str, Tensor]) -> tuple[list[int], list[int]]:
    """Where sequences begin and end."""
    offsets = batch["cu_seqlens"].tolist()
    return offsets[:-1], offsets[1:]


def test_discounts_count_live_tokens() -> None:
    out = ops.compute_advantages(
        "reinforce_kl",
        rewards=torch.tensor([1.0]),
        loss_mask=torch.tensor([[0, 1, 1, 0, 0, 1, 0]]),
        gamma=0.5,
    )
    assert out.tolist() == [[0, 0.25, 0.5, 0, 0, 1, 0]]


@pytest.mark.parametrize("name", ["reinforce_pp", "grpo_original", "ppo", "opo", "dapo"])
def test_no_bit_depends_on_the_number_of_threads(name: str) -> None:
    torch.manual_seed(1)
    lengths = torch.randint(0, 400, (400,))
    tokens = int(lengths.sum())
    batch = {
        "rewards": torch.rand(400),
        "group_ids": torch.arange(400) % 50,
        "cu_seqlens": torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]),
        "loss_mask": torch.rand(tokens) < 0.8,
        "logprobs": -torch.rand(tokens),
        "ref_logprobs": -torch.rand(tokens),
        "values": torch.randn(tokens),
    }
    results = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        results.append(estimate(name, batch, 0.3 if name in WITH_KL else 0.0))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_every_instruction_set_matches_the_definition(isa: str, estimator: str) -> None:
    if isa not in ISAS[: ISAS.index(_C.best_isa()) + 1]:
        pytest.skip(f"no {isa}")
    _C.set_active_isa(isa)
    batch = make_batch(torch.float32)
    lengths = batch["cu_seqlens"].diff()
    d = batch["logprobs"].double() - batch["ref_logprobs"].double()
    kl = {"k1": d, "k2": d * d / 2, "k3": (-d).expm1() + d}[estimator].masked_fill(~batch["loss_mask"], 0.0)
    assert_near(
        ops.kl_penalty(batch["logprobs"], batch["ref_logprobs"], loss_mask=batch["loss_mask"], estimator=estimator),
        kl,
        absolute=2e-7,
        relative=1e-6,
    )
    sums = torch.stack([part.sum() for part in kl.split(lengths.tolist())])
    truth = (batch["rewards"].double().nan_to_num() - 0.3 * sums).repeat_interleave(lengths)
    failed = batch["rewards"].isnan().repeat_interleave(lengths)
    truth = truth.masked_fill(failed | ~batch["loss_mask"], 0.0)
    out = estimate("reinforce", batch, 0.3, kl_estimator=estimator)
    assert_near(out, truth, absolute=1e-5, relative=1e-5)
    whitened = ops.whiten(batch["values"], loss_mask=batch["loss_mask"])
    live = batch["values"][batch["loss_mask"]].double()
    assert_near(whitened[batch["loss_mask"]], (live - live.mean()) / live.std(), absolute=1e-6, relative=1e-6)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"mean_level": "prompt"}, r"mean_level in \("),
        ({"kl": "everywhere"}, r"kl in \("),
        ({"eps": math.inf}, "eps >= 0 and finite"),
        ({"k": -1}, "k >= 0, got -1"),
        ({"k": 2}, "mean_level = 'group' and its plain mean with k = 2"),
        ({"leave_one_out": True}, "a mean_level with leave_one_out"),
        ({"leave_one_out_std": True, "std_level": "batch"}, "std_level = 'group' with leave_one_out_std"),
        ({"length_weighted": True}, "mean_level = 'group' with length_weighted"),
        ({"rescale_by_signal": True}, "a mean_level or std_level with rescale_by_signal"),
        ({"rescale_by_signal": True, "mean_level": "group", "k": 2}, "k = 0 with rescale_by_signal"),
        ({"per_reward": "yes"}, r"per_reward in \(False, True\), got 'yes'"),
        ({"critic": True, "kl": "token"}, "kl 'none' or 'to_go' with critic"),
        ({"discounted": True}, "a critic or kl = 'to_go' with discounted"),
        ({"critic": True, "length_norm": "group"}, "neither critic nor kl = 'to_go' with length_norm"),
    ],
)
def test_declarations_that_contradict_themselves_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="Estimator: expected " + message):
        ops.Estimator(**parts)


def test_what_is_no_number_and_no_estimator_raises_type_error() -> None:
    for parts in ({"k": "3"}, {"eps": None}):
        with pytest.raises(TypeError, match=r"Estimator: expected .* a number"):
            ops.Estimator(**parts)
    with pytest.raises(TypeError, match="expected a name or an Estimator, got 5"):
        ops.compute_advantages(5, rewards=torch.zeros(1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ppo", {"values": None}, "values with ppo, got None"),
        ("remax", {"greedy_rewards": None}, "greedy_rewards with remax, got None"),
        ("rloo", {"group_ids": None}, "group_ids with rloo, got None"),
        ("orz", {"gamma": 0.9}, "gamma = 1 with orz"),
        ("reinforce_kl", {"lam": 0.9}, "lam = 1 with reinforce_kl"),
        ("reinforce_kl", {"gamma": 1.5}, r"gamma in \[0, 1\]"),
        ("ppo", {"lam": -0.5}, r"lam in \[0, 1\], got -0.5"),
        ("reinforce_kl", {"gamma": 0.5, "length_norm": "group"}, "neither critic nor kl"),
        ("dr_grpo", {"k": 3}, "no k with dr_grpo"),
        ("orz", {"kl_estimator": "k3"}, "no kl_estimator with orz"),
        ("remax", {"greedy_rewards": torch.zeros(3)}, r"greedy_rewards of shape \[12\]"),
        ("dr_grpo", {"cu_seqlens": None, "loss_mask": None, "logprobs": None}, "cu_seqlens, or padded"),
        ("dr_grpo", {"cu_seqlens": None}, r"of shape \[S, L\] without cu_seqlens"),
    ],
)
def test_missing_and_ignored_inputs_are_named(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=": expected .*" + message):
        ops.compute_advantages(name, **{**used_by(name, make_batch(), 0.0), **change})
