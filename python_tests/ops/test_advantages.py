"""compute_advantages against its definition in fp64, and the promises of its docstring."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_near, assert_same_bits
from torch import Tensor

from areal_core import ops
from areal_core.reference import advantages as reference

NAMES = ["dr_grpo", "grpo_original", "grpo_r1", "maxrl", "reinforce", "rloo"]
USES_BETA = ["grpo_original", "grpo_r1", "reinforce", "rloo"]


def make_batch(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Ragged groups in any order: one of a single member, one of equal rewards, one with failed samples."""
    torch.manual_seed(seed)
    group_ids = torch.tensor([7, -3, 7, 40, -3, 7, 40, 2**40, 7, 11, 11, 40])
    rewards = torch.rand(12, dtype=torch.float64)
    rewards[[3, 6, 11]] = 0.1
    rewards[[2, 10]] = math.nan
    cu_seqlens = torch.tensor([0, 5, 0, 17, 3, 1, 33, 8, 2, 20, 4, 4, 6]).cumsum(0)
    tokens = int(cu_seqlens[-1])
    logprobs = -torch.rand(tokens, dtype=torch.float64) - 0.1
    return {
        "rewards": rewards.to(dtype),
        "cu_seqlens": cu_seqlens,
        "group_ids": group_ids,
        "loss_mask": torch.rand(tokens) < 0.7,
        "logprobs": logprobs.to(dtype),
        "ref_logprobs": (logprobs + 0.3 * torch.randn(tokens, dtype=torch.float64)).to(dtype),
    }


def estimate(name: str, batch: dict[str, Tensor], beta: float = 0.0, **options: Any) -> Tensor:
    """The estimator on a batch, whose reference policy is left out when beta = 0."""
    used = {k: v for k, v in batch.items() if beta != 0 or k != "ref_logprobs"}
    return ops.compute_advantages(name, **used, beta=beta, **options)


def definition(name: str, batch: dict[str, Tensor], beta: float = 0.0, **options: Any) -> Tensor:
    """The table of the docstring, composed from the reference functions."""
    parts: dict[str, Any] = {
        "dr_grpo": {"mean_level": "group"},
        "grpo_original": {"mean_level": "group", "std_level": "group"},
        "grpo_r1": {"mean_level": "group", "std_level": "group"},
        "maxrl": {"mean_level": "group", "divide_by_mean": True},
        "reinforce": {},
        "rloo": {"mean_level": "group", "leave_one_out": True},
    }[name]
    tokens = (batch["cu_seqlens"], batch["loss_mask"])
    logprobs = (batch["logprobs"], batch["ref_logprobs"])
    rewards = batch["rewards"].double()
    if name in ("reinforce", "rloo"):
        rewards = rewards - beta * reference.log_ratio_sums(*logprobs, *tokens)
    scores = reference.group_scores(rewards, batch["group_ids"], **{**parts, **options})
    per_token = {"logprobs": logprobs[0], "ref_logprobs": logprobs[1], "beta": beta} if name.startswith("grpo") else {}
    return reference.spread(scores, *tokens, **per_token, divide_by_length=name == "grpo_original")


def score_of(name: str, rewards: list[float], **options: Any) -> list[float]:
    """The advantages of one group of single-token sequences."""
    count = len(rewards)
    out = ops.compute_advantages(
        name,
        rewards=torch.tensor(rewards, dtype=torch.float64),
        cu_seqlens=torch.arange(count + 1),
        group_ids=torch.zeros(count, dtype=torch.int64),
        **options,
    )
    return out.tolist()


