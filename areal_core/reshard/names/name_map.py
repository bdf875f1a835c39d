"""`NameMap`: where a framework keeps the tensors of a model, for given parallel sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from areal_core.reshard.inventory import inventory
from areal_core.reshard.layout import Layout, TensorLayout
from areal_core.reshard.models import ModelSizes, load_model
from areal_core.reshard.names import hugging_face, megatron
from areal_core.reshard.names.arrangement import Arrangement
from areal_core.reshard.names.build import build_layouts
from areal_core.reshard.names.engines import (
    SGLANG_SIZES,
    VLLM_FLAGS,
    VLLM_SIZES,
    arrange_sglang,
    arrange_vllm,
)
from areal_core.reshard.names.lora import LoRA, lora_inventory, peft_layouts, vllm_lora_layouts
from areal_core.reshard.names.table import NameTable
from areal_core.reshard.spec import Spec

__all__ = ["FRAMEWORKS", "Framework", "NameMap"]


@dataclass(frozen=True)
class Framework:
    """What a framework's parallel sizes and flags are called, and what they mean."""

    name: str
    about: str
    sizes: Mapping[str, str]
    flags: Mapping[str, str]
    arrange: Callable[..., Arrangement] | None  # None: parameters are laid out without one


FRAMEWORKS: Mapping[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework("fsdp", "Hugging Face models, FSDP2, HSDP", hugging_face.SIZES, hugging_face.FLAGS, None),
        Framework("megatron", "Megatron-Core", megatron.SIZES, megatron.FLAGS, megatron.arrange_megatron),
        Framework("vllm", "vLLM", VLLM_SIZES, VLLM_FLAGS, arrange_vllm),
        Framework("sglang", "SGLang", SGLANG_SIZES, {}, arrange_sglang),
    )
}
_ALIASES = {"hf": "fsdp", "fsdp2": "fsdp", "hsdp": "fsdp", "mcore": "megatron"}
_FLAG_ARGUMENTS = {"tp-cp-ep-pp-dp": {"order": "tp-cp-ep-pp-dp"}}


@dataclass(frozen=True, eq=False)
class NameMap:
    """Where a framework keeps the tensors of a model: the layout of each canonical tensor on the framework's ranks.

    Attributes:
        model: the model's sizes.
        framework: "fsdp", "megatron", "vllm" or "sglang".
        tensors: canonical name -> TensorLayout.
    """

    model: ModelSizes
    framework: str
    tensors: Mapping[str, TensorLayout]
    tables: tuple[NameTable, ...]
    _arrangement: Arrangement | None

    @classmethod
    def for_model(
        cls,
        model: ModelSizes | Mapping[str, Any] | str | Path,
        framework: str,
        *,
        dtype: torch.dtype | None = None,
        mtp: bool = False,
        lora: LoRA | None = None,
        first_rank: int = 0,
        **sizes: Any,
    ) -> NameMap:
        """Lay a model out over a framework's ranks.

        Args:
            model: a public name, a config.json, a Hugging Face directory or a configuration (see `load_model`).
            framework: a key of FRAMEWORKS, or "hf", "fsdp2", "hsdp", "mcore".
            dtype: of the weights (see `inventory`); None: as the configuration says.
            mtp: with the layers of multi-token prediction, which only "fsdp" describes.
            lora: an adapter in place of the model's own tensors; "fsdp" (peft) and "vllm" describe those.
            first_rank: the number of the framework's first rank. Where trainer and generator are different
                processes, the generator's ranks follow the trainer's; equal numbers are one process.
            sizes: the framework's parallel sizes and flags: tp=4, ep=8, ... (`FRAMEWORKS[name].sizes`, `.flags`).

        Raises:
            ValueError: an unknown model, framework or size, or sizes that do not divide the model; the text says
                which would.
        """
        known = framework_of(framework)
        sizes = _checked(known, sizes)
        shape = load_model(model)
        if mtp and known.name != "fsdp":
            raise ValueError(f"{known.name}: expected mtp=False, got True: its multi-token prediction is not described")
        specs = inventory(shape, dtype=dtype, mtp=mtp) if lora is None else lora_inventory(shape, lora, dtype)
        if known.arrange is None:
            if lora is None:
                tensors = hugging_face.hugging_face_layouts(shape, specs, first_rank=first_rank, **sizes)
            else:
                tensors = peft_layouts(specs, lora, first_rank=first_rank, **sizes)
            table = hugging_face.hugging_face_table(shape, separate=sizes.get("separate", False))
            return cls(shape, known.name, tensors, (table,), None)
        arrangement = known.arrange(shape, first_rank=first_rank, **sizes)
        kinds = sorted({shape.is_sparse(layer) for layer in range(shape.layers)})
        tables = tuple(dict.fromkeys(arrangement.sparse if sparse else arrangement.dense for sparse in kinds))
        if lora is None:
            return cls(shape, known.name, build_layouts(shape, specs, arrangement), tables, arrangement)
        if known.name != "vllm":
            raise ValueError(f"{known.name}: expected lora=None, got an adapter; fsdp (peft) and vllm describe those")
        return cls(shape, known.name, vllm_lora_layouts(shape, specs, lora, arrangement), tables, arrangement)

    @cached_property
    def layout(self) -> Layout:
        """The layout of all tensors on all ranks."""
        return Layout(self.tensors)

    @property
    def specs(self) -> dict[str, Spec]:
        """The canonical tensors: name -> Spec."""
        return {name: tensor.spec for name, tensor in self.tensors.items()}

    def aliases(self, rank: int) -> dict[str, str]:
        """What a rank calls buffers that this layout knows by another name.

        A tied lm_head on the last of several stages is a tensor of its own in Megatron and SGLang; the layout has it as
        another copy of the embedding, under the embedding's name.
        """
        arrangement = self._arrangement
        if arrangement is None or not arrangement.aliases:
            return {}
        return dict(arrangement.aliases) if rank in arrangement.groups["tp"][arrangement.tail.stage] else {}

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables))


def framework_of(name: str) -> Framework:
    """Find a framework by name. Raises ValueError listing the names."""
    key = _ALIASES.get(name.lower(), name.lower())
    if key not in FRAMEWORKS:
        raise ValueError(f"name map: expected a framework of {', '.join([*FRAMEWORKS, *_ALIASES])}, got {name!r}")
    return FRAMEWORKS[key]


def _checked(framework: Framework, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the framework's function; only known sizes, all of them positive."""
    arguments: dict[str, Any] = {}
    for name, value in sizes.items():
        if name in framework.flags:
            if not isinstance(value, bool):
                raise ValueError(f"{framework.name}: expected {name} to be True or False, got {value!r}")
            arguments |= _FLAG_ARGUMENTS.get(name, {name: True}) if value else {}
        elif name in framework.sizes:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{framework.name}: expected {name} >= 1, got {value!r}")
            arguments[name] = value
        else:
            known = ", ".join([*framework.sizes, *framework.flags])
            raise ValueError(f"{framework.name}: expected sizes and flags of {known}, got {name}")
    return arguments
