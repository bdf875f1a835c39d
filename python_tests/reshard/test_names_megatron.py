"""Megatron-Core's storage, transcribed from its checkpoints' layout, against the name map."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from names_oracle import Array, Storage, check, dtypes, padded, part, tiny

from areal_core.reshard.models import PUBLIC_MODELS, ModelSizes
from areal_core.reshard.names import NameMap


def grouped(sizes: ModelSizes, query: Array, key: Array, value: Array) -> Array:
    """For each key/value group its query heads, its key head, its value head."""
    heads = [array.reshape(sizes.kv_heads, -1, *array.shape[1:]) for array in (query, key, value)]
    return np.concatenate(heads, axis=1).reshape(-1, *query.shape[1:])


def megatron_layer(sizes: ModelSizes, arrays: Storage, layer: int, tp: int, index: int) -> Storage:
    """Attention and norms of one layer on tensor-parallel rank `index`, by Megatron's names below the layer."""
    prefix = f"model.layers.{layer}."
    attention = {
        name.removeprefix(prefix + "self_attn."): a for name, a in arrays.items() if f"{prefix}self_attn" in name
    }
    found = {"self_attention.linear_proj.weight": part(attention["o_proj.weight"], tp, index, axis=1)}
    if sizes.is_mla:
        found["input_layernorm.weight"] = arrays[prefix + "input_layernorm.weight"]
        found["self_attention.linear_kv_up_proj.layer_norm_weight"] = attention["kv_a_layernorm.weight"]
        if not sizes.q_lora_rank:
            found["self_attention.linear_kv_down_proj.weight"] = attention["kv_a_proj_with_mqa.weight"]
            for ours, theirs in (("q_proj", "linear_q_proj"), ("kv_b_proj", "linear_kv_up_proj")):
                found[f"self_attention.{theirs}.weight"] = part(attention[f"{ours}.weight"], tp, index)
            return found
        for ours, theirs in (("q_a_proj", "linear_q_down_proj"), ("kv_a_proj_with_mqa", "linear_kv_down_proj")):
            found[f"self_attention.{theirs}.weight"] = attention[f"{ours}.weight"]
        for ours, theirs in (("q_b_proj", "linear_q_up_proj"), ("kv_b_proj", "linear_kv_up_proj")):
            found[f"self_attention.{theirs}.weight"] = part(attention[f"{ours}.weight"], tp, index)
        found["self_attention.linear_q_up_proj.layer_norm_weight"] = attention["q_a_layernorm.weight"]
        return found
    found["self_attention.linear_qkv.layer_norm_weight"] = arrays[prefix + "input_layernorm.weight"]
    for kind in ("weight", "bias") if sizes.qkv_bias else ("weight",):
        whole = grouped(sizes, *(attention[f"{name}_proj.{kind}"] for name in "qkv"))
        found[f"self_attention.linear_qkv.{kind}"] = part(whole, tp, index)
    if sizes.output_bias:
        found["self_attention.linear_proj.bias"] = attention["o_proj.bias"]
    for name in ("q", "k") if sizes.qk_norm else ():
        found[f"self_attention.{name}_layernorm.weight"] = attention[f"{name}_norm.weight"]
    return found


def gated(arrays: Storage, prefix: str, parts: int, index: int) -> tuple[Array, Array]:
    """linear_fc1 and linear_fc2 of one MLP on one rank."""
    gate, up = (part(arrays[f"{prefix}{name}_proj.weight"], parts, index) for name in ("gate", "up"))
    return np.concatenate([gate, up]), part(arrays[f"{prefix}down_proj.weight"], parts, index, axis=1)


