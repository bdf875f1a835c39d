from __future__ import annotations

import torch

from areal_core.model import DecoderConfig, PackedDecoder

SMALL = {"vocab_size": 41, "hidden_size": 24, "intermediate_size": 40, "num_layers": 3, "rope_theta": 500.0}

CONFIGS = {
    "llama": DecoderConfig("llama", **SMALL, num_heads=4, num_kv_heads=4, head_dim=6),
    "llama-gqa-tied": DecoderConfig(
        "llama", **SMALL, num_heads=4, num_kv_heads=2, head_dim=8, tie_word_embeddings=True, rms_norm_eps=1e-5
    ),
    "qwen2-gqa": DecoderConfig("qwen2", **SMALL, num_heads=6, num_kv_heads=2, head_dim=4, qkv_bias=True),
    "qwen2-mqa-tied": DecoderConfig(
        "qwen2", **SMALL, num_heads=3, num_kv_heads=1, head_dim=8, qkv_bias=True, tie_word_embeddings=True
    ),
}


def make_model(config: DecoderConfig, seed: int = 0) -> PackedDecoder:
    """Weights away from the initial pattern, so that norms and biases matter."""
    generator = torch.Generator().manual_seed(seed)
    model = PackedDecoder(config)
    with torch.no_grad():
        model.weights.add_(torch.randn(model.weights.shape, generator=generator), alpha=0.15)
    return model