@pytest.mark.parametrize(("name", "beta"), [*((name, 0.0) for name in NAMES), *((name, 0.25) for name in USES_BETA)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_matches_the_definition(name: str, beta: float, dtype: torch.dtype) -> None:
    batch = make_batch(dtype)
    out = estimate(name, batch, beta)
    assert out.dtype == dtype
    bound = 1e-6 if dtype == torch.float32 else 1e-12
    assert_near(out, definition(name, batch, beta), absolute=bound, relative=bound)


@pytest.mark.parametrize("mean_level", ["none", "group", "batch"])
@pytest.mark.parametrize("std_level", ["none", "group", "batch"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps_in_root", [False, True])
@pytest.mark.parametrize("singleton", ["zero", "raw"])
def test_every_composition_matches_the_definition(
    mean_level: str, std_level: str, ddof: int, eps_in_root: bool, singleton: str
) -> None:
    options: dict[str, Any] = {"mean_level": mean_level, "std_level": std_level}
    if mean_level != "none":
        options["leave_one_out"] = ddof == 1
    if std_level != "none":
        options |= {"ddof": ddof, "eps": 1e-3, "eps_in_root": eps_in_root}
    if mean_level != "none" or std_level != "none":
        options["singleton"] = singleton
    batch = make_batch(torch.float64)
    out = estimate("grpo_r1", batch, **options)
    assert_near(out, definition("grpo_r1", batch, **options), absolute=1e-12, relative=1e-12)


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("grpo_r1", [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        ("rloo", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ("dr_grpo", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("maxrl", [1, 0, 0, 0], [3, -1, -1, -1]),
        ("reinforce", [1, 0, 0, 0], [1, 0, 0, 0]),
        ("grpo_r1", [1, 0], [0.5**0.5, -(0.5**0.5)]),
        ("rloo", [1, 0], [1, -1]),
        ("dr_grpo", [1, 0], [0.5, -0.5]),
    ],
)
def test_known_values(name: str, rewards: list[float], expected: list[float]) -> None:
    assert score_of(name, rewards) == pytest.approx(expected, rel=1e-5)
    if name in ("grpo_r1", "maxrl"):
        assert score_of(name, rewards, eps=0.0) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "reinforce"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -7.3, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_rewards_give_exactly_zero(name: str, reward: float, dtype: torch.dtype) -> None:
    for count in (2, 3, 7):
        rewards = torch.full((count,), reward, dtype=dtype)
        ids = torch.zeros(count, dtype=torch.int64)
        out = ops.compute_advantages(name, rewards=rewards, cu_seqlens=torch.arange(count + 1), group_ids=ids)
        assert not out.any()


@pytest.mark.parametrize("name", NAMES)
def test_a_single_member_gives_zero_or_its_reward(name: str) -> None:
    assert score_of(name, [0.7]) == [0.7 if name == "reinforce" else 0.0]
    if name != "reinforce":
        assert score_of(name, [0.7], singleton="raw") == [0.7]


@pytest.mark.parametrize("name", NAMES)
def test_a_failed_sample_is_as_if_it_had_not_been(name: str) -> None:
    with_failure = score_of(name, [1.0, math.nan, 0.25, 0.0])
    without = score_of(name, [1.0, 0.25, 0.0])
    assert with_failure[1] == 0.0
    assert [with_failure[i] for i in (0, 2, 3)] == without
    assert score_of(name, [math.nan, math.nan]) == [0.0, 0.0]


def test_rewards_far_from_zero_keep_their_spread() -> None:
    assert score_of("grpo_r1", [1e6 + r for r in (1, 0, 0, 0)], eps=0.0) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    near_1000 = torch.tensor([1000.0, 1000.1, 1000.2, 1000.3])
    scores = score_of("grpo_r1", near_1000.tolist(), eps=0.0)
    expected = (near_1000.double() - near_1000.double().mean()) / near_1000.double().std()
    assert scores == pytest.approx(expected.tolist(), rel=1e-9)


def test_an_infinite_reward_shows_in_its_group_only() -> None:
    out = ops.compute_advantages(
        "dr_grpo",
        rewards=torch.tensor([math.inf, 0.0, 1.0, 0.0]),
        cu_seqlens=torch.arange(5),
        group_ids=torch.tensor([0, 0, 1, 1]),
    )
    assert not out[:2].isfinite().any()
    assert out[2:].tolist() == [0.5, -0.5]


@given(st.permutations(range(12)), st.sampled_from(NAMES))
@settings(max_examples=30, deadline=None)
def test_a_permutation_of_the_sequences_permutes_the_advantages(order: list[int], name: str) -> None:
    batch = make_batch(torch.float64)
    batch = {key: batch[key] for key in ("rewards", "group_ids")}
    cu_seqlens = torch.arange(13)
    plain = ops.compute_advantages(name, **batch, cu_seqlens=cu_seqlens)
    permuted = ops.compute_advantages(name, **{key: x[order] for key, x in batch.items()}, cu_seqlens=cu_seqlens)
    assert_near(permuted, plain[order], absolute=1e-14, relative=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_groups_do_not_see_each_other(name: str) -> None:
    batch = make_batch(torch.float64)
    whole = ops.compute_advantages(
        name, rewards=batch["rewards"], group_ids=batch["group_ids"], cu_seqlens=torch.arange(13)
    )
    for group in batch["group_ids"].unique():
        members = (batch["group_ids"] == group).nonzero().flatten()
        alone = ops.compute_advantages(
            name,
            rewards=batch["rewards"][members],
            group_ids=torch.zeros(len(members), dtype=torch.int32),
            cu_seqlens=torch.arange(len(members) + 1),
        )
        assert_same_bits(alone, whole[members])


@pytest.mark.parametrize("name", USES_BETA)
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_masked_tokens_are_never_looked_at(name: str, beta: float) -> None:
    batch = make_batch()
    masked = ~batch["loss_mask"]
    dirty = {**batch, "logprobs": batch["logprobs"].clone(), "ref_logprobs": batch["ref_logprobs"].clone()}
    dirty["logprobs"][masked], dirty["ref_logprobs"][masked] = math.nan, -math.inf
    clean = estimate(name, batch, beta)
    assert_same_bits(estimate(name, dirty, beta), clean)
    assert not clean[masked].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_extreme_log_ratios_stay_finite(dtype: torch.dtype) -> None:
    logprobs = torch.tensor([-1e4, -1.0, -math.inf, -math.inf], dtype=dtype)
    ref = torch.tensor([-1.0, -1e4, -1.0, -math.inf], dtype=dtype)
    for name in USES_BETA:
        out = ops.compute_advantages(
            name,
            rewards=torch.tensor([1.0, 0.0], dtype=dtype),
            cu_seqlens=torch.tensor([0, 2, 4]),
            group_ids=torch.tensor([0, 0]),
            logprobs=logprobs,
            ref_logprobs=ref,
            beta=0.1,
        )
        assert out.isfinite().all()


def test_no_bit_depends_on_the_number_of_threads() -> None:
    torch.manual_seed(1)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, 500, (400,)).cumsum(0)])
    logprobs, ref_logprobs = -torch.rand(2, int(cu_seqlens[-1]))
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        results.append(
            ops.compute_advantages(
                "rloo",
                rewards=torch.rand(400, generator=torch.Generator().manual_seed(0)),
                cu_seqlens=cu_seqlens,
                group_ids=torch.arange(400) % 50,
                logprobs=logprobs,
                ref_logprobs=ref_logprobs,
                beta=0.1,
            )
        )
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16], ids=str)
def test_rewards_of_other_dtypes_become_float32(dtype: torch.dtype) -> None:
    rewards = torch.tensor([1, 0, 0, 1], dtype=dtype)
    out = ops.compute_advantages("dr_grpo", rewards=rewards, cu_seqlens=torch.arange(5), group_ids=torch.zeros(4).int())
    assert out.dtype == torch.float32
    assert out.tolist() == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("name", NAMES)
def test_empty_batches(name: str) -> None:
    empty = ops.compute_advantages(
        name, rewards=torch.zeros(0), cu_seqlens=torch.zeros(1, dtype=torch.int64), group_ids=torch.zeros(0).long()
    )
    assert empty.shape == (0,)
    no_tokens = ops.compute_advantages(
        name, rewards=torch.tensor([1.0, 0.0]), cu_seqlens=torch.zeros(3).long(), group_ids=torch.zeros(2).long()
    )
    assert no_tokens.shape == (0,)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ppo2", {}, "name in .*'dr_grpo'.*'rloo'.*, got 'ppo2'"),
        ("grpo_r1", {"epsilon": 1.0}, "options among .*'ddof'.*, got 'epsilon'"),
        ("grpo_r1", {"ddof": 2}, r"ddof in \(0, 1\), got 2"),
        ("grpo_r1", {"eps": -1.0}, "eps >= 0"),
        ("grpo_r1", {"std_level": "token"}, "std_level in .*, got 'token'"),
        ("grpo_r1", {"singleton": "nan"}, "singleton in"),
        ("dr_grpo", {"ddof": 1}, "no ddof with dr_grpo"),
        ("dr_grpo", {"eps": 1e-3}, "no eps with dr_grpo"),
        ("rloo", {"eps_in_root": True}, "no eps_in_root with rloo"),
        ("reinforce", {"singleton": "raw"}, "no singleton with reinforce"),
        ("reinforce", {"leave_one_out": True}, "no leave_one_out with reinforce"),
        ("maxrl", {"std_level": "group"}, "no std_level with divide_by_mean"),
        ("dr_grpo", {"beta": 0.1}, "beta = 0 with dr_grpo"),
        ("grpo_r1", {"beta": 0.1, "ref_logprobs": None}, "ref_logprobs with beta = 0.1"),
        ("grpo_r1", {"ref_logprobs": torch.zeros(103)}, "ref_logprobs = None with beta = 0"),
        ("grpo_r1", {"gamma": 0.9}, "gamma = 1 with grpo_r1"),
        ("grpo_r1", {"lam": 0.9}, "lam = 1 with grpo_r1"),
        ("grpo_r1", {"values": torch.zeros(3)}, "values = None"),
        ("grpo_r1", {"greedy_rewards": torch.zeros(3)}, "greedy_rewards = None"),
        ("grpo_r1", {"rewards": torch.zeros(3)}, r"cu_seqlens of shape \[4\]"),
        ("grpo_r1", {"group_ids": torch.zeros(11).long()}, r"of shape \[12\]"),
        ("grpo_r1", {"cu_seqlens": torch.tensor([0, 103])}, r"cu_seqlens of shape \[13\]"),
    ],
)
def test_bad_arguments_name_themselves(name: str, change: dict[str, Any], message: str) -> None:
    batch = make_batch()
    if "beta" not in change:
        del batch["ref_logprobs"]
    with pytest.raises(ValueError, match=": expected .*" + message):
        ops.compute_advantages(name, **{**batch, **change})


