"""verl with our kernels against verl without them, on the installed package: values, gradients, metrics, refusals."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from areal_core.errors import PatchError, UnsupportedVersionError
from areal_core.integrations import verl as integration

pytest.importorskip("verl", reason="verl is not installed", exc_type=ImportError)
algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl lacks what it needs", exc_type=ImportError)
functional = sys.modules["verl.utils.torch_functional"]

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
TOTALS: tuple[dict[str, Any], ...] = (
    {},
    {"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 12, "loss_scale_factor": 9},
    {"dp_size": 1, "batch_num_tokens": torch.tensor(50), "global_batch_size": None, "loss_scale_factor": None},
)
LOSSES = ("vanilla", "gspo", "sapo", "cispo", "gpg", "geo_mean", "dppo_tv", "dppo_kl", "reinforce")


class Config(SimpleNamespace):
    """The fields of verl's ActorConfig that its losses read, with its `get`."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def actor_config(totals: dict[str, Any] | None = None, **changes: Any) -> Any:
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **changes)
    config.global_batch_info.update(totals or {})
    return config


def unpatched(function: Callable[..., Any]) -> Callable[..., Any]:
    original = getattr(function, "__wrapped__", None)
    assert original is not None, f"{function} is not replaced"
    return original


def batch(dtype: torch.dtype = torch.float32, seed: int = 0, rows: int = 6, columns: int = 11) -> dict[str, Tensor]:
    """Rows of every length from 0 up, with a hole in one of them, and ratios on both sides of every bound."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape, scale=1.0: torch.randn(*shape, generator=g, dtype=torch.float64) * scale  # noqa: E731
    old = -normal(rows, columns).abs() - 0.1
    mask = torch.arange(columns) < torch.arange(rows)[:, None] * 2 + 1
    mask[0] = False
    mask[-1, 3:6] = False
    x = {
        "old_log_prob": old,
        "log_prob": old + normal(rows, columns, scale=0.5),
        "advantages": normal(rows, 1).expand(rows, columns).clone(),
        "rollout_is_weights": normal(rows, columns, scale=0.3).exp(),
    }
    x["rollout_is_weights"][2, :3] = 0
    return {name: tensor.to(dtype) for name, tensor in x.items()} | {"response_mask": mask}


def run_loss(
    function: Callable[..., Any], x: dict[str, Any], **options: Any
) -> tuple[Tensor, Tensor, dict[str, float]]:
    x = dict(x)
    leaf = x.pop("log_prob").clone().requires_grad_()
    x["response_mask"] = x["response_mask"].clone()
    loss, metrics = function(x.pop("old_log_prob"), leaf, **x, **options)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad, metrics


def assert_same(ours: Any, theirs: Any, tolerance: float) -> None:
    """Loss, gradient and metrics alike, NaN nowhere."""
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        scale = max(float(b.abs().max()), 1e-3)
        assert a.dtype == b.dtype
        assert bool(((a - b).abs() <= tolerance * scale).all()), (a, b)
    assert set(ours[2]) == set(theirs[2])
    for name in theirs[2]:
        assert ours[2][name] == pytest.approx(theirs[2][name], abs=10 * tolerance), name


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


ESTIMATORS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("gae", "compute_gae_advantage_return", {"gamma": 0.97, "lam": 0.9}),
    ("gae", "compute_gae_advantage_return", {"gamma": 1.0, "lam": 1.0}),
    ("grpo", "compute_grpo_outcome_advantage", {}),
    ("grpo", "compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
    ("grpo", "compute_grpo_outcome_advantage", {"epsilon": 0.1}),
    ("grpo_vectorized", "compute_grpo_vectorized_outcome_advantage", {"epsilon": 0.1}),
    ("rloo", "compute_rloo_outcome_advantage", {}),
    ("rloo_vectorized", "compute_rloo_vectorized_outcome_advantage", {}),
    ("opo", "compute_opo_outcome_advantage", {}),
    ("gpg", "compute_gpg_outcome_advantage", {"f_norm": 0.5}),
    ("reinforce_plus_plus", "compute_reinforce_plus_plus_outcome_advantage", {"config": Config(gamma=0.9)}),
    ("reinforce_plus_plus_baseline", "compute_reinforce_plus_plus_baseline_outcome_advantage", {}),
    ("remax", "compute_remax_outcome_advantage", {}),
    ("gdpo", "compute_gdpo_outcome_advantage", {"norm_adv_by_std_in_grpo": True, "kinds": None}),
    ("gdpo", "compute_gdpo_outcome_advantage", {"kinds": None, "norm_adv_by_std_in_grpo": False}),
    ("gdpo", "compute_gdpo_outcome_advantage", {"epsilon": 0.1, "kinds": [0.3, 2.0]}),
    ("gdpo", "compute_gdpo_outcome_advantage", {}),
)


def rewards_batch(name: str, options: dict[str, Any]) -> dict[str, Any]:
    g = torch.Generator().manual_seed(3)
    rows, columns = 9, 12
    mask = torch.arange(columns) < torch.tensor([12, 3, 7, 1, 9, 12, 5, 8, 10])[:, None]
    mask[0, 4:7] = False  # a tool's turn
    x: dict[str, Any] = {
        "token_level_rewards": torch.randn(rows, columns, generator=g) * mask,
        "response_mask": mask.float(),
    }
    if name == "gae":
        x["values"] = torch.randn(rows, columns, generator=g)
    elif name == "remax":
        x["reward_baselines"] = torch.randn(rows, generator=g)
    elif name != "reinforce_plus_plus":
        x["index"] = np.array(["a", "b", "a", "c", "b", "a", "c", "d", "d"], dtype=object)
    if name == "gdpo" and "kinds" in options:
        x["batch"] = {
            "prompts": torch.zeros(rows, 2),
            "attention_mask": torch.ones(rows, 2 + columns, dtype=torch.int64),
        }
        x["non_tensor_batch"] = {k: torch.randn(rows, generator=g).numpy() for k in ("format", "accuracy")}
        x["config"] = Config(gdpo_reward_keys=["format", "accuracy"], gdpo_reward_weights=options["kinds"])
    return x | {k: v for k, v in options.items() if k != "kinds"}


@pytest.mark.parametrize(("name", "function", "options"), ESTIMATORS)
def test_advantage_estimators_and_their_options(name: str, function: str, options: dict[str, Any]) -> None:
    x = rewards_batch(name, options)
    live = x["response_mask"].bool()
    for strict in (False, True):
        with integration.apply(strict=strict) as patches:
            ours = getattr(algos, function)
            found = ours(**{k: v.clone() if isinstance(v, Tensor) else v for k, v in x.items()})
            assert patches.fallbacks == {}
        expected = getattr(algos, function)(**{k: v.clone() if isinstance(v, Tensor) else v for k, v in x.items()})
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            chosen = torch.ones_like(live) if strict else live
            torch.testing.assert_close(a[chosen], b[chosen], rtol=2e-5, atol=2e-6)
            assert strict or not a[~live].any()


@pytest.mark.parametrize(("name", "function", "options"), [ESTIMATORS[i] for i in (2, 6, 8, 9)])
def test_groups_of_one_and_equal_rewards(name: str, function: str, options: dict[str, Any]) -> None:
    x = rewards_batch(name, options)
    x["token_level_rewards"] = torch.full_like(x["token_level_rewards"], 0.1)
    x["index"] = np.array([0, 0, 0, 0, 0, 0, 0, 0, 7])
    for strict in (False, True):
        with integration.apply(strict=strict):
            found, _ = getattr(algos, function)(**x)
            expected, _ = unpatched(getattr(algos, function))(**x)
            torch.testing.assert_close(found[8], expected[8])  # the group of one, as verl has it: not 0
            assert found[8].any()
            if name != "opo":
                assert not found[:8].any()  # exactly: nothing to prefer


def test_estimators_fall_through() -> None:
    x = rewards_batch("grpo", {})
    with integration.apply(only={"advantage.grpo", "advantage.gae", "advantage.gdpo"}) as patches:
        weighted = x | {"response_mask": x["response_mask"] * 0.5}
        expected = unpatched(algos.compute_grpo_outcome_advantage)(**weighted)[0]
        assert algos.compute_grpo_outcome_advantage(**weighted)[0].equal(expected)
        values = torch.zeros_like(x["response_mask"])
        algos.compute_gae_advantage_return(x["token_level_rewards"], values, x["response_mask"], 1.5, 1.0)
        missing = rewards_batch("gdpo", {"kinds": None})
        missing["config"].gdpo_reward_keys = None
        with pytest.raises(AssertionError, match="gdpo_reward_keys"):
            algos.compute_gdpo_outcome_advantage(**missing)
        assert sum(patches.fallbacks.values()) == 3
    with integration.apply(strict=True) as patches:
        x["response_mask"] *= 0
        with pytest.raises(ValueError, match="mask"):
            algos.compute_gae_advantage_return(x["token_level_rewards"], values, x["response_mask"], 1.0, 1.0)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["packed", "padded", "sliced"])
def test_logprobs_and_entropy(dtype: torch.dtype, layout: str) -> None:
    g = torch.Generator().manual_seed(1)
    shape = {"packed": (7, 131), "padded": (3, 4, 131), "sliced": (3, 5, 131)}[layout]
    base = (torch.randn(*shape, generator=g) * 3).to(dtype)
    view = (lambda x: x[:, :-1]) if layout == "sliced" else (lambda x: x)
    labels = torch.randint(131, view(base).shape[:-1], generator=g)
    wide = view(base.double()).requires_grad_()
    truth = (functional.logprobs_from_logits(wide, labels), functional.entropy_from_logits(wide))
    low = dtype in (torch.bfloat16, torch.float16)
    for strict in (False, True):
        with integration.apply(strict=strict) as patches:
            leaf = base.clone().requires_grad_()
            logits = view(leaf)
            found = [functional.logprobs_from_logits(logits, labels), functional.entropy_from_logits(logits)]
            if logits.dim() == 2 and dtype != torch.float64:
                found.append(functional.entropy_from_logits_with_chunking(logits, chunk_size=3))
            assert patches.fallbacks == {}
        for value, expected in zip(found, (*truth, truth[1]), strict=False):
            rounded = low and strict and value.dtype == dtype
            assert value.dtype in ((dtype,) if rounded or dtype == torch.float64 else (torch.float32,))
            torch.testing.assert_close(value.double(), expected, rtol=1e-2 if rounded else 2e-6, atol=1e-5)
        ours, theirs = (torch.stack([x.double() for x in pair]).sum() for pair in (found[:2], truth))
        (grad,) = torch.autograd.grad(ours, leaf)
        (expected,) = torch.autograd.grad(theirs, wide, retain_graph=True)
        torch.testing.assert_close(
            view(grad).double(), expected, rtol=1e-2 if low else 2e-5, atol=1e-2 if low else 2e-6
        )


def test_logits_of_minus_infinity_and_other_inputs() -> None:
    logits = torch.randn(4, 9)
    logits[1, 3:] = -math.inf
    p = logits[1, :3].softmax(0)
    with integration.apply() as patches:
        assert functional.entropy_from_logits(logits)[1] == pytest.approx(float(-(p * p.log()).sum()), rel=1e-5)
        assert torch.compile(functional.entropy_from_logits, backend="eager", fullgraph=True)(logits).isfinite().all()
        assert patches.fallbacks == {}
        with pytest.raises(RuntimeError):
            functional.logprobs_from_logits(logits, torch.zeros(3, dtype=torch.int64))
        labels = torch.zeros(9, dtype=torch.int64)
        functional.logprobs_from_logits(logits.t(), labels)
        assert set(patches.fallbacks) == {
            "logprobs: labels of another shape than the rows of the logits",
            "logprobs: logits with a stride in the vocabulary",
        }
    with integration.apply(strict=True) as patches:
        assert functional.entropy_from_logits(logits)[1].isnan()
        assert functional.entropy_from_logits_with_chunking(logits)[1].isnan()
        assert sum(patches.fallbacks.values()) == 2


def test_logits_are_overwritten_only_where_verl_would(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.tensor([1, 2])
    for available, disabled, wanted, expected in (
        (False, "0", True, False),
        (True, "1", True, False),
        (True, "0", False, False),
        (True, "0", True, True),
    ):
        monkeypatch.setattr(functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", available)
        monkeypatch.setenv("VERL_DISABLE_FLASH_ATTN_CE", disabled)
        logits = torch.randn(2, 5, requires_grad=True)
        before = logits.detach().clone()
        with integration.apply(strict=True):
            functional.logprobs_from_logits(logits, labels, inplace_backward=wanted).sum().backward()
        assert logits.detach().equal(before) != expected


def test_balancing() -> None:
    from verl.utils import seqlen_balancing

    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 5000, (96,), generator=g).tolist()

    def spread(bins: list[list[int]]) -> int:
        loads = [sum(lengths[i] for i in members) for members in bins]
        return max(loads) - min(loads)

    for k, equal in itertools.product((1, 2, 8, 32, 96), (True, False)):
        theirs = seqlen_balancing.get_seqlen_balanced_partitions(lengths, k, equal)
        with integration.apply() as patches:
            ours = seqlen_balancing.get_seqlen_balanced_partitions(lengths, k, equal)
            assert patches.fallbacks == {}
        assert sorted(itertools.chain(*ours)) == list(range(96))
        assert spread(ours) <= spread(theirs)
        assert not equal or {len(members) for members in ours} == {96 // k}
    with integration.apply() as patches:
        heavy = seqlen_balancing.karmarkar_karp([5, 9, 1], 2, False)
        assert heavy == [[1], [0, 2]]
        with pytest.raises(AssertionError):
            seqlen_balancing.get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)
        assert seqlen_balancing.karmarkar_karp([0.5, 2.5], 2, False) == [[1], [0]]
        assert sum(patches.fallbacks.values()) == 2
    batch = {"input_ids": torch.zeros(96, 5000), "attention_mask": torch.arange(5000) < torch.tensor(lengths)[:, None]}
    with integration.apply():
        from tensordict import TensorDict

        parts, index = seqlen_balancing.rearrange_micro_batches(TensorDict(batch, batch_size=96), max_token_len=20_000)
    assert sorted(itertools.chain(*index)) == list(range(96))
    assert all(int(part["attention_mask"].sum()) <= 20_000 for part in parts)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_padding_of_responses(nested: bool, shape: tuple[int, ...]) -> None:
    from tensordict import TensorDict
    from verl.workers.utils import padding

    prompts, responses = [2, 1, 4], [3, 5, 0]
    total = sum(prompts) + sum(responses)
    if nested:
        jagged = [
            torch.nested.as_nested_tensor([torch.zeros(n) for n in sizes], layout=torch.jagged)
            for sizes in (prompts, responses)
        ]
        data = TensorDict({"prompts": jagged[0], "responses": jagged[1]}, batch_size=3)
    else:
        mask = torch.cat(
            [
                torch.arange(5).flip(0) < torch.tensor(prompts)[:, None],
                torch.arange(6) < torch.tensor(responses)[:, None],
            ],
            1,
        )
        data = TensorDict(
            {"prompts": torch.zeros(3, 5), "responses": torch.zeros(3, 6), "attention_mask": mask.long()}, batch_size=3
        )
    values = torch.randn(total, *shape, dtype=torch.float64)
    results = []
    for patched in (True, False):
        leaf = values.clone().requires_grad_()
        if patched:
            with integration.apply() as patches:
                out = padding.no_padding_2_padding(leaf, data)
                assert patches.fallbacks == {}
        else:
            out = padding.no_padding_2_padding(leaf, data)
        (grad,) = torch.autograd.grad((out * torch.arange(out.numel()).view_as(out)).sum(), leaf)
        results.append((out.detach(), grad))
    assert results[0][0].equal(results[1][0])
    assert results[0][1].equal(results[1][1])
    with integration.apply() as patches, pytest.raises(AssertionError):
        padding.no_padding_2_padding(values[1:], data)


def held() -> dict[str, Any]:
    """What verl's modules and registries hold at the seams."""
    found = {seam.name: getattr(sys.modules[seam.module], seam.attribute) for seam in integration.SEAMS}
    found |= {f"loss {k}": v for k, v in algos.POLICY_LOSS_REGISTRY.items() if not k.startswith("areal_core")}
    found |= {f"advantage {k}": v for k, v in algos.ADV_ESTIMATOR_REGISTRY.items() if not k.startswith("areal_core")}
    return found


