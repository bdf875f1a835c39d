"""Megatron-Core: fused and interleaved projections, renumbered layers, experts apart from the rest.

Facts from Megatron-LM and Megatron-Bridge of August 2026:

- `linear_qkv` holds, for each key/value group, the group's query heads, its key head and its value head; its bias too.
- `linear_fc1` holds, on each rank, that rank's part of gate_proj and then its part of up_proj.
- The vocabulary is padded to a multiple of 128 tp.
- Each model chunk of each stage counts its layers from 0. With virtual stages chunk v is the v-th module of the list
  that training code holds; its buffers are named `model{v}.` here.
- Layers that do not divide over the stages are divided as if embedding and loss were one layer each, where that
  divides (94 over 4: 23, 24, 24, 23; --account-for-embedding-in-pipeline-split and its like for the loss).
- A tied lm_head is a tensor of its own, `output_layer.weight`, on the last of several stages.
- Ranks are numbered tp-cp-ep-dp-pp, tp fastest. A stage's ranks are arranged twice: tp x cp x dp for everything, and
  etp x ep x dp for experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from areal_core.reshard.models import ModelSizes
from areal_core.reshard.names.arrangement import (
    Arrangement,
    Place,
    RankGrid,
    check_heads,
    divisors,
    even_slots,
    layer_places,
    number_ranks,
    pad,
    require_divisor,
)
from areal_core.reshard.names.table import NameTable

__all__ = ["SIZES", "arrange_megatron", "megatron_table"]

SIZES: Mapping[str, str] = {
    "tp": "tensor parallel",
    "pp": "pipeline stages",
    "vpp": "model chunks of each stage (virtual pipeline)",
    "cp": "context parallel: copies",
    "ep": "expert parallel",
    "etp": "tensor parallel of experts (default: tp)",
    "dp": "copies of the experts; the rest has ep times as many. Ranks = tp cp ep dp pp",
    "world": "ranks in all, in place of dp",
    "first": "layers of the first stage, where layers do not divide",
    "last": "layers of the last stage",
}
FLAGS: Mapping[str, str] = {
    "local": "modules without Transformer Engine: norms are tensors of their own, experts modules",
    "sequential": "experts are modules of their own: local_experts.0.linear_fc1.weight, not linear_fc1.weight0",
    "tp-cp-ep-pp-dp": "the order of ranks with --use-tp-pp-dp-mapping",
}

_OUTSIDE = """
    model.embed_tokens.weight                                | embedding.word_embeddings.weight                                 | vocabulary | tp
    model.norm.weight                                        | decoder.final_layernorm.weight                                   | whole      | -
    lm_head.weight                                           | output_layer.weight                                              | vocabulary | tp
"""  # noqa: E501
_ATTENTION = """
    model.layers.{layer}.self_attn.q_proj.*                  | decoder.layers.{layer}.self_attention.linear_qkv.*               | groups     | tp
    model.layers.{layer}.self_attn.k_proj.*                  | decoder.layers.{layer}.self_attention.linear_qkv.*               | groups     | tp
    model.layers.{layer}.self_attn.v_proj.*                  | decoder.layers.{layer}.self_attention.linear_qkv.*               | groups     | tp
    model.layers.{layer}.self_attn.q_norm.weight             | decoder.layers.{layer}.self_attention.q_layernorm.weight         | whole      | -
    model.layers.{layer}.self_attn.k_norm.weight             | decoder.layers.{layer}.self_attention.k_layernorm.weight         | whole      | -
    model.layers.{layer}.self_attn.o_proj.*                  | decoder.layers.{layer}.self_attention.linear_proj.*              | columns    | tp
"""  # noqa: E501
_LATENT_ATTENTION = """
    model.layers.{layer}.self_attn.q_proj.*                  | decoder.layers.{layer}.self_attention.linear_q_proj.*            | heads      | tp
    model.layers.{layer}.self_attn.q_a_proj.*                | decoder.layers.{layer}.self_attention.linear_q_down_proj.*       | whole      | -
    model.layers.{layer}.self_attn.q_b_proj.*                | decoder.layers.{layer}.self_attention.linear_q_up_proj.*         | heads      | tp
    model.layers.{layer}.self_attn.kv_a_proj_with_mqa.*      | decoder.layers.{layer}.self_attention.linear_kv_down_proj.*      | whole      | -
    model.layers.{layer}.self_attn.kv_b_proj.*               | decoder.layers.{layer}.self_attention.linear_kv_up_proj.*        | heads      | tp
    model.layers.{layer}.self_attn.o_proj.*                  | decoder.layers.{layer}.self_attention.linear_proj.*              | columns    | tp
"""  # noqa: E501
_DENSE_MLP = """
    model.layers.{layer}.mlp.gate_proj.*                     | decoder.layers.{layer}.mlp.linear_fc1.*                          | rows       | tp
    model.layers.{layer}.mlp.up_proj.*                       | decoder.layers.{layer}.mlp.linear_fc1.*                          | rows       | tp
    model.layers.{layer}.mlp.down_proj.*                     | decoder.layers.{layer}.mlp.linear_fc2.*                          | columns    | tp
