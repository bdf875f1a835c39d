"""Hugging Face models in memory: plain, under FSDP2 (`fully_shard`) and HSDP, also over transformers' tensor parallel.

Facts from transformers 5 and torch 2.10 and later:

- FSDP2 divides dimension 0 of every parameter over dp, unevenly where it must. Over tensor parallelism that divides
  dimension 0 as well, it divides each of the tp parts (DTensor's _StridedShard).
- A router's correction bias is a buffer of the module: every rank has all of it.
- The `base_model_tp_plan` of a model divides the projections of attention and MLP and lm_head; everything else is
  replicated: norms, embedding, routers, and DeepSeek's latent attention.
- transformers 5 fuses experts: `mlp.experts.gate_up_proj` [experts, 2 I, hidden] and `mlp.experts.down_proj`
  [experts, hidden, I], which FSDP2 then divides by experts. With `separate` every expert's projection is a parameter
  of its own, as in transformers 4 and in files.
"""

from __future__ import annotations

from collections.abc import Mapping

from areal_core.reshard.inventory import SCALE_BLOCK, SCALE_SUFFIX
from areal_core.reshard.layout import Storage, TensorLayout
from areal_core.reshard.models import ModelSizes
from areal_core.reshard.names.arrangement import RankGrid, check_heads, number_ranks, require_divisor
from areal_core.reshard.names.build import mesh_of
from areal_core.reshard.names.table import Match, NameTable, fill
from areal_core.reshard.placements import Box, Mesh, Placement, Ragged, Replicate, Shard, StridedShard
from areal_core.reshard.spec import Spec

__all__ = ["FLAGS", "SIZES", "hugging_face_layouts", "hugging_face_table"]

SIZES: Mapping[str, str] = {
    "dp": "fully sharded data parallel",
    "tp": "tensor parallel (transformers' tp_plan)",
    "replicas": "copies (HSDP)",
}
FLAGS: Mapping[str, str] = {"separate": "every expert's projection is a parameter of its own (transformers 4, files)"}

_OUTSIDE = """
    model.embed_tokens.weight                              | =                                                | whole      | -
    model.norm.weight                                      | =                                                | whole      | -
    lm_head.weight                                         | =                                                | rows       | tp
    model.layers.{layer}.input_layernorm.weight            | =                                                | whole      | -
    model.layers.{layer}.post_attention_layernorm.weight   | =                                                | whole      | -
"""  # noqa: E501
_ATTENTION = """
    model.layers.{layer}.self_attn.q_proj.*                | =                                                | heads      | tp
    model.layers.{layer}.self_attn.k_proj.*                | =                                                | heads      | tp
    model.layers.{layer}.self_attn.v_proj.*                | =                                                | heads      | tp
    model.layers.{layer}.self_attn.q_norm.weight           | =                                                | whole      | -
    model.layers.{layer}.self_attn.k_norm.weight           | =                                                | whole      | -
    model.layers.{layer}.self_attn.o_proj.*                | =                                                | columns    | tp
"""  # noqa: E501
_LATENT_ATTENTION = """
    model.layers.{layer}.self_attn.q_proj.*                | =                                                | whole      | -
    model.layers.{layer}.self_attn.q_a_proj.*              | =                                                | whole      | -
    model.layers.{layer}.self_attn.q_a_layernorm.weight    | =                                                | whole      | -
    model.layers.{layer}.self_attn.q_b_proj.*              | =                                                | whole      | -
    model.layers.{layer}.self_attn.kv_a_proj_with_mqa.*    | =                                                | whole      | -
    model.layers.{layer}.self_attn.kv_a_layernorm.weight   | =                                                | whole      | -
    model.layers.{layer}.self_attn.kv_b_proj.*             | =                                                | whole      | -
    model.layers.{layer}.self_attn.o_proj.*                | =                                                | whole      | -
    model.layers.{layer}.embed_tokens.weight               | =                                                | whole      | -
    model.layers.{layer}.enorm.weight                      | =                                                | whole      | -
    model.layers.{layer}.hnorm.weight                      | =                                                | whole      | -
    model.layers.{layer}.eh_proj.weight                    | =                                                | whole      | -
    model.layers.{layer}.shared_head.norm.weight           | =                                                | whole      | -
    model.layers.{layer}.shared_head.head.weight           | =                                                | whole      | -
"""  # noqa: E501
_MLP = """
    model.layers.{layer}.mlp.gate_proj.*                   | =                                                | rows       | tp
    model.layers.{layer}.mlp.up_proj.*                     | =                                                | rows       | tp
    model.layers.{layer}.mlp.down_proj.*                   | =                                                | columns    | tp

    model.layers.{layer}.mlp.gate.weight                   | =                                                | whole      | -
    model.layers.{layer}.mlp.gate.e_score_correction_bias  | =                                                | buffer     | -
    model.layers.{layer}.mlp.shared_experts.gate_proj.*    | =                                                | rows       | tp
    model.layers.{layer}.mlp.shared_experts.up_proj.*      | =                                                | rows       | tp
    model.layers.{layer}.mlp.shared_experts.down_proj.*    | =                                                | columns    | tp
"""  # noqa: E501
_FUSED_EXPERTS = """
    model.layers.{layer}.mlp.experts.{expert}.gate_proj.*  | model.layers.{layer}.mlp.experts.gate_up_proj.*  | rows       | tp
    model.layers.{layer}.mlp.experts.{expert}.up_proj.*    | model.layers.{layer}.mlp.experts.gate_up_proj.*  | rows       | tp
    model.layers.{layer}.mlp.experts.{expert}.down_proj.*  | model.layers.{layer}.mlp.experts.down_proj.*     | columns    | tp
"""  # noqa: E501
_SEPARATE_EXPERTS = """
    model.layers.{layer}.mlp.experts.{expert}.gate_proj.*  | =                                                | rows       | tp
    model.layers.{layer}.mlp.experts.{expert}.up_proj.*    | =                                                | rows       | tp
    model.layers.{layer}.mlp.experts.{expert}.down_proj.*  | =                                                | columns    | tp
"""  # noqa: E501
# A fused parameter has no ".weight".
_FUSED_SUFFIX = {"weight": "", SCALE_SUFFIX: "_scale_inv"}


