"""vLLM and SGLang: projections fused side by side, experts stacked.

Facts from vLLM and SGLang of 2026:

- `qkv_proj` holds, on each rank, its query heads, key heads and value heads; of fewer key/value heads than ranks,
  rank r holds number r // (tp / heads). `gate_up_proj` holds the rank's part of gate_proj, then of up_proj.
- `w13_weight` [experts here, 2 I / tp, hidden] stacks gate and up of a rank's experts, `w2_weight` [experts here,
  hidden, I / tp] their down_proj; scales alike.
- The vocabulary is padded to a multiple of 64. Layers keep their number under pipeline parallelism.
- vLLM's dp replicates attention, but experts are divided over dp x tp: their rows without `ep`, themselves with it
  (in order, the first ranks hold one more). Engines that know nothing of each other are `replicas`.
- SGLang's ep is a part of tp: experts go over ep groups, their rows over tp / ep. Its `adp` (data-parallel attention)
  divides tp too: attention and embedding are divided over tp / adp ranks.
- The latent attention's matrices are those of the checkpoint; what engines derive from kv_b_proj is not described.
- SGLang's shared expert is a tensor of its own (--disable-shared-experts-fusion).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from areal_core.reshard.models import ModelSizes
from areal_core.reshard.names.arrangement import (
    Arrangement,
    Place,
    check_heads,
    even_slots,
    layer_places,
    number_ranks,
    pad,
    require_divisor,
)
from areal_core.reshard.names.table import NameTable

__all__ = ["SGLANG_SIZES", "VLLM_FLAGS", "VLLM_SIZES", "arrange_sglang", "arrange_vllm", "sglang_table", "vllm_table"]

VLLM_SIZES: Mapping[str, str] = {
    "tp": "tensor parallel",
    "pp": "pipeline stages",
    "dp": "data parallel of one engine (--data-parallel-size)",
    "replicas": "engines",
}
VLLM_FLAGS: Mapping[str, str] = {"ep": "experts whole on one rank each, over dp x tp (--enable-expert-parallel)"}
SGLANG_SIZES: Mapping[str, str] = {
    "tp": "tensor parallel (--tp)",
    "pp": "pipeline stages",
    "ep": "groups of experts, a part of tp (--ep-size)",
    "adp": "data-parallel attention, a part of tp (--enable-dp-attention --dp-size)",
    "replicas": "engines",
}

_COMMON = """
    model.embed_tokens.weight                              | =                                                | vocabulary | EMBEDDING
    model.norm.weight                                      | =                                                | whole      | -
    lm_head.weight                                         | =                                                | vocabulary | tp
    model.layers.{layer}.input_layernorm.weight            | =                                                | whole      | -
    model.layers.{layer}.post_attention_layernorm.weight   | =                                                | whole      | -
    model.layers.{layer}.self_attn.o_proj.*                | =                                                | columns    | ATTENTION

    model.layers.{layer}.mlp.gate_proj.*                   | model.layers.{layer}.mlp.gate_up_proj.*          | rows       | tp
    model.layers.{layer}.mlp.up_proj.*                     | model.layers.{layer}.mlp.gate_up_proj.*          | rows       | tp
    model.layers.{layer}.mlp.down_proj.*                   | =                                                | columns    | tp

    model.layers.{layer}.mlp.gate.weight                   | =                                                | whole      | -
    model.layers.{layer}.mlp.gate.e_score_correction_bias  | =                                                | whole      | -
    model.layers.{layer}.mlp.experts.{expert}.gate_proj.*  | model.layers.{layer}.mlp.experts.w13_*           | rows       | experts
    model.layers.{layer}.mlp.experts.{expert}.up_proj.*    | model.layers.{layer}.mlp.experts.w13_*           | rows       | experts
    model.layers.{layer}.mlp.experts.{expert}.down_proj.*  | model.layers.{layer}.mlp.experts.w2_*            | columns    | experts
    model.layers.{layer}.mlp.shared_experts.gate_proj.*    | model.layers.{layer}.mlp.shared_experts.gate_up_proj.* | rows | tp
    model.layers.{layer}.mlp.shared_experts.up_proj.*      | model.layers.{layer}.mlp.shared_experts.gate_up_proj.* | rows | tp
    model.layers.{layer}.mlp.shared_experts.down_proj.*    | =                                                | columns    | tp
