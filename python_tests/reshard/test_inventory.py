"""Tensor lists against transformers' own models, published numbers, and the arithmetic of DeepSeek-V3."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_core.reshard.inventory import inventory
from areal_core.reshard.models import PUBLIC_MODELS, ModelSizes, load_model

# Parameters as the model cards' files have them, tensors as their indexes do.
PUBLISHED_PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "deepseek-v3": 671_026_419_200,  # 671,026,404,352 and the 58 x 256 values of the routers' biases
}
PUBLISHED_TENSORS = {
    "qwen2.5-7b": 339,
    "llama-3-8b": 291,
    "llama-3-70b": 723,
    "qwen3-30b-a3b": 18_867,
    "deepseek-v3": 45_395,
}


def hugging_face_config(sizes: ModelSizes) -> dict[str, Any]:
    """The configuration that these sizes would be read from."""
    config: dict[str, Any] = {
        "model_type": sizes.family,
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "vocab_size": sizes.vocabulary,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "tie_word_embeddings": sizes.tied,
    }
    if sizes.family != "deepseek_v3":
        config["head_dim"] = sizes.head_dim
    if sizes.family == "qwen3_moe":
        config |= {"num_experts": sizes.experts, "moe_intermediate_size": sizes.moe_intermediate}
    if sizes.family == "deepseek_v3":
        config |= {
            "n_routed_experts": sizes.experts,
            "moe_intermediate_size": sizes.moe_intermediate,
            "n_shared_experts": sizes.shared_experts,
            "first_k_dense_replace": sizes.first_sparse,
            "q_lora_rank": sizes.q_lora_rank or None,
            "kv_lora_rank": sizes.kv_lora_rank,
            "qk_nope_head_dim": sizes.qk_nope_head_dim,
            "qk_rope_head_dim": sizes.qk_rope_head_dim,
            "v_head_dim": sizes.v_head_dim,
            "num_nextn_predict_layers": sizes.mtp_layers,
        }
    return config


def transformers_tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of transformers' model, on the meta device; a tied lm_head left out."""
    transformers = pytest.importorskip("transformers")
    full = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(full)
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del state["lm_head.weight"]
    return state


def fused(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """What transformers 5 makes of the experts of a file."""
    found: dict[str, tuple[int, ...]] = {}
    for name, (*shape,) in shapes.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            found[name] = tuple(shape)
            continue
        key = f"{match[1]}.{'down_proj' if match[3] == 'down' else 'gate_up_proj'}"
        rows = shape[0] if match[3] == "down" else 2 * shape[0]
        found[key] = (max(int(match[2]) + 1, found.get(key, (0,))[0]), rows, shape[1])
    return found


def shapes_of(sizes: ModelSizes, **options: Any) -> dict[str, tuple[int, ...]]:
    return {name: spec.shape for name, spec in inventory(sizes, **options).items()}


@pytest.mark.parametrize("name", sorted(PUBLIC_MODELS))
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    sizes = PUBLIC_MODELS[name]
    sizes = dataclasses.replace(sizes, layers=sizes.first_sparse + 2)
    theirs = transformers_tensors(hugging_face_config(sizes))
    ours = shapes_of(sizes)
    assert theirs in (ours, fused(ours))  # transformers 4 keeps experts apart


def test_every_tensor_of_deepseek_v3_is_there() -> None:
    theirs = transformers_tensors(hugging_face_config(PUBLIC_MODELS["deepseek-v3"]))
    ours = shapes_of(PUBLIC_MODELS["deepseek-v3"])
    assert theirs in (ours, fused(ours))


@pytest.mark.parametrize("change", [{"qkv_bias": True, "output_bias": True, "family": "llama"}, {"tied": True}])
def test_biases_and_tied_heads(change: dict[str, Any]) -> None:
    sizes = dataclasses.replace(PUBLIC_MODELS["llama-3-8b"], layers=1, **change)
    config = hugging_face_config(sizes) | {"attention_bias": sizes.qkv_bias}
    assert shapes_of(sizes) == transformers_tensors(config)
    assert ModelSizes.from_config(config) == sizes


def test_latent_attention_without_a_query_rank() -> None:
    sizes = dataclasses.replace(PUBLIC_MODELS["deepseek-v3"], layers=1, q_lora_rank=0)
    assert shapes_of(sizes) == transformers_tensors(hugging_face_config(sizes))


@pytest.mark.parametrize("name", sorted(PUBLISHED_PARAMETERS))
def test_published_numbers_of_parameters(name: str) -> None:
    assert sum(math.prod(shape) for shape in shapes_of(PUBLIC_MODELS[name]).values()) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", sorted(PUBLISHED_TENSORS))
def test_published_numbers_of_tensors(name: str) -> None:
    assert len(inventory(name)) == PUBLISHED_TENSORS[name]


def test_what_deepseek_v3_counts() -> None:
    """61 layers of 9 attention tensors and norms; 3 dense MLPs; 58 of 256 experts, router, bias, shared expert."""
    layers = 61 * 9 + 3 * 3 + 58 * (256 * 3 + 2 + 3)
    assert len(inventory("deepseek-v3")) == 45_395 == layers + 3
    mtp = 9 + (256 * 3 + 2 + 3) + 6
    assert len(inventory("deepseek-v3", mtp=True)) == 45_395 + mtp == 46_183
    quantised = 62 * 5 + 3 * 3 + 59 * (256 * 3 + 3)
    assert len(inventory("deepseek-v3", mtp=True, dtype=torch.float8_e4m3fn)) == 46_183 + quantised == 91_991
    total = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in inventory("deepseek-v3").values())
    assert round(total / 1e9) == 1_342