def hugging_face_table(sizes: ModelSizes, *, separate: bool = False) -> NameTable:
    """The table of a model, with fused or `separate` experts."""
    attention = _LATENT_ATTENTION if sizes.is_mla else _ATTENTION
    return NameTable(_OUTSIDE + attention + _MLP + (_SEPARATE_EXPERTS if separate else _FUSED_EXPERTS))


def hugging_face_layouts(
    sizes: ModelSizes,
    specs: Mapping[str, Spec],
    *,
    first_rank: int = 0,
    dp: int = 1,
    tp: int = 1,
    replicas: int = 1,
    separate: bool = False,
) -> dict[str, TensorLayout]:
    """Lay out every tensor of `specs`; ranks are numbered replicas, dp, tp, the last fastest.

    Raises:
        ValueError: a tp that does not divide heads or rows; 8-bit block scales that tp would share and dp divide.
    """
    if not sizes.is_mla and tp > 1:
        check_heads("fsdp", "tp", tp, sizes, copies=False)
    ranks = number_ranks("fsdp", first_rank, (replicas, dp, tp))
    builder = _Builder(sizes, specs, ranks, hugging_face_table(sizes, separate=separate))
    return {name: builder.layout(name, spec) for name, spec in specs.items()}


class _Builder:
    def __init__(self, sizes: ModelSizes, specs: Mapping[str, Spec], ranks: RankGrid, table: NameTable) -> None:
        self._experts = sizes.experts
        self._table = table
        self._specs = specs
        self._replicas, self._dp, self._tp = (int(size) for size in ranks.shape)
        self._mesh = self._make_mesh(ranks)
        self._experts_here = -(-sizes.experts // self._dp)  # as Shard(0) divides the fused parameter
        count = -(-sizes.experts // self._experts_here) if sizes.experts else 0
        self._expert_meshes = [mesh_of(ranks[:, dp], ("replicas", "tp")) for dp in range(count)]

    def _make_mesh(self, ranks: RankGrid) -> Mesh:
        """All ranks, without the dimensions that torch's mesh would not have."""
        keep = [self._replicas > 1, True, self._tp > 1]
        names = tuple(name for name, kept in zip(("replicas", "dp", "tp"), keep, strict=True) if kept)
        shape = [size for size, kept in zip(ranks.shape, keep, strict=True) if kept]
        return mesh_of(ranks.reshape(shape), names)

    def layout(self, name: str, spec: Spec) -> TensorLayout:
        match = self._table.match(name)
        return self._fused_expert(match, spec) if match.row.is_stacked else self._parameter(name, match, spec)

    def _parameter(self, name: str, match: Match, spec: Spec) -> TensorLayout:
        """A parameter of its own."""
        placements: list[Placement] = [Replicate()] if self._replicas > 1 else []
        if match.row.split == "buffer":
            return TensorLayout(spec, self._mesh, (Replicate(),) * len(self._mesh.shape))
        if self._tp == 1:
            return TensorLayout(spec, self._mesh, (*placements, Shard(0)))
        dim = self._tp_dim(name, match, spec)
        shared = self._shared_scales(name, dim)
        if shared is not None:
            shapes = {box.size for (box,) in shared.boxes}
            storage = Storage(buffer_shape=shapes.pop() if len(shapes) == 1 else None)  # None: flat
            return TensorLayout(spec, self._mesh, (*placements, Replicate(), shared), storage)
        placements.append(StridedShard(0, self._tp) if dim == 0 else Shard(0))
        placements.append(Replicate() if dim is None else Shard(dim))
        return TensorLayout(spec, self._mesh, tuple(placements))

    def _tp_dim(self, name: str, match: Match, spec: Spec) -> int | None:
        """The dimension that tensor parallelism divides."""
        dim = {"whole": None, "columns": 1}.get(match.row.split, 0)
        if dim is None or dim >= len(spec.shape):
            return None
        if match.suffix != SCALE_SUFFIX:
            what = f"{'columns' if dim else 'rows'} of {name}"
            require_divisor("fsdp", "tp", self._tp, spec.shape[dim], what)
        return dim

    def _shared_scales(self, name: str, dim: int | None) -> Ragged | None:
        """Block scales whose blocks end within a rank's part: every rank that has some of a block holds its scale."""
        if dim is None or not name.endswith(SCALE_SUFFIX):
            return None
        weight = self._specs[name.removesuffix(SCALE_SUFFIX) + "weight"].shape
        here = weight[dim] // self._tp
        if here % SCALE_BLOCK == 0:
            return None
        if self._dp > 1:
            raise ValueError(
                f"fsdp: expected tp to leave a multiple of {SCALE_BLOCK} of {weight[dim]} rows or columns on every "
                f"rank, because blocks of {SCALE_BLOCK} share a scale, got tp{self._tp} with dp{self._dp}: {name}"
            )
        blocks = [-(-size // SCALE_BLOCK) for size in weight]
        boxes = []
        for rank in range(self._tp):
            first, end = rank * here // SCALE_BLOCK, -(-(rank + 1) * here // SCALE_BLOCK)
            start = tuple(first if axis == dim else 0 for axis in range(2))
            boxes.append((Box(start, tuple(end - first if axis == dim else blocks[axis] for axis in range(2))),))
        return Ragged(tuple(boxes))

    def _fused_expert(self, match: Match, spec: Spec) -> TensorLayout:
        """One expert's part of a fused parameter, which FSDP2 divides by experts."""
        group, slot = divmod(match.expert, self._experts_here)
        held = min(self._experts_here, self._experts - group * self._experts_here)
        dim = 1 if match.row.split == "columns" else 0
        rows, columns = (self._expert_extent(match, dim) if axis == dim else spec.shape[axis] for axis in range(2))
        parts = self._table.parts(match.row)
        buffer = fill(match.row.buffer, match.layer, match.expert, "")[:-1]
        storage = Storage(
            buffer=buffer + _FUSED_SUFFIX[match.suffix],
            buffer_shape=(held, len(parts) * rows, columns),
            offset=(slot * len(parts) + parts.index(match.row)) * rows * columns,
        )
        return TensorLayout(spec, self._expert_meshes[group], (Replicate(), Shard(dim)), storage)

    def _expert_extent(self, match: Match, dim: int) -> int:
        """Rows (or columns) of an expert on one rank; of scales, their blocks."""
        weight = self._specs[fill(match.row.canonical, match.layer, match.expert, "weight")].shape[dim]
        require_divisor("fsdp", "tp", self._tp, weight, f"{'columns' if dim else 'rows'} of {match.row.canonical}")
        here = weight // self._tp
        if match.suffix != SCALE_SUFFIX:
            return here
        if here % SCALE_BLOCK and self._tp > 1:
            raise ValueError(
                f"fsdp: expected tp to leave a multiple of {SCALE_BLOCK} of {weight} rows or columns of an expert on "
                f"every rank, because blocks of {SCALE_BLOCK} share a scale, got tp{self._tp}"
            )
        return -(-here // SCALE_BLOCK)
