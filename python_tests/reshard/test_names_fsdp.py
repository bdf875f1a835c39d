"""Hugging Face models under FSDP2, HSDP and tensor parallelism, transcribed from torch.chunk, against the name map."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from names_oracle import Array, Storage, check, part, tiny
from test_inventory import hugging_face_config, transformers_tensors

from areal_core.reshard.models import PUBLIC_MODELS, ModelSizes
from areal_core.reshard.names import NameMap
from areal_core.reshard.placements import Replicate, Shard, StridedShard

COLUMNS = ("o_proj.weight", "down_proj.weight")
ROWS = tuple(f"{name}_proj.{kind}" for name in ("q", "k", "v", "gate", "up") for kind in ("weight", "bias"))


def chunk(array: Array, parts: int, index: int) -> Array:
    """What torch.chunk gives rank `index`, an empty piece where there are fewer pieces."""
    size = -(-len(array) // parts)
    return array[index * size : (index + 1) * size]


def tensor_parallel(sizes: ModelSizes, name: str, array: Array, tp: int, index: int) -> Array:
    """transformers' plan: projections and lm_head; not DeepSeek's attention."""
    if sizes.is_mla and "self_attn" in name:
        return array
    if name.endswith(COLUMNS):
        return part(array, tp, index, axis=1)
    return part(array, tp, index) if name.endswith(ROWS) or name == "lm_head.weight" else array


def fused(arrays: Storage) -> Storage:
    """Experts as transformers 5 holds them."""
    found = {name: array for name, array in arrays.items() if ".experts." not in name}
    layers = {name.split(".experts.")[0] for name in arrays if ".experts." in name}
    for layer in sorted(layers):
        count = len([name for name in arrays if name.startswith(f"{layer}.experts.") and "down" in name])
        weights = {
            name: [arrays[f"{layer}.experts.{expert}.{name}_proj.weight"] for expert in range(count)]
            for name in ("gate", "up", "down")
        }
        pairs = zip(weights["gate"], weights["up"], strict=True)
        found[f"{layer}.experts.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in pairs])
        found[f"{layer}.experts.down_proj"] = np.stack(weights["down"])
    return found


def fused_part(name: str, array: Array, tp: int, index: int) -> Array:
    """`packed_colwise`: each rank's gate rows, then its up rows; `rowwise` of down_proj."""
    if name.endswith("down_proj"):
        return part(array, tp, index, axis=2)
    gate, up = np.split(array, 2, axis=1)
    return np.concatenate([part(gate, tp, index, axis=1), part(up, tp, index, axis=1)], axis=1)


