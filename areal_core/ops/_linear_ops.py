"""The torch ops of the fused LM head: chunk loops, fake kernels and autograd formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal_core.ops._dispatch import OnceDifferentiable
from areal_core.ops._linear_chunks import (
    PARTS,
    STATISTICS,
    ChunkedLinear,
    ChunkRows,
    LinearGradients,
    RowOutputs,
    Rows,
    live_indices,
    merge,
    row_dtype,
    split,
    take,
)

ROWS = "Tensor labels, Tensor? temperatures, float temperature, Tensor? loss_mask, int ignore_index"
LINEAR = "Tensor hidden, Tensor weight, Tensor? bias, ScalarType operand_dtype"


@torch.library.custom_op(
    "areal_core::linear_logprob_partial",
    mutates_args=(),
    schema=f"({LINEAR}, {ROWS}, int? chunk_tokens, int? live_tokens, int vocab_start, int vocab_total) -> Tensor",
)
def linear_logprob_partial(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operand_dtype: torch.dtype,
    labels: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    loss_mask: Tensor | None,
    ignore_index: int,
    chunk_tokens: int | None,
    live_tokens: int | None,
    vocab_start: int,
    vocab_total: int,
) -> Tensor:
    """Give [T, 4]: what this rank's rows of the weight contribute, as logprob_partial does."""
    rows = Rows(labels, temperatures, temperature, loss_mask, ignore_index)
    rows.check("linear_logprob", vocab_total)
    linear, live = ChunkedLinear(hidden, weight, bias, operand_dtype), rows.live()
    outputs = RowOutputs(live, PARTS, linear.dtype)
    for index in split(live_indices("linear_logprob", live, live_tokens), len(weight), chunk_tokens):
        logits = linear.logits(linear.operand(index))
        outputs.put(index, ChunkRows(index, rows).parts(logits, vocab_start, vocab_total))
    return outputs.results()


@linear_logprob_partial.register_fake
def _(hidden: Tensor, *args: Any) -> Tensor:
    return hidden.new_empty(hidden.shape[0], PARTS, dtype=row_dtype(hidden.dtype))


@torch.library.custom_op(
    "areal_core::linear_logprob",
    mutates_args=(),
    schema=f"({LINEAR}, {ROWS}, int? chunk_tokens, int? live_tokens, Tensor? parts, int vocab_start, "
    "Tensor? main_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operand_dtype: torch.dtype,
    labels: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    loss_mask: Tensor | None,
    ignore_index: int,
    chunk_tokens: int | None,
    live_tokens: int | None,
    parts: Tensor | None,
    vocab_start: int,
    main_grad: Tensor | None,
) -> tuple[Tensor, ...]:
    """Give (logprobs, entropy, lse, row_max, log_sum) of all rows; main_grad is for the autograd formula.

    With parts [ranks, T, 4] nothing is multiplied: they are what all ranks' linear_logprob_partial gave.
    """
    rows = Rows(labels, temperatures, temperature, loss_mask, ignore_index)
    if parts is not None:
        return merge(parts, rows, vocab_start)
    rows.check("linear_logprob", len(weight))
    linear, live = ChunkedLinear(hidden, weight, bias, operand_dtype), rows.live()
    outputs = RowOutputs(live, STATISTICS, linear.dtype)
    for index in split(live_indices("linear_logprob", live, live_tokens), len(weight), chunk_tokens):
        statistics = ChunkRows(index, rows).statistics(linear.logits(linear.operand(index)))
        outputs.put(index, torch.stack(statistics, 1))
    return outputs.columns()


@linear_logprob.register_fake
def _(hidden: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(hidden.new_empty(hidden.shape[0], dtype=row_dtype(hidden.dtype)) for _ in range(5))


@torch.library.custom_op(
    "areal_core::linear_logprob_backward",
    mutates_args=("main_grad",),
    schema=f"(Tensor?[] upstream, Tensor[] statistics, {LINEAR}, {ROWS}, int? chunk_tokens, int? live_tokens, "
    "int vocab_start, bool[] needs, Tensor(a!)? main_grad) -> (Tensor, Tensor, Tensor)",
)
def linear_logprob_backward(
    upstream: list[Tensor | None],
    statistics: list[Tensor],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operand_dtype: torch.dtype,
    labels: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    loss_mask: Tensor | None,
    ignore_index: int,
    chunk_tokens: int | None,
    live_tokens: int | None,
    vocab_start: int,
    needs: list[bool],
    main_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients of hidden, weight and bias, empty where not needed or in main_grad."""
    rows = Rows(labels, temperatures, temperature, loss_mask, ignore_index)
    linear = ChunkedLinear(hidden, weight, bias, operand_dtype)
    gradients = LinearGradients(linear, needs, main_grad)
    for index in split(live_indices("linear_logprob", rows.live(), live_tokens), len(weight), chunk_tokens):
        operand = linear.operand(index)
        logits = linear.logits(operand)
        upstream_rows = [None if x is None else take(x, index) for x in upstream]
        statistics_rows = [take(x, index) for x in statistics]
        ChunkRows(index, rows).to_gradient_(logits, upstream_rows, statistics_rows, vocab_start)
        gradients.add(index, operand, logits)
    return gradients.results(weight.dtype)


@linear_logprob_backward.register_fake
def _(upstream: Any, statistics: Any, hidden: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    needs, main_grad = args[-2:]
    vocab = weight.shape[0]
    return (
        hidden.new_empty(hidden.shape[0] if needs[0] else 0, hidden.shape[1]),
        weight.new_empty(vocab if needs[1] and main_grad is None else 0, weight.shape[1]),
        weight.new_empty(vocab if needs[2] else 0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, operand_dtype, labels, temperatures, temperature, loss_mask, *options = inputs
    ignore_index, chunk_tokens, live_tokens, _parts, vocab_start, main_grad = options
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3:])
    ctx.save_for_backward(hidden, weight, bias, labels, temperatures, loss_mask, *output)
    ctx.operand_dtype, ctx.temperature = operand_dtype, temperature
    ctx.options = (ignore_index, chunk_tokens, live_tokens, vocab_start)
    ctx.main_grad = main_grad  # not saved: backward of another call may change it first


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, labels, temperatures, loss_mask, *statistics = ctx.saved_tensors
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
    with torch.no_grad():
        results = linear_logprob_backward(
            list(grads[:3]),
            statistics,
            hidden,
            weight,
            bias,
            ctx.operand_dtype,
            labels,
            temperatures,
            ctx.temperature,
            loss_mask,
            *ctx.options,
            needs,
            ctx.main_grad,
        )
    wanted = [needs[0], needs[1] and ctx.main_grad is None, needs[2]]
    sources = [x for x in (hidden, weight, bias, *grads[:3]) if x is not None]
    once: Any = OnceDifferentiable.apply
    gradients = [
        once("linear_logprob", grad, *sources) if want else None for want, grad in zip(wanted, results, strict=True)
    ]
    return *gradients, *(None,) * 11


linear_logprob.register_autograd(_backward, setup_context=_setup_context)
