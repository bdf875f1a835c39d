"""slime's functions, patched against unpatched: values, gradients, every option; what falls through; strict."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_core.errors import UnsupportedVersionError
from areal_core.integrations import slime as integration

from patched import both, close

utils = pytest.importorskip("slime.utils.ppo_utils", reason="slime is not installed", exc_type=ImportError)
balancing = pytest.importorskip("slime.utils.seqlen_balancing")


def scored(logits: Tensor, tokens: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor]:
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = utils.calculate_log_probs_and_entropy(leaf, tokens, None, **options)
    total = (logprobs * torch.linspace(-1, 1, len(tokens))[:, None]).sum()
    if entropy is not None and entropy.requires_grad:
        total = total + (entropy * torch.linspace(1, 2, len(tokens))).sum()
    return logprobs.detach(), None if entropy is None else entropy.detach(), torch.autograd.grad(total, leaf)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_and_entropy(dtype: torch.dtype) -> None:
    logits, tokens = (4 * torch.randn(37, 101)).to(dtype), torch.randint(101, (37,))
    options = [
        {"with_entropy": entropy, "chunk_size": chunk, "with_entropy_grad": graded}
        for entropy, chunk, graded in itertools.product((False, True), (-1, 8), (False, True))
    ]
    for strict in (False, True):
        theirs, mine, fallbacks = both(
            integration, lambda: [scored(logits, tokens, option) for option in options], strict=strict
        )
        assert not fallbacks
        for (*expected, expected_grad), (*result, grad) in zip(theirs, mine, strict=True):
            close(result, expected)
            assert grad.dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            close(grad.float(), expected_grad.float(), rtol=tolerance, atol=tolerance)


def test_entropy_beside_an_impossible_token() -> None:
    logits, tokens = torch.randn(3, 11), torch.tensor([1, 2, 3])
    logits[1, 5:] = -torch.inf
    run = partial(scored, logits, tokens, {"with_entropy": True})
    theirs, mine, _ = both(integration, run)
    assert theirs[1][1].isnan()
    p = logits[1].softmax(0)
    close(mine[1][1], -torch.special.xlogy(p, p).sum())
    assert mine[2].isfinite().all()
    theirs, mine, fallbacks = both(integration, run, strict=True)
    assert len(fallbacks) == 1
    close(mine, theirs)


@pytest.mark.parametrize("case", ["keep mask", "no tokens"])
def test_what_falls_through(case: str) -> None:
    logits, tokens = torch.randn(3, 11), torch.tensor([1, 2, 3])
    keep = logits > 0 if case == "keep mask" else None
    rows = 0 if case == "no tokens" else 3
    run = partial(
        lambda: utils.calculate_log_probs_and_entropy(
            logits[:rows], tokens[:rows], None, with_entropy=True, log_prob_keep_mask=keep
        )
    )
    theirs, mine, fallbacks = both(integration, run)
    assert sum(fallbacks.values()) == 1
    close(mine, theirs)


@pytest.mark.parametrize("strict", [False, True])
def test_scans(strict: bool) -> None:
    rewards, values = torch.randn(5, 300), torch.randn(5, 300)
    factors = list(itertools.product((1.0, 0.97, 0.0), (1.0, 0.9, 0.0)))

    def run() -> list[Any]:
        scans = [function(rewards, values, *f) for function in (utils.chunked_gae, utils.vanilla_gae) for f in factors]
        return [*scans, *(utils.chunked_discounted_returns(rewards, gamma) for gamma, _ in factors)]

    theirs, mine, fallbacks = both(integration, run, strict=strict)
    assert not fallbacks
    for expected, result in zip(theirs, mine, strict=True):
        assert type(result) is type(expected)
        close(result, expected, rtol=1e-5, atol=2e-4)


def test_scans_that_fall_through() -> None:
    rewards, values = torch.randn(2, 9), torch.randn(2, 9)

    def run() -> list[Any]:
        learned = values.clone().requires_grad_()
        return [
            utils.vanilla_gae(rewards, values, 1.5, 0.9),
            utils.chunked_gae(rewards.bfloat16(), values.bfloat16(), 1.0, 0.9),
            torch.autograd.grad(utils.vanilla_gae(rewards, learned, 0.9, 0.9)[0].sum(), learned),
        ]

    theirs, mine, fallbacks = both(integration, run)
    assert sorted(fallbacks) == [
        "chunked_discounted_returns: rewards of dtype torch.bfloat16",  # slime's chunked_gae calls it
        "chunked_gae: rewards of dtype torch.bfloat16",
        "vanilla_gae: a discount out of [0, 1]",
        "vanilla_gae: gradients to rewards or values",
    ]
    close(mine, theirs)


def loads(bins: list[list[int]], lengths: list[int]) -> list[int]:
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(bins)
    return [sum(lengths[i] for i in b) for b in bins]


@pytest.mark.parametrize("cap", [700, 2000, 10**9])
def test_bins(cap: int) -> None:
    g = torch.Generator().manual_seed(cap % 11)
    lengths = torch.randint(1, 800, (200,), generator=g).tolist()
    theirs, mine, fallbacks = both(integration, lambda: balancing.first_fit_pack(lengths, cap))
    assert not fallbacks
    assert len(mine) <= len(theirs)
    assert all(load <= cap or len(b) == 1 for load, b in zip(loads(mine, lengths), mine, strict=True))
    theirs, mine, _ = both(integration, lambda: balancing.first_fit_pack(lengths, cap), strict=True)
    assert mine == theirs


@pytest.mark.parametrize("equal_size", [False, True])
def test_partitions(equal_size: bool) -> None:
    lengths = torch.randint(1, 9000, (96,), generator=torch.Generator().manual_seed(3)).tolist()
    lengths[5] = 10**17  # estimated FLOPs are as large
    for values in (lengths, [float(x) for x in lengths[6:90]]):
        theirs, mine, fallbacks = both(
            integration, lambda values=values: balancing.get_seqlen_balanced_partitions(values, 12, equal_size)
        )
        assert bool(fallbacks) == (10**17 in values)
        mine_loads, their_loads = loads(mine, values), loads(theirs, values)
        assert max(mine_loads) - min(mine_loads) <= max(their_loads) - min(their_loads)
        assert not equal_size or {len(b) for b in mine} == {len(values) // 12}
    with integration.apply(), pytest.raises(AssertionError):
        balancing.get_seqlen_balanced_partitions([1, 2], 3, False)


def test_undo_and_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(vars(utils))
    with integration.apply() as patches:
        assert len(patches.replaced) == len(integration.SEAMS)
        assert utils.chunked_gae is not before["chunked_gae"]
    assert all(vars(utils)[key] is value for key, value in before.items())
    monkeypatch.setattr(utils, "vanilla_gae", lambda rewards, values: None)
    with pytest.raises(UnsupportedVersionError, match="vanilla_gae"):
        integration.apply()
    assert utils.chunked_gae is before["chunked_gae"]
