from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_core.model import DecoderConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 5e5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_round_trip(config: DecoderConfig) -> None:
    assert DecoderConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_several_end_tokens_round_trip(config: DecoderConfig) -> None:
    several = replace(config, eos_token_ids=(2, 7), bos_token_id=1)
    assert several.eos_token_id == 2
    assert DecoderConfig.from_hf(several.to_hf()) == several


def test_rope_base_is_read_in_both_forms() -> None:
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
    assert DecoderConfig.from_hf(new) == DecoderConfig.from_hf(LLAMA)
    assert DecoderConfig.from_hf(LLAMA).rope_theta == 5e5


def test_defaults_of_absent_keys() -> None:
    bare = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rope_theta", "eos_token_id")}
    config = DecoderConfig.from_hf(bare)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 8, 10000.0)
    assert config.eos_token_ids == ()
    assert config.eos_token_id is None


def test_a_scaling_that_scales_nothing_is_accepted() -> None:
    assert DecoderConfig.from_hf({**LLAMA, "rope_scaling": {"rope_type": "default"}}) == DecoderConfig.from_hf(LLAMA)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mistral"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("attention_dropout", 0.1),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, key: value}))
    with pytest.raises(ValueError, match=key) as caught:
        DecoderConfig.from_pretrained(tmp_path)
    assert repr(value) in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ValueError, match="intermediate_size"):
        DecoderConfig.from_hf({k: v for k, v in LLAMA.items() if k != "intermediate_size"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("vocab_size", 0),
        ("eos_token_id", 100),
        ("bos_token_id", -1),
        ("rms_norm_eps", 0.0),
        ("rope_theta", -1.0),
    ],
)
def test_numbers_that_describe_no_model_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"got {value}"):
        DecoderConfig.from_hf({**LLAMA, key: value})
