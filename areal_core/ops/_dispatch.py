"""Calls into the native ops: the integer arguments they take, and their errors as Python means them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from areal_core import _C

# How torch's dispatcher refuses a number of the wrong type.
_WRONG_TYPE = re.compile(r"Expected a value of type '(.+?)' for argument '(\w+)' but instead found type '(.+?)'")


def call(op: Any, *args: Any, public: str | None = None) -> Any:
    """Call a native op; a broken contract raises ValueError (TypeError for a wrong dtype) instead of RuntimeError.

    Native checks read "<op>: expected <what>, got <value>"; `public` is the function that the user called, where it
    has another name. Inside a compiled graph nothing can catch, so there the same text arrives as RuntimeError.

    The ops have gradients for torch.autograd alone: forward-mode derivatives, which torch would take for zero, and
    torch.func.grad raise NotImplementedError, as does vmap over an op that returns a list.
    """
    if torch.compiler.is_compiling():
        return op(*args)
    if forward_ad._current_level >= 0:
        _refuse_tangents(public or _name(op), args)
    try:
        return op(*args)
    except (RuntimeError, _C.Error) as error:  # which one depends on how torch was built
        name = public or _name(op)
        text = str(error).split("\n", 1)[0]
        if wrong := _WRONG_TYPE.search(text):
            raise TypeError(f"{name}: expected {wrong[2]} of type {wrong[1]}, got {wrong[3]}") from None
        if "functorch transforms" in text:
            raise NotImplementedError(f"{name}: expected torch.autograd.grad, got torch.func.grad") from None
        if text.startswith("Batching rule not implemented"):
            raise NotImplementedError(f"{name}: expected a loop, got torch.func.vmap") from None
        if ": expected " not in text:
            raise
        text = text if public is None else f"{public}: {text.split(': ', 1)[1]}"
        raise (TypeError if " dtype " in text else ValueError)(text) from None


def register_fake(name: str, fake: Callable[..., Any]) -> None:
    """Register what `areal_core::<name>` gives for tensors without values: meta tensors, and those of a trace.

    There, and there alone, no native code looks at the devices: one tensor elsewhere would give a result of any values.
    """

    def checked(*args: Any) -> Any:
        arguments = getattr(torch.ops.areal_core, name).default._schema.arguments
        device = None
        for argument, value in zip(arguments, args, strict=False):
            for x in _tensors([value]):
                device = x.device if device is None else device
                if x.device != device:
                    raise ValueError(f"{name}: expected {argument.name} on {device}, got {x.device}")
        return fake(*args)

    torch.library.register_fake(f"areal_core::{name}", checked)


def _tensors(args: Any) -> Iterator[Tensor]:
    return (x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, Tensor))


def _refuse_tangents(name: str, args: tuple[Any, ...]) -> None:
    if any(forward_ad.unpack_dual(x).tangent is not None for x in _tensors(args)):  # type: ignore[no-untyped-call]
        raise NotImplementedError(f"{name}: expected reverse-mode differentiation, got forward mode (jvp)")


def _name(op: Any) -> str:
    """Of a native op, or of the apply of an autograd function that states it."""
    if name := getattr(getattr(op, "__self__", None), "op_name", None):
        return str(name)
    return str(op).removeprefix("areal_core.").removesuffix(".default")


def as_int64(tensor: Tensor, op: str, name: str) -> Tensor:
    """An integer argument (cu_seqlens, ids, lengths) as the native ops take it: int64 and contiguous.

    Raises:
        TypeError: a dtype that is not an integer one.
    """
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise TypeError(f"{op}: expected {name} of an integer dtype, got {tensor.dtype}")
    return tensor.to(torch.int64).contiguous()


class OnceDifferentiable(torch.autograd.Function):
    """Passes a gradient on and refuses to be differentiated: it was computed, not recorded."""

    @staticmethod
    def forward(ctx: Any, op: str, grad: Tensor, *sources: Tensor) -> Tensor:
        """Give the gradient of `op`, a function of the sources."""
        ctx.op = op
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Refuse."""
        raise NotImplementedError(f"{ctx.op}: expected one backward pass; the op has no second derivative")
