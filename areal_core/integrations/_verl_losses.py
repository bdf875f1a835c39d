"""verl's losses on our ops: value loss, aggregation, KL penalty, and what they share with the policy losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from areal_core import ops
from areal_core.integrations._adapters import (
    NotOursError,
    Reduction,
    aggregate,
    any_true,
    check_tokens,
    computed_dtype,
    has_kernels,
    is_not_finite,
    is_usable_total,
    k3_penalty,
)
from areal_core.integrations._patch import Original


def reduction_of(
    mode: str,
    mask: Tensor,
    dp_size: int = 1,
    batch_num_tokens: Any = None,
    global_batch_size: Any = None,
    loss_scale_factor: Any = None,
) -> Reduction:
    """What a loss_agg_mode with the totals of the global batch is for ours."""
    total = batch_num_tokens if mode == "token-mean" else global_batch_size
    if mode != "token-sum" and (not is_usable_total(total) or (total is None and dp_size > 1)):
        raise NotOursError("a total of the global batch that is missing or not positive")
    normalizer = None if total is None else total / dp_size
    if mode == "token-mean":
        return Reduction("token_mean", normalizer)
    if mode == "token-sum":
        return Reduction("constant", 1 / dp_size)
    if mode == "seq-mean-token-mean":
        return Reduction("sequence_mean_token_mean", normalizer)
    if mode == "seq-mean-token-sum":
        return Reduction("sequence_mean_token_sum", normalizer)
    if mode == "seq-mean-token-sum-norm":
        return Reduction(
            "sequence_mean_token_sum", normalizer, mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
        )
    raise NotOursError(f"loss_agg_mode {mode}")


def value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: Any = None,
    global_batch_size: Any = None,
    loss_scale_factor: Any = None,
    *,
    original: Original,
) -> Any:
    """PPO's clipped value loss."""
    totals = (dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    try:
        check_tokens(response_mask, vpreds, returns, values, strict=original.strict)
        reduction = reduction_of(loss_agg_mode, response_mask, *totals)
        if reduction.aggregation == "sequence_mean_token_mean" or not cliprange_value > 0:
            raise NotOursError("loss_agg_mode seq-mean-token-mean, or no clip range")
    except NotOursError as reason:
        return original.fall_through(
            str(reason), vpreds, returns, values, response_mask, cliprange_value, loss_agg_mode, *totals
        )
    live, normalizer = response_mask.bool(), reduction.normalizer
    if normalizer is None and reduction.aggregation == "sequence_mean_token_sum":
        normalizer = live.any(1).sum().clamp(min=1)
    dtype = computed_dtype(vpreds, returns, values)
    new, old, targets = (x.to(dtype).reshape(-1) for x in (vpreds, values, returns))
    out = ops.value_loss(new, old, targets, live.reshape(-1), clip=float(cliprange_value), normalizer=normalizer)
    return reduction.finish(out.loss), out.stats.finalize().clip_fraction.to(dtype)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: Any = None,
    global_batch_size: Any = None,
    loss_scale_factor: Any = None,
    *,
    original: Original,
) -> Any:
    """A loss of its terms."""
    totals = (dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    try:
        check_tokens(loss_mask, loss_mat, strict=original.strict)
        return aggregate(loss_mat, loss_mask.bool(), reduction_of(loss_agg_mode, loss_mask, *totals))
    except NotOursError as reason:
        return original.fall_through(str(reason), loss_mat, loss_mask, loss_agg_mode, *totals)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str, *, original: Original) -> Any:
    """k3 without cancellation: verl's clamps, of the log-ratio to [-20, 20] and of the estimate to 10."""
    kind = kl_penalty.removesuffix("+")
    reason = None
    if kind not in ("k3", "low_var_kl"):
        reason = f"{kl_penalty} is a subtraction"
    elif logprob.shape != ref_logprob.shape or not has_kernels(logprob, ref_logprob):
        reason = "shapes that differ, or another device"
    elif ref_logprob.requires_grad:
        reason = "a gradient to the reference"
    elif original.strict and (any(x.dtype.itemsize < 4 for x in (logprob, ref_logprob))):
        reason = "strict: 16-bit inputs"
    elif original.strict and any_true(is_not_finite((logprob, ref_logprob))):
        reason = "strict: a non-finite input"
    if reason is not None:
        return original.fall_through(reason, logprob, ref_logprob, kl_penalty)
    return k3_penalty(logprob, ref_logprob, cap=10.0, gradient="k2" if kl_penalty.endswith("+") else "k3")