def test_wrong_dtypes_raise_type_error() -> None:
    with pytest.raises(TypeError, match="group_ids of an integer dtype"):
        estimate("grpo_r1", {**make_batch(), "group_ids": torch.zeros(12)})
    with pytest.raises(TypeError, match="logprobs dtype = Float, got Double"):
        ops.compute_advantages("grpo_r1", **{**make_batch(), "logprobs": torch.zeros(103).double()}, beta=0.1)


def test_opcheck_and_compile() -> None:
    batch = make_batch()
    sorted_ids, order = torch.sort(batch["group_ids"], stable=True)
    ops_to_check = torch.ops.areal_core
    options = (1, 2, True, False, False, False, 1, 0.1, True, True)
    torch.library.opcheck(
        ops_to_check.group_scores.default,
        (torch.rand(12), torch.ones(12).double(), sorted_ids, order, torch.rand(5).double(), *options),
    )
    pair = (batch["logprobs"], batch["ref_logprobs"])
    rewards = torch.rand(len(pair[0]))
    torch.library.opcheck(
        ops_to_check.sequence_rewards.default, (rewards, *pair, batch["cu_seqlens"], batch["loss_mask"], 0.1, 2)
    )
    torch.library.opcheck(ops_to_check.token_rewards.default, (rewards, *pair, batch["loss_mask"], 0.1, 1))
    torch.library.opcheck(ops_to_check.live_tokens.default, (batch["cu_seqlens"], batch["loss_mask"], len(rewards)))
    torch.library.opcheck(
        ops_to_check.discounted_returns.default,
        (rewards, torch.rand(12).double(), batch["cu_seqlens"], batch["loss_mask"], 0.9),
    )
    scores = torch.rand(12, dtype=torch.float64)
    tokens = (batch["cu_seqlens"], len(pair[0]), batch["loss_mask"])
    torch.library.opcheck(ops_to_check.spread_scores.default, (scores, scores, *tokens, *pair, 0.1, False))

    def advantages(batch: dict[str, Tensor]) -> Tensor:
        return ops.compute_advantages("rloo", **batch, beta=0.1)

    assert_same_bits(torch.compile(advantages, fullgraph=True)(batch), advantages(batch))
