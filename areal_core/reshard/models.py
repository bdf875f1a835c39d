"""The sizes of a model that decide its tensors: read from a configuration, or known by a public name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["FAMILIES", "PUBLIC_MODELS", "ModelSizes", "load_model"]

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What a model's configuration says about the shapes of its tensors.

    Attributes:
        family: `model_type` of the Hugging Face configuration, one of FAMILIES.
        tied: lm_head is the embedding; it is no tensor of its own then.
        first_sparse: the first layer whose MLP is a mixture of experts; those before are dense.
        shared_experts: width of the shared expert in units of `moe_intermediate`; 0: there is none.
        q_lora_rank, kv_lora_rank: of multi-head latent attention (DeepSeek); kv_lora_rank 0: ordinary attention.
        mtp_layers: layers behind the last one that predict further tokens; listed only where asked for.
    """

    family: str
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    moe_intermediate: int = 0
    first_sparse: int = 0
    shared_experts: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    mtp_layers: int = 0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"model: expected model_type of {', '.join(FAMILIES)}, got {self.family!r}")
        positive = ("layers", "hidden", "intermediate", "vocabulary", "heads", "kv_heads", "head_dim")
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in positive else 0
            is_number = isinstance(field.default, int) or field.name in positive
            if is_number and (not isinstance(value, int) or value < least):
                raise ValueError(f"model: expected {field.name} to be an integer >= {least}, got {value!r}")
        if not self.is_mla and self.heads % self.kv_heads:
            raise ValueError(f"model: expected kv_heads to divide {self.heads} heads, got {self.kv_heads}")
        if self.experts and not self.moe_intermediate:
            raise ValueError("model: expected moe_intermediate >= 1 for a mixture of experts, got 0")
        if self.is_mla and not (self.qk_nope_head_dim and self.qk_rope_head_dim and self.v_head_dim):
            raise ValueError("model: expected qk_nope_head_dim, qk_rope_head_dim and v_head_dim with kv_lora_rank")

    @property
    def is_mla(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return self.experts > 0 and layer >= self.first_sparse

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSizes:
        """Read a Hugging Face configuration (config.json as a mapping).

        The dtype is that of `dtype` or `torch_dtype`; a `quantization_config` is not looked at.

        Raises:
            ValueError: a family that is not known, a size that is missing or no positive integer, or a setting that
                gives tensors which are not described here (sparse layers in alternation with dense ones, biases of
                the MLP).
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(f"model: expected model_type of {', '.join(FAMILIES)}, got {family!r}")
        if config.get("mlp_bias"):
            raise ValueError(f"model: expected mlp_bias = false, got {config['mlp_bias']!r}")
        heads = _size(config, "num_attention_heads")
        hidden = _size(config, "hidden_size")
        sizes: dict[str, Any] = {
            "family": family,
            "layers": _size(config, "num_hidden_layers"),
            "hidden": hidden,
            "intermediate": _size(config, "intermediate_size"),
            "vocabulary": _size(config, "vocab_size"),
            "heads": heads,
            "kv_heads": _size(config, "num_key_value_heads", heads),
            "head_dim": _size(config, "head_dim", 128 if family.startswith("qwen3") else max(hidden // heads, 1)),
            "tied": bool(config.get("tie_word_embeddings", False)),
            "qkv_bias": family == "qwen2" or bool(config.get("attention_bias", False)),
            "output_bias": family != "qwen2" and bool(config.get("attention_bias", False)),
            "qk_norm": family in ("qwen3", "qwen3_moe"),
            "dtype": str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        }
        if family == "qwen3_moe":
            if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
                raise ValueError("model: expected decoder_sparse_step = 1 and no mlp_only_layers, got others")
            sizes |= {
                "experts": _size(config, "num_experts", config.get("num_local_experts")),
                "moe_intermediate": _size(config, "moe_intermediate_size"),
            }
        if family == "deepseek_v3":
            sizes |= _deepseek_sizes(config)
        return cls(**sizes)


def _deepseek_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("moe_layer_freq", 1) != 1:
        raise ValueError(f"model: expected moe_layer_freq = 1, got {config['moe_layer_freq']}")
    if config.get("attention_bias"):
        raise ValueError("model: expected attention_bias = false with latent attention, got true")
    return {
        "head_dim": _size(config, "qk_nope_head_dim") + _size(config, "qk_rope_head_dim"),
        "experts": _size(config, "n_routed_experts", config.get("num_local_experts")),
        "moe_intermediate": _size(config, "moe_intermediate_size"),
        "first_sparse": _size(config, "first_k_dense_replace", 0, least=0),
        "shared_experts": _size(config, "n_shared_experts", 0, least=0),
        "q_lora_rank": _size(config, "q_lora_rank", 0, least=0),
        "kv_lora_rank": _size(config, "kv_lora_rank"),
        "qk_nope_head_dim": _size(config, "qk_nope_head_dim"),
        "qk_rope_head_dim": _size(config, "qk_rope_head_dim"),
        "v_head_dim": _size(config, "v_head_dim"),
        "mtp_layers": _size(config, "num_nextn_predict_layers", config.get("num_mtp_layers") or 0, least=0),
    }


def _size(config: Mapping[str, Any], key: str, default: Any = None, *, least: int = 1) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"model: expected {key} to be an integer >= {least}, got {value!r}")
    return value


def load_model(model: ModelSizes | Mapping[str, Any] | str | Path) -> ModelSizes:
    """The sizes of a model given as a public name, a config.json, a Hugging Face directory or a configuration.

    Names ignore case, the organisation and endings such as `-Instruct`; the parameters' number is enough where it is
    unambiguous: `Qwen/Qwen3-235B-A22B-Instruct-2507` and `qwen3-235b` are the same.

    Raises:
        ValueError: nothing of that name; the text lists the nearest names.
        FileNotFoundError: a path without a config.json.
    """
    if isinstance(model, ModelSizes):
        return model
    if isinstance(model, Mapping):
        return ModelSizes.from_config(model)
    path = Path(model)
    if (str(model) and path.is_dir()) or path.suffix == ".json" or path.is_absolute():
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"model: expected a config.json, got {path}, which is not there")
        return _read_config(path)
    name = _public_name(str(model))
    if name is None:
        near = difflib.get_close_matches(_bare_name(str(model)), PUBLIC_MODELS, 3, 0.5) or sorted(PUBLIC_MODELS)
        raise ValueError(
            f"model: expected a directory, a config.json or a public name, got {str(model)!r}; "
            f"names near it: {', '.join(near)}"
        )
    return PUBLIC_MODELS[name]


def _read_config(path: Path) -> ModelSizes:
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ValueError(f"model: expected at most {_MAX_CONFIG_BYTES} bytes in {path}, got {path.stat().st_size}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model: expected JSON in {path}: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"model: expected a JSON object in {path}, got {type(config).__name__}")
    return ModelSizes.from_config(config)


def _bare_name(name: str) -> str:
    name = name.rsplit("/", 1)[-1].lower().replace("meta-", "")
    for ending in ("-2507", "-instruct", "-thinking", "-base", "-chat", "-hf"):
        name = name.removesuffix(ending)
    return name.replace("llama-3.1-", "llama-3-").replace("qwen2-", "qwen2.5-").replace("-0324", "")


def _public_name(name: str) -> str | None:
    bare = _bare_name(name)
    if bare in PUBLIC_MODELS:
        return bare
    longer = [key for key in PUBLIC_MODELS if key.startswith(f"{bare}-")]
    return longer[0] if len(longer) == 1 else None


def _llama(layers: int, hidden: int, intermediate: int, heads: int, **more: Any) -> ModelSizes:
    defaults: dict[str, Any] = {"vocabulary": 128_256, "kv_heads": 8, "head_dim": 128}
    return ModelSizes(
        family="llama", layers=layers, hidden=hidden, intermediate=intermediate, heads=heads, **(defaults | more)
    )


def _qwen2(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, **more: Any) -> ModelSizes:
    defaults: dict[str, Any] = {"vocabulary": 152_064, "head_dim": hidden // heads, "qkv_bias": True}
    defaults |= {"layers": layers, "hidden": hidden, "intermediate": intermediate}
    return ModelSizes(family="qwen2", heads=heads, kv_heads=kv_heads, **(defaults | more))


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int = 8, **more: Any) -> ModelSizes:
    defaults: dict[str, Any] = {"family": "qwen3", "vocabulary": 151_936, "head_dim": 128, "qk_norm": True}
    defaults |= {"layers": layers, "hidden": hidden, "intermediate": intermediate}
    return ModelSizes(heads=heads, kv_heads=kv_heads, **(defaults | more))


# Qwen2 and Qwen2.5 of one size have the same tensors, as have Llama 3 and 3.1.
PUBLIC_MODELS: Mapping[str, ModelSizes] = {
    "qwen2.5-0.5b": _qwen2(24, 896, 4_864, 14, 2, vocabulary=151_936, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1_536, 8_960, 12, 2, vocabulary=151_936, tied=True),
    "qwen2.5-3b": _qwen2(36, 2_048, 11_008, 16, 2, vocabulary=151_936, tied=True),
    "qwen2.5-7b": _qwen2(28, 3_584, 18_944, 28, 4),
    "qwen2.5-14b": _qwen2(48, 5_120, 13_824, 40, 8),
    "qwen2.5-32b": _qwen2(64, 5_120, 27_648, 40, 8),
    "qwen2.5-72b": _qwen2(80, 8_192, 29_568, 64, 8),
    "qwen3-0.6b": _qwen3(28, 1_024, 3_072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2_048, 6_144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2_560, 9_728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4_096, 12_288, 32),
    "qwen3-14b": _qwen3(40, 5_120, 17_408, 40),
    "qwen3-32b": _qwen3(64, 5_120, 25_600, 64),
    "qwen3-30b-a3b": _qwen3(48, 2_048, 6_144, 32, 4, family="qwen3_moe", experts=128, moe_intermediate=768),
    "qwen3-235b-a22b": _qwen3(94, 4_096, 12_288, 64, 4, family="qwen3_moe", experts=128, moe_intermediate=1_536),
    "llama-3.2-1b": _llama(16, 2_048, 8_192, 32, head_dim=64, tied=True),
    "llama-3.2-3b": _llama(28, 3_072, 8_192, 24, tied=True),
    "llama-3-8b": _llama(32, 4_096, 14_336, 32),
    "llama-3-70b": _llama(80, 8_192, 28_672, 64),
    "deepseek-v3": ModelSizes(
        family="deepseek_v3",
        layers=61,
        hidden=7_168,
        intermediate=18_432,
        vocabulary=129_280,
        heads=128,
        kv_heads=128,
        head_dim=192,
        experts=256,
        moe_intermediate=2_048,
        first_sparse=3,
        shared_experts=1,
        q_lora_rank=1_536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        mtp_layers=1,
    ),
}
