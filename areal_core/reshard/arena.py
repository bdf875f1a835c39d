"""The tensors that lie in an arena of a version store, and the check of those that are to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from areal_core import _C
from areal_core.reshard.spec import Spec


class ArenaTensors(NamedTuple):
    """What lies where in an arena; both in the same order."""

    specs: dict[str, Spec]
    offsets_bytes: list[int]

    def views(self, buffer: _C.ArenaView) -> dict[str, Tensor]:
        """Tensors over an arena; each keeps the buffer alive."""
        storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
        views = {}
        for (name, spec), offset in zip(self.specs.items(), self.offsets_bytes, strict=True):
            first = offset // spec.dtype.itemsize
            views[name] = torch.empty(0, dtype=spec.dtype).set_(storage, first, spec.shape)  # type: ignore[call-overload]
        return views

    def in_order(self, call: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors in the order of the layout. Raises ValueError unless they are what the specs say."""
        unknown = sorted(tensors.keys() - self.specs.keys())
        if unknown:
            raise ValueError(f"{call}: tensor '{unknown[0]}': expected no tensor of that name, got one")
        ordered = []
        for name, spec in self.specs.items():
            if name not in tensors:
                raise ValueError(f"{call}: tensor '{name}': expected, got no tensor of that name")
            _check_tensor(call, name, spec, tensors[name])
            ordered.append(tensors[name])
        return ordered


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's bytes lie in host memory one behind the other, as they are meant."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _check_tensor(call: str, name: str, spec: Spec, tensor: Tensor) -> None:
    """Runs for every tensor of every publication: no text before it is due."""
    expected: str | None = None
    if not isinstance(tensor, Tensor):
        expected = f"a torch.Tensor, got {type(tensor).__name__}"
    elif tensor.dtype != spec.dtype:
        expected = f"dtype = {spec.dtype}, got {tensor.dtype}"
    elif tensor.shape != spec.shape:
        expected = f"shape = {list(spec.shape)}, got {list(tensor.shape)}"
    elif is_traceable_wrapper_subclass(tensor):
        expected = f"a plain tensor, got {type(tensor).__name__} (gather it first)"
    elif tensor.layout != torch.strided or tensor.is_meta:
        expected = f"a dense tensor with storage, got {tensor.layout} on {tensor.device}"
    if expected is not None:
        raise ValueError(f"{call}: tensor '{name}': expected {expected}")