def test_dtypes_of_an_8_bit_checkpoint() -> None:
    specs = inventory("deepseek-v3", dtype=torch.float8_e4m3fn, mtp=True)
    prefix = "model.layers.61."
    expected = {
        "self_attn.kv_a_proj_with_mqa.weight": (torch.float8_e4m3fn, (576, 7168)),
        "self_attn.kv_a_proj_with_mqa.weight_scale_inv": (torch.float32, (5, 56)),  # 576 rows are 4.5 blocks
        "mlp.experts.255.down_proj.weight": (torch.float8_e4m3fn, (7168, 2048)),
        "mlp.experts.255.down_proj.weight_scale_inv": (torch.float32, (56, 16)),
        "mlp.gate.weight": (torch.bfloat16, (256, 7168)),
        "mlp.gate.e_score_correction_bias": (torch.float32, (256,)),
        "self_attn.q_a_layernorm.weight": (torch.bfloat16, (1536,)),
        "eh_proj.weight": (torch.bfloat16, (7168, 14336)),
    }
    for name, (dtype, shape) in expected.items():
        assert (specs[prefix + name].dtype, specs[prefix + name].shape) == (dtype, shape), name
    assert prefix + "eh_proj.weight_scale_inv" not in specs
    assert specs["lm_head.weight"].dtype == torch.bfloat16
    assert "lm_head.weight_scale_inv" not in specs
    bias = inventory("deepseek-v3", dtype=torch.float16)["model.layers.3.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-8b", "qwen3-30b-a3b", "llama-3-70b", "deepseek-v3"])
def test_a_config_json_gives_the_public_sizes(name: str, tmp_path: Path) -> None:
    config = hugging_face_config(PUBLIC_MODELS[name])
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    assert load_model(tmp_path) == load_model(tmp_path / "config.json") == load_model(config) == PUBLIC_MODELS[name]


def test_the_dtype_of_the_configuration_is_used() -> None:
    config = hugging_face_config(PUBLIC_MODELS["qwen3-0.6b"])
    assert inventory(config | {"dtype": "float16"})["model.norm.weight"].dtype == torch.float16
    assert inventory(config)["model.norm.weight"].dtype == torch.bfloat16
    assert inventory(config, dtype=torch.float32)["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"),
        ("qwen3-235b", "qwen3-235b-a22b"),
        ("Qwen/Qwen2-7B-Instruct", "qwen2.5-7b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3-70b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
    ],
)
def test_public_names(name: str, known: str) -> None:
    assert load_model(name) is PUBLIC_MODELS[known]


@pytest.mark.parametrize("name", ["qwen9", "qwen3", "", "qwen2.5-0.5", "Qwen/Qwen3-8B-FP8"])
def test_an_unknown_name_lists_those_near_it(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected a directory, a config.json or a public name, got .*qwen"):
        load_model(name)


def config_without(key: str) -> dict[str, Any]:
    config = hugging_face_config(PUBLIC_MODELS["qwen3-30b-a3b"])
    del config[key]
    return config


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (config_without("hidden_size"), "hidden_size to be an integer >= 1, got None"),
        (config_without("model_type"), "expected model_type of llama"),
        (config_without("num_experts"), "num_experts to be an integer >= 1"),
        (config_without("vocab_size") | {"vocab_size": True}, "vocab_size to be an integer >= 1, got True"),
        (config_without("vocab_size") | {"vocab_size": -5}, "got -5"),
        (config_without("num_key_value_heads") | {"num_key_value_heads": 5}, "kv_heads to divide 32 heads, got 5"),
        (config_without("vocab_size") | {"vocab_size": 9, "decoder_sparse_step": 2}, "decoder_sparse_step = 1"),
        (hugging_face_config(PUBLIC_MODELS["deepseek-v3"]) | {"moe_layer_freq": 2}, "moe_layer_freq = 1, got 2"),
        (hugging_face_config(PUBLIC_MODELS["llama-3-8b"]) | {"mlp_bias": True}, "mlp_bias = false, got True"),
        (hugging_face_config(PUBLIC_MODELS["deepseek-v3"]) | {"n_shared_experts": 1.5}, "n_shared_experts .* got 1.5"),
        (hugging_face_config(PUBLIC_MODELS["deepseek-v3"]) | {"first_k_dense_replace": -1}, "integer >= 0, got -1"),
    ],
)
def test_a_configuration_that_cannot_be_read(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load_model(config)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="which is not there"):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="which is not there"):
        load_model(tmp_path / "qwen3-8b")  # no directory, and no public name either
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="expected JSON"):
        load_model(tmp_path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        load_model(path)
    path.write_text(" " * (1 << 20) + "{}")
    with pytest.raises(ValueError, match="expected at most 1048576 bytes"):
        load_model(path)


def test_what_an_inventory_refuses() -> None:
    with pytest.raises(ValueError, match="expected mtp=False for qwen3"):
        inventory("qwen3-8b", mtp=True)
    with pytest.raises(ValueError, match=r"floating-point dtype, got torch\.int8"):
        inventory("qwen3-8b", dtype=torch.int8)
    with pytest.raises(ValueError, match="expected torch's name of a dtype, got 'bf16'"):
        inventory(dataclasses.replace(PUBLIC_MODELS["qwen3-8b"], dtype="bf16"))
