"""OpenRLHF with our kernels against OpenRLHF without them, on the installed package; GPU libraries that it imports but
that these functions do not use are stood in for where they are absent.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_core.errors import UnsupportedVersionError
from areal_core.integrations import openrlhf as integration


class StandIn(ModuleType):
    """A module whose every attribute is an empty class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder:
    """Stand-ins for absent packages; not for flash-attn's kernels, without which OpenRLHF has a path of its own."""

    def __init__(self, *packages: str) -> None:
        self.packages = [name for name in packages if importlib.util.find_spec(name) is None]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in self.packages and not name.startswith("flash_attn.ops"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def load(name: str) -> Any:
    finder = Finder("flash_attn", "vllm")
    sys.meta_path.append(finder)  # type: ignore[arg-type]
    try:
        return pytest.importorskip(name, reason=f"{name} does not import here", exc_type=ImportError)
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]


if importlib.util.find_spec("openrlhf") is None:
    pytest.skip("openrlhf is not installed", allow_module_level=True)
maker = load("openrlhf.trainer.ppo_utils.experience_maker")
losses = load("openrlhf.models.loss")
utils = load("openrlhf.models.utils")
balancing = load("openrlhf.utils.seqlen_balancing")

TOTALS: tuple[dict[str, Any], ...] = (
    {},
    {"dp_size": 2, "batch_num_tokens": 77.0, "global_batch_size": 12.0},
    {"dp_size": 4, "batch_num_tokens": torch.tensor(50.0), "global_batch_size": torch.tensor(8.0)},
)
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"is_correction_level": "token"},
    {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": (0.8, 1.3)},
    {"is_correction_level": "seq", "is_correction_threshold": (0.95, 1.1)},
    {"is_correction_level": "token", "is_correction_gating": "tv", "is_correction_threshold": (0.0, 0.05)},
    {"is_correction_level": "seq", "is_correction_gating": "tv", "is_correction_threshold": (0.0, 0.05)},
    {"is_correction_level": "token", "is_correction_gating": "binary_kl", "is_correction_threshold": (0.0, 0.02)},
    {"is_correction_level": "seq", "is_correction_gating": "binary_kl", "is_correction_threshold": (0.0, 0.02)},
)


def batch(dtype: torch.dtype = torch.float64, rows: int = 6, columns: int = 11) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    old = -torch.randn(rows, columns, generator=g, dtype=torch.float64).abs() - 0.1
    noise = [torch.randn(rows, columns, generator=g, dtype=torch.float64) for _ in range(3)]
    mask = torch.arange(columns) < torch.arange(rows)[:, None] * 2 + 1
    mask[-1, 3:6] = False
    mask[0] = False
    x = {"log_probs": old + 0.5 * noise[0], "old_log_probs": old, "advantages": noise[1]}
    x["rollout_log_probs"] = old + 0.2 * noise[2]
    return {name: tensor.to(dtype) for name, tensor in x.items()} | {"action_mask": mask}


def run(module: Any, first: str, x: dict[str, Any], totals: dict[str, Any]) -> tuple[Any, ...]:
    leaf = x[first].clone().requires_grad_()
    outputs = module(**(x | {first: leaf}), **totals)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    (grad,) = torch.autograd.grad(outputs[0], leaf)
    return (*(y if y is None else y.detach() for y in outputs), grad)


def assert_same(ours: tuple[Any, ...], theirs: tuple[Any, ...], tolerance: float) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_policy_loss_and_its_options(kind: str, strict: bool) -> None:
    cases = [(correction, {}, True, torch.float64, TOTALS[1]) for correction in CORRECTIONS]
    for dual, token_level, dtype in itertools.product((None, 1.4), (True, False), (torch.float64, torch.float32)):
        options = {"dual_clip": dual, "clip_eps_low": 0.1, "clip_eps_high": 0.4}
        cases += [(CORRECTIONS[3], options, token_level, dtype, totals) for totals in TOTALS]
    for correction, options, token_level, dtype, totals in cases:
        module = losses.PolicyLoss(policy_loss_type=kind, token_level_loss=token_level, **options, **correction)
        x = batch(dtype)
        theirs = run(module, "log_probs", x, totals)
        with integration.apply(strict=strict) as patches:
            ours = run(module, "log_probs", x, totals)
            assert patches.fallbacks == {}
        assert_same(ours, theirs, 1e-7 if dtype == torch.float64 else 5e-6)


def test_policy_loss_where_openrlhf_gives_nan() -> None:
    module, x = losses.PolicyLoss(is_correction_level="token"), batch()
    spoilt = {k: torch.where(x["action_mask"], v, math.nan) if v.is_floating_point() else v for k, v in x.items()}
    nothing = x | {"action_mask": torch.zeros_like(x["action_mask"])}
    with integration.apply() as patches:
        assert_same(run(module, "log_probs", spoilt, {}), run(module, "log_probs", x, {}), 0.0)
        assert run(module, "log_probs", nothing, {})[0] == 0
        assert patches.fallbacks == {}
    with integration.apply(strict=True) as patches:
        assert run(module, "log_probs", spoilt, {})[0].isnan()
        assert run(module, "log_probs", nothing, {})[0].isnan()
        assert sum(patches.fallbacks.values()) == 2 + 2  # the aggregation inside too


