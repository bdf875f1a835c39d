"""The LM head fused with what follows it: log-probabilities from hidden states, without a [T, V] tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from areal_core.ops._dispatch import as_int64, call
from areal_core.ops._head_arguments import (
    check_counts,
    check_linear,
    loss_inputs,
    row_arguments,
    split_temperature,
)
from areal_core.ops._linear_chunks import Rows
from areal_core.ops._linear_loss_ops import LinearPPOLoss
from areal_core.ops._linear_ops import LinearLogprobThatKeeps, rows_to_keep
from areal_core.ops._vocab_parallel import find_shard, gather_parts
from areal_core.ops.logprob import LogprobOutput
from areal_core.ops.loss import check_inputs, normalizer_tensor, ppo_loss, version_arguments
from areal_core.ops.loss_config import PPOLossConfig
from areal_core.ops.loss_stats import PPOLossStats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LOGPROB, _PPO_LOSS = "linear_logprob", "linear_ppo_loss"
_DEFAULT_CONFIG = PPOLossConfig()
_OPTIONAL = ("behavior_logprobs", "ref_logprobs", "teacher_logprobs", "keep_mask")  # after proximal and advantages


class FusedPPOLossOutput(NamedTuple):
    """The loss, a differentiable 0-d tensor; statistics of the call; per-row results [T], without gradient."""

    loss: Tensor
    stats: PPOLossStats
    logprobs: Tensor
    entropy: Tensor


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    loss_mask: Tensor | None = None,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
    live_tokens: int | None = None,
    main_grad: Tensor | None = None,
    group: ProcessGroup | None = None,
    vocab_sizes: Sequence[int] | None = None,
    reduce_hidden_grad: bool = True,
) -> LogprobOutput:
    """Log-probability of each label under logits = hidden @ weight.T + bias, with entropy (nats) and log-sum-exp.

    What logprob_from_logits gives for those logits, which exist for a chunk of live rows at a time. Backward computes
    them again, but those of the last chunk: between three and four matrix products a step, over the live rows only.

    Args:
        hidden: float32, bfloat16, float16 (float64 on CPU) [T, H], any strides; row t predicts labels[t].
        weight: same dtype [V, H], any strides.
        labels: integer [T], each in [0, V) or equal to ignore_index.
        bias: same dtype [V].
        temperature: > 0 and finite; a number, or a tensor [T] (or of one element) that receives no gradient.
        loss_mask: bool (or number, nonzero = live) [T]; None: every row is live.
        ignore_index: label of rows that count as masked.
        chunk_tokens: rows of logits that exist at once. None: 256 MB of them on a CPU (at least 128 rows), 1024 to 4096
            rows on a GPU (2 GB if that is between).
        live_tokens: at least as many as there are live rows, where the host knows it. A GPU is not waited for to count
            them: without this number it computes all T rows, masked ones as zeros.
        main_grad: float32 (float64 for float64) [V, H], to which backward adds the gradient of the weight; weight.grad
            is then left alone. The weight must require a gradient.
        group: the ranks that share the vocabulary: weight and bias are then this rank's rows, shards in rank order of
            any lengths, and everything else is the same on all ranks, labels being indices of the whole vocabulary.
        vocab_sizes: length of each rank's shard, as in logprob_from_logits.
        reduce_hidden_grad: with a group, whether the gradient of hidden is summed over the ranks. Where False it is
            this rank's share, for a caller that adds shares up later, as sequence parallelism does.

    Returns:
        LogprobOutput(logprobs, entropy, lse), each [T] float32 (float64 for float64), all differentiable.

    Logits and their gradients are float32 (float64 for float64), and the gradient of the weight adds up in float32
    before it is rounded to the weight's dtype. On a GPU the products of backward round the gradient of bfloat16 or
    float16 logits to that dtype first. Under autocast a GPU multiplies in the dtype of autocast, and hidden and
    weight may differ in dtype; a CPU multiplies in float32 always.

    Memory beyond inputs and gradients: one chunk of logits, and on a GPU its gradient in the operands' dtype. Where a
    gradient will be wanted, the chunk is held until the graph is freed, and several graphs hold one each; chunk_tokens
    bounds it. With a group, in a compiled graph and in vmap nothing is held: there backward computes all logits again.
    So does a second backward through a retained graph.

    With a group, ranks exchange 16 bytes a row (float64: 32) in one all-gather and get the same bits; backward sums the
    gradient of hidden with one all-reduce, given that every rank computes the same loss from the outputs.

    Masked rows are not multiplied: their outputs and gradients are 0, and NaN or inf in their hidden state reaches
    nothing. Otherwise NaN and inf act as in logprob_from_logits. T = 0 gives empty tensors. Bitwise the same from run
    to run where the matrix product is; chunk_tokens changes the last bits at most. Only once differentiable.

    Raises:
        ValueError: wrong shape or device, temperature not > 0, a label out of range, chunk_tokens < 1, or fewer
            live_tokens than live rows. On a GPU nothing waits for these values to be checked: rows with such labels or
            temperatures give NaN, and so do live rows beyond live_tokens.
        TypeError: wrong dtype.

    Source: M. Milakov, N. Gimelshein, arXiv 1805.02867; chunks of logits under the loss: E. Wijmans et al., "Cut Your
    Losses in Large-Vocabulary Language Models", arXiv 2411.09009; P.-L. Hsu et al., "Liger Kernel", arXiv 2410.10989.
    """
    operand_dtype = check_linear(_LOGPROB, hidden, weight, bias, main_grad)
    labels, loss_mask = row_arguments(_LOGPROB, hidden, labels, loss_mask)
    temperatures, scalar = split_temperature(_LOGPROB, temperature, hidden)
    check_counts(_LOGPROB, chunk_tokens, live_tokens)
    linear = (hidden, weight, bias, operand_dtype)
    rows = (labels, temperatures, scalar, loss_mask, ignore_index, chunk_tokens, live_tokens)
    parallel = _Parallel(group, vocab_sizes, reduce_hidden_grad)
    return LogprobOutput(*_logprob(_LOGPROB, linear, rows, main_grad, parallel))


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
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
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    normalizer: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    config: PPOLossConfig = _DEFAULT_CONFIG,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
    live_tokens: int | None = None,
    main_grad: Tensor | None = None,
    group: ProcessGroup | None = None,
    vocab_sizes: Sequence[int] | None = None,
    reduce_hidden_grad: bool = True,
) -> FusedPPOLossOutput:
    """Policy loss of logits = hidden @ weight.T + bias: ppo_loss of linear_logprob, in three matrix products, not four.

    Where the gradient of the loss at a token needs that token alone, forward turns each chunk of logits into its
    gradient and multiplies it out at once, and backward only scales the result by the gradient of the loss. Losses that
    go by sequence run as linear_logprob and ppo_loss one after the other: the result is the same.

    Rows are prediction-aligned: row t of every input belongs to the prediction of labels[t].

    Args:
        hidden, weight, labels, bias, temperature, ignore_index, chunk_tokens, live_tokens: as in linear_logprob.
        proximal_logprobs, advantages, behavior_logprobs, ref_logprobs, teacher_logprobs: float32 (float64 for float64)
            [T], as in ppo_loss.
        keep_mask, versions, current_version: as in ppo_loss.
        loss_mask: bool or number [T], nonzero = live. Rows whose label is ignore_index count as masked.
        normalizer: as in ppo_loss. None: the live tokens of this call.
        cu_seqlens: as in ppo_loss, of the rows.
        config: the variant. The entropy is always there: entropy_coef needs no further input.
        main_grad: float32 (float64 for float64) [V, H], to which backward adds the gradient of the weight; weight.grad
            is then left alone.
        group, vocab_sizes, reduce_hidden_grad: as in linear_logprob; the gradient then needs all ranks' sums, so this
            runs as linear_logprob and ppo_loss too.

    Returns:
        FusedPPOLossOutput(loss, stats, logprobs, entropy). Only the loss is differentiable. Statistics are to the last
        bit those of ppo_loss for these logprobs and entropy.

    Memory beyond inputs: one chunk of logits and, from forward until backward, the gradients, that of the weight in the
    weight's dtype (in float32 with main_grad). A second backward raises. Masked rows, precision, autocast and what is
    bitwise the same: as in linear_logprob. Where no gradient is needed none is computed.

    Raises:
        ValueError: as linear_logprob and ppo_loss do.
        TypeError: wrong dtype.

    Source: P.-L. Hsu et al., "Liger Kernel", arXiv 2410.10989 (gradients in forward); losses: see ppo_loss.
    """
    operand_dtype = check_linear(_PPO_LOSS, hidden, weight, bias, main_grad)
    labels, mask = row_arguments(_PPO_LOSS, hidden, labels, loss_mask)
    temperatures, scalar = split_temperature(_PPO_LOSS, temperature, hidden)
    check_counts(_PPO_LOSS, chunk_tokens, live_tokens)
    inputs = loss_inputs(
        _PPO_LOSS,
        hidden,
        keep_mask,
        proximal_logprobs=proximal_logprobs,
        advantages=advantages,
        behavior_logprobs=behavior_logprobs,
        ref_logprobs=ref_logprobs,
        teacher_logprobs=teacher_logprobs,
    )
    live = labels != ignore_index if mask is None else mask & (labels != ignore_index)
    linear = (hidden, weight, bias, operand_dtype)
    rows = (labels, temperatures, scalar, live, ignore_index, chunk_tokens, live_tokens)
    parallel = _Parallel(group, vocab_sizes, reduce_hidden_grad)
    # Gradients computed in forward have not seen the loss scale that keeps float16 from underflowing.
    has_float16 = torch.float16 in (operand_dtype, hidden.dtype, weight.dtype)
    if group is not None or has_float16 or not _is_token_level(config):
        logprobs, entropy, _ = _logprob(_PPO_LOSS, linear, rows, main_grad, parallel)
        out = ppo_loss(
            logprobs,
            proximal_logprobs,
            advantages,
            live,
            behavior_logprobs=behavior_logprobs,
            ref_logprobs=ref_logprobs,
            teacher_logprobs=teacher_logprobs,
            keep_mask=keep_mask,
            versions=versions,
            current_version=current_version,
            entropy=entropy,
            cu_seqlens=cu_seqlens,
            normalizer=normalizer,
            config=config,
        )
        return FusedPPOLossOutput(*out, logprobs.detach(), entropy.detach())
    given = dict(zip(_OPTIONAL, inputs[2:], strict=True))
    check_inputs({**given, "normalizer": normalizer, "entropy": advantages}, config)  # the entropy will be there
    if normalizer is None:
        normalizer = live.sum(dtype=torch.float64)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    arguments = (
        *linear,
        *rows,
        *inputs,
        normalizer_tensor(normalizer, hidden, "ppo_loss"),
        [float(x) for x in config._native()],
        *version_arguments(_PPO_LOSS, hidden, versions, current_version),
        None if cu_seqlens is None else as_int64(cu_seqlens, _PPO_LOSS, "cu_seqlens"),
        needs,
    )
    if any(needs):
        loss, stats, logprobs, entropy = call(LinearPPOLoss.apply, main_grad, *arguments)
    else:
        op = torch.ops.areal_core.linear_ppo_forward_backward.default
        loss, stats, logprobs, entropy, *_ = call(op, *arguments, False)
    return FusedPPOLossOutput(loss, PPOLossStats(stats), logprobs, entropy)


def _is_token_level(config: PPOLossConfig) -> bool:
    """Whether the gradient of the loss at a token needs nothing of other tokens but the normalizer."""
    return not config.needs_sequences


# -- vocab-parallel ---------------------------------------------------------------------------------------------------


class _Parallel(NamedTuple):
    group: ProcessGroup | None
    vocab_sizes: Sequence[int] | None
    reduce_hidden_grad: bool


def _logprob(
    op: str,
    linear: tuple[Tensor, Tensor, Tensor | None, torch.dtype],
    rows: tuple[Any, ...],
    main_grad: Tensor | None,
    parallel: _Parallel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give differentiable (logprobs, entropy, lse), over the group's whole vocabulary."""
    native = torch.ops.areal_core
    parts, vocab_start, kept_rows = None, 0, 0
    if parallel.group is not None:
        hidden, weight, bias, operand_dtype = linear
        shard = find_shard(op, parallel.group, len(weight), hidden.device, parallel.vocab_sizes)
        vocab_start = shard.start
        with torch.no_grad():
            parts = call(native.linear_logprob_partial.default, *linear, *rows, shard.start, shard.total)
            parts = gather_parts(parts, parallel.group)
        if parallel.reduce_hidden_grad:
            reduced: Any = _SumGradient.apply(hidden, parallel.group)  # type: ignore[no-untyped-call]
            linear = (reduced, weight, bias, operand_dtype)
    elif parallel.vocab_sizes is not None:
        raise ValueError(f"{op}: expected vocab_sizes with a group only")
    elif torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in linear[:3]):
        kept_rows = rows_to_keep(Rows(*rows[:5]), len(linear[1]), *rows[5:])
    function: Any = LinearLogprobThatKeeps.apply if kept_rows else native.linear_logprob.default
    logprobs, entropy, lse, *_ = call(function, *linear, *rows, parts, vocab_start, main_grad, kept_rows)
    return logprobs, entropy, lse


class _SumGradient(torch.autograd.Function):
    """The input; its gradient is summed over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
