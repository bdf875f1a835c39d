"""verl's losses with our kernels against verl without them: values, gradients, metrics, refusals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from verl_cases import MODES, TOTALS, actor_config, assert_same, batch, run_loss, unpatched

from areal_core.integrations import verl as integration

pytest.importorskip("verl", reason="verl is not installed", exc_type=ImportError)
algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl lacks what it needs", exc_type=ImportError)

LOSSES = ("vanilla", "gspo", "sapo", "cispo", "gpg", "geo_mean", "dppo_tv", "dppo_kl", "reinforce")
CLIPS = (
    {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None},
    {"clip_ratio_high": 0.6, "clip_ratio_c": 1.4},
    {"clip_ratio_low": 1.7},  # no lower bound
)


@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses_and_their_options(name: str) -> None:
    x, first = {dtype: batch(dtype) for dtype in (torch.float32, torch.float64)}, CLIPS[0]
    cases = [(mode, totals, True, first, torch.float64) for mode in MODES for totals in TOTALS]
    cases += [("token-mean", {}, weighted, clip, torch.float64) for weighted in (True, False) for clip in CLIPS]
    cases += [(mode, TOTALS[1], True, clip, torch.float32) for mode in MODES for clip in CLIPS[:2]]
    for strict in (False, True):
        with integration.apply(only={f"policy_loss.{name}"}, strict=strict) as patches:
            ours = getattr(algos, f"compute_policy_loss_{name}")
            for mode, totals, weighted, clip, dtype in cases[strict * 12 :]:
                inputs = x[dtype] if weighted else {k: v for k, v in x[dtype].items() if k != "rollout_is_weights"}
                options = {"loss_agg_mode": mode, "config": actor_config(totals, **clip)}
                tolerance = 5e-6 if dtype == torch.float32 else 2e-8  # verl's means have 1e-8 in their denominators
                theirs = run_loss(unpatched(ours), inputs, **options)
                assert_same(run_loss(ours, inputs, **options), theirs, tolerance)
            assert patches.fallbacks == {}


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "geo_mean"])  # which verl leaves unbounded
def test_clamps_of_extreme_ratios(name: str) -> None:
    x = batch(torch.float64)
    x["log_prob"] = x["old_log_prob"] + torch.tensor([0, 30, -30, 11, 15, -15])[:, None]
    for sign in (1, -1):
        x["advantages"] = torch.full_like(x["advantages"], float(sign))
        with integration.apply(only={f"policy_loss.{name}"}) as patches:
            ours = getattr(algos, f"compute_policy_loss_{name}")
            options = {"config": actor_config(clip_ratio_c=1e6)}
            assert_same(run_loss(ours, x, **options), run_loss(unpatched(ours), x, **options), 2e-8)
            assert patches.fallbacks == {}


@pytest.mark.parametrize("name", LOSSES)
def test_what_verl_gets_wrong_reaches_no_loss(name: str) -> None:
    x = batch()
    hidden = ~x["response_mask"]
    bad = {k: torch.where(hidden, math.nan, v) if v.is_floating_point() else v for k, v in x.items()}
    bad["log_prob"] = torch.where(hidden, 400.0, x["log_prob"])
    options = {"config": actor_config()}
    with integration.apply() as patches:
        ours = getattr(algos, f"compute_policy_loss_{name}")
        assert_same(run_loss(ours, bad, **options), run_loss(ours, x, **options), 0.0)
        nothing = x | {"response_mask": torch.zeros_like(hidden)}
        loss, grad, _ = run_loss(ours, nothing, **options)
        assert loss == 0
        assert not grad.any()
        assert patches.fallbacks == {}


def test_strict_leaves_non_finite_and_empty_batches_to_verl() -> None:
    x = batch()
    nothing = x | {"response_mask": torch.zeros_like(x["response_mask"])}
    with integration.apply(only={"policy_loss.vanilla"}, strict=True) as patches:
        loss, _, _ = run_loss(algos.compute_policy_loss_vanilla, nothing, config=actor_config())
        assert loss.isnan()
        x["advantages"][1, 5] = math.nan  # under the mask
        assert run_loss(algos.compute_policy_loss_vanilla, x, loss_agg_mode=MODES[4], config=actor_config())[0].isnan()
        assert patches.fallbacks == {"policy_loss.vanilla: strict: a non-finite input, or no live token": 2}


def test_calls_that_are_verl_s_fall_through() -> None:
    x = batch()
    loss = lambda inputs, **options: run_loss(algos.compute_policy_loss_vanilla, inputs, **options)[0]  # noqa: E731
    with integration.apply(only={"policy_loss.vanilla"}) as patches:
        theirs = unpatched(algos.compute_policy_loss_vanilla)
        weighted = x | {"response_mask": x["response_mask"] * 0.5}
        negative = x | {"rollout_is_weights": -x["rollout_is_weights"]}
        for inputs in (weighted, negative):
            expected = run_loss(theirs, inputs, config=actor_config())[0]
            assert loss(inputs, config=actor_config()) == expected
        with pytest.raises(ValueError, match="loss_agg_mode"):
            loss(x, loss_agg_mode="mean", config=actor_config())
        with pytest.raises(ValueError, match="batch_num_tokens"):
            loss(x, config=actor_config({"dp_size": 2}))
        with pytest.raises(TypeError):
            loss(x, config=actor_config({"cp_size": 2}))
        with pytest.raises(AssertionError):
            loss(x, config=None)
        with pytest.raises(AssertionError):
            loss(x, config=actor_config(clip_ratio_c=0.5))
        assert sum(patches.fallbacks.values()) == 7
        assert patches.fallbacks["policy_loss.vanilla: a mask that weights tokens, or negative rollout weights"] == 2
    bfloat = {k: v.bfloat16() if v.is_floating_point() else v for k, v in x.items()}
    with integration.apply(only={"policy_loss.vanilla"}, strict=True) as patches:
        assert loss(bfloat, config=actor_config()).dtype == torch.bfloat16
    with integration.apply(only={"policy_loss.vanilla"}):
        assert loss(bfloat, config=actor_config()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_loss_and_aggregation(dtype: torch.dtype) -> None:
    x = batch(dtype)
    terms, live = x["log_prob"], x["response_mask"]
    values = {"vpreds": terms, "returns": x["advantages"], "values": x["old_log_prob"]}
    tolerance = 5e-6 if dtype == torch.float32 else 2e-8
    for strict in (False, True):
        with integration.apply(strict=strict) as patches:
            for mode, totals, mask in itertools.product(MODES, TOTALS, (live, live.long(), live.float())):
                found, expected = [], []
                for into, value, agg in (
                    (found, algos.compute_value_loss, algos.agg_loss),
                    (expected, unpatched(algos.compute_value_loss), unpatched(algos.agg_loss)),
                ):
                    leaf = terms.clone().requires_grad_()
                    loss, clipped = value(
                        **(values | {"vpreds": leaf}),
                        response_mask=mask,
                        cliprange_value=0.3,
                        loss_agg_mode=mode,
                        **totals,
                    )
                    into += [loss, clipped, *torch.autograd.grad(loss, leaf)]
                    loss = agg(leaf, mask, mode, **totals)
                    into += [loss, *torch.autograd.grad(3 * loss, leaf)]
                for a, b in zip(found, expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, check_dtype=a.dim() > 0)
            reason = "value_loss: loss_agg_mode seq-mean-token-mean, or no clip range"
            assert patches.fallbacks == {reason: 9}
    spoilt = torch.where(live, terms, math.nan)
    with integration.apply():
        for mode in MODES:
            assert algos.agg_loss(spoilt, live, mode) == algos.agg_loss(terms, live, mode)


@pytest.mark.parametrize(
    "kind", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "abs+", "low_var_kl+", "k3+"]
)
def test_kl_penalty(kind: str) -> None:
    y = torch.tensor([-30.0, -20.0, -3.0, -0.1, -1e-4, 0.0, 1e-4, 0.5, 2.0, 2.5, 19.0, 30.0], dtype=torch.float64)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-6)):
        reference = (y - 5).to(dtype)
        leaves = [torch.full_like(reference, -5.0).requires_grad_() for _ in range(2)]
        with integration.apply(strict=dtype == torch.float64):
            ours = algos.kl_penalty(leaves[0], reference, kind)
        theirs = algos.kl_penalty(leaves[1], reference, kind)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        weights = torch.linspace(1, 2, len(y), dtype=dtype)
        grads = [torch.autograd.grad(v, leaf, weights)[0] for v, leaf in zip((ours, theirs), leaves, strict=True)]
        torch.testing.assert_close(*grads, rtol=tolerance, atol=tolerance)
    if kind.startswith(("k3", "low_var_kl")):
        tiny = torch.full((1,), 1e-4)
        with integration.apply():
            assert float(algos.kl_penalty(torch.zeros(1), tiny, kind)) == pytest.approx(5.00017e-9, rel=1e-4)


@pytest.mark.parametrize("mode", ["vanilla", "gspo"])
def test_actor_loss_of_a_worker(mode: str) -> None:
    from tensordict import NonTensorData, TensorDict
    from verl.workers.config import PolicyLossConfig
    from verl.workers.utils import losses

    x = batch()
    rows, columns = x["response_mask"].shape
    results = []
    for patched in (True, False):
        options = {"use_kl_loss": True, "kl_loss_type": "low_var_kl", "entropy_coeff": 0.01}
        config = actor_config(**options, policy_loss=PolicyLossConfig(loss_mode=mode))
        data = TensorDict(
            {
                "prompts": torch.ones(rows, 2),
                "responses": torch.ones(rows, columns),
                "attention_mask": torch.cat([torch.ones(rows, 2), x["response_mask"]], 1).long(),
                "response_mask": x["response_mask"].long(),
                "old_log_probs": x["old_log_prob"],
                "advantages": x["advantages"],
                "ref_log_prob": x["old_log_prob"] - 0.3,
                "rollout_is_weights": x["rollout_is_weights"],
            },
            batch_size=rows,
        )
        for name, value in {"dp_size": 2, "batch_num_tokens": 60, "global_batch_size": 16}.items():
            data[name] = NonTensorData(value)
        packed = torch.cat([torch.zeros(rows, 2), x["log_prob"]], 1)[data["attention_mask"].bool()]
        leaf = packed.clone().requires_grad_()
        outputs = {"log_probs": leaf, "entropy": leaf.square()}
        if patched:
            with integration.apply() as patches:
                loss, metrics = losses.ppo_loss(config, outputs, data)
                assert patches.fallbacks == {}
        else:
            loss, metrics = losses.ppo_loss(config, outputs, data)
        results.append(
            (
                loss.detach(),
                torch.autograd.grad(loss, leaf)[0],
                {
                    k: float(getattr(v, "value", v)) if not hasattr(v, "aggregate") else float(v.aggregate())
                    for k, v in metrics.items()
                },
            )
        )
    assert_same(results[0], results[1], 5e-6)
