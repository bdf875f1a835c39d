"""Log-probability of a label, entropy and log-sum-exp of each row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from areal_core.ops._dispatch import call, register_fake
from areal_core.ops._vocab_parallel import find_shard, gather_parts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_OP = "logprob_from_logits"


class LogprobOutput(NamedTuple):
    """Per-row results, [T]: float32, or float64 for float64 logits. All three are differentiable."""

    logprobs: Tensor
    entropy: Tensor
    lse: Tensor


def logprob_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    loss_mask: Tensor | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    group: ProcessGroup | None = None,
    vocab_sizes: Sequence[int] | None = None,
) -> LogprobOutput:
    """Log-softmax of each row at its label, with the row's entropy (nats) and log-sum-exp, in one read of the logits.

    Row t of the logits predicts labels[t]; with z = logits / temperature: logprobs = z_y - lse,
    entropy = -sum p ln p, lse = ln sum e^z. The softmax is never stored: backward recomputes it.

    Args:
        logits: float32, bfloat16, float16 (float64 on CPU) [T, V]; any stride(0), stride(-1) = 1.
        labels: integer [T], each in [0, V) or equal to ignore_index.
        temperature: > 0 and finite; a number, or a tensor [T] (or of one element) that receives no gradient.
        loss_mask: bool (or number, nonzero = live) [T]; None: every row is live.
        ignore_index: label of rows that count as masked.
        inplace_backward: the gradient overwrites the logits, whose version counter is bumped; a second backward
            through them raises.
        group: the ranks that share the vocabulary. The logits are then this rank's columns, shards in rank order (any
            lengths; columns that pad the vocabulary hold -inf), and labels are indices of the whole vocabulary. All
            ranks give the same labels, temperature and loss_mask, in the same order of calls.
        vocab_sizes: length of each rank's shard. Default: asked for once per group, by a collective that waits for the
            host; inside torch.compile it must be given.

    Returns:
        LogprobOutput(logprobs, entropy, lse), each [T], float32 whatever the dtype of the logits (float64 for float64).

    With a group, ranks exchange 16 bytes a row (float64: 32) in one all-gather and merge them in rank order, so outputs
    are bitwise the same on all ranks. Backward needs no communication: it gives the gradient of this rank's columns,
    given that every rank computes the same loss from the outputs.

    Masked rows are not read: their outputs and gradients are 0, even where their logits hold NaN or inf. A logit of
    -inf contributes nothing; a row of them gives logprob and lse -inf, entropy 0, gradient 0. A NaN or +inf logit
    makes its own row NaN. A row whose incoming gradients are all 0 gets an exactly zero gradient. T = 0 gives empty
    tensors. Results are bitwise the same from run to run, and on CPU for any number of threads.

    Raises:
        ValueError: wrong shape, stride or device, temperature not > 0, a label out of range, vocab_sizes that disagree
            with the group or the logits. On CUDA nothing waits
            for the labels and a temperature tensor to be checked: such a row gives NaN, and the first call after the
            device has got there raises.
        TypeError: wrong dtype.

    Source: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867, algorithm 3.
    """
    if group is None and vocab_sizes is not None:
        raise ValueError(f"{_OP}: expected vocab_sizes with a group only")
    temperatures, scalar = _split_temperature(temperature, logits)
    mask = None if loss_mask is None else loss_mask.to(torch.bool).contiguous()
    rows = (_labels(labels), temperatures, scalar, mask, ignore_index)
    if group is None:
        outputs = call(torch.ops.areal_core.logprob_forward.default, logits, *rows, inplace_backward, public=_OP)
    else:
        shard = find_shard(_OP, group, logits.shape[-1], logits.device, vocab_sizes)
        with torch.no_grad():
            parts = call(
                torch.ops.areal_core.logprob_partial.default, logits, *rows, shard.start, shard.total, public=_OP
            )
            parts = gather_parts(parts, group)
        merge = torch.ops.areal_core.logprob_merge.default
        outputs = call(merge, logits, parts, *rows, shard.start, inplace_backward, public=_OP)
    return LogprobOutput(*outputs[:3])


def _labels(labels: Tensor) -> Tensor:
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise TypeError(f"{_OP}: expected labels of an integer dtype, got {labels.dtype}")
    return labels.to(torch.int64).contiguous()


def _split_temperature(temperature: float | Tensor, logits: Tensor) -> tuple[Tensor | None, float]:
    """Give the op's (temperatures, temperature): one per row, or a number."""
    if not isinstance(temperature, Tensor):
        return None, float(temperature)
    if temperature.requires_grad:
        raise ValueError(f"{_OP}: expected temperature without requires_grad (it gets no gradient)")
    values = temperature.to(device=logits.device, dtype=_row_dtype(logits))
    if values.numel() == 1:
        values = values.reshape(1).expand(logits.shape[0])
    return values.contiguous(), 1.0


