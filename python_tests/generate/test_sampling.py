from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.generate import EmbeddedEngine, GenerateRequest, SamplingParams

from .models import (
    CONFIGS,
    distribution,
    engine,
    prompts_of,
    random_weights,
    response_logits,
    run,
    transformers_model,
    transformers_twin,
)


def chi_square_bound(bins: int) -> float:
    """Beyond the 1 - 1e-6 quantile of chi-square for any number of bins (Wilson-Hilferty, z = 4.8)."""
    k = max(bins - 1, 1)
    return k * (1 - 2 / (9 * k) + 4.8 * (2 / (9 * k)) ** 0.5) ** 3


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1, seed=5),
        SamplingParams(1, temperature=2.5, seed=6),
        SamplingParams(1, temperature=0.6, top_p=0.9, seed=7),
        SamplingParams(1, temperature=1.3, top_k=5, seed=8),
        SamplingParams(1, temperature=1.5, top_k=20, top_p=0.85, seed=9),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["tiny", "llama-odd"])
def test_tokens_follow_the_distribution(name: str, sampling: SamplingParams) -> None:
    config, n = CONFIGS[name], 20000
    prompt = prompts_of(config, [9])[0]
    generator = EmbeddedEngine(config, max_slots=512, max_context=16)
    weights = random_weights(config, spread=0.5)
    generator.load_weights(weights, 0)
    generator.submit(GenerateRequest(0, prompt, n, sampling))
    tokens = np.array([sample.token_ids[0] for sample in run(generator).values()])
    logits = response_logits(transformers_model(config, weights), prompt, np.zeros(1, np.int32))
    p = distribution(logits, sampling)[0].numpy()
    observed = np.bincount(tokens, minlength=config.vocab_size)
    assert observed[p == 0].sum() == 0
    rare = p * n < 5
    expected = np.append(p[~rare] * n, p[rare].sum() * n)
    counts = np.append(observed[~rare], observed[rare].sum())
    kept = expected > 0
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert statistic < chi_square_bound(int(kept.sum()))


@settings(max_examples=25, deadline=None)
@given(
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 140),
    top_p=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**64 - 1),
)
def test_logprob_is_that_of_the_truncated_distribution(temperature: float, top_k: int, top_p: float, seed: int) -> None:
    config = CONFIGS["llama-odd"]
    sampling = SamplingParams(6, temperature, top_p, top_k, seed=seed)
    prompt = prompts_of(config, [4], seed=seed % 1000)[0]
    generator = engine("llama-odd")
    generator.submit(GenerateRequest(1, prompt, 1, sampling))
    sample = run(generator)[1, 0]
    model = transformers_twin("llama-odd")
    p = distribution(response_logits(model, prompt, sample.token_ids), sampling)
    expected = p.log().gather(1, torch.from_numpy(sample.token_ids).long()[:, None])[:, 0].numpy()
    # A set whose last member the rounding of fp32 moves across the edge changes the sum by that member: skip those.
    sure = np.isfinite(expected) & (np.abs(expected - sample.logprobs) < 0.5)
    assert sure.mean() >= 0.5
    # The temperature divides the logits, and with them their fp32 rounding.
    atol = 5e-5 * max(1.0, 1.0 / temperature)
    np.testing.assert_allclose(sample.logprobs[sure], expected[sure], rtol=0, atol=atol)


def test_greedy_takes_the_lower_id_among_equals() -> None:
    config = CONFIGS["tiny"]
    weights = random_weights(config)
    weights["lm_head.weight"][:] = weights["lm_head.weight"][:1]
    generator = EmbeddedEngine(config)
    generator.load_weights(weights, 0)
    for sampling in (SamplingParams(4, temperature=0.0), SamplingParams(4, top_k=1)):
        generator.submit(GenerateRequest(0, prompts_of(config, [5])[0], 1, sampling))
        assert run(generator)[0, 0].token_ids.tolist() == [0, 0, 0, 0]


def test_top_k_of_one_has_logprob_zero() -> None:
    generator = engine("tiny")
    generator.submit(GenerateRequest(0, np.array([3], np.int32), 1, SamplingParams(8, top_k=1)))
    assert (run(generator)[0, 0].logprobs == 0).all()


def test_extreme_logits() -> None:
    """A head scaled up by 1e4: one token takes all, the sum of the others underflows."""
    config = CONFIGS["tiny"]
    weights = random_weights(config)
    weights["lm_head.weight"] *= 1e4
    generator = EmbeddedEngine(config)
    generator.load_weights(weights, 0)
    generator.submit(GenerateRequest(0, np.array([3], np.int32), 1, SamplingParams(8)))
    sample = run(generator)[0, 0]
    assert (sample.logprobs == 0).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_raise_and_change_nothing(poison: float) -> None:
    config = CONFIGS["tiny"]
    generator = EmbeddedEngine(config)
    good, bad = random_weights(config), random_weights(config)
    bad["lm_head.weight"][7, 0] = poison
    generator.load_weights(good, 0)
    generator.submit(GenerateRequest(4, np.array([3, 1], np.int32), 2, SamplingParams(8)))
    generator.decode(3)
    generator.load_weights(bad, 1)
    with pytest.raises(ValueError, match="expected finite logits for request_id 4, sample_index 0, response token 3"):
        generator.decode(1)
    generator.load_weights(good, 2)
    samples = run(generator)
    assert [len(sample.token_ids) for sample in samples.values()] == [8, 8]
    assert samples[4, 0].versions.tolist() == [0, 0, 0, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("seed", -1),
    ],
)
def test_sampling_parameters_out_of_range_raise(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"SamplingParams: expected .*{field}"):
        SamplingParams(**{"max_new_tokens": 4, field: value})