"""  # noqa: E501
_ATTENTION = """
    model.layers.{layer}.self_attn.q_proj.*                | model.layers.{layer}.self_attn.qkv_proj.*        | heads      | ATTENTION
    model.layers.{layer}.self_attn.k_proj.*                | model.layers.{layer}.self_attn.qkv_proj.*        | kv heads   | ATTENTION
    model.layers.{layer}.self_attn.v_proj.*                | model.layers.{layer}.self_attn.qkv_proj.*        | kv heads   | ATTENTION
    model.layers.{layer}.self_attn.q_norm.weight           | =                                                | whole      | -
    model.layers.{layer}.self_attn.k_norm.weight           | =                                                | whole      | -
"""  # noqa: E501
_LATENT_ATTENTION = """
    model.layers.{layer}.self_attn.q_a_proj.*              | model.layers.{layer}.self_attn.FUSED_QKV_A.*     | whole      | -
    model.layers.{layer}.self_attn.kv_a_proj_with_mqa.*    | model.layers.{layer}.self_attn.FUSED_QKV_A.*     | whole      | -
    model.layers.{layer}.self_attn.q_a_layernorm.weight    | =                                                | whole      | -
    model.layers.{layer}.self_attn.kv_a_layernorm.weight   | =                                                | whole      | -
    model.layers.{layer}.self_attn.q_b_proj.*              | =                                                | heads      | ATTENTION
    model.layers.{layer}.self_attn.kv_b_proj.*             | =                                                | heads      | ATTENTION
"""  # noqa: E501
# Without a query rank nothing is fused.
_PLAIN_LATENT_ATTENTION = """
    model.layers.{layer}.self_attn.q_proj.*                | =                                                | heads      | ATTENTION
    model.layers.{layer}.self_attn.kv_a_proj_with_mqa.*    | =                                                | whole      | -
    model.layers.{layer}.self_attn.kv_a_layernorm.weight   | =                                                | whole      | -
    model.layers.{layer}.self_attn.kv_b_proj.*             | =                                                | heads      | ATTENTION
