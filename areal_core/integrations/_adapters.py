"""What adapters of several frameworks share: logits of any shape, padded tensors, and what the kernels do not take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_core import ops
from areal_core.integrations._patch import Original
from areal_core.ops import _C, LogprobOutput

_LOGITS = (torch.float32, torch.bfloat16, torch.float16)


def no_kernel_for(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels do not run there, for `Original.fall_through`; None where they do."""
    kinds = ("cpu", "cuda") if _C.cuda_compiled else ("cpu",)
    if device.type not in kinds:
        return f"no kernel for {device.type}"
    if dtype not in _LOGITS and not (dtype == torch.float64 and device.type == "cpu"):
        return f"no kernel for {dtype} on {device.type}"
    return None


def cannot_score(logits: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> str | None:
    """Why `score` does not take logits [..., V] and labels [...]; None where it does."""
    if any(type(x) not in (Tensor, torch.nn.Parameter) or x.is_nested for x in (logits, labels)):
        return "logits that are no plain tensor"  # DTensor, jagged
    if logits.dim() < 1 or labels.shape != logits.shape[:-1]:
        return "labels of another shape than the rows of the logits"
    if labels.dtype not in (torch.int64, torch.int32):
        return f"labels of dtype {labels.dtype}"
    if loss_mask is not None and loss_mask.shape != labels.shape:
        return "a mask of another shape than the labels"
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        return "logits with a stride in the vocabulary"
    if any(x is not None and x.device != logits.device for x in (labels, loss_mask)):
        return "labels on another device than the logits"
    return no_kernel_for(logits.device, logits.dtype)


def cannot_multiply(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why `ops.linear_logprob` does not take the hidden states and head of a model; None where it does."""
    if type(weight) not in (Tensor, torch.nn.Parameter) or hasattr(weight, "ds_id"):  # DTensor, quantized; ZeRO-3
        return "a sharded or special parameter"
    if reason := no_kernel_for(hidden.device, hidden.dtype):
        return reason
    # Autocast casts hidden states and weight; a bias goes with the weight.
    is_cast = torch.is_autocast_enabled(hidden.device.type)
    if (weight.dtype != hidden.dtype and not is_cast) or (bias is not None and bias.dtype != weight.dtype):
        return "a head of another dtype than the hidden states"
    return None


def score(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    loss_mask: Tensor | None = None,
    inplace_backward: bool = False,
) -> LogprobOutput:
    """`ops.logprob_from_logits` for logits [..., V] and labels [...]; outputs have the shape of the labels.

    Logits are never copied: a slice such as logits[:, :-1], which is no matrix, is scored batch row by batch row.
    """
    if _is_matrix(logits):
        rows = logits.view(-1, logits.shape[-1])
        mask = None if loss_mask is None else loss_mask.reshape(-1)
        out = ops.logprob_from_logits(
            rows, labels.reshape(-1), temperature=temperature, loss_mask=mask, inplace_backward=inplace_backward
        )
        return LogprobOutput(*(x.view(labels.shape) for x in out))
    masks = [None] * len(logits) if loss_mask is None else loss_mask.unbind(0)
    outs = [
        score(one, label, temperature=temperature, loss_mask=mask, inplace_backward=inplace_backward)
        for one, label, mask in zip(logits.unbind(0), labels.unbind(0), masks, strict=True)
    ]
    return LogprobOutput(*(torch.stack(x) for x in zip(*outs, strict=True)))


def _is_matrix(logits: Tensor) -> bool:
    """Whether logits [..., V] are a view [T, V]: whether the rows lie evenly spaced."""
    if logits.dim() <= 2 or logits.numel() == 0:
        return True
    spacing = None
    for size, stride in reversed(list(zip(logits.shape[:-1], logits.stride()[:-1], strict=True))):
        if size == 1:
            continue
        if spacing is not None and stride != spacing:
            return False
        spacing = size * stride
    return True


def has_kernels(*tensors: Tensor | None) -> bool:
    """Whether the kernels run where the tensors are."""
    return all(x is None or no_kernel_for(x.device, torch.float32) is None for x in tensors)


def row_offsets(padded: Tensor) -> Tensor:
    """cu_seqlens of the rows of a padded tensor [S, L]."""
    rows, columns = padded.shape
    return torch.arange(0, rows * columns + 1, max(columns, 1), device=padded.device)[: rows + 1]


def computed_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype in which our losses take the tensors: float32, or float64 where there is one."""
    given = [x.dtype for x in tensors if x is not None]
    return torch.float64 if torch.float64 in given else torch.float32


def any_true(*flags: Tensor | None) -> bool:
    """Whether one of the 0-d flags is set: one wait for the device, none without flags."""
    present = [flag for flag in flags if flag is not None]
    return bool(present) and bool(torch.stack(present).any())


def is_not_binary(mask: Tensor) -> Tensor | None:
    """0-d flag: a mask that weights tokens rather than choosing them. None for bools, which can't."""
    return None if mask.dtype == torch.bool else ((mask != 0) & (mask != 1)).any()


def is_not_finite(tensors: Iterable[Tensor | None]) -> Tensor:
    """0-d flag: some tensor holds NaN or an infinity."""
    return torch.stack([~x.isfinite().all() for x in tensors if x is not None]).any()


class NotOursError(Exception):
    """The call is one for the framework's own function; the text says why."""


def check_tokens(mask: Tensor, differentiable: Tensor, *constants: Tensor | None, strict: bool) -> None:
    """Raise NotOursError for what our losses do not take, and with strict for what they do differently.

    The last of three constants are rollout weights.
    """
    present = [x for x in constants if x is not None]
    if any(x.is_nested or x.dim() != 2 or x.shape != mask.shape for x in (mask, differentiable, *present)):
        raise NotOursError("shapes other than [S, L]")
    if not has_kernels(mask, differentiable, *present):
        raise NotOursError("another device")
    if any(x.requires_grad for x in present):
        raise NotOursError("a gradient to old log-probabilities, advantages or returns")
    weights = constants[-1] if len(constants) == 3 else None
    if any_true(is_not_binary(mask), None if weights is None else (weights < 0).any()):
        raise NotOursError("a mask that weights tokens, or negative rollout weights")
    if strict:
        if any(x.dtype.itemsize < 4 for x in (differentiable, *present)):
            raise NotOursError("strict: 16-bit inputs")
        if any_true(is_not_finite((differentiable, *present)), ~mask.bool().any()):
            raise NotOursError("strict: a non-finite input, or no live token")


class Reduction(NamedTuple):
    """How the terms of a padded batch become a loss: what PPOLossConfig and ppo_loss take, then a division."""

    aggregation: str
    normalizer: float | Tensor | None = None
    divisor: float | Tensor | None = None

    def finish(self, loss: Tensor) -> Tensor:
        return loss if self.divisor is None else loss / self.divisor


def is_usable_total(total: Any) -> bool:
    """Whether it can be a normalizer: None, a positive number, or a tensor of one element (not read back)."""
    if total is None:
        return True
    return total.numel() == 1 if isinstance(total, Tensor) else total > 0


def aggregate(terms: Tensor, live: Tensor, reduction: Reduction) -> Tensor:
    """Reduce terms [S, L] to a loss; masked terms have no part in it, whatever they are.

    In plain torch: a sum has no statistics that a kernel could compute along with it.
    """
    kept, normalizer = torch.where(live, terms.to(computed_dtype(terms)), 0.0), reduction.normalizer
    if reduction.aggregation.startswith("sequence"):
        counts = live.sum(1, dtype=torch.int32)
        normalizer = (counts > 0).sum().clamp(min=1) if normalizer is None else normalizer
        kept = kept.sum(1)
        if reduction.aggregation == "sequence_mean_token_mean":
            kept = kept / counts.clamp(min=1)
    elif normalizer is None:
        normalizer = live.sum().clamp(min=1)
    return reduction.finish(kept.sum() / normalizer)


def carried_back(values: Tensor, live: Tensor) -> Tensor:
    """Give masked tokens of [S, L] the value of the next live one of their row, 0 after the last."""
    columns = values.shape[1]
    index = torch.where(live, torch.arange(columns, device=values.device), columns)
    following = index.flip(1).cummin(1).values.flip(1)
    return torch.cat([values, values.new_zeros(len(values), 1)], dim=1).gather(1, following)


def group_ids(labels: Any) -> Tensor:
    """Number groups by the first appearance of their labels, which may be any hashable values; on the host."""
    numbers: dict[Any, int] = {}
    listed = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    return torch.tensor([numbers.setdefault(x, len(numbers)) for x in listed], dtype=torch.int64)


class _K3(torch.autograd.Function):
    """exp(y) - 1 - y with y = reference - logprob held to [-20, 20], at most `cap`; no gradient beyond either."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, reference: Tensor, cap: float, gradient: str) -> Tensor:
        value = ops.kl_penalty(logprobs, reference, estimator="k3")
        ctx.save_for_backward(logprobs, reference)
        ctx.options = (cap, gradient)
        return value.clamp(max=cap)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logprobs, reference = ctx.saved_tensors
        cap, gradient = ctx.options
        y = reference - logprobs
        if gradient == "k2":
            return -grad * y, None, None, None
        slope = torch.expm1(y)
        inside = (y.abs() <= 20) & (slope - y <= cap)
        return torch.where(inside | y.isnan(), -grad * slope, 0.0), None, None, None


def k3_penalty(logprobs: Tensor, reference: Tensor, *, cap: float, gradient: str = "k3") -> Tensor:
    """Schulman's k3 per token, right to the last digits also where it is tiny, and at most `cap`.

    `gradient` "k2": its value with the gradient of k2.
    """
    dtype = computed_dtype(logprobs, reference)
    value: Tensor = _K3.apply(logprobs.to(dtype), reference.detach().to(dtype), cap, gradient)  # type: ignore[no-untyped-call]
    return value


def live_mean(values: Tensor, live: Tensor) -> Tensor:
    """Mean over live tokens in float64; 0 without any."""
    return torch.where(live, values, 0).sum(dtype=torch.float64) / live.sum().clamp(min=1)


def karmarkar_karp(seqlen_list: list[int], k_partitions: int, equal_size: bool, *, original: Original) -> Any:
    """Balanced partitions, of which none is empty, the heaviest first."""
    lengths = [int(x) for x in seqlen_list]
    if lengths != list(seqlen_list) or min(lengths, default=-1) < 0:
        reason = "lengths that are negative or no integers"
    elif not 0 < k_partitions <= len(lengths) or (equal_size and len(lengths) % k_partitions):
        reason = "fewer sequences than partitions, or partitions that can't be equal"
    else:
        bins = ops.partition_balanced(lengths, k_partitions, equal_size=equal_size)
        return sorted(bins, key=lambda members: sum(lengths[i] for i in members), reverse=True)
    return original.fall_through(reason, seqlen_list, k_partitions, equal_size)
