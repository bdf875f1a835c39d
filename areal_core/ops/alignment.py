"""Shifts inside packed sequences, between logits rows and the tokens they predict.

Per-token values are token-aligned (entry t belongs to token t); logits are prediction-aligned (row t predicts token
t+1). The functions here convert between the two and never let a value cross into another sequence.
"""

from collections.abc import Mapping
from typing import Any, overload

import torch
from torch import Tensor

from areal_core.ops._dispatch import as_int64, call, register_fake
from areal_core.ops._segments import Fill, fill_values

_ops = torch.ops.areal_core


def next_token_labels(input_ids: Tensor, cu_seqlens: Tensor, ignore_index: int = -100) -> Tensor:
    """Label each prediction-aligned row: the next token of the same sequence.

    Args:
        input_ids: int [T].
        cu_seqlens: int32 or int64 [S+1].
        ignore_index: int, the label of the last token of each sequence.

    Returns:
        int64 [T] labels: row t of the logits predicts labels[t].

    On an accelerator the values of `cu_seqlens` are trusted; nothing synchronises. Bit-exact.

    Raises:
        ValueError: shapes or `cu_seqlens` that do not fit T.
        TypeError: ids or `cu_seqlens` that are not integers.
    """
    if input_ids.dim() == 0:
        raise ValueError("next_token_labels: expected input_ids of shape [T], got []")
    return _shift(
        "next_token_labels", as_int64(input_ids, "next_token_labels", "input_ids"), cu_seqlens, -1, ignore_index
    )


@overload
def to_token_aligned(x: Tensor, cu_seqlens: Tensor, fill: float = 0.0) -> Tensor: ...
@overload
def to_token_aligned(x: Mapping[str, Tensor], cu_seqlens: Tensor, fill: Fill = 0.0) -> dict[str, Tensor]: ...
def to_token_aligned(
    x: Tensor | Mapping[str, Tensor], cu_seqlens: Tensor, fill: Fill = 0.0
) -> Tensor | dict[str, Tensor]:
    """Move per-row values of the logits to the token they are about: x at t-1 goes to t inside each sequence.

    Args:
        x: any dtype [T, ...], prediction-aligned (logprobs, entropy of logits row t), or a dict of such tensors, which
            are moved in one pass.
        cu_seqlens: int32 or int64 [S+1].
        fill: float, or for a dict one per key (missing keys: 0), the value at the first token of each sequence, which
            no row predicts.

    Returns:
        [T, ...] of the dtype of x, token-aligned, or a dict of them. Differentiable: the last row of each sequence gets
        gradient 0.

    On an accelerator the values of `cu_seqlens` are trusted; nothing synchronises. Bit-exact.

    Raises:
        ValueError: shapes or `cu_seqlens` that do not fit T, a fill that the dtype can't hold.
        TypeError: `cu_seqlens` that are not integers.
    """
    return _shift("to_token_aligned", x, cu_seqlens, 1, fill)


@overload
def to_prediction_aligned(x: Tensor, cu_seqlens: Tensor, fill: float = 0.0) -> Tensor: ...
@overload
def to_prediction_aligned(x: Mapping[str, Tensor], cu_seqlens: Tensor, fill: Fill = 0.0) -> dict[str, Tensor]: ...
def to_prediction_aligned(
    x: Tensor | Mapping[str, Tensor], cu_seqlens: Tensor, fill: Fill = 0.0
) -> Tensor | dict[str, Tensor]:
    """Move token-aligned values to the logits row that predicts the token: x at t+1 goes to t inside each sequence.

    The counterpart of `to_token_aligned`, for what goes into the LM head: a loss mask, a temperature per token. A
    trainer that works on rows of the logits shifts everything that it has about tokens together, so that a version
    never stays behind its label:

        rows = to_prediction_aligned(
            {"labels": ids, "loss_mask": mask, "logprobs": logprobs, "versions": versions}, cu_seqlens,
            fill={"labels": -100, "versions": -1})

    Args:
        x: any dtype [T, ...], token-aligned, or a dict of such tensors, which are moved in one pass.
        cu_seqlens: int32 or int64 [S+1].
        fill: float, or for a dict one per key (missing keys: 0), the value at the last row of each sequence, which
            predicts nothing.

    Returns:
        [T, ...] of the dtype of x, prediction-aligned, or a dict of them. Differentiable: the first token of each
        sequence gets gradient 0.

    Raises:
        ValueError: shapes or `cu_seqlens` that do not fit T, a fill that the dtype can't hold.
        TypeError: `cu_seqlens` that are not integers.
    """
    return _shift("to_prediction_aligned", x, cu_seqlens, -1, fill)


