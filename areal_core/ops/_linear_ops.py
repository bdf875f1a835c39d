"""The torch ops of the fused LM head: chunk loops, fake kernels and autograd formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from areal_core.ops._dispatch import OnceDifferentiable
from areal_core.ops._linear_chunks import (
    PARTS,
    STATISTICS,
    ChunkedLinear,
    ChunkRows,
    LinearGradients,
    RowOutputs,
    Rows,
    chunk_length,
    live_indices,
    live_places,
    longest,
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
    live = rows.live()
    chunks = split(live_indices("linear_logprob", live, live_tokens), len(weight), chunk_tokens)
    linear = ChunkedLinear(hidden, weight, bias, operand_dtype, longest(chunks))
    outputs = RowOutputs(live, PARTS, linear.dtype)
    for index in chunks:
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
    "Tensor? main_grad, int kept_rows) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
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
    kept_rows: int,
) -> tuple[Tensor, ...]:
    """Give (logprobs, entropy, lse, row_max, log_sum) of all rows, and a buffer of kept_rows * V logits.

    The buffer begins with those of the last chunk, for backward; kept_rows is what rows_to_keep gives, or 0. main_grad
    is for the autograd formula. With parts [ranks, T, 4], what all ranks' linear_logprob_partial gave, nothing is
    multiplied, and kept_rows is 0.
    """
    rows = Rows(labels, temperatures, temperature, loss_mask, ignore_index)
    if parts is not None:
        return *merge(parts, rows, vocab_start), hidden.new_empty(0, dtype=row_dtype(hidden.dtype))
    rows.check("linear_logprob", len(weight))
    live = rows.live()
    chunks = split(live_indices("linear_logprob", live, live_tokens), len(weight), chunk_tokens)
    linear = ChunkedLinear(hidden, weight, bias, operand_dtype, longest(chunks))
    outputs = RowOutputs(live, STATISTICS, linear.dtype)
    for index in chunks:
        statistics = ChunkRows(index, rows).statistics(linear.logits(linear.operand(index)))
        outputs.put(index, torch.stack(statistics, 1))
    return *outputs.columns(), linear.buffer if kept_rows else linear.buffer.new_empty(0)


def rows_to_keep(rows: Rows, vocab: int, chunk_tokens: int | None, live_tokens: int | None) -> int:
    """Length of the longest chunk, where backward may find the last one's logits in the buffer.

    0 where the number of live rows cannot be known: in traces, in vmap and without values.
    """
    live = rows.live()
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or is_fake(live) or live.is_meta:
        return 0
    return chunk_length(live_places(live, live_tokens), vocab, chunk_tokens, live.device)


@linear_logprob.register_fake
def _(hidden: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, ...]:
    sizes = [hidden.shape[0]] * STATISTICS + [args[-1] * weight.shape[0]]
    return tuple(hidden.new_empty(size, dtype=row_dtype(hidden.dtype)) for size in sizes)


@torch.library.custom_op(
    "areal_core::linear_logprob_backward",
    mutates_args=("main_grad", "kept"),
    schema=f"(Tensor?[] upstream, Tensor[] statistics, {LINEAR}, {ROWS}, int? chunk_tokens, int? live_tokens, "
    "int vocab_start, bool[] needs, Tensor(a!)? main_grad, Tensor(b!)? kept) -> (Tensor, Tensor, Tensor)",
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
    kept: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients of hidden, weight and bias, empty where not needed or in main_grad.

    `kept`: the buffer of linear_logprob, which is overwritten. Without it all logits are computed again.
    """
    rows = Rows(labels, temperatures, temperature, loss_mask, ignore_index)
    chunks = split(live_indices("linear_logprob", rows.live(), live_tokens), len(weight), chunk_tokens)
    linear = ChunkedLinear(hidden, weight, bias, operand_dtype, longest(chunks) if kept is None else kept)
    gradients = LinearGradients(linear, needs, main_grad)
    for i, index in enumerate(reversed(chunks)):
        operand = linear.operand(index)
        logits = linear.last_logits(operand) if i == 0 and kept is not None else linear.logits(operand)
        upstream_rows = [None if x is None else take(x, index) for x in upstream]
        statistics_rows = [take(x, index) for x in statistics]
        ChunkRows(index, rows).to_gradient_(logits, upstream_rows, statistics_rows, vocab_start)
        gradients.add(index, operand, logits)
    return gradients.results(weight.dtype)


@linear_logprob_backward.register_fake
def _(upstream: Any, statistics: Any, hidden: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    needs, main_grad, _kept = args[-3:]
    vocab = weight.shape[0]
    return (
        hidden.new_empty(hidden.shape[0] if needs[0] else 0, hidden.shape[1]),
        weight.new_empty(vocab if needs[1] and main_grad is None else 0, weight.shape[1]),
        weight.new_empty(vocab if needs[2] else 0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], kept: Tensor | None = None) -> None:
    hidden, weight, bias, operand_dtype, labels, temperatures, temperature, loss_mask, *options = inputs
    ignore_index, chunk_tokens, live_tokens, _parts, vocab_start, main_grad, _kept_rows = options
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3:])
    ctx.save_for_backward(hidden, weight, bias, labels, temperatures, loss_mask, kept, *output[:STATISTICS])
    ctx.operand_dtype, ctx.temperature = operand_dtype, temperature
    ctx.options = (ignore_index, chunk_tokens, live_tokens, vocab_start)
    ctx.main_grad = main_grad  # not saved: backward of another call may change it first
    ctx.may_use_kept = kept is not None


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, labels, temperatures, loss_mask, kept, *statistics = ctx.saved_tensors
    # Overwritten below; a second backward, through a retained graph, computes them again. That is no change of a
    # saved tensor to complain about: .data has a version of its own.
    kept, ctx.may_use_kept = (kept.data if ctx.may_use_kept else None), False
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
            kept,
        )
    wanted = [needs[0], needs[1] and ctx.main_grad is None, needs[2]]
    sources = [x for x in (hidden, weight, bias, *grads[:3]) if x is not None]
    once: Any = OnceDifferentiable.apply
    gradients = [
        once("linear_logprob", grad, *sources) if want else None for want, grad in zip(wanted, results, strict=True)
    ]
    return *gradients, *(None,) * 12


linear_logprob.register_autograd(_backward, setup_context=_setup_context)


class LinearLogprobThatKeeps(torch.autograd.Function):
    """The op, whose backward finds the logits of the last chunk and overwrites them.

    Written out rather than registered for the op, whose outputs it may not change.
    """

    op_name = "linear_logprob"

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """Inputs and outputs are those of the op, but for the buffer."""
        *output, kept = torch.ops.areal_core.linear_logprob.default(*inputs)
        _setup_context(ctx, inputs, tuple(output), kept)
        return tuple(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Of the op."""
        return _backward(ctx, *grads)