def test_registries_are_replaced_and_restored() -> None:
    before = held()
    with integration.apply() as patches:
        assert patches.replaced == tuple(seam.name for seam in integration.SEAMS)
        assert algos.get_policy_loss_fn("gspo") is algos.compute_policy_loss_gspo is not before["policy_loss.gspo"]
        assert algos.get_adv_estimator_fn("grpo") is algos.compute_grpo_outcome_advantage
        assert algos.get_policy_loss_fn("kl_cov") is before["loss kl_cov"]
        with pytest.raises(PatchError):
            integration.apply()
    after = held()
    assert all(after[name] is before[name] for name in before)


def test_a_source_that_was_not_looked_at_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode="token-mean",
        config=None,
        rollout_is_weights=None,
    ):  # type: ignore[no-untyped-def]
        return 0.0, {}

    monkeypatch.setattr(algos, "compute_policy_loss_vanilla", other)
    before = held()
    with pytest.raises(UnsupportedVersionError, match="compute_policy_loss_vanilla"):
        integration.apply()
    assert all(value is before[name] for name, value in held().items())
    with integration.apply(only={"logprobs"}) as patches:
        assert patches.replaced == ("logprobs",)


def test_registered_beside_verl_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in ("POLICY_LOSS_REGISTRY", "ADV_ESTIMATOR_REGISTRY"):
        monkeypatch.setattr(algos, registry, dict(getattr(algos, registry)))
    before = held()
    names = integration.register()
    assert {"areal_core_ppo", "areal_core_gspo", "areal_core_rloo", "areal_core_grpo"} <= set(names)
    assert all(value is before[name] for name, value in held().items())
    options = {"config": actor_config(clip_ratio_high=0.4)}
    ours = run_loss(algos.get_policy_loss_fn("areal_core_ppo"), batch(), **options)
    assert_same(ours, run_loss(algos.compute_policy_loss_vanilla, batch(), **options), 5e-6)
    x = rewards_batch("grpo", {"config": Config(norm_adv_by_std_in_grpo=False)})
    found, _ = algos.get_adv_estimator_fn("areal_core_grpo")(**x)
    expected, _ = algos.compute_grpo_outcome_advantage(**x, norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(found, expected)
    with pytest.raises(PatchError, match="register"):
        integration.register()


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


def test_plugin_in_a_process_of_verl() -> None:
    code = (
        "import verl, sys; m = sys.modules['areal_core.integrations.verl_plugin']\n"
        "from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as r, compute_policy_loss_vanilla as f\n"
        "assert r['vanilla'] is f and f.__areal_core__ and set(m.NAMES) >= {'areal_core_ppo'} and m.PATCHES.replaced"
    )
    plugin = {"VERL_USE_EXTERNAL_MODULES": "areal_core.integrations.verl_plugin"}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | plugin, timeout=300)
