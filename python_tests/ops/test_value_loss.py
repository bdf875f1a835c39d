"""value_loss: values, gradients and statistics against the definition in fp64; masks, splits, threads, autograd."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import RUNNABLE_ISAS
from op_checks import assert_near, assert_same_bits, reference_data
from torch import Tensor

from areal_core import _C, ops
from areal_core.reference import value_loss as reference

VARIANTS: dict[str, dict[str, Any]] = {
    "square": {},
    "clip": {"clip": 0.2},
    "huber": {"huber_delta": 0.5},
    "clip_huber": {"clip": 0.2, "huber_delta": 0.5},
}


def make_batch(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0, live: float = 0.7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old, noise, returns = (torch.randn(tokens, generator=generator, dtype=torch.float64) for _ in range(3))
    batch = {"values": old + 0.4 * noise, "old_values": old, "returns": returns}
    return {
        **{name: x.to(dtype) for name, x in batch.items()},
        "loss_mask": torch.rand(tokens, generator=generator) < live,
    }


def run(batch: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    values = batch["values"].clone().requires_grad_()
    out = ops.value_loss(**{**batch, "values": values}, **options)
    (grad,) = torch.autograd.grad(out.loss, values)
    return out.loss.detach(), grad, out.stats.raw


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_matches_the_definition(variant: str, isa: str) -> None:
    _C.set_active_isa(isa)
    for tokens, dtype in itertools.product((0, 1, 15, 16, 17, 2047, 2049, 5000), (torch.float32, torch.float64)):
        batch = make_batch(tokens, dtype, seed=tokens)
        loss, grad, raw = run(batch, **VARIANTS[variant])
        leaf = batch["values"].double().requires_grad_()
        true_loss, stats = reference.value_loss(**{**batch, "values": leaf}, **VARIANTS[variant])
        (true_grad,) = torch.autograd.grad(true_loss, leaf)
        rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1e-12, 1e-13)
        torch.testing.assert_close(loss.double(), true_loss.detach(), rtol=rtol, atol=atol)
        torch.testing.assert_close(grad.double(), true_grad, rtol=rtol, atol=atol / max(tokens, 1))
        summary = ops.ValueLossStats(raw).finalize()._asdict()
        assert summary.keys() == stats.keys()
        for name, value in summary.items():
            torch.testing.assert_close(value, stats[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck(variant: str) -> None:
    batch = make_batch(12, torch.float64, seed=3)
    fixed = {name: x for name, x in batch.items() if name != "values"}
    loss = lambda values: ops.value_loss(values, **fixed, **VARIANTS[variant], normalizer=5.0).loss  # noqa: E731
    assert torch.autograd.gradcheck(loss, batch["values"].requires_grad_())


def test_known_values_and_a_tie_takes_the_unclipped_gradient() -> None:
    one = torch.ones(1, dtype=torch.float64)
    # Clipped to 0.25 of the old value 0, a value of 1 with return 1 has error -0.75: the larger branch, held.
    out = ops.value_loss(one.clone().requires_grad_(), 0 * one, one, one, clip=0.25)
    assert out.loss.item() == 0.75**2 / 2
    assert out.stats.finalize().clip_fraction == 1
    # The errors of 1 and of 0.25 + ... are equal in size at return 0.625: both branches are equal.
    value = one.clone().requires_grad_()
    out = ops.value_loss(value, 0 * one, 0.625 * one, one, clip=0.25)
    out.loss.backward()
    assert value.grad.item() == 0.375
    assert out.stats.finalize().clip_fraction == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_masked_tokens_are_never_looked_at(dtype: torch.dtype) -> None:
    batch = make_batch(2500, dtype)
    dirty = {name: x.clone() for name, x in batch.items()}
    for junk, name in zip((math.nan, math.inf, -math.inf), ("values", "old_values", "returns"), strict=True):
        dirty[name][~batch["loss_mask"]] = junk
    for clean, other in zip(run(batch, clip=0.2), run(dirty, clip=0.2), strict=True):
        assert_same_bits(clean, other)
    assert not run(dirty, clip=0.2)[1][~batch["loss_mask"]].any()


def test_without_live_tokens_everything_is_zero() -> None:
    for tokens, normalizer in itertools.product((0, 1, 40, 5000), (None, 0.5, torch.tensor(0.0))):
        batch = make_batch(tokens, live=0.0)
        loss, grad, raw = run({**batch, "values": batch["values"] + math.nan}, clip=0.1, normalizer=normalizer)
        assert float(loss) == 0.0
        assert torch.equal(grad, torch.zeros(tokens))
        assert all(float(value) == 0.0 for value in ops.ValueLossStats(raw).finalize())


@pytest.mark.parametrize("name", ["values", "old_values", "returns"])
def test_nan_at_a_live_token_shows_and_stays_there(name: str) -> None:
    batch = make_batch(100, live=1.1)
    batch[name][70] = math.nan
    loss, grad, _ = run(batch, clip=0.2)
    assert set(grad.isnan().nonzero().flatten().tolist()) <= {70}
    assert loss.isnan() == (name != "old_values")  # an unknown old value clips nothing


@given(tokens=st.integers(1, 3000), cuts=st.lists(st.floats(0, 1), max_size=4))
@settings(max_examples=15, deadline=None)
def test_any_split_gives_the_same(tokens: int, cuts: list[float]) -> None:
    batch, options = make_batch(tokens, torch.float64, seed=tokens), {"clip": 0.2, "normalizer": 100.0}
    whole = run(batch, **options)
    bounds = sorted({0, tokens, *(int(c * tokens) for c in cuts)})
    parts = [run({k: x[a:b] for k, x in batch.items()}, **options) for a, b in itertools.pairwise(bounds)]
    torch.testing.assert_close(sum(part[0] for part in parts), whole[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.cat([part[1] for part in parts]), whole[1])
    merged = ops.ValueLossStats.merge([ops.ValueLossStats(part[2]) for part in parts])
    torch.testing.assert_close(merged.raw, whole[2], rtol=1e-12, atol=1e-12)


def test_no_bit_depends_on_the_number_of_threads() -> None:
    batch, results = make_batch(100_003), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(run(batch, clip=0.2))
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            assert_same_bits(a, b)


def test_variance_of_large_returns_does_not_cancel() -> None:
    returns = 1000 + 0.1 * torch.randn(50_000)
    summary = ops.value_loss(returns + 0.05, None, returns, torch.ones(50_000)).stats.finalize()
    assert float(summary.return_std) == pytest.approx(float(returns.double().std(correction=0)), rel=1e-6)
    assert float(summary.explained_variance) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("count", [3, 7, 5000])
@pytest.mark.parametrize("constant", [0.1, 1000.1])
def test_nothing_explains_returns_that_do_not_vary(count: int, constant: float) -> None:
    """The sums of equal numbers are rounded; what that leaves must not pass for a variance to divide by."""
    returns = torch.full((count,), constant, dtype=torch.float64)
    parts = [ops.value_loss(torch.randn(count).double(), None, returns, torch.ones(count)).stats for _ in range(3)]
    summary = ops.ValueLossStats.merge(parts).finalize()
    assert float(summary.explained_variance) == 0
    assert float(summary.return_std) == 0


def test_no_gradient_reaches_other_inputs() -> None:
    batch = make_batch(9)
    for name in ("old_values", "returns"):
        batch[name].requires_grad_()
    assert not ops.value_loss(**batch, clip=0.2).loss.requires_grad


def test_opcheck_and_second_derivative() -> None:
    batch = make_batch(20)
    leaf = batch["values"].requires_grad_()
    arguments = (leaf, batch["old_values"], batch["returns"], batch["loss_mask"], None, 0.2, math.inf)
    torch.library.opcheck(torch.ops.areal_core.value_loss.default, arguments)
    (grad,) = torch.autograd.grad(ops.value_loss(**batch).loss, leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="value_loss: expected one backward pass"):
        torch.autograd.grad(grad.sum(), leaf)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"clip": 0.0}, ValueError, "clip > 0, got 0.0"),
        ({"huber_delta": math.nan}, ValueError, "huber_delta > 0"),
        ({"clip": 0.2, "old_values": None}, ValueError, "old_values with clip set"),
        ({"normalizer": 0.0}, ValueError, "normalizer > 0"),
        ({"returns": torch.zeros(4)}, ValueError, r"returns of shape \[5\]"),
        ({"values": torch.zeros(5).bfloat16()}, TypeError, "values dtype in {float32, float64}, got BFloat16"),
        ({"old_values": torch.zeros(5).double()}, TypeError, "old_values dtype = Float, got Double"),
    ],
)
def test_bad_arguments_name_themselves(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match="value_loss: expected .*" + message):
        ops.value_loss(**{**make_batch(5), **change})


# The recorded peers' settings: a clip of 0.2, and half the squared error but where noted. skyrl.ppo_critic_loss is left
# out: it averages over sequences, those without a live token included.
PEERS = {
    "areal.ppo_critic_loss_fn:mse": {},
    "areal.ppo_critic_loss_fn:huber": {"huber_delta": 10.0},
    "verl.compute_value_loss": {},
    "openrlhf.ValueLoss": {},
}


@pytest.mark.parametrize("peer", PEERS)
def test_agrees_with_recorded_peers(peer: str) -> None:
    recorded, compared = reference_data("value"), 0
    for dtype in ("f32", "f64"):
        outputs = recorded["out", "base", dtype]
        if f"{peer}/loss" not in outputs:
            continue
        x = {name: torch.from_numpy(array).flatten() for name, array in recorded["in", "base", dtype].items()}
        value = x["value"].requires_grad_()
        out = ops.value_loss(value, x["old"], x["ret"], x["mask"], clip=0.2, **PEERS[peer])
        out.loss.backward()
        for ours, name in ((out.loss.detach(), "loss"), (value.grad, "grad")):
            theirs = torch.from_numpy(outputs[f"{peer}/{name}"]).double().flatten()
            assert_near(ours.flatten(), theirs, absolute=1e-6 * float(theirs.abs().max()), relative=0)
            compared += 1
    assert compared >= 2