def megatron_mlp(
    sizes: ModelSizes, arrays: Storage, layer: int, tensor: tuple[int, int], expert: tuple[int, int, int, int]
) -> Storage:
    """The MLP of one layer; tensor: (tp, rank), expert: (ep, rank, etp, rank)."""
    prefix, found = f"model.layers.{layer}.", {}
    norm = arrays[prefix + "post_attention_layernorm.weight"]
    if not sizes.is_sparse(layer):
        fc1, fc2 = gated(arrays, prefix + "mlp.", *tensor)
        return {"mlp.linear_fc1.layer_norm_weight": norm, "mlp.linear_fc1.weight": fc1, "mlp.linear_fc2.weight": fc2}
    found = {"pre_mlp_layernorm.weight": norm, "mlp.router.weight": arrays[prefix + "mlp.gate.weight"]}
    if sizes.shared_experts:
        fc1, fc2 = gated(arrays, prefix + "mlp.shared_experts.", *tensor)
        found |= {"mlp.shared_experts.linear_fc1.weight": fc1, "mlp.shared_experts.linear_fc2.weight": fc2}
        found["mlp.router.expert_bias"] = arrays[prefix + "mlp.gate.e_score_correction_bias"]
    ep, ep_rank, etp, etp_rank = expert
    count = sizes.experts // ep
    for local in range(count):
        fc1, fc2 = gated(arrays, f"{prefix}mlp.experts.{ep_rank * count + local}.", etp, etp_rank)
        found |= {f"mlp.experts.linear_fc1.weight{local}": fc1, f"mlp.experts.linear_fc2.weight{local}": fc2}
    return found