"""  # noqa: E501


def vllm_table(sizes: ModelSizes) -> NameTable:
    """The table of a model in vLLM."""
    text = _table_text(sizes).replace("EMBEDDING", "tp").replace("ATTENTION", "tp")
    return NameTable(text.replace("FUSED_QKV_A", "fused_qkv_a_proj"))


def sglang_table(sizes: ModelSizes) -> NameTable:
    """The table of a model in SGLang."""
    text = _table_text(sizes).replace("EMBEDDING", "attention").replace("ATTENTION", "attention")
    return NameTable(text.replace("FUSED_QKV_A", "fused_qkv_a_proj_with_mqa"))


def _table_text(sizes: ModelSizes) -> str:
    if not sizes.is_mla:
        return _COMMON + _ATTENTION
    return _COMMON + (_LATENT_ATTENTION if sizes.q_lora_rank else _PLAIN_LATENT_ATTENTION)


def arrange_vllm(
    sizes: ModelSizes,
    *,
    first_rank: int = 0,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    replicas: int = 1,
    ep: bool = False,
) -> Arrangement:
    """Arrange vLLM's ranks: engines, dp, pp, tp, the last fastest; VLLM_SIZES says what the arguments are.

    Raises:
        ValueError: sizes that do not divide the model; the text says which would.
    """
    check_heads("vllm", "tp", tp, sizes, copies=True)
    _check_vocabulary("vllm", tp, sizes)
    if ep and not sizes.experts:
        raise ValueError("vllm: expected no ep for a model without experts, got ep")
    if sizes.experts and not ep:
        require_divisor("vllm", "dp x tp", dp * tp, sizes.moe_intermediate, "rows of an expert (or ep)")
    ranks = number_ranks("vllm", first_rank, (replicas, dp, pp, tp)).transpose(2, 0, 1, 3)  # pp, replicas, dp, tp
    over = ranks.transpose(0, 2, 3, 1).reshape(pp, dp * tp, replicas)  # pp, position in dp x tp, replicas
    experts = over[..., np.newaxis] if ep else over.transpose(0, 2, 1)[:, np.newaxis]
    table = vllm_table(sizes)
    return Arrangement(
        framework="vllm",
        dense=table,
        sparse=table,
        groups={"tp": ranks.reshape(pp, replicas * dp, tp)},
        experts=experts,
        sizes_of={"tp": "tp", "experts": "dp x tp"},
        slots=even_slots(sizes.experts, dp * tp if ep else 1),
        places=layer_places([_vllm_layers(sizes.layers, pp)], renumber=False),
        head=Place(0, 0),
        tail=Place(pp - 1, 0),
        padded_vocabulary=pad(sizes.vocabulary, 64),
    )


def arrange_sglang(
    sizes: ModelSizes,
    *,
    first_rank: int = 0,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    adp: int = 1,
    replicas: int = 1,
) -> Arrangement:
    """Arrange SGLang's ranks: engines, pp, tp, the last fastest; SGLANG_SIZES says what the arguments are.

    Raises:
        ValueError: sizes that do not divide the model or each other; the text says which would.
    """
    if ep > 1 and not sizes.experts:
        raise ValueError(f"sglang: expected ep1 for a model without experts, got ep{ep}")
    require_divisor("sglang", "ep", ep, tp, f"ranks of tp{tp}, of which ep is a part")
    require_divisor("sglang", "adp", adp, tp, f"ranks of tp{tp}, of which adp is a part")
    check_heads("sglang", "tp" if adp == 1 else "tp / adp", tp // adp, sizes, copies=True)
    _check_vocabulary("sglang", tp, sizes)
    if sizes.experts:
        require_divisor("sglang", "ep", ep, sizes.experts, "experts")
    ranks = number_ranks("sglang", first_rank, (replicas, pp, tp)).transpose(1, 0, 2)  # pp, replicas, tp
    experts = ranks.reshape(pp, replicas, ep, tp // ep).transpose(0, 2, 1, 3)
    table = sglang_table(sizes)
    return Arrangement(
        framework="sglang",
        dense=table,
        sparse=table,
        groups={"tp": ranks, "attention": ranks.reshape(pp, replicas * adp, tp // adp)},
        experts=experts,
        sizes_of={"tp": "tp", "attention": "tp / adp", "experts": "tp / ep"},
        slots=even_slots(sizes.experts, ep),
        places=layer_places([_sglang_layers(sizes.layers, pp)], renumber=False),
        head=Place(0, 0),
        tail=Place(pp - 1, 0),
        padded_vocabulary=pad(sizes.vocabulary, 64),
        aliases={"lm_head.weight": "model.embed_tokens.weight"} if sizes.tied and pp > 1 else {},
    )


def _check_vocabulary(framework: str, tp: int, sizes: ModelSizes) -> None:
    require_divisor(framework, "tp", tp, pad(sizes.vocabulary, 64), "padded rows of the vocabulary")


def _vllm_layers(layers: int, pp: int) -> list[int]:
    """Layers of each stage: what does not divide goes to stages before the last, from the back."""
    counts = [layers // pp] * pp
    for index in range(layers % pp):
        counts[-2 - index] += 1
    return _nonempty("vllm", layers, counts)


def _sglang_layers(layers: int, pp: int) -> list[int]:
    """Layers of each stage: the last ones hold one more where they do not divide."""
    return _nonempty("sglang", layers, [(layers + stage) // pp for stage in range(pp)])


def _nonempty(framework: str, layers: int, counts: list[int]) -> list[int]:
    if min(counts) < 1:
        raise ValueError(f"{framework}: expected at most {layers} stages for {layers} layers, got pp{len(counts)}")
    return counts