def position_ids(cu_seqlens: Tensor, *, total_tokens: int | None = None) -> Tensor:
    """Number the tokens of each sequence from 0.

    Args:
        cu_seqlens: int32 or int64 [S+1].
        total_tokens: int, T. Left out, it is read from `cu_seqlens`: on an accelerator a synchronising read.

    Returns:
        int64 [T] on the device of `cu_seqlens`.

    Raises:
        ValueError: `cu_seqlens` that is not a running sum of lengths, or does not end at `total_tokens`.
        TypeError: `cu_seqlens` that are not integers.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"position_ids: expected cu_seqlens [S+1], got {list(cu_seqlens.shape)}")
    cu_seqlens = as_int64(cu_seqlens, "position_ids", "cu_seqlens")
    tokens = int(cu_seqlens[-1]) if total_tokens is None else total_tokens
    out: Tensor = call(_ops.position_ids, cu_seqlens, tokens)
    return out


@overload
def _shift(op: str, x: Tensor, cu_seqlens: Tensor, shift: int, fill: Fill) -> Tensor: ...
@overload
def _shift(op: str, x: Mapping[str, Tensor], cu_seqlens: Tensor, shift: int, fill: Fill) -> dict[str, Tensor]: ...
def _shift(
    op: str, x: Tensor | Mapping[str, Tensor], cu_seqlens: Tensor, shift: int, fill: Fill
) -> Tensor | dict[str, Tensor]:
    cu_seqlens = as_int64(cu_seqlens, op, "cu_seqlens")
    if isinstance(x, Tensor):
        if isinstance(fill, Mapping):
            raise ValueError(f"{op}: expected one fill for one tensor, got {dict(fill)}")
        out: Tensor = call(_ops.shift_tokens, x.contiguous(), cu_seqlens, shift, float(fill), public=op)
        return out
    if not x:
        return {}
    tensors = [value.contiguous() for value in x.values()]
    shifted = call(_ops.shift_segments, tensors, cu_seqlens, shift, fill_values(op, x, fill), public=op)
    return dict(zip(x, shifted, strict=True))


# --- fake kernels and gradients ---------------------------------------------------------------------------------------


def _fake_shift_tokens(x: Tensor, cu_seqlens: Tensor, shift: int, fill: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_position_ids(cu_seqlens: Tensor, total_tokens: int) -> Tensor:
    return cu_seqlens.new_empty(total_tokens)


def _fake_shift_segments(tensors: list[Tensor], cu_seqlens: Tensor, shift: int, fills: list[float]) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def _shift_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cu_seqlens, shift, _ = inputs
    ctx.save_for_backward(cu_seqlens)
    ctx.shift = shift


def _shift_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (cu_seqlens,) = ctx.saved_tensors
    return _ops.shift_tokens(grad.contiguous(), cu_seqlens, -ctx.shift, 0.0), None, None, None


def _shift_segments_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, cu_seqlens, shift, _ = inputs
    ctx.save_for_backward(cu_seqlens)
    ctx.shift = shift


def _shift_segments_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    (cu_seqlens,) = ctx.saved_tensors
    present = [g.contiguous() for g in grads if g is not None]
    fills = [0.0] * len(present)
    moved = iter(_ops.shift_segments(present, cu_seqlens, -ctx.shift, fills) if present else [])
    return [None if g is None else next(moved) for g in grads], None, None, None


register_fake("shift_tokens", _fake_shift_tokens)
register_fake("shift_segments", _fake_shift_segments)
register_fake("position_ids", _fake_position_ids)
torch.library.register_autograd("areal_core::shift_tokens", _shift_backward, setup_context=_shift_setup)
torch.library.register_autograd(
    "areal_core::shift_segments", _shift_segments_backward, setup_context=_shift_segments_setup
)
