"""The policy loss of given logits, which become their own gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal_core.ops._dispatch import OnceDifferentiable, as_int64, call, register_fake
from areal_core.ops._head_arguments import loss_inputs, row_arguments, split_temperature
from areal_core.ops._linear_chunks import row_dtype
from areal_core.ops._linear_loss_ops import TokenLoss, scale_
from areal_core.ops.lm_head import FusedPPOLossOutput
from areal_core.ops.logprob import logprob_from_logits
from areal_core.ops.loss import check_inputs, normalizer_tensor, ppo_loss, version_arguments
from areal_core.ops.loss_config import PPOLossConfig
from areal_core.ops.loss_stats import PPOLossStats

_OP = "ppo_loss_from_logits"
_DEFAULT_CONFIG = PPOLossConfig()


def ppo_loss_from_logits(
    logits: Tensor,
    labels: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    behavior_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    teacher_logprobs: Tensor | None = None,
    keep_mask: Tensor | None = None,
    versions: Tensor | None = None,
    current_version: int | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    normalizer: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    config: PPOLossConfig = _DEFAULT_CONFIG,
    ignore_index: int = -100,
) -> FusedPPOLossOutput:
    """Policy loss of logits: ppo_loss of logprob_from_logits, whose gradient overwrites the logits.

    Where the gradient of the loss at a token needs that token alone, one pass reads the logits and writes their
    gradient: rows in cache on a CPU, in the shared memory of a cluster on sm_90. Elsewhere the ops run one after the
    other, and backward overwrites the logits. The result is the same.

    Rows are prediction-aligned: row t of every input belongs to the prediction of labels[t].

    Args:
        logits: float32, bfloat16, float16 (float64 on CPU) [T, V]; any stride(0) of at least V, stride(-1) = 1. Theirs
            is the gradient's storage: after this call they hold no logits, their version counter has moved.
        labels, temperature, ignore_index: as in logprob_from_logits.
        proximal_logprobs, advantages, behavior_logprobs, ref_logprobs, teacher_logprobs: float32 (float64 for float64)
            [T], as in ppo_loss.
        loss_mask: bool or number [T], nonzero = live. Rows whose label is ignore_index count as masked.
        keep_mask, versions, current_version, normalizer, config: as in ppo_loss. The entropy is always there:
            entropy_coef needs no further input.
        cu_seqlens: as in ppo_loss, of the rows.

    Returns:
        FusedPPOLossOutput(loss, stats, logprobs, entropy). Only the loss is differentiable. Statistics are to the last
        bit those of ppo_loss for these logprobs and entropy.

    Logits that need no gradient are left alone. Backward scales by the gradient of the loss in place; a second one
    raises. Masked rows and non-finite logits: as in logprob_from_logits. Bitwise the same from run to run and for any
    number of threads.

    Raises:
        ValueError: as logprob_from_logits and ppo_loss do, before anything is overwritten.
        TypeError: wrong dtype.

    Source: see logprob_from_logits and ppo_loss.
    """
    if logits.dim() != 2:
        raise ValueError(f"{_OP}: expected logits of shape [T, V], got {logits.dim()}-D")
    labels, mask = row_arguments(_OP, logits, labels, loss_mask)
    temperatures, scalar = split_temperature(_OP, temperature, logits)
    optional = {
        "behavior_logprobs": behavior_logprobs,
        "ref_logprobs": ref_logprobs,
        "teacher_logprobs": teacher_logprobs,
    }
    tokens = {"proximal_logprobs": proximal_logprobs, "advantages": advantages}
    inputs = loss_inputs(_OP, logits, keep_mask, **tokens, **optional)
    live = labels != ignore_index if mask is None else mask & (labels != ignore_index)
    if not _is_fused(logits, config):
        row_options: dict[str, Any] = {"temperature": temperature, "loss_mask": live, "ignore_index": ignore_index}
        out = logprob_from_logits(logits, labels, **row_options, inplace_backward=True)
        options: dict[str, Any] = {"keep_mask": keep_mask, "cu_seqlens": cu_seqlens, "normalizer": normalizer}
        options |= {"versions": versions, "current_version": current_version}
        loss = ppo_loss(
            out.logprobs, proximal_logprobs, advantages, live, entropy=out.entropy, config=config, **optional, **options
        )
        return FusedPPOLossOutput(*loss, out.logprobs.detach(), out.entropy.detach())
    given = {**optional, "keep_mask": keep_mask, "normalizer": normalizer, "entropy": advantages}
    check_inputs(given, config)  # the entropy will be there
    counted = live.sum(dtype=torch.float64) if normalizer is None else normalizer
    divisor = normalizer_tensor(counted, logits, _OP)
    assert divisor is not None
    temperatures = None if temperatures is None else temperatures.contiguous()
    rows = (labels.contiguous(), temperatures, scalar, live.contiguous(), ignore_index)
    segments = None if cu_seqlens is None else as_int64(cu_seqlens, _OP, "cu_seqlens")
    of_rows = (*version_arguments(_OP, logits, versions, current_version), segments)
    token_loss = TokenLoss(inputs, divisor, [float(x) for x in config._native()], *of_rows)
    value, stats, logprobs, entropy = call(_LogitsLoss.apply, logits, rows, token_loss)
    return FusedPPOLossOutput(value, PPOLossStats(stats), logprobs, entropy)


def _is_fused(logits: Tensor, config: PPOLossConfig) -> bool:
    """Whether one pass serves: a gradient is wanted, of a loss without sequences, and there is a kernel.

    Not in float16: a gradient computed in forward has not seen the loss scale that keeps it from underflowing.
    """
    wanted = torch.is_grad_enabled() and logits.requires_grad and logits.dtype != torch.float16
    if torch.compiler.is_compiling() or not wanted or config.needs_sequences or logits.device.type == "meta":
        return False
    fits: bool = torch.ops.areal_core.fused_policy_loss_fits.default(logits.detach())
    return fits


class _LogitsLoss(torch.autograd.Function):
    """Gives (loss, stats, logprobs, entropy); overwrites the logits with the gradient of the loss."""

    op_name = _OP

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: tuple[Any, ...], token_loss: TokenLoss) -> tuple[Tensor, ...]:
        """`rows`: labels, temperatures, temperature, live, ignore_index."""
        *_, live, _ignore_index = rows
        gradient, divisor = logits.detach(), token_loss.normalizer
        scale = torch.where(live.any(), 1 / divisor, 0).to(row_dtype(logits.dtype))
        native = torch.ops.areal_core.fused_policy_loss_.default
        logprobs, entropy, _lse = native(gradient, *rows, *token_loss.inputs, scale, token_loss.options)
        torch.autograd.graph.increment_version(gradient)
        loss, stats, *_ = token_loss.evaluate(logprobs, entropy, live)
        ctx.mark_non_differentiable(stats, logprobs, entropy)
        ctx.save_for_backward(gradient, logits)
        return loss, stats, logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """In place: a second backward raises."""
        gradient, logits = ctx.saved_tensors
        with torch.no_grad():
            scale_(gradient, grad_loss)
            torch.autograd.graph.increment_version(gradient)
        once: Any = OnceDifferentiable.apply
        return once(_OP, gradient, grad_loss, logits), None, None


def _fake(
    logits: Tensor,
    labels: Tensor,
    temperatures: Any,
    temperature: float,
    mask: Tensor,
    ignore_index: int,
    proximal: Tensor,
    *_: Any,
) -> Any:
    return tuple(torch.empty_like(proximal) for _ in range(3))


register_fake("fused_policy_loss_", _fake)
register_fake("fused_policy_loss_fits", lambda logits: True)
