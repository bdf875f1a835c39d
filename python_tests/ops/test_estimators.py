"""Every named estimator against the table it comes from, and what holds for all of them."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from estimator_cases import SEED, TABLE, WITH_KL, estimate, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_near, assert_same_bits
from torch import Tensor

from areal_core import ops
from areal_core.reference import estimators as reference


def test_every_name_is_listed() -> None:
    assert ops.estimators() == sorted(ops.estimators())
    assert set(SEED) < set(TABLE) < set(ops.estimators())


@pytest.mark.parametrize(("name", "beta"), [*((n, 0.0) for n in TABLE), *((n, 0.25) for n in WITH_KL)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_matches_the_table(name: str, beta: float, dtype: torch.dtype) -> None:
    batch = make_batch(dtype)
    options = {"gamma": 0.97, "lam": 0.9} if name == "ppo" else {}
    out = estimate(name, batch, beta, **options)
    assert out.dtype == dtype
    bound = 5e-6 if dtype == torch.float32 else 1e-12
    assert_near(out, reference.compute_advantages(name, **batch, beta=beta, **options), absolute=bound, relative=bound)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("kind", ["binary", "real", "ties", "offset"])
def test_pass_at_k_is_the_mean_over_all_subsets(k: int, kind: str) -> None:
    rewards = torch.rand(6, dtype=torch.float64)
    rewards = {
        "binary": (rewards < 0.5).double(),
        "real": rewards,
        "ties": torch.tensor([0.5, 0.1, 0.5, 0.9, 0.1, 0.9]).double(),
        "offset": rewards + 1e6,
    }[kind]
    group = [reference.Sequence(r, 0.0, [], [], [], []) for r in rewards.tolist()]
    for s in group:
        s.group.extend(group)
    truth = torch.tensor([reference.pass_at_k(s, k) for s in group], dtype=torch.float64)
    one_token = {"rewards": rewards, "group_ids": torch.zeros(6).long(), "cu_seqlens": torch.arange(7)}
    out = ops.compute_advantages("pass_at_k", k=k, **one_token)
    assert_near(out, truth, absolute=1e-7 if kind == "offset" else 1e-13, relative=0)  # the truth rounds


def test_pass_at_k_gives_equal_rewards_equal_bits() -> None:
    rewards = torch.tensor([0.3, 0.7, 0.3, 0.9, 0.7, 0.3, 0.9, 0.7, 0.3, 0.1], dtype=torch.float64)
    for k in range(1, 9):
        one_token = {"group_ids": torch.zeros(10).long(), "cu_seqlens": torch.arange(11)}
        scores = ops.compute_advantages("pass_at_k", rewards=rewards, **one_token, k=k)
        for reward in rewards.unique():
            assert len(scores[rewards == reward].unique()) == 1


def test_pass_at_k_of_binary_rewards_is_the_paper_s_closed_form() -> None:
    n, right, k = 8, 2, 3
    solved = 1 - math.comb(n - right, k) / math.comb(n, k)
    std = math.sqrt(solved * (1 - solved))
    wrong = 1 - solved - math.comb(n - right - 1, k - 1) / math.comb(n - 1, k - 1)
    out = ops.compute_advantages(
        "pass_at_k",
        k=k,
        rewards=torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0]),
        group_ids=torch.zeros(8).long(),
        cu_seqlens=torch.arange(9),
    )
    assert out.tolist() == pytest.approx([(1 - solved) / std] * right + [wrong / std] * (n - right), rel=1e-6)


def test_orz_is_ppo_without_discount_and_kl() -> None:
    batch = make_batch()
    assert_same_bits(estimate("orz", batch), estimate("ppo", batch))


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_masked_tokens_are_never_looked_at(name: str, beta: float) -> None:
    beta = beta if name in WITH_KL else 0.0
    batch = make_batch(torch.float32)
    masked = ~batch["loss_mask"]
    dirty = dict(batch)
    for key, junk in (("logprobs", math.nan), ("ref_logprobs", -math.inf), ("values", math.inf)):
        dirty[key] = batch[key].masked_fill(masked, junk)
    clean = estimate(name, batch, beta)
    assert_same_bits(estimate(name, dirty, beta), clean)
    assert not clean[masked].any()


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_failed_sample_is_as_if_it_had_not_been(name: str, beta: float) -> None:
    beta = beta if name in WITH_KL else 0.0
    batch = make_batch()
    lengths = batch["cu_seqlens"].diff()
    kept = ~batch["rewards"].isnan()
    token_kept = kept.repeat_interleave(lengths)
    cut = {key: x[kept] for key, x in batch.items() if len(x) == len(kept)}
    cut |= {key: x[token_kept] for key, x in batch.items() if len(x) == len(token_kept)}
    cut["cu_seqlens"] = torch.cat([torch.zeros(1).long(), lengths[kept].cumsum(0)])
    out = estimate(name, batch, beta)
    assert_same_bits(out[token_kept], estimate(name, cut, beta))
    assert not out[~token_kept].any()


@given(order=st.permutations(range(12)), name=st.sampled_from(TABLE), beta=st.sampled_from([0.0, 0.5]))
@settings(max_examples=60, deadline=None)
def test_no_bit_depends_on_the_order_of_the_sequences(order: list[int], name: str, beta: float) -> None:
    beta = beta if name in WITH_KL else 0.0
    batch = make_batch()
    bounds = batch["cu_seqlens"]
    tokens = torch.cat([torch.arange(int(bounds[s]), int(bounds[s + 1])) for s in order])
    permuted = {key: x[order] for key, x in batch.items() if len(x) == 12}
    permuted |= {key: x[tokens] for key, x in batch.items() if len(x) == len(tokens)}
    permuted["cu_seqlens"] = torch.cat([torch.zeros(1).long(), bounds.diff()[order].cumsum(0)])
    assert_same_bits(estimate(name, permuted, beta), estimate(name, batch, beta)[tokens])


@pytest.mark.parametrize("name", TABLE)
def test_padded_data_gives_the_same(name: str) -> None:
    batch = make_batch()
    beta = 0.25 if name in WITH_KL else 0.0
    lengths = batch["cu_seqlens"].diff()
    inside = torch.arange(40) < lengths[:, None]
    padded = {}
    for key, x in batch.items():
        if len(x) == len(batch["loss_mask"]):
            padded[key] = torch.zeros(12, 40, dtype=x.dtype)
            padded[key][inside] = x
        elif key != "cu_seqlens":
            padded[key] = x
    out = estimate(name, padded, beta)
    assert out.shape == (12, 40)
    assert_same_bits(out[inside], estimate(name, batch, beta))
    assert not out[~inside].any()


@pytest.mark.parametrize("name", TABLE)
def test_empty_batches(name: str) -> None:
    batch = make_batch()
    nothing = {key: x[:0] for key, x in batch.items()}
    assert estimate(name, {**nothing, "cu_seqlens": torch.zeros(1).long()}).shape == (0,)
    no_tokens = {key: x[:0] if len(x) == len(batch["loss_mask"]) else x for key, x in batch.items()}
    assert estimate(name, {**no_tokens, "cu_seqlens": torch.zeros(13).long()}).shape == (0,)


@pytest.mark.parametrize("name", TABLE)
def test_all_masked_and_all_failed_give_zeros(name: str) -> None:
    batch = make_batch()
    masked = estimate(name, {**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])})
    failed = estimate(name, {**batch, "rewards": torch.full((12,), math.nan, dtype=torch.float64)})
    assert not masked.any()
    assert not failed.any()


def test_a_new_estimator_is_a_declaration() -> None:
    lite_ppo = ops.Estimator(mean_level="group", std_level="batch")
    ops.register_estimator("lite_ppo", lite_ppo)
    batch = make_batch()
    by_name = estimate("lite_ppo", batch)
    assert_same_bits(by_name, estimate(lite_ppo, batch))
    assert_same_bits(by_name, estimate("grpo_r1", batch, std_level="batch"))
    assert "lite_ppo" in ops.estimators()
    with pytest.raises(ValueError, match="expected a new name, got 'lite_ppo'"):
        ops.register_estimator("lite_ppo", lite_ppo)


@pytest.mark.parametrize(
    ("name", "estimator", "error"),
    [("", ops.Estimator(), ValueError), (3, ops.Estimator(), TypeError), ("new", {"mean_level": "group"}, TypeError)],
)
def test_what_is_no_estimator_gets_no_name(name: Any, estimator: Any, error: type[Exception]) -> None:
    known = ops.estimators()
    with pytest.raises(error, match="register_estimator: expected"):
        ops.register_estimator(name, estimator)
    assert ops.estimators() == known


@pytest.mark.parametrize("name", ["dapo", "maxrl", "opo", "orz", "reinforce_pp_baseline"])  # others: op_samples.py
def test_compiles_without_a_graph_break(name: str) -> None:
    batch = make_batch(torch.float32)
    beta = 0.25 if name in WITH_KL else 0.0

    def advantages(batch: dict[str, Tensor]) -> Tensor:
        return estimate(name, batch, beta)

    torch._dynamo.reset()  # the names share code, whose recompilations are limited
    compiled = torch.compile(advantages, fullgraph=True, backend="eager")
    assert_same_bits(compiled(batch), advantages(batch))


def test_get_estimator_replaces_parts_as_compute_advantages_does() -> None:
    assert ops.get_estimator("grpo_r1", ddof=0) == dataclasses.replace(ops.get_estimator("grpo_r1"), ddof=0)
    with pytest.raises(ValueError, match=r"get_estimator: expected options among .*, got 'critic'"):
        ops.get_estimator("grpo_r1", critic=True)
    with pytest.raises(ValueError, match="get_estimator: expected no ddof with rloo, which does not use it, got 0"):
        ops.get_estimator("rloo", ddof=0)
    with pytest.raises(ValueError, match=r"get_estimator: expected name in .*, got 'grpo'"):
        ops.get_estimator("grpo")
