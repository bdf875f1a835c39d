"""Parallel sizes as people write them: "megatron:pp4,tp4,ep8,dp1", "fsdp:1024", "vllm:tp8,dp8,ep".

A framework's name, a colon, then sizes (a name and a number) and flags (a name). `spec_help()` lists them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areal_core.reshard.models import ModelSizes
from areal_core.reshard.names.arrangement import MAX_RANKS
from areal_core.reshard.names.lora import LoRA
from areal_core.reshard.names.name_map import FRAMEWORKS, Framework, NameMap, framework_of

__all__ = ["Parallel", "spec_help"]

_MAX_CHARACTERS = 200
_ITEM = re.compile(r"([a-z][a-z-]*?)[=]?(\d+)")
# What people write for sizes that a framework calls otherwise.
_HINTS = {
    ("sglang", "dp"): "adp<n> for data-parallel attention, replicas<n> for engines",
    ("vllm", "rep"): "replicas<n>",
    ("fsdp", "pp"): "no pipeline stages",
    ("fsdp", "ep"): "experts go with dp",
}


@dataclass(frozen=True)
class Parallel:
    """A framework and its parallel sizes."""

    framework: str
    sizes: Mapping[str, int | bool]

    @classmethod
    def parse(cls, text: str) -> Parallel:
        """Parse a spec string.

        Raises:
            ValueError: naming the item that is no size or flag of the framework, and those that are.
        """
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"parallel: expected at most {_MAX_CHARACTERS} characters, got {len(text)}")
        name, _, rest = text.strip().partition(":")
        framework = framework_of(name.strip())
        sizes: dict[str, int | bool] = {}
        for item in filter(None, (part.strip().lower() for part in rest.split(","))):
            key, value = _item(framework, item)
            if key in sizes:
                raise ValueError(f"{framework.name}: expected {key} once, got it twice in {text!r}")
            sizes[key] = value
        if framework.name == "vllm":
            _check_vllm_experts(sizes)
        return cls(framework.name, sizes)

    def name_map(
        self,
        model: ModelSizes | Mapping[str, Any] | str | Path,
        *,
        dtype: torch.dtype | None = None,
        mtp: bool = False,
        lora: LoRA | None = None,
        first_rank: int = 0,
    ) -> NameMap:
        """Lay a model out with these sizes: `NameMap.for_model`, which says what can be wrong."""
        sizes: dict[str, Any] = {name: value for name, value in self.sizes.items() if value is not False}
        if self.framework == "vllm" and "ep" in sizes:
            sizes["ep"] = True
        return NameMap.for_model(model, self.framework, dtype=dtype, mtp=mtp, lora=lora, first_rank=first_rank, **sizes)

    def __str__(self) -> str:
        items = [name if value is True else f"{name}{value}" for name, value in self.sizes.items()]
        return f"{self.framework}:{','.join(items)}" if items else self.framework


def spec_help() -> str:
    """What spec strings may say, one framework after the other."""
    lines = []
    for framework in FRAMEWORKS.values():
        lines.append(f"{framework.name} ({framework.about}):")
        lines += [f"  {name + '<n>':12} {about}" for name, about in framework.sizes.items()]
        lines += [f"  {name:12} {about}" for name, about in framework.flags.items()]
    return "\n".join(lines)


def _item(framework: Framework, item: str) -> tuple[str, int | bool]:
    if item in framework.flags:
        return item, True
    if framework.name == "fsdp" and item.isdecimal():  # "fsdp:1024"
        item = f"dp{item}"
    found = _ITEM.fullmatch(item)
    name = found[1] if found else item
    is_vllm_ep = framework.name == "vllm" and name == "ep"
    if found is None or (name not in framework.sizes and not is_vllm_ep):
        raise ValueError(_unknown(framework, item, name))
    value = int(found[2])
    if not 1 <= value <= MAX_RANKS:
        raise ValueError(f"{framework.name}: expected {name} in [1, {MAX_RANKS}], got {item}")
    return name, value


def _unknown(framework: Framework, item: str, name: str) -> str:
    known = [f"{size}<n>" for size in framework.sizes] + list(framework.flags)
    text = f"{framework.name}: expected sizes and flags of {', '.join(known)}, got {item!r}"
    if name in framework.sizes:
        return f"{text}; write {name} with a number"
    hint = _HINTS.get((framework.name, name))
    if hint is None:
        near = difflib.get_close_matches(name, [*framework.sizes, *framework.flags], 1, 0.5)
        return f"{text}; did you mean {near[0]}?" if near else text
    return f"{text}; {hint}"


def _check_vllm_experts(sizes: Mapping[str, int | bool]) -> None:
    """vLLM's ep is a flag; a number beside it must be what it comes to."""
    over = int(sizes.get("dp", 1)) * int(sizes.get("tp", 1))
    if "ep" in sizes and sizes["ep"] is not True and sizes["ep"] != over:
        raise ValueError(
            f"vllm: expected ep (or ep{over}), got ep{sizes['ep']}: vLLM divides experts over dp x tp = {over} ranks"
        )