def _row_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _fake_outputs(logits: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(logits.shape[0], dtype=_row_dtype(logits)) for _ in range(5))


def _fake_partial(logits: Tensor, *args: Any) -> Tensor:
    return logits.new_empty(logits.shape[0], 4, dtype=_row_dtype(logits))


def _fake_backward(
    grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_lse: Tensor | None, logits: Tensor, *saved: Any
) -> Tensor:
    return logits.new_empty(logits.shape)


def _fake_backward_inplace(*args: Any) -> None:
    return None


def _setup_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, *rows, inplace_backward = inputs
    _setup(ctx, logits, rows, 0, inplace_backward, output)


def _setup_merge(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _parts, *rows, vocab_start, inplace_backward = inputs
    _setup(ctx, logits, rows, vocab_start, inplace_backward, output)


def _setup(
    ctx: Any, logits: Tensor, rows: list[Any], vocab_start: int, inplace_backward: bool, output: tuple[Tensor, ...]
) -> None:
    labels, temperatures, temperature, loss_mask, ignore_index = rows
    logprobs, entropy, _lse, row_max, log_sum = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(row_max, log_sum)
    ctx.save_for_backward(logits, labels, temperatures, loss_mask, logprobs, entropy, row_max, log_sum)
    ctx.options = (temperature, ignore_index, vocab_start, inplace_backward)


def _backward(ctx: Any, *grads: Tensor | None) -> Tensor:
    logits, labels, temperatures, loss_mask, *statistics = ctx.saved_tensors
    temperature, ignore_index, vocab_start, inplace_backward = ctx.options
    upstream = [None if grad is None else grad.contiguous() for grad in grads[:3]]
    args = (*upstream, logits, labels, temperatures, temperature, loss_mask, ignore_index, *statistics, vocab_start)
    if inplace_backward:
        with torch.no_grad():
            torch.ops.areal_core.logprob_backward_.default(*args)
        torch.autograd.graph.increment_version(logits)
        gradient: Tensor = logits.detach()
    else:
        gradient = torch.ops.areal_core.logprob_backward.default(*args)
    return gradient


def _backward_forward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _backward(ctx, *grads), *(None,) * 6


def _backward_merge(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _backward(ctx, *grads), *(None,) * 8


def _refuse_second_derivative(ctx: Any, grad: Tensor) -> None:
    raise NotImplementedError(f"{_OP}: expected one backward pass; the op has no second derivative")


register_fake("logprob_forward", _fake_outputs)
register_fake("logprob_merge", _fake_outputs)
register_fake("logprob_partial", _fake_partial)
register_fake("logprob_backward", _fake_backward)
register_fake("logprob_backward_", _fake_backward_inplace)
torch.library.register_autograd("areal_core::logprob_forward", _backward_forward, setup_context=_setup_forward)
torch.library.register_autograd("areal_core::logprob_merge", _backward_merge, setup_context=_setup_merge)
torch.library.register_autograd("areal_core::logprob_backward", _refuse_second_derivative)