def megatron_rank(
    sizes: ModelSizes, arrays: Storage, coordinates: dict[str, int], chunks: list[list[int]], **parallel: int
) -> Storage:
    """All buffers of a rank at these coordinates; chunks: the layers of each of its model chunks."""
    tp, pp = parallel.get("tp", 1), parallel.get("pp", 1)
    expert = (parallel.get("ep", 1), coordinates["ep"], parallel.get("etp", tp), coordinates["etp"])
    tensor = (tp, coordinates["tp"])
    found: Storage = {}
    for chunk, layers in enumerate(chunks):
        prefix = f"model{chunk}." if len(chunks) > 1 else ""
        for local, layer in enumerate(layers):
            block = megatron_layer(sizes, arrays, layer, *tensor) | megatron_mlp(sizes, arrays, layer, tensor, expert)
            found |= {f"{prefix}decoder.layers.{local}.{name}": array for name, array in block.items()}
    rows = -(-sizes.vocabulary // (128 * tp)) * 128 * tp
    first, last = ("model0.", f"model{len(chunks) - 1}.") if len(chunks) > 1 else ("", "")
    embedding = part(padded(arrays["model.embed_tokens.weight"], rows), *tensor)
    if coordinates["pp"] == 0 or (sizes.tied and coordinates["pp"] == pp - 1):
        found[f"{first}embedding.word_embeddings.weight"] = embedding
    if coordinates["pp"] == pp - 1:
        found[f"{last}decoder.final_layernorm.weight"] = arrays["model.norm.weight"]
        if not sizes.tied:
            found[f"{last}output_layer.weight"] = part(padded(arrays["lm_head.weight"], rows), *tensor)
    return found


# Coordinates of a rank, written out for each case: order tp-cp-ep-dp-pp, tp fastest.
CASES: dict[str, tuple[ModelSizes, dict[str, int], Any, list[list[list[int]]]]] = {
    "one rank": (tiny("qwen2"), {}, lambda r: (0, 0, 0, 0), [[[0, 1]]]),
    "tp2, bias": (tiny("qwen2"), {"tp": 2}, lambda r: (r, 0, 0, r), [[[0, 1]]]),
    "tp4, norms of heads": (tiny("qwen3"), {"tp": 4}, lambda r: (r, 0, 0, r), [[[0, 1]]]),
    "biases of o_proj": (
        tiny("llama", qkv_bias=True, output_bias=True),
        {"tp": 2},
        lambda r: (r, 0, 0, r),
        [[[0, 1]]],
    ),
    "tp2 cp2 dp2: copies": (tiny("llama"), {"tp": 2, "cp": 2, "dp": 2}, lambda r: (r % 2, 0, 0, r % 2), [[[0, 1]]]),
    "tied under pp": (
        tiny("qwen2", tied=True, layers=4),
        {"tp": 2, "pp": 2},
        lambda r: (r % 2, r // 2, 0, r % 2),
        [[[0, 1]], [[2, 3]]],
    ),
    "virtual stages": (
        tiny("llama", layers=8),
        {"tp": 2, "pp": 2, "vpp": 2},
        lambda r: (r % 2, r // 2, 0, r % 2),
        [[[0, 1], [4, 5]], [[2, 3], [6, 7]]],
    ),
    "tied under virtual stages": (
        tiny("llama", layers=4, tied=True),
        {"pp": 2, "vpp": 2},
        lambda r: (0, r, 0, 0),
        [[[0], [2]], [[1], [3]]],
    ),
    "uneven stages": (
        tiny("llama", layers=7),
        {"pp": 3, "last": 1},
        lambda r: (0, r, 0, 0),
        [[[0, 1, 2]], [[3, 4, 5]], [[6]]],
    ),
    "short first stage": (
        tiny("llama", layers=7),
        {"pp": 3, "first": 2, "last": 1},
        lambda r: (0, r, 0, 0),
        [[[0, 1]], [[2, 3, 4, 5]], [[6]]],
    ),
    "embedding and loss count as layers": (
        tiny("llama", layers=7),
        {"pp": 3},
        lambda r: (0, r, 0, 0),
        [[[0, 1]], [[2, 3, 4]], [[5, 6]]],
    ),
    "experts over ep, etp = tp": (
        tiny("qwen3_moe"),
        {"tp": 2, "ep": 3},
        lambda r: (r % 2, 0, r // 2, r % 2),
        [[[0, 1]]],
    ),
    "ep out of dp, etp 1": (
        tiny("qwen3_moe"),
        {"tp": 2, "ep": 3, "etp": 1, "world": 6},
        lambda r: (r % 2, 0, r % 3, 0),
        [[[0, 1]]],
    ),
    "etp above tp, two copies": (
        tiny("qwen3_moe"),
        {"tp": 2, "ep": 3, "etp": 4, "dp": 4},
        lambda r: (r % 2, 0, r // 4 % 3, r % 4),
        [[[0, 1]]],
    ),
    "latent attention without a query rank": (
        tiny("deepseek_v3", q_lora_rank=0),
        {"tp": 2},
        lambda r: (r, 0, 0, r),
        [[[0, 1]]],
    ),
    "latent attention, shared experts, pp": (
        tiny("deepseek_v3"),
        {"tp": 2, "ep": 2, "pp": 2},
        lambda r: (r % 2, r // 4, r // 2 % 2, r % 2),
        [[[0]], [[1]]],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_storage_of_every_rank(case: str) -> None:
    sizes, parallel, coordinates_of, chunks = CASES[case]
    names = NameMap.for_model(sizes, "megatron", **parallel)

    def of_rank(arrays: Storage, rank: int) -> Storage:
        coordinates = dict(zip(("tp", "pp", "ep", "etp"), coordinates_of(rank), strict=True))
        return megatron_rank(sizes, arrays, coordinates, chunks[coordinates["pp"]], **parallel)

    check(names, of_rank)


def test_rank_numbers_with_pipeline_before_data() -> None:
    sizes = tiny("qwen3_moe")
    parallel = {"tp": 2, "pp": 2, "ep": 3}
    names = NameMap.for_model(sizes, "megatron", **parallel, **{"tp-cp-ep-pp-dp": True}, first_rank=100)

    def of_rank(arrays: Storage, rank: int) -> Storage:
        # Experts: etp 2 (= tp), ep 3, pp 2. Dense: tp 2, cp 1, pp 2, dp 3.
        rank -= 100
        dense, expert = {"tp": rank % 2, "pp": rank // 2 % 2}, {"etp": rank % 2, "ep": rank // 2 % 3, "pp": rank // 6}
        found = megatron_rank(sizes, arrays, {**dense, "ep": 0, "etp": 0}, [[dense["pp"]]], **parallel)
        found = {name: array for name, array in found.items() if ".mlp.experts." not in name}
        of_expert = megatron_rank(sizes, arrays, {"tp": 0, **expert}, [[expert["pp"]]], **parallel)
        return found | {name: array for name, array in of_expert.items() if ".mlp.experts." in name}

    check(names, of_rank)


def test_modules_without_transformer_engine() -> None:
    sizes = tiny("deepseek_v3")
    names = NameMap.for_model(sizes, "megatron", local=True, tp=2)

    def of_rank(arrays: Storage, rank: int) -> Storage:
        found = megatron_rank(sizes, arrays, {"tp": rank, "pp": 0, "ep": 0, "etp": rank}, [[0, 1]], tp=2)
        renamed = {}
        for name, array in found.items():
            for theirs, local in (
                ("linear_q_up_proj.layer_norm_weight", "q_layernorm.weight"),
                ("linear_kv_up_proj.layer_norm_weight", "kv_layernorm.weight"),
                ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
                *((f"experts.linear_fc{i}.weight{e}", f"experts.local_experts.{e}.linear_fc{i}.weight")
                  for i in (1, 2) for e in range(6)),
            ):  # fmt: skip
                name = name.replace(theirs, local) if name.endswith(theirs) else name
            renamed[name] = array
        return renamed

    check(names, of_rank)


def test_experts_as_modules_of_their_own() -> None:
    names = NameMap.for_model(tiny("qwen3_moe"), "megatron", sequential=True, ep=2)
    grouped = NameMap.for_model(tiny("qwen3_moe"), "megatron", ep=2)
    prefix = "decoder.layers.0.mlp.experts."
    for rank in range(2):
        sequential, together = names.layout.buffers(rank), grouped.layout.buffers(rank)
        assert len(sequential) == len(together)
        assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in sequential
        for expert in range(3):
            for number in (1, 2):
                ours = sequential[f"{prefix}local_experts.{expert}.linear_fc{number}.weight"]
                assert ours == together[f"{prefix}linear_fc{number}.weight{expert}"]


def test_local_modules_of_grouped_attention() -> None:
    names = NameMap.for_model(tiny("qwen2"), "megatron", local=True)
    buffers = names.layout.buffers(0)
    assert "decoder.layers.0.input_layernorm.weight" in buffers
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in buffers
    assert not [name for name in buffers if "layer_norm_weight" in name]


def test_qwen_7b_at_tp_2_is_896_128_128() -> None:
    """28 query and 4 key/value heads of 128: groups of 896 query rows, 128 key rows, 128 value rows."""
    names = NameMap.for_model(dataclasses.replace(PUBLIC_MODELS["qwen2.5-7b"], layers=1), "megatron", tp=2)
    prefix = "model.layers.0.self_attn."
    storages = {part: names.tensors[f"{prefix}{part}_proj.weight"].storage for part in "qkv"}
    assert [storage.group_rows for storage in storages.values()] == [896, 128, 128]
    assert [storage.offset for storage in storages.values()] == [0, 896 * 3584, 1024 * 3584]
    assert {storage.group_stride for storage in storages.values()} == {1152 * 3584}
    assert names.layout.buffers(1)["decoder.layers.0.self_attention.linear_qkv.weight"].shape == (2304, 3584)
    assert names.layout.buffers(1)["decoder.layers.0.self_attention.linear_qkv.bias"].shape == (2304,)


def test_the_vocabulary_of_151_936_rows_is_152_576_at_tp_8() -> None:
    sizes = dataclasses.replace(PUBLIC_MODELS["qwen3-8b"], layers=1)
    names = NameMap.for_model(sizes, "megatron", tp=8)
    shapes = [names.layout.buffers(rank)["output_layer.weight"].shape for rank in range(8)]
    assert shapes == [(19_072, 4096)] * 8
    held = [names.layout.boxes("lm_head.weight", rank)[0].size[0] for rank in range(8)]
    assert held == [19_072] * 7 + [151_936 - 7 * 19_072]


def test_a_tied_head_of_the_last_stage_has_another_name() -> None:
    names = NameMap.for_model(tiny("qwen2", tied=True, layers=4), "megatron", tp=2, pp=2)
    assert names.aliases(0) == names.aliases(1) == {}
    assert names.aliases(2) == names.aliases(3) == {"output_layer.weight": "embedding.word_embeddings.weight"}
    assert "embedding.word_embeddings.weight" in names.layout.buffers(3)
    assert NameMap.for_model(tiny("qwen2", tied=True), "megatron", tp=2).aliases(0) == {}
    assert NameMap.for_model(tiny("qwen2", layers=4), "megatron", pp=2).aliases(1) == {}


def test_the_routers_bias_stays_fp32() -> None:
    names = NameMap.for_model(tiny("deepseek_v3"), "megatron")
    found = dtypes(names.layout, 0)
    assert found.pop("decoder.layers.1.mlp.router.expert_bias") == torch.float32
    assert set(found.values()) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("sizes", "parallel", "text"),
    [
        (tiny("qwen2"), {"tp": 3}, "megatron: expected tp to divide 8 attention heads, got tp3.*these do: 1, 2, 4, 8"),
        (tiny("qwen2"), {"tp": 8}, "expected tp to divide 4 key/value heads, got tp8.*these do: 1, 2, 4"),
        (PUBLIC_MODELS["qwen2.5-7b"], {"tp": 6}, "divide 28 attention heads, got tp6; .*1, 2, 4, 7, 14, 28"),
        (tiny("qwen3_moe"), {"ep": 4}, "expected ep to divide 6 experts, got ep4.*1, 2, 3, 6"),
        (tiny("qwen3"), {"ep": 2}, "expected ep1 for a model without experts, got ep2"),
        (tiny("qwen3_moe"), {"etp": 5, "dp": 5}, r"expected etp to divide 12 rows of .*experts.*gate_proj.*got etp5"),
        (
            tiny("qwen3_moe"),
            {"etp": 4, "ep": 2},
            "etp x ep to divide 2 ranks of a stage, got etp x ep = 8; .* 1, 2",
        ),
        (tiny("llama"), {"pp": 3}, "expected 2 layers to divide over pp3.*pp of 1, 2 would do"),
        (tiny("llama", layers=61), {"pp": 16}, "expected 61 layers to divide over pp16.*first1 or last1"),
        (tiny("llama", layers=61), {"pp": 16, "last": 4}, "less first0 and last4"),
        (tiny("llama", layers=6), {"pp": 2, "vpp": 2}, r"expected vpp2 to divide the layers .*\[3, 3\]"),
        (tiny("llama"), {"dp": 2, "world": 4}, "expected dp or world, got both"),
        (tiny("llama"), {"tp": 2, "world": 5}, "expected world to be a multiple of tp cp pp = 2, got world5"),
        (tiny("llama"), {"tp": 0}, "expected tp >= 1, got 0"),
        (tiny("llama"), {"adp": 2}, "expected sizes and flags of tp, pp.*got adp"),
        (tiny("llama"), {"local": 1}, "expected local to be True or False, got 1"),
        (tiny("llama"), {"order": "tp-dp"}, "expected sizes and flags"),
    ],
)
def test_sizes_that_do_not_fit(sizes: ModelSizes, parallel: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NameMap.for_model(sizes, "megatron", **parallel)
