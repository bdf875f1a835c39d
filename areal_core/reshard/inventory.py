"""The canonical tensors of a model: the names and shapes of its Hugging Face files.

Files keep one tensor for each expert and projection (`mlp.experts.17.gate_proj.weight`), and so does this list; the
fused parameters that transformers 5 holds in memory are a matter of the name map "hf". A tied lm_head is no entry.

DeepSeek-V3 in bfloat16 has 45,395 tensors: its 61 layers without the layer of multi-token prediction. With
`mtp=True` there are 46,183, and with 8-bit weights each of the 45,808 quantised ones has a tensor of scales beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from areal_core.reshard.models import ModelSizes, load_model
from areal_core.reshard.spec import Spec

__all__ = ["SCALE_BLOCK", "SCALE_SUFFIX", "inventory"]

SCALE_BLOCK = 128  # rows and columns that share one scale
SCALE_SUFFIX = "weight_scale_inv"

_Shapes = Iterator[tuple[str, tuple[int, ...]]]


def inventory(
    model: ModelSizes | Mapping[str, Any] | str | Path, *, dtype: torch.dtype | None = None, mtp: bool = False
) -> dict[str, Spec]:
    """List the canonical tensors of a model, in the order of its layers.

    Args:
        model: what `load_model` takes: a public name, a config.json, a Hugging Face directory or a configuration.
        dtype: of the weights; None: as the configuration says. An 8-bit float gives block-scaled weights: the
            projections of the layers are of that dtype with fp32 scales of 128 x 128 blocks beside them, everything
            else stays bfloat16. The router's correction bias is fp32 in any case.
        mtp: list the layers of multi-token prediction too (DeepSeek-V3).

    Returns:
        Name -> Spec.

    Raises:
        ValueError: see `load_model`; mtp for a model without such layers; a dtype that is no float.
    """
    sizes = load_model(model)
    dtype = _torch_dtype(sizes.dtype) if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ValueError(f"inventory: expected a floating-point dtype, got {dtype}")
    if mtp and not sizes.mtp_layers:
        raise ValueError(f"inventory: expected mtp=False for {sizes.family} without mtp_layers, got True")
    is_scaled = dtype.itemsize == 1
    specs: dict[str, Spec] = {}
    for name, shape in _tensors(sizes, mtp):
        if name.endswith("e_score_correction_bias"):
            specs[name] = Spec(torch.float32, shape)
        elif is_scaled and _has_scales(name):
            specs[name] = Spec(dtype, shape)
            blocks = tuple(-(-size // SCALE_BLOCK) for size in shape)
            specs[name.removesuffix("weight") + SCALE_SUFFIX] = Spec(torch.float32, blocks)
        else:
            specs[name] = Spec(torch.bfloat16 if is_scaled else dtype, shape)
    return specs


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"model: expected torch's name of a dtype, got {name!r}")
    return dtype


def _has_scales(name: str) -> bool:
    """Whether 8-bit checkpoints quantise a tensor: projections of layers, but neither router nor MTP's eh_proj."""
    return (name.endswith("_proj.weight") and not name.endswith("eh_proj.weight")) or name.endswith("_with_mqa.weight")


def _tensors(sizes: ModelSizes, mtp: bool) -> _Shapes:
    yield "model.embed_tokens.weight", (sizes.vocabulary, sizes.hidden)
    for layer in range(sizes.layers):
        yield from _layer(sizes, layer)
    for layer in range(sizes.layers, sizes.layers + sizes.mtp_layers * mtp):
        yield from _layer(sizes, layer)
        yield from _mtp_extras(sizes, f"model.layers.{layer}.")
    yield "model.norm.weight", (sizes.hidden,)
    if not sizes.tied:
        yield "lm_head.weight", (sizes.vocabulary, sizes.hidden)


def _layer(sizes: ModelSizes, layer: int) -> _Shapes:
    prefix = f"model.layers.{layer}."
    yield prefix + "input_layernorm.weight", (sizes.hidden,)
    attention = _latent_attention(sizes) if sizes.is_mla else _attention(sizes)
    for name, shape in attention:
        yield f"{prefix}self_attn.{name}", shape
    yield prefix + "post_attention_layernorm.weight", (sizes.hidden,)
    if sizes.is_sparse(layer):
        yield from _experts(sizes, prefix + "mlp.")
    else:
        yield from _mlp(prefix + "mlp.", sizes.hidden, sizes.intermediate)


def _attention(sizes: ModelSizes) -> _Shapes:
    query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    for part, size in (("q", query), ("k", key), ("v", key)):
        yield f"{part}_proj.weight", (size, sizes.hidden)
        if sizes.qkv_bias:
            yield f"{part}_proj.bias", (size,)
    yield "o_proj.weight", (sizes.hidden, query)
    if sizes.output_bias:
        yield "o_proj.bias", (sizes.hidden,)
    if sizes.qk_norm:
        yield "q_norm.weight", (sizes.head_dim,)
        yield "k_norm.weight", (sizes.head_dim,)


def _latent_attention(sizes: ModelSizes) -> _Shapes:
    query = sizes.heads * (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim)
    if sizes.q_lora_rank:
        yield "q_a_proj.weight", (sizes.q_lora_rank, sizes.hidden)
        yield "q_a_layernorm.weight", (sizes.q_lora_rank,)
        yield "q_b_proj.weight", (query, sizes.q_lora_rank)
    else:
        yield "q_proj.weight", (query, sizes.hidden)
    yield "kv_a_proj_with_mqa.weight", (sizes.kv_lora_rank + sizes.qk_rope_head_dim, sizes.hidden)
    yield "kv_a_layernorm.weight", (sizes.kv_lora_rank,)
    yield "kv_b_proj.weight", (sizes.heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), sizes.kv_lora_rank)
    yield "o_proj.weight", (sizes.hidden, sizes.heads * sizes.v_head_dim)


def _mlp(prefix: str, hidden: int, intermediate: int) -> _Shapes:
    yield prefix + "gate_proj.weight", (intermediate, hidden)
    yield prefix + "up_proj.weight", (intermediate, hidden)
    yield prefix + "down_proj.weight", (hidden, intermediate)


def _experts(sizes: ModelSizes, prefix: str) -> _Shapes:
    yield prefix + "gate.weight", (sizes.experts, sizes.hidden)
    if sizes.family == "deepseek_v3":
        yield prefix + "gate.e_score_correction_bias", (sizes.experts,)
    for expert in range(sizes.experts):
        yield from _mlp(f"{prefix}experts.{expert}.", sizes.hidden, sizes.moe_intermediate)
    if sizes.shared_experts:
        yield from _mlp(prefix + "shared_experts.", sizes.hidden, sizes.shared_experts * sizes.moe_intermediate)


def _mtp_extras(sizes: ModelSizes, prefix: str) -> _Shapes:
    yield prefix + "embed_tokens.weight", (sizes.vocabulary, sizes.hidden)
    yield prefix + "enorm.weight", (sizes.hidden,)
    yield prefix + "hnorm.weight", (sizes.hidden,)
    yield prefix + "eh_proj.weight", (sizes.hidden, 2 * sizes.hidden)
    yield prefix + "shared_head.norm.weight", (sizes.hidden,)
    yield prefix + "shared_head.head.weight", (sizes.vocabulary, sizes.hidden)
