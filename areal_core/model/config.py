"""The shape of a decoder, and its translation from and to Hugging Face's config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HF_CLASS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

# Settings that change the computation: (key, the values under which it is the one implemented here).
_FIXED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", (None, "silu", "swish")),
    ("attention_bias", (None, False)),
    ("mlp_bias", (None, False)),
    ("attention_dropout", (None, 0, 0.0)),
    ("use_sliding_window", (None, False)),
    ("rope_scaling", (None,)),
    ("partial_rotary_factor", (None, 1, 1.0)),
    ("quantization_config", (None,)),
)


@dataclass(frozen=True)
class DecoderConfig:
    """A Llama- or Qwen2-shaped decoder: pre-norm RMSNorm, rotary attention with grouped keys, SwiGLU.

    architecture: "llama" or "qwen2"; they differ in the defaults of Hugging Face, and in `qkv_bias`.
    eos_token_ids: every token that ends a response; `eos_token_id` is the first.
    Raises: ValueError naming the field when the numbers do not describe a model.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.architecture not in _HF_CLASS:
            raise ValueError(f"DecoderConfig: expected architecture llama or qwen2, got {self.architecture!r}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            _require(getattr(self, name) >= 1, f"{name} >= 1", getattr(self, name))
        _require(self.num_heads % self.num_kv_heads == 0, f"num_kv_heads to divide {self.num_heads}", self.num_kv_heads)
        _require(self.head_dim >= 2 and self.head_dim % 2 == 0, "an even head_dim", self.head_dim)
        _require(self.rope_theta > 0, "rope_theta > 0", self.rope_theta)
        _require(self.rms_norm_eps > 0, "rms_norm_eps > 0", self.rms_norm_eps)
        _require(self.max_position_embeddings >= 1, "max_position_embeddings >= 1", self.max_position_embeddings)
        _require(self.qkv_bias == (self.architecture == "qwen2"), "qkv_bias with qwen2 and only there", self.qkv_bias)
        for token in (self.bos_token_id, self.pad_token_id, *self.eos_token_ids):
            _require(token is None or 0 <= token < self.vocab_size, f"token ids below {self.vocab_size}", token)

    @property
    def eos_token_id(self) -> int | None:
        """The first end-of-sequence token, or None."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def q_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (and of the values) of all heads."""
        return self.num_kv_heads * self.head_dim

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face's parameter names and shapes, in the order in which the decoder lays them out."""
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        widths = {"q": self.q_size, "k": self.kv_size, "v": self.kv_size}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
            shapes |= {f"{prefix}.self_attn.{x}_proj.weight": (width, hidden) for x, width in widths.items()}
            if self.qkv_bias:
                shapes |= {f"{prefix}.self_attn.{x}_proj.bias": (width,) for x, width in widths.items()}
            shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, self.q_size)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}.mlp.gate_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> DecoderConfig:
        """Read `directory`/config.json; ValueError naming key and value of whatever is not implemented here."""
        path = Path(directory) / "config.json"
        return cls.from_hf(json.loads(path.read_text(encoding="utf-8")), source=str(path))

    @classmethod
    def from_hf(cls, hf: dict[str, Any], source: str = "config.json") -> DecoderConfig:
        """Translate the contents of a Hugging Face config.json; `source` names it in errors."""
        architecture = hf.get("model_type")
        if architecture not in _HF_CLASS:
            raise ValueError(f"{source}: expected model_type llama or qwen2, got {architecture!r}")
        for key, accepted in _FIXED:
            if hf.get(key) not in accepted and not _is_plain_rope(key, hf[key]):
                raise ValueError(f"{source}: {key} = {hf[key]!r} is not supported")
        if "sliding_attention" in (hf.get("layer_types") or ()):
            raise ValueError(f"{source}: layer_types = {hf['layer_types']!r} is not supported (sliding attention)")
        try:
            heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
            eos = hf.get("eos_token_id")
            return cls(
                architecture=architecture,
                vocab_size=hf["vocab_size"],
                hidden_size=hidden,
                intermediate_size=hf["intermediate_size"],
                num_layers=hf["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=hf.get("num_key_value_heads") or heads,
                head_dim=hf.get("head_dim") or hidden // heads,
                rope_theta=_rope_theta(hf, source),
                rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
                tie_word_embeddings=hf.get("tie_word_embeddings", False),
                qkv_bias=architecture == "qwen2",
                max_position_embeddings=hf.get("max_position_embeddings", 2048),
                bos_token_id=hf.get("bos_token_id"),
                eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
                pad_token_id=hf.get("pad_token_id"),
            )
        except KeyError as error:
            raise ValueError(f"{source}: expected the key {error.args[0]!r}, which is missing") from error

    def to_hf(self) -> dict[str, Any]:
        """The contents of a config.json that `from_hf` and transformers read back as this model."""
        eos: int | list[int] | None = self.eos_token_id if len(self.eos_token_ids) <= 1 else list(self.eos_token_ids)
        return {
            "architectures": [_HF_CLASS[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": "float32",
        }


def _require(condition: bool, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"DecoderConfig: expected {expected}, got {got}")


def _is_plain_rope(key: str, value: object) -> bool:
    """True for a `rope_scaling` that says in so many words that nothing is scaled."""
    return key == "rope_scaling" and isinstance(value, dict) and value.get("rope_type", value.get("type")) == "default"


def _rope_theta(hf: dict[str, Any], source: str) -> float:
    """Read the rotary base from `rope_parameters` (transformers 5) or `rope_theta` (before)."""
    parameters = hf.get("rope_parameters") or {}
    if parameters.get("rope_type", "default") != "default":
        raise ValueError(f"{source}: rope_parameters = {parameters!r} is not supported (rope_type)")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{source}: rope_parameters = {parameters!r} is not supported (partial_rotary_factor)")
    return float(parameters.get("rope_theta", hf.get("rope_theta", 10000.0)))
