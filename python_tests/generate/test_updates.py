from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_core.generate import EmbeddedEngine, GenerateRequest, SamplingParams, UnfinishedSample

from .models import (
    CONFIGS,
    TINY,
    assert_same,
    distribution,
    generate,
    prompts_of,
    random_weights,
    response_logits,
    run,
    transformers_model,
)

OLD, NEW = 0, 1
SAMPLING = SamplingParams(30, temperature=1.2, stop_token_ids=(3,), seed=4)


def make(version: int, name: str = "tiny", **options: int) -> EmbeddedEngine:
    result = EmbeddedEngine(CONFIGS[name], **options)
    result.load_weights(random_weights(CONFIGS[name], seed=version), version)
    return result


def start(target: EmbeddedEngine, lengths: list[int], n: int, steps: int) -> list[UnfinishedSample]:
    for i, prompt in enumerate(prompts_of(TINY, lengths)):
        target.submit(GenerateRequest(i, prompt, n, SAMPLING))
    target.decode(steps)
    return target.unfinished()


@pytest.mark.parametrize("slots", [4, 64])
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 13])
@pytest.mark.parametrize("prefill_tokens", [7, 256])
def test_recompute_goes_on_as_a_fresh_engine_would(slots: int, steps: int, prefill_tokens: int) -> None:
    target = make(OLD, max_slots=slots, prefill_tokens=prefill_tokens)
    before = start(target, [5, 33, 16, 18, 47], 3, steps)
    update = target.load_weights(random_weights(TINY, seed=NEW), NEW)
    assert target.version == NEW

    fresh = make(NEW, max_slots=slots)
    for sample in before:
        fresh.resume(sample)
    expected, samples = run(fresh), run(target)
    assert samples.keys() == expected.keys()
    for sample in before:
        key = (sample.request_id, sample.sample_index)
        assert_same(samples[key], expected[key])
        begun = len(sample.token_ids)
        assert samples[key].token_ids[:begun].tolist() == sample.token_ids.tolist()
        assert samples[key].versions.tolist() == [OLD] * begun + [NEW] * (len(samples[key].token_ids) - begun)
    in_flight = [sample for sample in before if len(sample.token_ids) > 0]
    assert update.interrupted_samples == len(in_flight)
    prompts = {sample.request_id: len(sample.prompt_ids) for sample in in_flight}
    assert update.recomputed_tokens == sum(prompts.values()) + sum(len(s.token_ids) - 1 for s in in_flight)
    assert update.seconds > 0


def test_recompute_under_the_same_weights_changes_nothing() -> None:
    expected = generate(make(OLD), prompts_of(TINY, [5, 33, 16]), 3, SAMPLING)
    target = make(OLD, max_slots=5)
    start(target, [5, 33, 16], 3, 4)
    target.load_weights(random_weights(TINY, seed=OLD), OLD)
    samples = run(target)
    for key, sample in samples.items():
        assert_same(sample, expected[key])


def test_finish_stays_on_the_old_weights() -> None:
    prompts = prompts_of(TINY, [5, 33, 16, 18])
    old, new = (generate(make(version), prompts, 3, SAMPLING) for version in (OLD, NEW))
    target = make(OLD, max_slots=5)
    before = {(s.request_id, s.sample_index): s for s in start(target, [5, 33, 16, 18], 3, 4)}
    update = target.load_weights(random_weights(TINY, seed=NEW), NEW, "finish")
    assert (update.interrupted_samples, update.recomputed_tokens) == (0, 0)
    assert target.version == NEW
    samples = run(target)
    assert samples.keys() == before.keys()
    for key, sample in samples.items():
        begun = len(before[key].token_ids) > 0
        assert_same(sample, (old if begun else new)[key])
        assert set(sample.versions.tolist()) == {OLD if begun else NEW}
    assert {len(s.token_ids) > 0 for s in before.values()} == {True, False}


def test_keep_goes_on_with_the_cache_it_has() -> None:
    """New weights that differ in the head alone: the old cache is the right cache."""
    target = make(OLD)
    before = start(target, [5, 33], 2, 6)
    weights = random_weights(TINY, seed=OLD)
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(0)
    update = target.load_weights(weights, NEW, "keep")
    assert (update.interrupted_samples, update.recomputed_tokens) == (len(before), 0)
    fresh = EmbeddedEngine(TINY)
    fresh.load_weights(weights, NEW)
    for sample in before:
        fresh.resume(sample)
    expected, samples = run(fresh), run(target)
    for key, sample in samples.items():
        assert_same(sample, expected[key])
        assert set(sample.versions.tolist()) == {OLD, NEW}


def test_keep_and_recompute_differ_when_the_cache_does() -> None:
    runs = []
    for on_update in ("keep", "recompute"):
        target = make(OLD)
        start(target, [33], 4, 6)
        target.load_weights(random_weights(TINY, seed=NEW), NEW, on_update)
        runs.append(run(target))
    differ = [runs[0][key].logprobs.tobytes() != runs[1][key].logprobs.tobytes() for key in runs[0]]
    assert all(differ)


def test_a_prompt_is_computed_once_per_version() -> None:
    """Samples of one request that start before and after an update don't share a prompt across versions."""
    prompt = prompts_of(TINY, [40])[0]
    old, new = (generate(make(version), [prompt], 6, SAMPLING) for version in (OLD, NEW))
    target = make(OLD, max_slots=2)
    target.submit(GenerateRequest(0, prompt, 6, SAMPLING))
    target.decode(3)
    assert target.stats().prefill_tokens == 40
    started = [s.sample_index for s in target.unfinished() if len(s.token_ids) > 0]
    target.load_weights(random_weights(TINY, seed=NEW), NEW, "finish")
    samples = run(target)
    assert target.stats().prefill_tokens == 80
    for (_, index), sample in samples.items():
        assert_same(sample, (old if index in started else new)[0, index])


def test_modes_follow_each_other() -> None:
    """finish, then keep, then recompute: each applies to all samples in flight at the time."""
    target = make(OLD, max_slots=3)
    start(target, [5, 18, 16, 33, 7], 2, 2)
    for version, mode in ((1, "finish"), (2, "keep"), (3, "finish"), (4, "recompute")):
        target.load_weights(random_weights(TINY, seed=version), version, mode)
        target.decode(3)
    last = target.unfinished()
    fresh = make(4)
    for sample in last:
        fresh.resume(sample)
    expected, samples = run(fresh), run(target)
    for key, sample in expected.items():
        assert_same(samples[key], sample)
        versions = samples[key].versions
        assert (np.diff(versions) >= 0).all()


def test_each_logprob_is_that_of_the_weights_its_version_names() -> None:
    target = make(OLD)
    start(target, [5, 18], 2, 4)
    target.load_weights(random_weights(TINY, seed=NEW), NEW)
    prompts = prompts_of(TINY, [5, 18])
    models = {version: transformers_model(TINY, random_weights(TINY, seed=version)) for version in (OLD, NEW)}
    for (request, _), sample in run(target).items():
        ids = torch.from_numpy(sample.token_ids).long()[:, None]
        logprobs = {
            version: distribution(response_logits(model, prompts[request], sample.token_ids), SAMPLING).log()
            for version, model in models.items()
        }
        expected = [logprobs[v].gather(1, ids)[t, 0].item() for t, v in enumerate(sample.versions.tolist())]
        np.testing.assert_allclose(sample.logprobs, expected, rtol=0, atol=5e-5)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected on_update in \{recompute, keep, finish\}, got drop"):
        make(OLD).load_weights(random_weights(TINY), NEW, "drop")