"""  # noqa: E501
_SPARSE_MLP = """
    model.layers.{layer}.post_attention_layernorm.weight     | decoder.layers.{layer}.pre_mlp_layernorm.weight                  | whole      | -
    model.layers.{layer}.mlp.gate.weight                     | decoder.layers.{layer}.mlp.router.weight                         | whole      | -
    model.layers.{layer}.mlp.gate.e_score_correction_bias    | decoder.layers.{layer}.mlp.router.expert_bias                    | whole      | -
    model.layers.{layer}.mlp.shared_experts.gate_proj.*      | decoder.layers.{layer}.mlp.shared_experts.linear_fc1.*           | rows       | tp
    model.layers.{layer}.mlp.shared_experts.up_proj.*        | decoder.layers.{layer}.mlp.shared_experts.linear_fc1.*           | rows       | tp
    model.layers.{layer}.mlp.shared_experts.down_proj.*      | decoder.layers.{layer}.mlp.shared_experts.linear_fc2.*           | columns    | tp
"""  # noqa: E501
# Norms that Transformer Engine computes in the projection behind them, and their names without it.
_FUSED_NORM = """
    model.layers.{layer}.input_layernorm.weight              | decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight         | whole | -
"""  # noqa: E501
_FUSED_DENSE_NORM = """
    model.layers.{layer}.post_attention_layernorm.weight     | decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight                    | whole | -
"""  # noqa: E501
_FUSED_LATENT_NORMS = """
    model.layers.{layer}.self_attn.q_a_layernorm.weight      | decoder.layers.{layer}.self_attention.linear_q_up_proj.layer_norm_weight   | whole | -
    model.layers.{layer}.self_attn.kv_a_layernorm.weight     | decoder.layers.{layer}.self_attention.linear_kv_up_proj.layer_norm_weight  | whole | -
"""  # noqa: E501
_LOCAL_NORM = """
    model.layers.{layer}.input_layernorm.weight              | decoder.layers.{layer}.input_layernorm.weight                    | whole      | -
"""  # noqa: E501
_LOCAL_DENSE_NORM = """
    model.layers.{layer}.post_attention_layernorm.weight     | decoder.layers.{layer}.pre_mlp_layernorm.weight                  | whole      | -
"""  # noqa: E501
_LOCAL_LATENT_NORMS = """
    model.layers.{layer}.self_attn.q_a_layernorm.weight      | decoder.layers.{layer}.self_attention.q_layernorm.weight         | whole      | -
    model.layers.{layer}.self_attn.kv_a_layernorm.weight     | decoder.layers.{layer}.self_attention.kv_layernorm.weight        | whole      | -
"""  # noqa: E501
_GROUPED_EXPERTS = """
    model.layers.{layer}.mlp.experts.{expert}.gate_proj.*    | decoder.layers.{layer}.mlp.experts.linear_fc1.*{expert}          | rows       | experts
    model.layers.{layer}.mlp.experts.{expert}.up_proj.*      | decoder.layers.{layer}.mlp.experts.linear_fc1.*{expert}          | rows       | experts
    model.layers.{layer}.mlp.experts.{expert}.down_proj.*    | decoder.layers.{layer}.mlp.experts.linear_fc2.*{expert}          | columns    | experts
"""  # noqa: E501
_LOCAL_EXPERTS = """
    model.layers.{layer}.mlp.experts.{expert}.gate_proj.*    | decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.*  | rows    | experts
    model.layers.{layer}.mlp.experts.{expert}.up_proj.*      | decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.*  | rows    | experts
    model.layers.{layer}.mlp.experts.{expert}.down_proj.*    | decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.*  | columns | experts
"""  # noqa: E501


def megatron_table(sizes: ModelSizes, *, sparse: bool, local: bool = False, sequential: bool = False) -> NameTable:
    """The table of a model's dense or sparse layers; `local` and `sequential` as in FLAGS."""
    # Latent attention keeps its input norm apart in both forms.
    norm = _LOCAL_NORM if local or sizes.is_mla else _FUSED_NORM
    text = _OUTSIDE + norm
    if sizes.is_mla:
        text += _LATENT_ATTENTION + (_LOCAL_LATENT_NORMS if local else _FUSED_LATENT_NORMS)
    else:
        text += _ATTENTION
    if sparse:
        text += _SPARSE_MLP + (_LOCAL_EXPERTS if local or sequential else _GROUPED_EXPERTS)
    else:
        text += _DENSE_MLP + (_LOCAL_DENSE_NORM if local else _FUSED_DENSE_NORM)
    return NameTable(text)


