"""vLLM's and SGLang's storage, transcribed from their layers' layout, against the name maps."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from names_oracle import Array, Storage, check, dtypes, padded, part, tiny

from areal_core.reshard.models import PUBLIC_MODELS, ModelSizes, load_model
from areal_core.reshard.names import NameMap


def heads_of(array: Array, heads: int, parts: int, index: int) -> Array:
    """The rows of a rank's heads; of fewer heads than ranks, one head that its neighbours hold too."""
    if heads >= parts:
        return part(array, parts, index)
    return part(array, heads, index // (parts // heads))


def attention(sizes: ModelSizes, arrays: Storage, parts: int, index: int, fused_a: str) -> Storage:
    """The attention of one layer, by names below `self_attn`."""
    found = {"o_proj.weight": part(arrays["o_proj.weight"], parts, index, axis=1)}
    if sizes.is_mla and not sizes.q_lora_rank:
        found |= {f"{name}.weight": part(arrays[f"{name}.weight"], parts, index) for name in ("q_proj", "kv_b_proj")}
        return found | {name: arrays[name] for name in ("kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight")}
    if sizes.is_mla:
        joined = [arrays["q_a_proj.weight"], arrays["kv_a_proj_with_mqa.weight"]]
        found[f"{fused_a}.weight"] = np.concatenate(joined)
        found |= {f"{name}.weight": part(arrays[f"{name}.weight"], parts, index) for name in ("q_b_proj", "kv_b_proj")}
        return found | {name: arrays[name] for name in ("q_a_layernorm.weight", "kv_a_layernorm.weight")}
    for kind in ("weight", "bias") if sizes.qkv_bias else ("weight",):
        query, key, value = (arrays[f"{name}_proj.{kind}"] for name in "qkv")
        rows = [
            heads_of(query, sizes.heads, parts, index),
            heads_of(key, sizes.kv_heads, parts, index),
            heads_of(value, sizes.kv_heads, parts, index),
        ]
        found[f"qkv_proj.{kind}"] = np.concatenate(rows)
    if sizes.qk_norm:
        found |= {name: arrays[name] for name in ("q_norm.weight", "k_norm.weight")}
    return found


def gated(arrays: Storage, prefix: str, parts: int, index: int) -> tuple[Array, Array]:
    gate, up = (part(arrays[f"{prefix}{name}_proj.weight"], parts, index) for name in ("gate", "up"))
    return np.concatenate([gate, up]), part(arrays[f"{prefix}down_proj.weight"], parts, index, axis=1)


def mlp(
    sizes: ModelSizes, arrays: Storage, layer: int, tensor: tuple[int, int], held: range, over: tuple[int, int]
) -> Storage:
    """The MLP of one layer, by names below `mlp`; held: this rank's experts, over: how their rows are divided."""
    prefix = f"model.layers.{layer}.mlp."
    if not sizes.is_sparse(layer):
        joined, down = gated(arrays, prefix, *tensor)
        return {"gate_up_proj.weight": joined, "down_proj.weight": down}
    found = {"gate.weight": arrays[prefix + "gate.weight"]}
    if sizes.shared_experts:
        joined, down = gated(arrays, prefix + "shared_experts.", *tensor)
        found |= {"shared_experts.gate_up_proj.weight": joined, "shared_experts.down_proj.weight": down}
        found["gate.e_score_correction_bias"] = arrays[prefix + "gate.e_score_correction_bias"]
    experts = [gated(arrays, f"{prefix}experts.{expert}.", *over) for expert in held]
    if experts:
        found["experts.w13_weight"] = np.stack([joined for joined, _ in experts])
        found["experts.w2_weight"] = np.stack([down for _, down in experts])
    return found


def engine_rank(
    sizes: ModelSizes,
    arrays: Storage,
    layers: range,
    tensor: tuple[int, int],
    *,
    held: range = range(0),
    over: tuple[int, int] = (1, 0),
    attention_over: tuple[int, int] | None = None,
    fused_a: str = "fused_qkv_a_proj",
) -> Storage:
    """All buffers of a rank that runs these layers."""
    attention_over = attention_over or tensor
    rows = -(-sizes.vocabulary // 64) * 64
    found: Storage = {}
    is_first, is_last = layers.start == 0, layers.stop == sizes.layers
    for layer in layers:
        prefix = f"model.layers.{layer}."
        below = prefix + "self_attn."
        theirs = {name.removeprefix(below): array for name, array in arrays.items() if name.startswith(below)}
        block = {f"self_attn.{n}": a for n, a in attention(sizes, theirs, *attention_over, fused_a).items()}
        block |= {f"mlp.{n}": a for n, a in mlp(sizes, arrays, layer, tensor, held, over).items()}
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            block[norm] = arrays[prefix + norm]
        found |= {prefix + name: array for name, array in block.items()}
    if is_first or (is_last and sizes.tied):
        found["model.embed_tokens.weight"] = part(padded(arrays["model.embed_tokens.weight"], rows), *attention_over)
    if is_last:
        found["model.norm.weight"] = arrays["model.norm.weight"]
        if not sizes.tied:
            found["lm_head.weight"] = part(padded(arrays["lm_head.weight"], rows), *tensor)
    return found


ALL = range(2)
SIX = range(6)
# A rank's own arguments of engine_rank, written out for each case: engines, dp, pp, tp, the last fastest.
VLLM: dict[str, tuple[ModelSizes, dict[str, Any], Any]] = {
    "one rank, bias": (tiny("qwen2"), {}, lambda r: {"layers": ALL, "tensor": (1, 0)}),
    "tp2": (tiny("qwen2"), {"tp": 2}, lambda r: {"layers": ALL, "tensor": (2, r)}),
    "tp4": (tiny("qwen3", vocabulary=64), {"tp": 4}, lambda r: {"layers": ALL, "tensor": (4, r)}),
    "8 query, 2 key heads at tp4": (tiny("llama", kv_heads=2), {"tp": 4}, lambda r: {"layers": ALL, "tensor": (4, r)}),
    "1 key head at tp8, bias": (
        tiny("qwen2", kv_heads=1, intermediate=24),
        {"tp": 8},
        lambda r: {"layers": ALL, "tensor": (8, r)},
    ),
    "dp2, two engines": (
        tiny("llama"),
        {"tp": 2, "dp": 2, "replicas": 2},
        lambda r: {"layers": ALL, "tensor": (2, r % 2)},
    ),
    "tied under pp": (
        tiny("qwen2", tied=True, layers=5),
        {"tp": 2, "pp": 3},  # 5 layers over 3 stages: the last has the fewest
        lambda r: {"layers": (range(2), range(2, 4), range(4, 5))[r // 2], "tensor": (2, r % 2)},
    ),
    "pp4 of 6: the middle stages have more": (
        tiny("llama", layers=6),
        {"pp": 4},
        lambda r: {"layers": (range(1), range(1, 3), range(3, 5), range(5, 6))[r], "tensor": (1, 0)},
    ),
    "rows of experts over dp x tp": (
        tiny("qwen3_moe"),
        {"tp": 2, "dp": 2},
        lambda r: {"layers": ALL, "tensor": (2, r % 2), "held": SIX, "over": (4, r)},
    ),
    "experts over dp x tp, unevenly": (
        tiny("qwen3_moe"),
        {"tp": 2, "dp": 2, "ep": True},
        lambda r: {
            "layers": ALL,
            "tensor": (2, r % 2),
            "held": (range(2), range(2, 4), range(4, 5), range(5, 6))[r],
        },
    ),
    "more ranks than experts": (
        tiny("qwen3_moe", intermediate=24),
        {"tp": 8, "ep": True, "replicas": 2},
        lambda r: {"layers": ALL, "tensor": (8, r % 8), "held": range(r % 8, min(r % 8 + 1, 6))},
    ),
    "latent attention, pp, two engines": (
        tiny("deepseek_v3"),
        {"tp": 2, "pp": 2, "dp": 2, "replicas": 2},
        lambda r: {
            "layers": range(r // 2 % 2, r // 2 % 2 + 1),
            "tensor": (2, r % 2),
            "held": SIX,
            "over": (4, r // 4 % 2 * 2 + r % 2),
        },
    ),
    "latent attention without a query rank": (
        tiny("deepseek_v3", q_lora_rank=0),
        {"tp": 2},
        lambda r: {"layers": ALL, "tensor": (2, r), "held": SIX, "over": (2, r)},
    ),
    "latent attention, pp, ep": (
        tiny("deepseek_v3"),
        {"tp": 1, "pp": 2, "dp": 3, "ep": True},
        lambda r: {
            "layers": range(r % 2, r % 2 + 1),
            "tensor": (1, 0),
            "held": range(r // 2 * 2, r // 2 * 2 + 2),
        },
    ),
}

MQA = "fused_qkv_a_proj_with_mqa"
SGLANG: dict[str, tuple[ModelSizes, dict[str, Any], Any]] = {
    "8 query, 2 key heads at tp4": (tiny("qwen2", kv_heads=2), {"tp": 4}, lambda r: {"layers": ALL, "tensor": (4, r)}),
    "ep2 of tp4, two engines": (
        tiny("qwen3_moe"),
        {"tp": 4, "ep": 2, "replicas": 2},
        lambda r: {
            "layers": ALL,
            "tensor": (4, r % 4),
            "held": (range(3), range(3, 6))[r % 4 // 2],
            "over": (2, r % 2),
        },
    ),
    "data-parallel attention": (
        tiny("deepseek_v3"),
        {"tp": 4, "ep": 2, "adp": 2},
        lambda r: {
            "layers": ALL,
            "tensor": (4, r),
            "held": (range(3), range(3, 6))[r // 2],
            "over": (2, r % 2),
            "attention_over": (2, r % 2),
            "fused_a": MQA,
        },
    ),
    "pp3 of 5: the last stages have more": (
        tiny("llama", layers=5),
        {"tp": 2, "pp": 3},
        lambda r: {"layers": (range(1), range(1, 3), range(3, 5))[r // 2], "tensor": (2, r % 2)},
    ),
}


@pytest.mark.parametrize("case", VLLM)
def test_vllm_storage_of_every_rank(case: str) -> None:
    sizes, parallel, arguments_of = VLLM[case]
    names = NameMap.for_model(sizes, "vllm", **parallel)
    check(names, lambda arrays, rank: engine_rank(sizes, arrays, **arguments_of(rank)))


@pytest.mark.parametrize("case", SGLANG)
def test_sglang_storage_of_every_rank(case: str) -> None:
    sizes, parallel, arguments_of = SGLANG[case]
    names = NameMap.for_model(sizes, "sglang", first_rank=8, **parallel)
    check(names, lambda arrays, rank: engine_rank(sizes, arrays, **arguments_of(rank - 8)))


def test_numbers_of_ranks() -> None:
    for framework, table in {"vllm": VLLM, "sglang": SGLANG}.items():
        for case, (sizes, parallel, _) in table.items():
            count = np.prod([v for k, v in parallel.items() if k in ("tp", "pp", "dp", "replicas")], dtype=int)
            ranks = NameMap.for_model(sizes, framework, first_rank=3, **parallel).layout.ranks
            assert list(ranks) == list(range(3, 3 + int(count))), case


# -- 8-bit weights ----------------------------------------------------------------------------------------------------

SCALED = ModelSizes(
    family="deepseek_v3",
    layers=2,
    hidden=192,  # one and a half blocks
    intermediate=512,
    vocabulary=128,
    heads=4,
    kv_heads=4,
    head_dim=128,
    experts=4,
    moe_intermediate=256,
    first_sparse=1,
    shared_experts=1,
    q_lora_rank=128,
    kv_lora_rank=96,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=128,
)


def vllm_scales(arrays: Storage, layer: int, tp: int, index: int, held: range, over: tuple[int, int]) -> Storage:
    """The scales of one layer: those of the blocks that the rank's weights consist of."""
    prefix = f"model.layers.{layer}."
    scale = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix) and "scale" in name}
    joined = [scale[f"self_attn.{name}.weight_scale_inv"] for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    found = {"self_attn.fused_qkv_a_proj.weight_scale_inv": np.concatenate(joined)}
    for name in ("q_b_proj", "kv_b_proj"):
        found[f"self_attn.{name}.weight_scale_inv"] = part(scale[f"self_attn.{name}.weight_scale_inv"], tp, index)
    found["self_attn.o_proj.weight_scale_inv"] = part(scale["self_attn.o_proj.weight_scale_inv"], tp, index, axis=1)

    def gated_scales(below: str, parts: int, number: int) -> tuple[Array, Array]:
        gate, up = (part(scale[f"{below}{name}_proj.weight_scale_inv"], parts, number) for name in ("gate", "up"))
        return np.concatenate([gate, up]), part(scale[f"{below}down_proj.weight_scale_inv"], parts, number, axis=1)

    if layer == 0:
        pairs = {"mlp.": gated_scales("mlp.", tp, index)}
    else:
        pairs = {"mlp.shared_experts.": gated_scales("mlp.shared_experts.", tp, index)}
        experts = [gated_scales(f"mlp.experts.{expert}.", *over) for expert in held]
        found["mlp.experts.w13_weight_scale_inv"] = np.stack([joined for joined, _ in experts])
        found["mlp.experts.w2_weight_scale_inv"] = np.stack([down for _, down in experts])
    for below, (joined_scales, down) in pairs.items():
        found[f"{below}gate_up_proj.weight_scale_inv"] = joined_scales
        found[f"{below}down_proj.weight_scale_inv"] = down
    return {prefix + name: array for name, array in found.items()}


@pytest.mark.parametrize(
    ("parallel", "held_by", "over_of"),
    [
        ({}, lambda r: range(4), lambda r: (1, 0)),
        ({"tp": 2}, lambda r: range(4), lambda r: (2, r)),
        ({"tp": 2, "ep": True}, lambda r: range(2 * r, 2 * r + 2), lambda r: (1, 0)),
    ],
)
def test_block_scales_go_with_their_weights(parallel: dict[str, Any], held_by: Any, over_of: Any) -> None:
    names = NameMap.for_model(SCALED, "vllm", dtype=torch.float8_e4m3fn, **parallel)
    tp = parallel.get("tp", 1)

    def of_rank(arrays: Storage, rank: int) -> Storage:
        found = engine_rank(SCALED, arrays, ALL, (tp, rank), held=held_by(rank), over=over_of(rank))
        for layer in range(2):
            found |= vllm_scales(arrays, layer, tp, rank, held_by(rank), over_of(rank))
        return found

    check(names, of_rank)
    found = dtypes(names.layout, 0)
    assert found["model.layers.1.mlp.experts.w13_weight"] == torch.float8_e4m3fn
    assert found["model.layers.1.mlp.experts.w13_weight_scale_inv"] == torch.float32
    assert found["model.layers.1.mlp.gate.weight"] == torch.bfloat16


@pytest.mark.parametrize(
    ("model", "framework", "parallel", "text"),
    [
        # The well-known case: 1,536 rows of an expert over 8 ranks are 192, one and a half blocks.
        ("qwen3-235b", "vllm", {"tp": 8}, "leave a multiple of 128 rows of .*gate_proj.*got dp x tp = 8.*192 of 1536"),
        ("deepseek-v3", "sglang", {"tp": 128, "ep": 128}, "rows of .*q_b_proj.*got tp / adp = 128.*leaves 192"),
    ],
)
def test_blocks_that_two_ranks_would_share_are_refused(model: str, framework: str, parallel: Any, text: str) -> None:
    sizes = dataclasses.replace(load_model(model), layers=4)
    with pytest.raises(ValueError, match=text):
        NameMap.for_model(sizes, framework, dtype=torch.float8_e4m3fn, **parallel)
    NameMap.for_model(sizes, framework, **parallel)  # in bfloat16 it is fine


def test_parts_that_would_start_within_a_block_are_refused() -> None:
    sizes = dataclasses.replace(SCALED, q_lora_rank=96)
    with pytest.raises(ValueError, match=r"parts of .*fused_qkv_a_proj.* to start at multiples of 128 rows.*got 96"):
        NameMap.for_model(sizes, "vllm", dtype=torch.float8_e4m3fn)


def test_megatron_refuses_groups_that_end_within_a_block() -> None:
    sizes = dataclasses.replace(PUBLIC_MODELS["qwen3-8b"], layers=1)
    NameMap.for_model(sizes, "megatron", tp=2, dtype=torch.float8_e4m3fn)
    sizes = dataclasses.replace(sizes, head_dim=64)
    with pytest.raises(ValueError, match=r"got 64 rows of .*k_proj"):
        NameMap.for_model(sizes, "megatron", tp=2, dtype=torch.float8_e4m3fn)


# -- what is refused, and public models -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "framework", "parallel", "text"),
    [
        (
            tiny("llama"),
            "vllm",
            {"tp": 3},
            "expected tp to divide 8 attention heads, got tp3; these do: 1, 2, 4, 8",
        ),
        (tiny("llama", heads=12, kv_heads=4), "vllm", {"tp": 6}, "tp to be a multiple of 4 key/value heads.*got tp6"),
        (tiny("llama", heads=12, kv_heads=4), "vllm", {"tp": 3}, "expected tp to divide 4 key/value heads, got tp3"),
        (tiny("llama"), "vllm", {"ep": True}, "expected no ep for a model without experts"),
        (tiny("qwen3_moe"), "vllm", {"tp": 4, "dp": 2}, r"expected dp x tp to divide 12 rows of an expert \(or ep\)"),
        (tiny("llama"), "vllm", {"pp": 3}, "expected at most 2 stages for 2 layers, got pp3"),
        (tiny("llama", intermediate=21), "vllm", {"tp": 2}, "tp to divide 21 rows of .*gate_proj"),
        (tiny("qwen3_moe"), "sglang", {"tp": 4, "ep": 3}, "expected ep to divide 4 ranks of tp4, .* got ep3"),
        (tiny("qwen3_moe"), "sglang", {"tp": 4, "ep": 4}, "expected ep to divide 6 experts, got ep4"),
        (tiny("qwen3_moe"), "sglang", {"tp": 8}, "expected tp / ep to divide 12 rows"),
        (tiny("llama"), "sglang", {"tp": 4, "adp": 3}, "expected adp to divide 4 ranks of tp4"),
        (tiny("llama"), "sglang", {"ep": 2}, "expected ep1 for a model without experts"),
        (tiny("llama", heads=256, kv_heads=256), "vllm", {"tp": 128}, "tp to divide 192 padded rows of the vocabulary"),
    ],
)
def test_sizes_that_do_not_fit(sizes: ModelSizes, framework: str, parallel: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NameMap.for_model(sizes, framework, **parallel)


def test_a_tied_head_under_pipeline_parallelism() -> None:
    sizes = tiny("qwen2", tied=True)
    assert NameMap.for_model(sizes, "vllm", pp=2).aliases(1) == {}  # the last stage has embed_tokens itself
    assert NameMap.for_model(sizes, "sglang").aliases(0) == {}
    names = NameMap.for_model(sizes, "sglang", pp=2)
    assert names.aliases(0) == {}
    assert names.aliases(1) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert set(names.layout.buffers(1)) >= {"model.embed_tokens.weight"}


def test_shapes_of_public_models() -> None:
    sizes = dataclasses.replace(PUBLIC_MODELS["qwen3-235b-a22b"], layers=1)
    buffers = NameMap.for_model(sizes, "vllm", tp=8, replicas=2).layout.buffers(9)
    assert buffers["model.layers.0.mlp.experts.w13_weight"].shape == (128, 2 * 1536 // 8, 4096)
    assert buffers["model.layers.0.mlp.experts.w2_weight"].shape == (128, 4096, 1536 // 8)
    assert buffers["model.layers.0.self_attn.qkv_proj.weight"].shape == ((8 + 1 + 1) * 128, 4096)
    sizes = dataclasses.replace(PUBLIC_MODELS["deepseek-v3"], layers=4)
    buffers = NameMap.for_model(sizes, "sglang", tp=16, ep=16, dtype=torch.float8_e4m3fn).layout.buffers(0)
    assert buffers["model.layers.3.self_attn.fused_qkv_a_proj_with_mqa.weight"].shape == (2112, 7168)
    assert buffers["model.layers.3.self_attn.fused_qkv_a_proj_with_mqa.weight_scale_inv"].shape == (17, 56)
    assert buffers["model.layers.3.mlp.experts.w13_weight_scale_inv"].shape == (16, 32, 56)
