"""The torch op of the LM head fused with a policy loss: the gradient is ready when forward ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_core.ops._dispatch import OnceDifferentiable, register_fake
from areal_core.ops._linear_chunks import (
    STATISTICS,
    ChunkedLinear,
    ChunkRows,
    LinearGradients,
    RowOutputs,
    Rows,
    live_indices,
    longest,
    row_dtype,
    split,
    take,
)
from areal_core.ops._linear_ops import LINEAR, ROWS

_INPUTS = (
    "Tensor proximal_logprobs, Tensor advantages, Tensor? behavior_logprobs, Tensor? ref_logprobs, "
    "Tensor? teacher_logprobs, Tensor? keep_mask"
)
_ppo_loss = torch.ops.areal_core.ppo_loss.default


class TokenLoss(NamedTuple):
    """A loss whose gradient at a token needs that token alone, as the native ppo_loss takes it."""

    inputs: Sequence[Tensor | None]  # per row: proximal, advantages, behavior, reference, teacher, keep_mask
    normalizer: Tensor
    options: Sequence[float]  # the scalar arguments, integers among them
    # Of all rows, for statistics:
    versions: Tensor | None = None
    current_version: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def at(self, index: Tensor) -> TokenLoss:
        """The loss of a chunk of rows."""
        inputs = [None if x is None else take(x, index) for x in self.inputs]
        return TokenLoss(inputs, self.normalizer, self.options)

    def evaluate(self, logprobs: Tensor, entropy: Tensor, live: Tensor) -> tuple[Tensor, ...]:
        """Give (loss, stats, dL/dlogprobs, dL/dentropy)."""
        proximal, advantages, behavior, reference, *others = self.inputs
        types = [argument.type for argument in _ppo_loss._schema.arguments[-len(self.options) :]]
        options = [int(x) if str(t) == "int" else x for t, x in zip(types, self.options, strict=True)]
        others += [self.versions, self.current_version, self.cu_seqlens]
        loss, stats, grad_logprobs, grad_entropy, scale = _ppo_loss(
            logprobs, proximal, advantages, live, behavior, reference, entropy, *others, self.normalizer, *options
        )
        grad_entropy = grad_entropy * scale if grad_entropy.numel() else torch.zeros_like(grad_logprobs)
        return loss, stats, grad_logprobs * scale, grad_entropy


@torch.library.custom_op(
    "areal_core::linear_ppo_forward_backward",
    mutates_args=(),
    schema=f"({LINEAR}, {ROWS}, int? chunk_tokens, int? live_tokens, {_INPUTS}, Tensor normalizer, "
    "float[] options, Tensor? versions, Tensor? current_version, Tensor? cu_seqlens, bool[] needs, "
    "bool keeps_float32) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def linear_ppo_forward_backward(
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
    proximal_logprobs: Tensor,
    advantages: Tensor,
    behavior_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    teacher_logprobs: Tensor | None,
    keep_mask: Tensor | None,
    normalizer: Tensor,
    options: list[float],
    versions: Tensor | None,
    current_version: Tensor | None,
    cu_seqlens: Tensor | None,
    needs: list[bool],
    keeps_float32: bool,
) -> tuple[Tensor, ...]:
    """Give (loss, stats, logprobs, entropy) and the gradients of hidden, weight and bias, empty where not needed.

    The latter two are of the weight's dtype, or as they added up.
    """
    rows = Rows(labels, temperatures, temperature, loss_mask, ignore_index)
    rows.check("linear_ppo_loss", len(weight))
    inputs = (proximal_logprobs, advantages, behavior_logprobs, ref_logprobs, teacher_logprobs, keep_mask)
    token_loss, live = TokenLoss(inputs, normalizer, options, versions, current_version, cu_seqlens), rows.live()
    chunks = split(live_indices("linear_ppo_loss", live, live_tokens), len(weight), chunk_tokens)
    linear = ChunkedLinear(hidden, weight, bias, operand_dtype, longest(chunks))
    gradients, outputs = LinearGradients(linear, needs), RowOutputs(live, STATISTICS, linear.dtype)
    for index in chunks:
        operand, chunk = linear.operand(index), ChunkRows(index, rows)
        logits = linear.logits(operand)
        statistics = chunk.statistics(logits)
        outputs.put(index, torch.stack(statistics, 1))
        if any(needs):
            logprobs, entropy, *_ = statistics
            upstream = token_loss.at(index).evaluate(logprobs, entropy, index < len(live))[2:]
            chunk.to_gradient_(logits, [*upstream, None], statistics)
            gradients.add(index, operand, logits)
    logprobs, entropy, *_ = outputs.columns()
    # All rows at once: to the last bit what ppo_loss gives for these log-probabilities.
    loss, stats, *_ = token_loss.evaluate(logprobs, entropy, live)
    results = gradients.results(linear.dtype if keeps_float32 else weight.dtype)
    return loss, stats, logprobs, entropy, *results


@linear_ppo_forward_backward.register_fake
def _(hidden: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *inputs, normalizer, options, versions, current_version, cu_seqlens, needs, keeps_float32 = args[9:]
    rows = hidden.new_empty(hidden.shape[0], dtype=row_dtype(hidden.dtype))
    token_loss = TokenLoss(inputs, normalizer, options, versions, current_version, cu_seqlens)
    loss, stats, *_ = token_loss.evaluate(rows, rows, rows.to(torch.bool))
    like = rows if keeps_float32 else weight
    return (
        loss,
        stats,
        torch.empty_like(rows),
        torch.empty_like(rows),
        hidden.new_empty(hidden.shape[0] if needs[0] else 0, hidden.shape[1]),
        like.new_empty(weight.shape[0] if needs[1] else 0, weight.shape[1]),
        like.new_empty(weight.shape[0] if needs[2] else 0),
    )


class LinearPPOLoss(torch.autograd.Function):
    """Gives (loss, stats, logprobs, entropy); the gradient of the loss scales what forward has computed.

    Written out rather than registered for the op, whose outputs it may not change: it scales the gradients in place.
    """

    op_name = "linear_ppo_loss"

    @staticmethod
    def forward(
        ctx: Any, main_grad: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any
    ) -> tuple[Tensor, ...]:
        """Arguments are those of the op after bias, but for keeps_float32."""
        op = torch.ops.areal_core.linear_ppo_forward_backward.default
        loss, stats, logprobs, entropy, *gradients = op(hidden, weight, bias, *arguments, main_grad is not None)
        ctx.mark_non_differentiable(stats, logprobs, entropy)
        ctx.save_for_backward(hidden, weight, bias, *gradients)
        ctx.main_grad = main_grad  # not saved: backward of another call may change it first
        ctx.argument_count = len(arguments)
        return loss, stats, logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """In place: a second backward raises."""
        hidden, weight, bias, *gradients = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[1:4])
        with torch.no_grad():
            if needs[1] and ctx.main_grad is not None:
                ctx.main_grad.addcmul_(gradients[1], grad_loss.to(ctx.main_grad.dtype))
                needs[1] = False
            for gradient, need in zip(gradients, needs, strict=True):
                if need:
                    scale_(gradient, grad_loss)
            torch.autograd.graph.increment_version(gradients)
        sources = [x for x in (grad_loss, hidden, weight, bias) if x is not None]
        once: Any = OnceDifferentiable.apply
        results = [
            once("linear_ppo_loss", grad, *sources) if need else None
            for grad, need in zip(gradients, needs, strict=True)
        ]
        return None, *results, *(None,) * ctx.argument_count


def scale_(gradient: Tensor, factor: Tensor) -> None:
    """gradient *= factor, a 0-d tensor; where it is exactly 1 the gradient is neither read nor written."""
    if torch.compiler.is_compiling():
        gradient.mul_(factor)
    elif gradient.numel() > 0:
        one = factor.reshape(1).to(row_dtype(gradient.dtype))
        torch.ops.areal_core.scale_.default(gradient, one)


register_fake("scale_", lambda values, factor: None)
