"""Adapters: peft's names and vLLM's slots."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from names_oracle import PADDING, Storage, check, part, tiny

from areal_core.reshard.models import PUBLIC_MODELS
from areal_core.reshard.names import LoRA, NameMap

PREFIX = "base_model.model."
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)}
FUSED |= {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@pytest.mark.parametrize(("kv_heads", "tp", "replicas"), [(4, 1, 1), (4, 2, 2), (2, 4, 1)])
def test_slots_of_vllm(kv_heads: int, tp: int, replicas: int) -> None:
    """Zeros around the adapter, B divided with rows, A with columns; key heads fewer than ranks are doubled."""
    sizes = tiny("qwen2", kv_heads=kv_heads)
    lora = LoRA(rank=3, max_rank=5)
    names = NameMap.for_model(sizes, "vllm", lora=lora, tp=tp, replicas=replicas)

    def of_rank(arrays: Storage, rank: int) -> Storage:
        index, found = rank % tp, {}
        for layer in range(2):
            for fused, parts in FUSED.items():
                block = "self_attn" if fused in ("qkv_proj", "o_proj") else "mlp"
                for number, name in enumerate(parts):
                    a, b = (arrays[f"{PREFIX}model.layers.{layer}.{block}.{name}.lora_{m}.weight"] for m in "AB")
                    if name in ("o_proj", "down_proj"):
                        a = part(a, tp, index, axis=1)
                    elif name in ("k_proj", "v_proj") and kv_heads < tp:
                        b = part(b, kv_heads, index // (tp // kv_heads))
                    else:
                        b = part(b, tp, index)
                    below = f"model.layers.{layer}.{block}.{fused}"
                    slot_a = np.full((1, 5, a.shape[1]), PADDING)
                    slot_a[0, :3] = a
                    slot_b = np.full((1, len(b), 5), PADDING)
                    slot_b[0, :, :3] = b
                    found |= {f"{below}.lora_a_stacked.{number}": slot_a, f"{below}.lora_b_stacked.{number}": slot_b}
        return found

    check(names, of_rank)


def test_peft_under_fsdp() -> None:
    sizes = tiny("llama")
    names = NameMap.for_model(sizes, "fsdp", lora=LoRA(rank=3, targets=("q_proj", "down_proj"), adapter="a"), dp=2)

    def of_rank(arrays: Storage, rank: int) -> Storage:
        found = {}
        for name, array in arrays.items():
            size = -(-len(array) // 2)
            found[name.replace(".weight", ".a.weight")] = array[rank * size : (rank + 1) * size]
        return found

    check(names, of_rank)
    assert len(names.tensors) == 2 * 2 * 2
    assert names.specs[f"{PREFIX}model.layers.1.mlp.down_proj.lora_A.weight"].shape == (3, 20)


def test_both_sides_of_an_adapter_have_the_same_tensors() -> None:
    sizes = dataclasses.replace(PUBLIC_MODELS["qwen3-30b-a3b"], layers=1)
    lora = LoRA(rank=16)
    train = NameMap.for_model(sizes, "fsdp", lora=lora, dp=4)
    serve = NameMap.for_model(sizes, "vllm", lora=lora, tp=2, first_rank=4)
    assert train.specs == serve.specs
    assert len(train.specs) == 8  # attention alone: experts are not adapted


@pytest.mark.parametrize(
    ("framework", "options", "parallel", "text"),
    [
        ("fsdp", {"rank": 0}, {}, "lora: expected rank >= 1, got 0"),
        ("fsdp", {"rank": 4, "max_rank": 3}, {}, "expected max_rank >= rank = 4, got 3"),
        ("fsdp", {"rank": 4, "targets": ("lm_head",)}, {}, "expected targets of q_proj, .*got lm_head"),
        ("fsdp", {"rank": 4, "targets": ()}, {}, "got none"),
        ("fsdp", {"rank": 4}, {"tp": 2}, "fsdp: expected tp1 for an adapter, got tp2"),
        ("megatron", {"rank": 4}, {}, "megatron: expected lora=None"),
        ("sglang", {"rank": 4}, {}, "sglang: expected lora=None"),
    ],
)
def test_what_is_refused(framework: str, options: dict[str, Any], parallel: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NameMap.for_model(tiny("llama", vocabulary=132), framework, lora=LoRA(**options), **parallel)
