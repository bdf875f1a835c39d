"""The fused LM head as its definition reads, in plain fp64 torch: the oracle of `areal_core.ops.lm_head`."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_core.reference.logprob import logprob_from_logits


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    loss_mask: Tensor | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give (logprobs, entropy, lse) in float64, differentiable; masked rows are replaced before they are used."""
    live = labels != ignore_index
    if loss_mask is not None:
        live = live & (loss_mask != 0)
    used = torch.where(live[:, None], hidden.double(), 0.0)
    logits = used @ weight.double().t()
    if bias is not None:
        logits = logits + bias.double()
    return logprob_from_logits(logits, labels, temperature=temperature, loss_mask=loss_mask, ignore_index=ignore_index)
