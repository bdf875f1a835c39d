"""ppo_loss: values, gradients and statistics against the definition in fp64; splits, threads, autograd."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import (
    AGGREGATIONS,
    CURRENT_VERSION,
    RUNNABLE_ISAS,
    VARIANTS,
    assert_summary,
    make_batch,
    run,
    run_reference,
    sequences_of,
)
from op_checks import assert_same_bits
from torch import Tensor

from areal_core import _C, ops
from areal_core.ops import PPOLossConfig
from areal_core.reference import loss as reference

# 16, 2048: the vector and block sizes of the CPU kernel; the others leave every kind of remainder.
SIZES = [0, 1, 3, 15, 16, 17, 31, 33, 255, 2047, 2048, 2049, 5000]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_matches_the_definition(variant: str, aggregation: str) -> None:
    config = dataclasses.replace(VARIANTS[variant], aggregation=aggregation)
    options: dict[str, Any] = {"normalizer": 50.0} if aggregation == "constant" else {}
    for tokens, dtype in itertools.product((1, 17, 5000), (torch.float32, torch.float64)):
        batch = make_batch(tokens, dtype, seed=tokens)
        loss, grad, grad_entropy, raw = run(batch, config, **options)
        true_loss, true_grad, true_grad_entropy, stats = run_reference(batch, config, **options)
        rtol, atol = (4e-6, 1e-6) if dtype == torch.float32 else (1e-11, 1e-12)
        scale = max(float(true_grad.abs().max()), 1 / tokens)
        torch.testing.assert_close(loss.double(), true_loss, rtol=rtol, atol=atol)
        torch.testing.assert_close(grad.double(), true_grad, rtol=rtol, atol=atol * scale)
        torch.testing.assert_close(grad_entropy.double(), true_grad_entropy, rtol=rtol, atol=atol / tokens)
        assert_summary(raw, stats, rtol, atol)


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_every_instruction_set_matches_the_definition(tokens: int, isa: str) -> None:
    _C.set_active_isa(isa)
    for variant in ("all", "gspo_weight_sequence", "gmpo", "sapo"):
        batch, config = make_batch(tokens, seed=tokens + 1), VARIANTS[variant]
        loss, grad, _, raw = run(batch, config)
        true_loss, true_grad, _, stats = run_reference(batch, config)
        torch.testing.assert_close(loss.double(), true_loss, rtol=4e-6, atol=1e-6)
        torch.testing.assert_close(grad.double(), true_grad, rtol=4e-6, atol=1e-6 / max(tokens, 1))
        assert_summary(raw, stats, rtol=4e-6, atol=1e-6)


def ratios(values: list[float], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.tensor(values, dtype=torch.float64).log().to(dtype), torch.zeros(len(values), dtype=dtype)


@pytest.mark.parametrize(("ratio", "advantage", "term"), [(2.0, 2.0, -2.4), (2.0, -2.0, 3.0), (0.5, 2.0, -1.0)])
def test_known_values_of_dual_clip(ratio: float, advantage: float, term: float) -> None:
    config = PPOLossConfig(dual_clip=1.5)
    out = ops.ppo_loss(*ratios([ratio]), torch.tensor([advantage]).double(), torch.ones(1), config=config)
    assert out.loss.item() == pytest.approx(term, rel=1e-14)


def test_known_value_of_the_mean() -> None:
    out = ops.ppo_loss(*ratios([0.5, 1.0, 1.5]), torch.tensor([1.0, -1.0, 2.0]).double(), torch.ones(3))
    assert out.loss.item() == pytest.approx(-1.9 / 3, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("side", ["low", "high", "dual"])
def test_a_tie_at_a_clip_edge_takes_the_unclipped_gradient(side: str, dtype: torch.dtype) -> None:
    logprobs, proximal = ratios([0.75] if side == "low" else [1.5], dtype)
    advantage = torch.tensor([1.0 if side == "high" else -1.0], dtype=dtype)

    def grad(clip_low: float, clip_high: float, dual_clip: float | None) -> tuple[float, float]:
        config = PPOLossConfig(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
        leaf = logprobs.clone().requires_grad_()
        out = ops.ppo_loss(leaf, proximal, advantage, torch.ones(1), config=config)
        out.loss.backward()
        return float(leaf.grad), float(out.stats.finalize().ratio_max)

    _, u = grad(1.0, 9.0, None)  # the ratio as the kernel computes it; u - 1 and 1 - u are exact
    edge = {"low": (1 - u, 9.0, None), "high": (1.0, u - 1, None), "dual": (1.0, 9.0, u)}[side]
    inside = {"low": (1 - u / 1.001, 9.0, None), "high": (1.0, u * 1.001 - 1, None), "dual": (1.0, 9.0, u * 1.001)}[
        side
    ]
    beyond = {"low": (1 - u * 1.001, 9.0, None), "high": (1.0, u / 1.001 - 1, None), "dual": (1.0, 9.0, u / 1.001)}[
        side
    ]
    assert grad(*edge)[0] == grad(*inside)[0] == pytest.approx(-u * float(advantage), rel=1e-6)
    assert grad(*beyond)[0] == 0.0


@pytest.mark.parametrize("y", [1e-4, -1e-4, 1e-3, 0.01, 0.1, -0.3, 0.34, 0.35, -0.35, 0.5, 1.0, -1.0, 5.0, -19.0, 19.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_k3_keeps_its_digits(y: float, dtype: torch.dtype, isa: str) -> None:
    _C.set_active_isa(isa)
    proximal = torch.zeros(33, dtype=dtype)
    logprobs = proximal + y
    out = ops.ppo_loss(logprobs, proximal, proximal, torch.ones(33), ref_logprobs=2 * logprobs)
    truth = float(reference.k3(logprobs.double())[0])
    rel = 3e-6 if dtype == torch.float32 else 1e-12
    assert float(out.stats.finalize().kl_proximal_current_k3) == pytest.approx(truth, rel=rel, abs=0)
    assert float(out.stats.finalize().kl_current_reference_k3) == pytest.approx(truth, rel=rel, abs=0)


@given(
    tokens=st.integers(1, 3000),
    cuts=st.lists(st.floats(0, 1), max_size=5),
    variant=st.sampled_from(sorted(VARIANTS)),
    aggregation=st.sampled_from(AGGREGATIONS),
    as_tensor=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_split_gives_the_same_loss_gradient_and_statistics(
    tokens: int, cuts: list[float], variant: str, aggregation: str, as_tensor: bool
) -> None:
    config = dataclasses.replace(VARIANTS[variant], aggregation=aggregation)
    batch = make_batch(tokens, torch.float64, seed=tokens)
    live = max(int(batch["loss_mask"].sum()), 1)
    normalizer = torch.tensor(live) if as_tensor else live
    whole = run(batch, config, normalizer=normalizer)
    sequences = len(batch["cu_seqlens"]) - 1
    bounds = sorted({0, sequences, *(int(c * sequences) for c in cuts)})
    parts = [
        run(sequences_of(batch, first, last), config, normalizer=normalizer)
        for first, last in itertools.pairwise(bounds)
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), whole[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.cat([part[1] for part in parts]), whole[1])
    assert torch.equal(torch.cat([part[2] for part in parts]), whole[2])
    merged = ops.PPOLossStats.merge([ops.PPOLossStats(part[3]) for part in parts])
    torch.testing.assert_close(merged.raw, whole[3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_a_split_changes_no_bit_of_the_fp32_gradient(isa: str) -> None:
    _C.set_active_isa(isa)
    for variant in ("all", "gspo_weight_sequence", "gmpo"):
        batch, config = make_batch(5003), VARIANTS[variant]
        grad = run(batch, config, normalizer=1000.0)[1]
        sequences = len(batch["cu_seqlens"]) - 1
        for cut in (1, 2, sequences // 2, sequences - 1):
            parts = [sequences_of(batch, 0, cut), sequences_of(batch, cut, sequences)]
            assert torch.equal(torch.cat([run(part, config, normalizer=1000.0)[1] for part in parts]), grad)


def test_a_token_level_loss_may_be_split_inside_a_sequence() -> None:
    batch, config = make_batch(5003), VARIANTS["all"]
    del batch["cu_seqlens"]
    grad = run(batch, config, normalizer=1000.0)[1]
    for cut in (1, 16, 333, 2048, 5002):
        parts = [{name: x[part] for name, x in batch.items()} for part in (slice(cut), slice(cut, None))]
        assert torch.equal(torch.cat([run(part, config, normalizer=1000.0)[1] for part in parts]), grad)


def test_no_bit_depends_on_the_number_of_threads() -> None:
    for variant in ("all", "gspo_weight_sequence"):
        batch, config = make_batch(200_003), VARIANTS[variant]
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(run(batch, config))
        for result in results[1:]:
            for a, b in zip(results[0], result, strict=True):
                assert_same_bits(a, b)


def test_fp32_sums_do_not_drift() -> None:
    tokens = 1 << 20
    logprobs = torch.full((tokens,), 0.1)
    zeros = torch.zeros(tokens)
    out = ops.ppo_loss(logprobs, zeros, zeros + 1, torch.ones(tokens))
    u = math.exp(float(torch.tensor(0.1)))
    assert float(out.stats.finalize().ratio_mean) == pytest.approx(u, rel=3e-7)
    assert out.loss.item() == pytest.approx(-u, rel=3e-7)


# The gradients of these are not those of their value: they treat a ratio as a constant.
STOP_GRADIENT = {name for name, config in VARIANTS.items() if config.objective == "cispo"}


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - STOP_GRADIENT))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradcheck(variant: str, aggregation: str) -> None:
    config = dataclasses.replace(VARIANTS[variant], aggregation=aggregation)
    batch = make_batch(12, torch.float64, seed=3)
    fixed = {name: x for name, x in batch.items() if name not in ("logprobs", "entropy", "versions")}

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return ops.ppo_loss(logprobs, entropy=entropy, **fixed, config=config, normalizer=5.0).loss

    leaves = [batch[name].requires_grad_() for name in ("logprobs", "entropy")]
    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("variant", sorted(STOP_GRADIENT))
def test_cispo_gives_the_gradient_of_the_log_likelihood_under_fixed_weights(variant: str) -> None:
    batch, config = make_batch(60, torch.float64, seed=3), dataclasses.replace(VARIANTS[variant], behavior_cap=None)
    del batch["behavior_logprobs"], batch["keep_mask"]
    grad = run(batch, config, normalizer=1.0)[1]
    ratio = (batch["logprobs"] - batch["proximal_logprobs"]).exp()
    if config.ratio_level == "sequence":
        live, cu = batch["loss_mask"], batch["cu_seqlens"]
        for begin, end in itertools.pairwise(cu.tolist()):
            part = slice(begin, end)
            ratio[part] = ratio[part][live[part]].log().mean().exp() if live[part].any() else 1.0
    weight = ratio.clamp(1 - config.clip_low, 1 + float(config.clip_high or 0)) * batch["advantages"]
    expected = torch.where(batch["loss_mask"], -weight, torch.zeros_like(weight))
    torch.testing.assert_close(grad, expected)


def test_the_upstream_gradient_scales() -> None:
    batch = make_batch(50)
    grads = []
    for factor in (1.0, -3.0):
        leaf = batch["logprobs"].clone().requires_grad_()
        (factor * ops.ppo_loss(**{**batch, "logprobs": leaf}, current_version=CURRENT_VERSION).loss).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], -3.0 * grads[0])


def test_no_gradient_reaches_other_inputs() -> None:
    batch = {name: x.requires_grad_(x.is_floating_point()) for name, x in make_batch(20).items()}
    ops.ppo_loss(**batch, current_version=CURRENT_VERSION, config=VARIANTS["default"]).loss.backward()
    assert [name for name, x in batch.items() if x.grad is not None and x.grad.any()] == ["logprobs"]
    batch["logprobs"], batch["entropy"] = batch["logprobs"].detach(), batch["entropy"].detach()
    assert not ops.ppo_loss(**batch, current_version=CURRENT_VERSION).loss.requires_grad


def test_a_second_derivative_raises() -> None:
    batch = make_batch(5)
    leaf = batch["logprobs"].requires_grad_()
    loss = ops.ppo_loss(**batch, current_version=CURRENT_VERSION).loss
    (grad,) = torch.autograd.grad(loss + leaf.pow(2).sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="ppo_loss: expected one backward pass"):
        torch.autograd.grad(grad.sum(), leaf)


@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_opcheck(dtype: torch.dtype, optional: bool) -> None:
    batch = make_batch(20, dtype)
    for name in ("logprobs", "entropy"):
        batch[name].requires_grad_()
    required = [batch[name] for name in ("logprobs", "proximal_logprobs", "advantages", "loss_mask")]
    names = ("behavior_logprobs", "ref_logprobs", "entropy", "teacher_logprobs", "keep_mask", "versions")
    scalars = [torch.tensor([CURRENT_VERSION]), batch["cu_seqlens"], torch.tensor([3.0], dtype=torch.float64)]
    given_inputs = [*(batch[name] for name in names), *scalars]
    config = VARIANTS["gspo_weight_sequence" if optional else "default"]
    arguments = [*required, *(given_inputs if optional else [None] * len(given_inputs)), *config._native()]
    torch.library.opcheck(torch.ops.areal_core.ppo_loss.default, arguments)


@pytest.mark.parametrize("variant", ["all", "gspo_weight_sequence"])
def test_compiles_whole(variant: str) -> None:
    config = VARIANTS[variant]

    def step(logprobs: Tensor, entropy: Tensor, fixed: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        out = ops.ppo_loss(
            logprobs, entropy=entropy, **fixed, current_version=CURRENT_VERSION, config=config, normalizer=7.0
        )
        return out.loss * 2, out.stats.raw, out.stats.finalize().ratio_mean

    batch = make_batch(100)
    fixed = {name: x for name, x in batch.items() if name not in ("logprobs", "entropy")}
    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        leaves = [batch[name].clone().requires_grad_() for name in ("logprobs", "entropy")]
        out = function(*leaves, fixed)
        out[0].backward()
        results.append([*(x.detach() for x in out), *(leaf.grad for leaf in leaves)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-7)


def test_merging_with_an_empty_part_changes_nothing() -> None:
    full = ops.ppo_loss(**make_batch(100), current_version=CURRENT_VERSION).stats
    empty = ops.ppo_loss(**make_batch(10, live=0.0), current_version=CURRENT_VERSION).stats
    assert torch.equal(ops.PPOLossStats.merge([empty, full, empty]).raw, full.raw)


def test_all_reduce_over_one_rank_changes_nothing() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        stats = ops.ppo_loss(**make_batch(100), current_version=CURRENT_VERSION).stats
        before = stats.raw.clone()
        assert torch.equal(stats.all_reduce().raw, before)
        assert torch.equal(stats.raw, before)
    finally:
        torch.distributed.destroy_process_group()
