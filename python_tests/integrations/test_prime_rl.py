"""prime-rl's functions, patched against unpatched: values, gradients, metrics; what falls through; strict."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from areal_core.errors import UnsupportedVersionError
from areal_core.integrations import prime_rl as integration

from patched import both, close

losses = pytest.importorskip("prime_rl.trainer.rl.loss", reason="prime_rl is not installed", exc_type=ImportError)
configs = pytest.importorskip("prime_rl.configs.trainer")


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """prime-rl compiles its log-probabilities; eager they give the same numbers in less time."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_and_entropy(dtype: torch.dtype) -> None:
    logits, index = (4 * torch.randn(2, 19, 67)).to(dtype), torch.randint(67, (2, 19))

    def run() -> list[Any]:
        leaf = logits.clone().requires_grad_()
        logprobs = losses.selective_log_softmax(leaf, index)
        grad = torch.autograd.grad(logprobs, leaf, torch.linspace(-1, 1, 38).view(2, 19).to(logprobs.dtype))[0]
        entropy = losses.compute_entropy(leaf)
        assert not entropy.requires_grad
        return [logprobs.detach(), grad, entropy]

    theirs, mine, fallbacks = both(integration, run)
    assert not fallbacks
    assert mine[0].dtype == mine[2].dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    for result, expected in zip(mine, theirs, strict=True):
        close(result.float(), expected.float(), rtol=tolerance, atol=tolerance)
    theirs, mine, fallbacks = both(integration, run, strict=True)
    assert bool(fallbacks) == (dtype == torch.bfloat16)
    close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_entropy_beside_an_impossible_token() -> None:
    logits = torch.randn(1, 3, 11)
    logits[0, 1, 4:] = -torch.inf
    theirs, mine, _ = both(integration, lambda: losses.compute_entropy(logits))
    assert theirs[0, 1].isnan()
    p = logits[0, 1].softmax(0)
    close(mine[0, 1], -torch.special.xlogy(p, p).sum())
    theirs, mine, fallbacks = both(integration, lambda: losses.compute_entropy(logits), strict=True)
    assert len(fallbacks) == 1
    close(mine, theirs)


def sample(**changes: Any) -> Any:
    g = torch.Generator().manual_seed(7)
    sampler = -2 * torch.rand(41, generator=g)
    values = {
        "trainer_logprobs": sampler + 0.4 * torch.randn(41, generator=g),
        "inference_logprobs": sampler,
        "ref_logprobs": sampler + 0.3 * torch.randn(41, generator=g),
        "advantages": torch.randn(41, generator=g).round(decimals=0),
        "loss_mask": torch.rand(41, generator=g) < 0.7,
    }
    return losses.LossInputs(**values | changes)


def outcome(name: str, inputs: Any, config: Any) -> Any:
    inputs.trainer_logprobs = inputs.trainer_logprobs.detach().requires_grad_()
    output = getattr(losses, name)(inputs, *([] if config is None else [config]))
    return output.loss.detach(), torch.autograd.grad(output.loss, inputs.trainer_logprobs)[0], output.metrics


CASES = [
    *(
        ("default_loss_fn", configs.DefaultLossConfig(adv_tau=a, kl_tau=k, dppo_mask_low=low, dppo_mask_high=high))
        for a, k, (low, high) in itertools.product((1.0, 0.5), (0.0, 1e-2), ((0.2, 0.2), (0.05, 0.1)))
    ),
    *(("ipo_loss_fn", configs.IPOLossConfig(kl_tau=k, ipo_threshold=t)) for k in (0.0, 1e-2) for t in (0.05, 0.3)),
    ("ref_kl_loss_fn", None),
]


@pytest.mark.parametrize("strict", [False, True])
def test_losses(strict: bool) -> None:
    masks = ({}, {"loss_mask": torch.zeros(41, dtype=torch.bool)})
    calls = [(name, config, mask) for (name, config), mask in itertools.product(CASES, masks)]
    run = lambda: [outcome(name, sample(**mask), config) for name, config, mask in calls]  # noqa: E731
    theirs, mine, fallbacks = both(integration, run, strict=strict)
    assert not fallbacks
    for result, expected in zip(mine, theirs, strict=True):
        close(result[:2], expected[:2], rtol=2e-6, atol=2e-6)
        assert result[2].keys() == expected[2].keys()
        for name, value in expected[2].items():
            close(result[2][name], value, rtol=2e-5, atol=1e-6)


def test_overflow_under_the_mask() -> None:
    inputs = sample()
    dead = (~inputs.loss_mask).nonzero()[:2, 0]
    inputs.trainer_logprobs[dead[0]], inputs.advantages[dead[1]] = 200.0, torch.nan
    run = lambda: outcome("default_loss_fn", inputs, CASES[1][1])  # noqa: E731
    theirs, mine, _ = both(integration, run)
    assert not theirs[1].isfinite().all()
    expected = outcome("default_loss_fn", sample(), CASES[1][1])
    close(mine[:2], expected[:2], rtol=2e-6, atol=2e-6)
    theirs, mine, fallbacks = both(integration, run, strict=True)
    assert fallbacks == {"default_loss_fn: strict: log-ratios beyond 20": 1}
    close(mine, theirs)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss_weights": torch.rand(41)}, "weights of tokens"),
        ({"advantages": torch.rand(41).bfloat16()}, "half-precision logprobs or advantages"),
        ({"advantages": torch.rand(41, requires_grad=True)}, "gradients to what the loss holds constant"),
    ],
)
def test_what_falls_through(changes: dict[str, Any], reason: str) -> None:
    theirs, mine, fallbacks = both(integration, partial(outcome, "default_loss_fn", sample(**changes), CASES[1][1]))
    assert fallbacks == {f"default_loss_fn: {reason}": 1}
    close(mine[:2], theirs[:2])


def test_the_loss_of_a_micro_batch() -> None:
    """compute_loss and what setup_rl_loss_fn bound before the patch."""
    rl_loss = losses.setup_rl_loss_fn(CASES[1][1])

    def run() -> Any:
        one, two = sample(), sample(advantages=torch.ones(41))
        weights = [torch.ones(41), torch.rand(41, generator=torch.Generator().manual_seed(0))]
        leaves = [x.trainer_logprobs.requires_grad_() for x in (one, two)]
        loss, metrics = losses.compute_loss(
            leaves,
            [x.inference_logprobs for x in (one, two)],
            [x.ref_logprobs for x in (one, two)],
            [x.advantages for x in (one, two)],
            [x.loss_mask for x in (one, two)],
            None,
            None,
            weights,
            rl_loss,
            40,
            1,
            20,
        )
        return loss.detach(), torch.autograd.grad(loss, leaves), metrics

    theirs, mine, fallbacks = both(integration, run)
    assert fallbacks == {"ref_kl_loss_fn: weights of tokens": 2}
    close(mine[:2], theirs[:2], rtol=2e-6, atol=2e-6)


def test_undo_and_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(vars(losses))
    with integration.apply() as patches:
        assert len(patches.replaced) == len(integration.SEAMS)
    assert all(vars(losses)[key] is value for key, value in before.items())

    def ipo_loss_fn(inputs: Any, loss_config: Any) -> Any:
        return None

    monkeypatch.setattr(losses, "ipo_loss_fn", ipo_loss_fn)
    with pytest.raises(UnsupportedVersionError, match=r"source of .*ipo_loss_fn"):
        integration.apply()
    assert losses.default_loss_fn is before["default_loss_fn"]
