"""Log-softmax gather with entropy as the definition reads, in plain fp64 torch: oracle of `areal_core.ops.logprob`."""

from __future__ import annotations

import torch
from torch import Tensor


def logprob_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    loss_mask: Tensor | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give (logprobs, entropy, lse) in float64, differentiable; masked rows are replaced before they are used."""
    live = labels != ignore_index
    if loss_mask is not None:
        live = live & (loss_mask != 0)
    empty = (logits == -torch.inf).all(-1)  # no token is possible: logprob and lse -inf, entropy 0, gradient 0
    usable = live & ~empty
    scale = temperature.double()[:, None] if isinstance(temperature, Tensor) and temperature.ndim else temperature
    z = torch.where(usable[:, None], logits.double(), 0.0) / scale
    logp = z.log_softmax(-1)
    p = logp.exp()
    safe_labels = torch.where(live, labels, 0)[:, None]
    logprobs = logp.gather(1, safe_labels).squeeze(1)
    entropy = -(p * torch.where(p == 0, 0.0, logp)).sum(-1)
    lse = z.logsumexp(-1)
    lost = torch.where(live & empty, -torch.inf, 0.0).double()
    return torch.where(usable, logprobs, lost), torch.where(usable, entropy, 0.0), torch.where(usable, lse, lost)
