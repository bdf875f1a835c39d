from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_core.model import DecoderConfig, PackedDecoder, load_model, save_model
from areal_core.model.checkpoint import write_directory

from .small_models import CONFIGS, make_model


def test_round_trip(tmp_path: Path, config: DecoderConfig) -> None:
    model = make_model(config)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.config == config
    assert torch.equal(loaded.weights, model.weights)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_transformers_loads_what_we_save(tmp_path: Path, config: DecoderConfig) -> None:
    transformers = pytest.importorskip("transformers")
    model = make_model(config)
    save_model(model, tmp_path / "model")
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.arange(12) % config.vocab_size
    torch.testing.assert_close(model(ids, torch.tensor([0, 12])), peer(ids[None]).logits[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen2-gqa", "llama-gqa-tied"])
def test_we_load_what_transformers_saves_in_half_precision(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    config = CONFIGS[name]
    peer = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config.to_hf())).to(dtype)
    peer.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert model.weights.dtype == torch.float32
    assert model.config == config
    for key, weight in peer.state_dict().items():
        if key in model.named_weights():
            assert torch.equal(model.named_weights()[key], weight.float())


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    model = make_model(CONFIGS["llama"])
    save_model(model, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(weights)}
    for part in set(weight_map.values()):
        save_file({name: weights[name] for name in weights if weight_map[name] == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load_model(tmp_path).weights, model.weights)


def edit(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    for name, tensor in changes.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, path)


def test_derived_tensors_are_ignored(tmp_path: Path) -> None:
    model = make_model(CONFIGS["llama-gqa-tied"])
    save_model(model, tmp_path)
    embedding = model.named_weights()["model.embed_tokens.weight"]
    edit(
        tmp_path,
        **{"lm_head.weight": embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    )
    assert torch.equal(load_model(tmp_path).weights, model.weights)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, "expected the tensor model.norm.weight"),
        ("model.norm.weight", torch.ones(3), r"model.norm.weight of shape \[24\], got \[3\]"),
        ("model.extra", torch.ones(3), "unknown tensor model.extra"),
    ],
)
def test_a_bad_tensor_is_named(tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str) -> None:
    save_model(make_model(CONFIGS["llama"]), tmp_path)
    edit(tmp_path, **{name: tensor})
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"].to_hf()))
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_model(tmp_path)


def test_saving_replaces_the_old_directory(tmp_path: Path) -> None:
    first, second = (make_model(CONFIGS["llama"], seed) for seed in (1, 2))
    save_model(first, tmp_path / "model")
    (tmp_path / "model" / "stale.txt").write_text("left over")
    save_model(second, tmp_path / "model")
    assert torch.equal(load_model(tmp_path / "model").weights, second.weights)
    assert not (tmp_path / "model" / "stale.txt").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_failed_write_leaves_the_old_directory(tmp_path: Path) -> None:
    model = make_model(CONFIGS["llama"])
    save_model(model, tmp_path / "model")

    def interrupted() -> None:
        with write_directory(tmp_path / "model") as partial:
            (partial / "model.safetensors").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.equal(load_model(tmp_path / "model").weights, model.weights)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_double_precision_model_is_saved_as_fp32(tmp_path: Path) -> None:
    model: PackedDecoder = make_model(CONFIGS["llama"]).double()
    save_model(model, tmp_path)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}
