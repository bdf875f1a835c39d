"""Small random decoders, their transformers twins, and the fp64 distributions that tokens should be drawn from."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from areal_core.generate import EmbeddedEngine, GeneratedSample, GenerateRequest, SamplingParams
from areal_core.model import DecoderConfig

TINY = DecoderConfig("llama", 32, 64, 128, 2, 4, 4, 16, rope_theta=100.0, max_position_embeddings=96)

# Grouped and single KV heads, sizes that fill no vector, tied and untied embeddings, biases.
CONFIGS = {
    "tiny": TINY,
    "llama-odd": DecoderConfig("llama", 131, 54, 77, 3, 6, 2, 10, max_position_embeddings=160),
    "llama-mqa": DecoderConfig("llama", 50, 48, 33, 2, 3, 1, 32, rms_norm_eps=1e-5, max_position_embeddings=160),
    "qwen2-tied": DecoderConfig(
        "qwen2", 1003, 72, 101, 2, 6, 3, 24, tie_word_embeddings=True, qkv_bias=True, max_position_embeddings=160
    ),
    "qwen2": DecoderConfig("qwen2", 97, 130, 200, 2, 5, 5, 26, 1e6, qkv_bias=True, max_position_embeddings=160),
}


def random_weights(config: DecoderConfig, seed: int = 0, spread: float = 1.0) -> dict[str, Tensor]:
    """fp32 weights large enough that the logits differ clearly from token to token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            return 1.0 + 0.2 * noise
        return spread * noise * (0.2 if len(shape) == 1 else 1.5 / math.sqrt(shape[-1]))

    return {name: draw(name, shape) for name, shape in config.tensor_shapes().items()}


@functools.cache
def transformers_twin(name: str, seed: int = 0) -> torch.nn.Module:
    """The transformers model of random_weights(CONFIGS[name], seed)."""
    return transformers_model(CONFIGS[name], random_weights(CONFIGS[name], seed))


def transformers_model(config: DecoderConfig, weights: dict[str, Tensor]) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    hf = transformers.AutoConfig.for_model(**config.to_hf())
    model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="eager").double().eval()
    missing, unexpected = model.load_state_dict({k: v.double() for k, v in weights.items()}, strict=False)
    assert not unexpected
    assert all(name == "lm_head.weight" for name in missing)
    model.tie_weights()
    return model


def response_logits(model: torch.nn.Module, prompt: npt.NDArray[np.int32], response: npt.NDArray[np.int32]) -> Tensor:
    """fp64 [R, V]: row t predicts token t of the response."""
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()
    with torch.no_grad():
        return model(ids[None]).logits[0, len(prompt) - 1 : -1]


def distribution(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """fp64 probabilities [R, V] of the next token."""
    if sampling.temperature == 0.0:
        return torch.softmax(logits, -1)
    p = torch.softmax(logits / sampling.temperature, -1)
    order = torch.argsort(p, dim=-1, descending=True, stable=True)
    ranked = p.gather(-1, order)
    if sampling.top_k:
        ranked[..., sampling.top_k :] = 0.0
        ranked /= ranked.sum(-1, keepdim=True)
    before = ranked.cumsum(-1) - ranked
    ranked = torch.where(before < sampling.top_p, ranked, 0.0)
    ranked /= ranked.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter(-1, order, ranked)


@functools.cache
def engine(name: str, seed: int = 0) -> EmbeddedEngine:
    """A shared idle engine under random weights."""
    result = EmbeddedEngine(CONFIGS[name], max_slots=8, prefill_tokens=24)
    result.load_weights(random_weights(CONFIGS[name], seed), 0)
    return result


def prompts_of(config: DecoderConfig, lengths: Iterable[int], seed: int = 0) -> list[npt.NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, config.vocab_size, size=length).astype(np.int32) for length in lengths]


def run(target: EmbeddedEngine, steps: int = 1000) -> dict[tuple[int, int], GeneratedSample]:
    """Decode until nothing is left; samples by (request_id, sample_index)."""
    samples: dict[tuple[int, int], GeneratedSample] = {}
    while target.num_active + target.num_waiting > 0:
        for sample in target.decode(steps):
            key = (sample.request_id, sample.sample_index)
            assert key not in samples
            samples[key] = sample
    return samples


def generate(
    target: EmbeddedEngine, prompts: list[npt.NDArray[np.int32]], n: int, sampling: SamplingParams
) -> dict[tuple[int, int], GeneratedSample]:
    for i, prompt in enumerate(prompts):
        target.submit(GenerateRequest(i, prompt, n, sampling))
    return run(target)


def assert_same(a: GeneratedSample, b: GeneratedSample) -> None:
    """Equal bit for bit."""
    assert a.token_ids.tolist() == b.token_ids.tolist()
    assert a.logprobs.tobytes() == b.logprobs.tobytes()
    assert a.finish_reason == b.finish_reason
