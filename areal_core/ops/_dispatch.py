"""Calls into the native ops, with their errors as Python means them."""

from __future__ import annotations

from typing import Any

import torch

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