CASES: dict[str, tuple[ModelSizes, dict[str, Any]]] = {
    "one rank": (tiny("qwen2"), {}),
    "tied": (tiny("llama", tied=True), {"dp": 2}),
    "uneven": (tiny("qwen2"), {"dp": 3}),
    "more ranks than rows": (tiny("qwen3"), {"dp": 16}),
    "replicas": (tiny("qwen2"), {"dp": 3, "replicas": 2}),
    "dp over tp": (tiny("qwen2"), {"dp": 4, "tp": 2}),
    "dp over tp, uneven": (tiny("qwen3", intermediate=26), {"dp": 4, "tp": 2}),
    "replicas, dp, tp": (tiny("qwen3"), {"dp": 2, "tp": 4, "replicas": 2}),
    "fused experts": (tiny("qwen3_moe"), {"dp": 2}),
    "fused experts, unevenly": (tiny("qwen3_moe"), {"dp": 4, "tp": 2}),
    "fewer experts on the last rank": (tiny("qwen3_moe", experts=7), {"dp": 4}),
    "more ranks than experts": (tiny("qwen3_moe"), {"dp": 7, "replicas": 2}),
    "separate experts": (tiny("qwen3_moe"), {"dp": 2, "tp": 2, "separate": True}),
    "latent attention": (tiny("deepseek_v3"), {"dp": 3, "tp": 2}),
    "latent attention, separate": (tiny("deepseek_v3"), {"dp": 3, "separate": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_storage_of_every_rank(case: str) -> None:
    sizes, parallel = CASES[case]
    sizes = dataclasses.replace(sizes, vocabulary=132)  # what tp divides
    names = NameMap.for_model(sizes, "hf", **parallel)
    dp, tp = parallel.get("dp", 1), parallel.get("tp", 1)

    def of_rank(arrays: Storage, rank: int) -> Storage:
        found = {}
        for name, array in (arrays if parallel.get("separate") else fused(arrays)).items():
            if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                local = fused_part(name, array, tp, rank % tp)
            else:
                local = tensor_parallel(sizes, name, array, tp, rank % tp)
            is_buffer = name.endswith("e_score_correction_bias")  # of the module: no parameter, so not divided
            found[name] = local if is_buffer else chunk(local, dp, rank // tp % dp)
        # A rank has an empty tensor of each parameter, but the layout does not know of it where experts are fused.
        return {
            name: a
            for name, a in found.items()
            if a.size or not name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        }

    check(names, of_rank)


def test_placements_are_those_of_dtensor() -> None:
    names = NameMap.for_model(tiny("qwen2", vocabulary=132), "fsdp", dp=4, tp=2, replicas=3)
    tensors = names.tensors
    prefix = "model.layers.0."
    expected = {
        "self_attn.q_proj.weight": (StridedShard(0, 2), Shard(0)),
        "self_attn.q_proj.bias": (StridedShard(0, 2), Shard(0)),
        "self_attn.o_proj.weight": (Shard(0), Shard(1)),
        "input_layernorm.weight": (Shard(0), Replicate()),
    }
    for name, placements in expected.items():
        tensor = tensors[prefix + name]
        assert tensor.placements == (Replicate(), *placements)
        assert (tensor.mesh.shape, tensor.mesh.dim_names) == ((3, 4, 2), ("replicas", "dp", "tp"))
    plain = NameMap.for_model(tiny("qwen2"), "fsdp", dp=4).tensors["model.norm.weight"]
    assert (plain.placements, plain.mesh.shape) == ((Shard(0),), (4,))


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-8b", "llama-3-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_one_rank_holds_what_transformers_holds(name: str) -> None:
    sizes = PUBLIC_MODELS[name]
    sizes = dataclasses.replace(sizes, layers=sizes.first_sparse + 1)
    theirs = transformers_tensors(hugging_face_config(sizes))
    found = [NameMap.for_model(sizes, "hf", separate=separate).layout.buffers(0) for separate in (False, True)]
    assert theirs in [{name: spec.shape for name, spec in buffers.items()} for buffers in found]


def test_multi_token_prediction() -> None:
    names = NameMap.for_model(tiny("deepseek_v3", mtp_layers=1, vocabulary=132), "hf", mtp=True, dp=2)
    assert names.layout.buffers(1)["model.layers.2.eh_proj.weight"].shape == (3, 14)
    with pytest.raises(ValueError, match="vllm: expected mtp=False"):
        NameMap.for_model(tiny("deepseek_v3", mtp_layers=1), "vllm", mtp=True)


# -- 8-bit weights ----------------------------------------------------------------------------------------------------

SCALED = ModelSizes(
    family="qwen3_moe",
    layers=1,
    hidden=256,
    intermediate=256,
    vocabulary=128,
    heads=12,
    kv_heads=4,
    head_dim=64,
    experts=2,
    moe_intermediate=256,
    qk_norm=True,
)


def test_scales_of_blocks_that_shards_share_are_on_both() -> None:
    """768 query rows over tp4 are 192 each: blocks 0-1, 1-2, 3-4, 4-5."""
    names = NameMap.for_model(SCALED, "hf", tp=4, dtype=torch.float8_e4m3fn, separate=True)

    def of_rank(arrays: Storage, rank: int) -> Storage:
        found = {}
        for name, array in arrays.items():
            if not name.endswith("scale_inv"):
                found[name] = tensor_parallel(SCALED, name, array, 4, rank)
                continue
            weight = arrays[name.removesuffix("_scale_inv")]
            axis = 1 if name.removesuffix("_scale_inv").endswith(COLUMNS) else 0
            rows = np.split(np.arange(weight.shape[axis]), 4)[rank]
            found[name] = np.take(array, sorted({row // 128 for row in rows}), axis)
        return found

    check(names, of_rank)
    held = [names.layout.boxes("model.layers.0.self_attn.q_proj.weight_scale_inv", rank)[0] for rank in range(4)]
    assert [(box.start[0], box.size[0]) for box in held] == [(0, 2), (1, 2), (3, 2), (4, 2)]


def test_scales_of_fused_experts() -> None:
    names = NameMap.for_model(SCALED, "hf", tp=2, dp=2, dtype=torch.float8_e4m3fn, separate=False)
    buffers = names.layout.buffers(1)
    assert buffers["model.layers.0.mlp.experts.gate_up_proj_scale_inv"].shape == (1, 2, 2)
    assert buffers["model.layers.0.mlp.experts.down_proj_scale_inv"].shape == (1, 2, 1)


@pytest.mark.parametrize(
    ("sizes", "parallel", "dtype", "text"),
    [
        (tiny("llama"), {"tp": 3}, None, "fsdp: expected tp to divide 8 attention heads, got tp3"),
        (tiny("llama"), {"tp": 8}, None, "fsdp: expected tp to divide 4 key/value heads, got tp8"),
        (tiny("llama"), {"tp": 2}, None, r"fsdp: expected tp to divide 131 rows of lm_head\.weight, got tp2"),
        (SCALED, {"tp": 4, "dp": 2}, torch.float8_e4m3fn, "leave a multiple of 128 of 768 rows.*got tp4 with dp2"),
        (SCALED, {"tp": 4}, torch.float8_e4m3fn, None),
        (tiny("llama"), {"pp": 2}, None, "fsdp: expected sizes and flags of dp, tp, replicas, separate, got pp"),
    ],
)
def test_sizes_that_do_not_fit(sizes: ModelSizes, parallel: dict[str, int], dtype: Any, text: str | None) -> None:
    if text is None:
        with pytest.raises(ValueError, match="of 256 rows or columns of an expert"):
            NameMap.for_model(sizes, "fsdp", dtype=dtype, **parallel)
        NameMap.for_model(sizes, "fsdp", dtype=dtype, separate=True, **parallel)
        return
    with pytest.raises(ValueError, match=text):
        NameMap.for_model(sizes, "fsdp", dtype=dtype, **parallel)
