"""A tensor before there is one: dtype and shape, and how dtypes are named across processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Their scale and zero point lie beside the tensor's bytes.
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True)
class Spec:
    """What is known of a tensor before there is one: dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, value: Tensor | Spec) -> Spec:
        """The spec of a tensor; a spec stays itself."""
        return value if isinstance(value, Spec) else cls(value.dtype, tuple(value.shape))


def dtype_name(dtype: torch.dtype) -> str:
    """How both sides of a transfer call a dtype: "bfloat16", "float8_e4m3fn"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(call: str, tensor: str, name: str, item_bytes: int | None = None) -> torch.dtype:
    """The dtype of that name. Raises ValueError naming the call and the tensor unless its elements are plain bytes."""
    dtype = _DTYPES.get(name)
    if dtype is None or item_bytes not in (None, dtype.itemsize):
        of_bytes = "" if item_bytes is None else f" of {item_bytes} bytes"
        raise ValueError(f"{call}: tensor '{tensor}': expected a dtype of this torch, got {name}{of_bytes}")
    if dtype in _QUANTIZED:
        raise ValueError(f"{call}: tensor '{tensor}': expected a dtype of plain bytes, got {name}")
    return dtype
