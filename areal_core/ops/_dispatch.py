"""Calls into the native ops: the integer arguments they take, and their errors as Python means them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal_core import _C


def call(op: Any, *args: Any) -> Any:
    """Call a native op; a broken contract raises ValueError (TypeError for a wrong dtype) instead of RuntimeError.

    Native checks read "<op>: expected <what>, got <value>". Inside a compiled graph nothing can catch, so there the
    same text arrives as RuntimeError.
    """
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        return op(*args)
    except (RuntimeError, _C.Error) as error:  # which one depends on how torch was built
        text = str(error).split("\n", 1)[0]
        if ": expected " not in text:
            raise
        raise (TypeError if " dtype " in text else ValueError)(text) from None


def as_int64(tensor: Tensor, op: str, name: str) -> Tensor:
    """An integer argument (cu_seqlens, ids, lengths) as the native ops take it: int64 and contiguous.

    Raises:
        TypeError: a dtype that is not an integer one.
    """
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise TypeError(f"{op}: expected {name} of an integer dtype, got {tensor.dtype}")
    return tensor.to(torch.int64).contiguous()