def test_policy_loss_falls_through() -> None:
    x = batch()
    module = losses.PolicyLoss()
    with integration.apply(only={"policy_loss"}) as patches:
        for mask in (0.5 * x["action_mask"], None):
            inputs = x | {"action_mask": mask}
            theirs = losses.PolicyLoss.forward.__wrapped__(module, **inputs)
            assert module(**inputs)[0] == theirs[0]
        assert sum(patches.fallbacks.values()) == 2
    with integration.apply(), pytest.raises(ValueError, match="Invalid policy loss type: reinforce"):
        losses.PolicyLoss(policy_loss_type="reinforce")(**x)


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_loss_and_aggregation(clip: float | None, dtype: torch.dtype) -> None:
    x = batch(dtype)
    values = {"values": x["log_probs"], "old_values": x["old_log_probs"], "returns": x["advantages"]}
    values["action_mask"] = x["action_mask"]
    terms = {"loss": x["log_probs"], "loss_mask": x["action_mask"].float()}
    for token_level, totals, strict in itertools.product((True, False), TOTALS, (True, False)):
        module = losses.ValueLoss(clip, token_level)
        options = totals | {"token_level_loss": token_level}
        theirs = (run(module, "values", values, totals), run(losses.aggregate_loss, "loss", terms, options))
        with integration.apply(strict=strict) as patches:
            ours = (run(module, "values", values, totals), run(losses.aggregate_loss, "loss", terms, options))
            reason = "value_loss: no mask, or a mean over sequences"
            assert patches.fallbacks == ({} if token_level else {reason: 1})
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b, 1e-7 if dtype == torch.float64 else 5e-6)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl(estimator: str, unbiased: bool) -> None:
    y = torch.tensor([-30.0, -20.0, -3.0, -0.1, -1e-4, 0.0, 1e-4, 0.5, 2.0, 2.5, 19.0, 30.0])
    old, results = torch.full_like(y, -4.0), []
    for patched in (True, False):
        leaf = torch.full_like(y, -5.0).requires_grad_()
        arguments = {"log_probs_old": old, "kl_estimator": estimator, "unbiased_gradient": unbiased}
        if patched:
            with integration.apply(strict=True):
                value = utils.compute_approx_kl(leaf, y - 5, **arguments)
        else:
            value = utils.compute_approx_kl(leaf, y - 5, **arguments)
        results.append((value.detach(), torch.autograd.grad(value, leaf, torch.linspace(1, 2, len(y)))[0]))
    assert_same(results[0], results[1], 3e-6)
    with integration.apply():
        tiny = utils.compute_approx_kl(torch.zeros(1), torch.full((1,), 1e-4), kl_estimator="k3")
        assert float(tiny) == pytest.approx(5.00017e-9, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 4), (1, 9)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy(dtype: torch.dtype, shape: tuple[int, int], temperature: float) -> None:
    g = torch.Generator().manual_seed(1)
    base = (torch.randn(*shape, 131, generator=g) * 3).to(dtype)
    labels = torch.randint(131, shape, generator=g)
    wide = base.double() / temperature
    truth = utils.log_probs_from_logits(wide, labels)
    for strict in (False, True):
        with integration.apply(strict=strict) as patches:
            logits = base.clone()
            logprobs, entropy = utils.log_probs_from_logits(logits, labels, temperature), utils.compute_entropy(logits)
            assert patches.fallbacks == {}
        torch.testing.assert_close(logits, base / temperature)  # divided in place, as OpenRLHF does
        low = dtype == torch.bfloat16
        assert logprobs.dtype == entropy.dtype == (dtype if strict else torch.float32)
        p = wide.softmax(-1)
        tolerance = {"rtol": 2e-2, "atol": 3e-2} if low else {"rtol": 2e-6, "atol": 1e-5}
        torch.testing.assert_close(logprobs.double(), truth, **tolerance)
        torch.testing.assert_close(entropy.double(), -(p * p.log()).sum(-1), **tolerance)
    base[0, 0, 5:] = -math.inf
    with integration.apply():
        assert utils.compute_entropy(base).isfinite().all()


@pytest.mark.parametrize("masked", [True, False])
def test_advantages_and_returns(masked: bool) -> None:
    x = batch(torch.float32)
    mask = x["action_mask"].long() if masked else None
    self = SimpleNamespace()
    functions: tuple[Callable[[], Any], ...] = (
        lambda: maker.RemoteExperienceMaker.get_advantages_and_returns(
            self, x["log_probs"], x["advantages"], mask, 0.97, 0.9
        ),
        lambda: (maker.RemoteExperienceMaker.get_cumulative_returns(self, x["advantages"], mask, 0.9),),
    )
    for function, strict in itertools.product(functions, (True, False)):
        theirs = function()
        with integration.apply(strict=strict) as patches:
            ours = function()
            assert patches.fallbacks == {}
        assert_same(ours, theirs, 2e-6)
    with integration.apply() as patches:
        maker.RemoteExperienceMaker.get_cumulative_returns(self, x["advantages"], mask, 1.5)
        assert patches.fallbacks == {"returns: gamma or lambda outside [0, 1]": 1}


def test_balancing_undo_and_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = (utils.compute_approx_kl, vars(losses.PolicyLoss)["forward"], balancing.karmarkar_karp)
    with integration.apply() as patches:
        assert patches.replaced == tuple(seam.name for seam in integration.SEAMS)
        bins = balancing.get_seqlen_balanced_partitions([5, 9, 1, 7], 2, equal_size=True)
        assert bins == [[1, 2], [0, 3]] or bins == [[0, 3], [1, 2]]
        assert maker.compute_approx_kl is utils.compute_approx_kl is not before[0]
    assert before == (utils.compute_approx_kl, vars(losses.PolicyLoss)["forward"], balancing.karmarkar_karp)
    monkeypatch.setattr(losses, "aggregate_loss", lambda loss, loss_mask: loss.sum())
    with pytest.raises(UnsupportedVersionError, match="aggregate_loss"):
        integration.apply()
    assert utils.compute_approx_kl is before[0]
