"""AReaL's losses, patched against unpatched: values, gradients, every option and statistic; what falls through."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from areal_calls import both, close, graded, one
from torch import Tensor

from areal_core.integrations import areal as ours

actor = pytest.importorskip("areal.trainer.ppo.actor", reason="areal is not installed", exc_type=ImportError)
functional = pytest.importorskip("areal.utils.functional")

pytestmark = pytest.mark.usefixtures("eager")


def policy_batch(packed: bool, seed: int = 0) -> SimpleNamespace:
    """Ragged sequences, one without a live token, stale logprobs."""
    g = torch.Generator().manual_seed(seed)
    shape = (61,) if packed else (6, 17)
    logp = -3 * torch.rand(shape, generator=g)
    mask = torch.rand(shape, generator=g) < 0.7
    cu_seqlens = torch.tensor([0, 9, 9, 20, 31, 61], dtype=torch.int32)
    if packed:
        mask[9:20] = False
    else:
        mask[2] = False
    noise = lambda scale: scale * torch.randn(shape, generator=g)  # noqa: E731
    prox = logp + noise(0.4)
    return SimpleNamespace(
        logp=logp,
        prox=prox,
        old=prox + noise(0.5),
        advantages=noise(1.0),
        mask=mask,
        cu_seqlens=cu_seqlens if packed else None,
    )


def rejections() -> list[Any]:
    config = actor.RejectionSamplingConfig
    token = [
        config(level="token", action=action, metric=metric, upper=upper, lower=lower)
        for action, metric, (upper, lower) in itertools.product(
            ("mask", "clamp"), ("ratio", "kl_k1", "kl_k2", "kl_k3"), ((1.3, None), (1.3, 0.7))
        )
        if not (action == "clamp" and metric != "ratio")
    ]
    sequence = [
        config(level="sequence", action=action, metric=metric, agg=agg, upper=1.05, lower=lower)
        for action, metric, agg, lower in itertools.product(
            ("mask", "clamp"), ("ratio", "kl_k2"), ("sum", "mean", "max"), (None, 0.6)
        )
        if not (action == "clamp" and metric != "ratio")
    ]
    return [None, *token, *sequence]


def policy_loss(batch: SimpleNamespace, **options: Any) -> Any:
    options = {"eps_clip": 0.2, **options}
    return graded(
        lambda logp: functional.ppo_actor_loss_fn(
            logp, batch.prox, batch.old, batch.advantages, loss_mask=batch.mask, cu_seqlens=batch.cu_seqlens, **options
        ),
        batch.logp,
    )


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_policy_loss(level: str, packed: bool, strict: bool) -> None:
    batch = policy_batch(packed)
    clips = ((0.2, None, None), (0.2, 0.28, None), (0.2, 0.4, 1.5), (1.7, 0.1, 3.0))
    calls = [
        partial(
            policy_loss,
            batch,
            eps_clip=low,
            eps_clip_higher=high,
            c_clip=dual,
            rejection_sampling=rejection,
            importance_sampling_level=level,
        )
        for (low, high, dual), rejection in itertools.product(clips, rejections())
    ]
    theirs, patched, fallbacks = both(*calls, strict=strict)
    assert not fallbacks
    for expected, result in zip(theirs, patched, strict=True):
        same_loss(result, expected)


def same_loss(result: Any, expected: Any) -> None:
    """The loss, its gradient and every statistic."""
    close(result[0][0], expected[0][0])
    close(result[1], expected[1])
    assert result[0][1].keys() == expected[0][1].keys()
    for name, value in expected[0][1].items():
        close(result[0][1][name], value)
        if isinstance(value, Tensor):
            assert not result[0][1][name].requires_grad, name


def test_overflow_under_the_mask_and_beyond_reaches_nothing() -> None:
    batch = policy_batch(packed=True)
    dead = (~batch.mask).nonzero()[:3, 0]
    batch.logp[dead[0]], batch.prox[dead[1]], batch.advantages[dead[2]] = 1e4, torch.nan, torch.nan
    batch.old[dead] = -torch.inf
    clean = policy_batch(packed=True)
    (_, their_grad), (result, grad), fallbacks = one(lambda: policy_loss(batch))
    assert not their_grad.isfinite().all()
    assert not fallbacks
    expected, expected_grad = policy_loss(clean)
    close(result[0], expected[0])
    close(grad, expected_grad)
    _, strict, fallbacks = one(lambda: policy_loss(batch), strict=True)
    assert fallbacks == {"ppo_actor_loss_fn: strict: log-ratios beyond 20": 1}
    close(strict[1], their_grad)


def test_a_behavior_logprob_of_minus_infinity_is_an_infinite_weight() -> None:
    batch = policy_batch(packed=True)
    token = int(batch.mask.nonzero()[0])
    batch.old[token] = -torch.inf
    for action, weight in (("mask", 0.0), ("clamp", 2.0)):
        rejection = actor.RejectionSamplingConfig(level="token", action=action, metric="ratio", upper=2.0)
        theirs, result, _ = one(lambda rejection=rejection: policy_loss(batch, rejection_sampling=rejection))
        assert theirs[0][1]["behave_imp_weight"][token] == 1
        assert result[0][1]["behave_imp_weight"][token] == weight
    batch.old[token] = torch.nan
    for action in ("mask", "clamp"):
        metric = "kl_k1" if action == "mask" else "ratio"
        rejection = actor.RejectionSamplingConfig(level="token", action=action, metric=metric, upper=2.0)
        assert one(lambda rejection=rejection: policy_loss(batch, rejection_sampling=rejection))[1][0][0].isnan()


def test_without_live_tokens_the_loss_is_zero() -> None:
    batch = policy_batch(packed=True)
    batch.mask[:] = False
    for rejection in (None, rejections()[1]):
        theirs, result, _ = one(lambda rejection=rejection: policy_loss(batch, rejection_sampling=rejection))
        close(result[0][0], theirs[0][0])
        assert result[0][0] == 0
        assert not result[1].any()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"eps_clip": -0.1}, "clipping bounds out of range"),
        ({"eps_clip_higher": float("inf")}, "clipping bounds out of range"),
        ({"half": True}, "half-precision logprobs or advantages"),
        ({"learned": True}, "gradients to what the loss holds constant"),
    ],
)
def test_what_a_policy_loss_does_not_take_falls_through(change: dict[str, Any], reason: str) -> None:
    batch = policy_batch(packed=True)
    options = {k: v for k, v in change.items() if k.startswith("eps")}
    if "half" in change:
        batch.prox = batch.prox.half()
    if "learned" in change:
        batch.advantages.requires_grad_()
    theirs, result, fallbacks = one(lambda: policy_loss(batch, **options))
    assert fallbacks == {f"ppo_actor_loss_fn: {reason}": 1}
    close(result[0][0], theirs[0][0], 0.0)


@pytest.mark.parametrize("options", [{"c_clip": 0.5}, {"importance_sampling_level": "word"}])
def test_refusals_of_areal_stay_its_own(options: dict[str, Any]) -> None:
    batch = policy_batch(packed=True)
    with ours.apply(), pytest.raises((AssertionError, ValueError)):
        policy_loss(batch, **options)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_sapo(level: str, packed: bool, strict: bool) -> None:
    batch = policy_batch(packed)
    calls = [
        lambda taus=taus: graded(
            lambda logp: functional.sapo_loss_fn(
                logp, batch.prox, batch.advantages, *taus, batch.mask, level, batch.cu_seqlens
            ),
            batch.logp,
        )
        for taus in ((1.0, 1.05), (3.0, 0.4))
    ]
    theirs, patched, fallbacks = both(*calls, strict=strict)
    assert not fallbacks
    for expected, result in zip(theirs, patched, strict=True):
        same_loss(result, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_value_loss(strict: bool) -> None:
    value, old, target = (8 * torch.randn(5, 13) for _ in range(3))
    calls = [
        lambda mask=mask, kind=kind: graded(
            lambda x: functional.ppo_critic_loss_fn(x, old, target, 3.0, mask, kind), value
        )
        for mask, kind in itertools.product((None, torch.rand(5, 13) < 0.6), ("mse", "huber"))
    ]
    theirs, patched, fallbacks = both(*calls, strict=strict)
    assert not fallbacks
    for expected, result in zip(theirs, patched, strict=True):
        same_loss(result, expected)


def test_value_loss_over_nothing() -> None:
    none = torch.zeros(4, dtype=torch.bool)
    call = lambda: functional.ppo_critic_loss_fn(torch.ones(4), torch.ones(4), torch.zeros(4), 0.2, none)[0]  # noqa: E731
    theirs, result, _ = one(call)
    assert theirs.isnan()
    assert result == 0
    assert one(call, strict=True)[1].isnan()


# -- stale tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_m2po(strict: bool) -> None:
    batch = policy_batch(packed=False)
    calls = [
        lambda threshold=t: actor._apply_m2po_masking(batch.old, batch.prox, batch.mask, threshold)
        for t in (5e-3, 0.04, 0.2, 9.0)
    ]
    theirs, patched, fallbacks = both(*calls, strict=strict)
    assert bool(fallbacks) == strict
    assert all(torch.equal(result, expected) for expected, result in zip(theirs, patched, strict=True))
    far = batch.old + 9
    theirs, result, _ = one(lambda: actor._apply_m2po_masking(far, batch.prox, batch.mask, 0.01), strict=strict)
    assert int(theirs.sum()) == 1
    assert int(result.sum()) == strict


@pytest.mark.parametrize("method", ["loglinear", "linear", "rollout", None])
def test_proximal_approximations(method: str | None) -> None:
    batch = policy_batch(packed=True)
    versions = torch.randint(-1, 6, batch.old.shape)
    call = lambda: actor.compute_prox_logp_approximations(batch.old, batch.logp, versions, 5, method)  # noqa: E731
    theirs, result, fallbacks = one(call)
    assert not fallbacks
    assert list(result) == list(theirs)
    for name in theirs:
        close(result[name], theirs[name])
    theirs, result, fallbacks = one(call, strict=True)
    assert bool(fallbacks) == (method in ("linear", None))
    for name in theirs:
        close(result[name], theirs[name])


# -- a whole loss and whole advantages ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prox_logp_method": "loglinear", "current_version": 4},
        {"prox_logp_method": "metrics", "current_version": 4},
        {"m2_threshold": 0.1},
        {"importance_sampling_level": "sequence"},
        {"use_sapo_loss": True},
    ],
)
def test_the_loss_of_a_step(options: dict[str, Any]) -> None:
    batch = policy_batch(packed=True)
    inputs = {
        "logprobs": batch.old,
        "advantages": batch.advantages,
        "loss_mask": batch.mask,
        "prox_logp": None if options.get("prox_logp_method") == "loglinear" else batch.prox,
        "versions": torch.arange(61) % 5,
        "cu_seqlens": batch.cu_seqlens,
        "teacher_logp": batch.prox - 0.1,
    }
    entropy = torch.ones_like(batch.logp)
    call = lambda: graded(  # noqa: E731
        lambda x: actor.grpo_loss_fn(x, entropy, dict(inputs), 0.2, 0.28, 3.0, **options), batch.logp
    )
    (theirs, their_grad), (result, grad), fallbacks = one(call)
    assert not fallbacks
    close(result, theirs)
    close(grad, their_grad)