def arrange_megatron(
    sizes: ModelSizes,
    *,
    first_rank: int = 0,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    dp: int | None = None,
    world: int | None = None,
    first: int | None = None,
    last: int | None = None,
    local: bool = False,
    sequential: bool = False,
    order: str = "tp-cp-ep-dp-pp",
) -> Arrangement:
    """Arrange Megatron's ranks; SIZES and FLAGS say what the arguments are.

    Raises:
        ValueError: sizes that do not divide the model or each other; the text says which would.
    """
    etp = tp if etp is None else etp
    check_heads("megatron", "tp", tp, sizes, copies=False)
    if sizes.experts:
        require_divisor("megatron", "ep", ep, sizes.experts, "experts")
    elif ep > 1:
        raise ValueError(f"megatron: expected ep1 for a model without experts, got ep{ep}")
    per_stage = _ranks_per_stage(tp, cp, ep, pp, dp, world)
    require_divisor("megatron", "etp x ep", etp * ep, per_stage, "ranks of a stage")
    counts = _layer_counts(sizes.layers, pp, vpp, first, last)
    last_prefix = f"model{vpp - 1}." if vpp > 1 else ""
    first_prefix = "model0." if vpp > 1 else ""
    dense = {"tp": tp, "cp": cp, "ep": 1, "dp": per_stage // (tp * cp), "pp": pp}
    experts = {"tp": etp, "cp": 1, "ep": ep, "dp": per_stage // (etp * ep), "pp": pp}
    grid = _grid(dense, order, ("pp", "dp", "cp", "ep", "tp"), first_rank).reshape(pp, -1, tp)
    dense_table, sparse_table = (
        megatron_table(sizes, sparse=sparse, local=local, sequential=sequential) for sparse in (False, True)
    )
    return Arrangement(
        framework="megatron",
        dense=dense_table,
        sparse=sparse_table,
        groups={"tp": grid},
        experts=_grid(experts, order, ("pp", "ep", "dp", "cp", "tp"), first_rank).reshape(pp, ep, -1, etp),
        sizes_of={"tp": "tp", "experts": "etp"},
        slots=even_slots(sizes.experts, ep),
        places=layer_places(counts, renumber=True),
        head=Place(0, 0, first_prefix),
        tail=Place(pp - 1, 0, last_prefix),
        padded_vocabulary=pad(sizes.vocabulary, 128 * tp),
        aliases=(
            {f"{last_prefix}output_layer.weight": f"{first_prefix}embedding.word_embeddings.weight"}
            if sizes.tied and pp > 1
            else {}
        ),
    )


def _ranks_per_stage(tp: int, cp: int, ep: int, pp: int, dp: int | None, world: int | None) -> int:
    if world is None:
        return tp * cp * ep * (1 if dp is None else dp)
    if dp is not None:
        raise ValueError("megatron: expected dp or world, got both")
    if world % (tp * cp * pp):
        raise ValueError(f"megatron: expected world to be a multiple of tp cp pp = {tp * cp * pp}, got world{world}")
    return world // pp


def _grid(sizes: Mapping[str, int], order: str, axes: tuple[str, ...], first_rank: int) -> RankGrid:
    """Ranks numbered in `order`, its first name fastest, as an array with these axes."""
    names = order.split("-")[::-1]
    if sorted(names) != sorted(sizes):
        raise ValueError(f"megatron: expected an order of {'-'.join(sorted(sizes))}, got {order}")
    ranks = number_ranks("megatron", first_rank, [sizes[name] for name in names])
    return np.ascontiguousarray(ranks.transpose([names.index(axis) for axis in axes]))


def _layer_counts(layers: int, pp: int, vpp: int, first: int | None, last: int | None) -> list[list[int]]:
    """Layers of [model chunk][stage]."""
    # As Megatron's options that count embedding and loss as layers.
    if first is None and last is None and layers % pp and (layers + 2) % pp == 0:
        first = last = (layers + 2) // pp - 1
    middle = pp - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    if middle < 0 or left < 0 or (left % middle if middle else left):
        raise ValueError(_uneven_text(layers, pp, first, last))
    each = left // middle if middle else 0
    stages = ([] if first is None else [first]) + [each] * middle + ([] if last is None else [last])
    if min(stages) < 1 or any(count % vpp for count in stages):
        raise ValueError(f"megatron: expected vpp{vpp} to divide the layers of every stage, got stages of {stages}")
    return [[count // vpp for count in stages] for _ in range(vpp)]


def _uneven_text(layers: int, pp: int, first: int | None, last: int | None) -> str:
    text = f"megatron: expected {layers} layers to divide over pp{pp}"
    if first is not None or last is not None:
        return f"{text} less first{first or 0} and last{last or 0}, which they do not"
    each = -(-layers // pp)
    rest = layers - each * (pp - 1)
    ways = [f"first{rest}", f"last{rest}"] if rest > 0 else []
    ways.append(f"pp of {', '.join(map(str, divisors(layers)))}")
    return f"{text}, which they do not; {' or '.join(ways)} would do"
