"""What adapters of several frameworks share: logits of any shape, and what the kernels do not take."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_core import ops
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


def score(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, loss_mask: Tensor | None = None
) -> LogprobOutput:
    """`ops.logprob_from_logits` for logits [..., V] and labels [...]; outputs have the shape of the labels.

    Logits are never copied: a slice such as logits[:, :-1], which is no matrix, is scored batch row by batch row.
    """
    if _is_matrix(logits):
        rows = logits.view(-1, logits.shape[-1])
        mask = None if loss_mask is None else loss_mask.reshape(-1)
        out = ops.logprob_from_logits(rows, labels.reshape(-1), temperature=temperature, loss_mask=mask)
        return LogprobOutput(*(x.view(labels.shape) for x in out))
    masks = [None] * len(logits) if loss_mask is None else loss_mask.unbind(0)
    outs = [
        score(one, label, temperature=temperature, loss_mask=mask)
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
