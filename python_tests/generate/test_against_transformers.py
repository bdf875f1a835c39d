from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from areal_core import _C
from areal_core.generate import EmbeddedEngine, SamplingParams

from .models import CONFIGS, distribution, generate, prompts_of, random_weights, response_logits, transformers_twin

PROMPTS = [1, 2, 15, 16, 17, 31, 33, 48]


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _C.active_isa()
    try:
        _C.set_active_isa(request.param)
    except ValueError:
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    _C.set_active_isa(before)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(40, temperature=0.0),
        SamplingParams(40, temperature=1.0, seed=1),
        SamplingParams(40, temperature=0.7, top_p=0.8, top_k=11, seed=2),
    ],
    ids=["greedy", "sampled", "truncated"],
)
def test_logprobs_and_greedy_tokens_equal_transformers(name: str, sampling: SamplingParams, isa: str) -> None:
    config = CONFIGS[name]
    weights = random_weights(config)
    model = transformers_twin(name)
    engine = EmbeddedEngine(config, max_slots=5, prefill_tokens=20)
    engine.load_weights(weights, 3)
    prompts = prompts_of(config, PROMPTS)
    samples = generate(engine, prompts, 2, sampling)
    assert len(samples) == 2 * len(PROMPTS)
    for (request, _), sample in samples.items():
        logits = response_logits(model, prompts[request], sample.token_ids)
        if sampling.temperature == 0.0:
            assert sample.token_ids.tolist() == logits.argmax(-1).tolist()
        expected = distribution(logits, sampling).log().gather(1, torch.from_numpy(sample.token_ids).long()[:, None])
        np.testing.assert_allclose(sample.logprobs, expected[:, 0].numpy(), rtol=0, atol=5e-5)
        assert sample.finish_reason == "length"
        assert (sample.versions == 3).all()


@pytest.mark.parametrize("name", ["tiny", "qwen2-tied", "llama-odd"])
def test_bf16_weights_give_what_their_fp32_values_give(name: str) -> None:
    config = CONFIGS[name]
    half = {key: value.bfloat16() for key, value in random_weights(config).items()}
    whole = {key: value.float() for key, value in half.items()}
    mixed = {key: (half if "q_proj" in key or "norm" in key else whole)[key] for key in half}
    runs = []
    for weights in (half, whole, mixed):
        engine = EmbeddedEngine(config, max_slots=5)
        engine.load_weights(weights, 0)
        runs.append(generate(engine, prompts_of(config, PROMPTS), 1, SamplingParams(10)))
    for other in runs[1:]:
        for key, sample in runs[0].items():
            assert sample.token_ids.tolist() == other[key].token_ids.tolist()
            assert sample.logprobs.tobytes() == other[key].logprobs.tobytes()


def test_tensors_need_not_be_contiguous() -> None:
    config = CONFIGS["tiny"]
    weights = random_weights(config)
    engine = EmbeddedEngine(config)
    engine.load_weights(
        {key: (value.t().contiguous().t() if value.ndim == 2 else value) for key, value in weights.items()}, 0
    )
    expected = EmbeddedEngine(config)
    expected.load_weights(weights, 0)
    prompts = prompts_of(config, [7])
    ours, theirs = (generate(e, prompts, 1, SamplingParams(10))[0, 0] for e in (engine, expected))
    assert ours.logprobs.tobytes() == theirs.logprobs.tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "expected a tensor named model.norm.weight, got none"),
        (lambda w: w.update(extra=torch.zeros(1)), "expected only tensors of this model, got extra"),
        (
            lambda w: w.update({"lm_head.weight": torch.zeros(3, 64)}),
            r"lm_head.weight of shape \[32, 64\], got \[3, 64\]",
        ),
        (lambda w: w.update({"lm_head.weight": torch.zeros(32, 64).half()}), "lm_head.weight in float32 or bfloat16"),
    ],
)
def test_bad_weights_are_named_and_change_nothing(change, message: str) -> None:
    config = CONFIGS["tiny"]
    weights = random_weights(config)
    engine = EmbeddedEngine(config)
    engine.load_weights(weights, 1)
    before = generate(engine, prompts_of(config, [5]), 1, SamplingParams(8))[0, 0]
    bad = random_weights(config, seed=1)
    change(bad)
    with pytest.raises(ValueError, match=message):
        engine.load_weights(bad, 2)
    assert engine.version == 1
    after = generate(engine, prompts_of(config, [5]), 1, SamplingParams(8))[0, 0]
    assert before.logprobs.tobytes() == after.logprobs.tobytes()


def test_unused_tensors_that_checkpoints_carry_are_accepted() -> None:
    config = CONFIGS["qwen2-tied"]
    weights = random_weights(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(12)
    EmbeddedEngine(config).load_weights(weights, 0)
