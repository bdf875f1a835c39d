"""The kernels inside OpenRLHF: log-probabilities and entropy, losses, KL, advantages and balancing.

from areal_core.integrations import openrlhf
openrlhf.apply()  # in every process, before models and trainers are built
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from areal_core import ops
from areal_core.integrations._adapters import (
    any_true,
    cannot_score,
    computed_dtype,
    has_kernels,
    is_not_binary,
    is_not_finite,
    k3_penalty,
    karmarkar_karp,
    score,
)
from areal_core.integrations._openrlhf_losses import aggregate_loss, policy_loss, value_loss
from areal_core.integrations._patch import Original, Patches, Seam, apply_seams

__all__ = ["apply"]


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0, *, original: Original) -> Any:
    """Log-probabilities, float32 also for 16-bit logits; a temperature divides the logits in place, as there."""
    reason = cannot_score(logits, labels)
    if reason is not None:
        return original.fall_through(reason, logits, labels, temperature)
    if temperature != 1.0:
        logits.div_(temperature)
    out = score(logits, labels).logprobs
    return out.to(logits.dtype) if original.strict else out


def compute_entropy(logits: Tensor, *, original: Original) -> Any:
    """Entropy, float32 also for 16-bit logits; a logit of -inf adds nothing."""
    labels = logits.new_zeros(logits.shape[:-1], dtype=torch.int64)
    reason = cannot_score(logits, labels)
    if reason is None and original.strict and any_true((logits == -torch.inf).any()):
        reason = "strict: a logit of -inf"
    if reason is not None:
        return original.fall_through(reason, logits)
    entropy = score(logits, labels).entropy
    return entropy.to(logits.dtype) if original.strict else entropy


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    log_probs_old: Tensor | None = None,
    kl_estimator: str = "k1",
    unbiased_gradient: bool = False,
    *,
    original: Original,
) -> Any:
    """k3 without cancellation, at most 10 as there; the unbiased gradient is OpenRLHF's."""
    reason = None
    if kl_estimator != "k3":
        reason = f"{kl_estimator} is a subtraction"
    elif log_probs.shape != log_probs_base.shape or not has_kernels(log_probs, log_probs_base):
        reason = "shapes that differ, or another device"
    elif log_probs_base.requires_grad:
        reason = "a gradient to the reference"
    elif original.strict and any_true(is_not_finite((log_probs, log_probs_base))):
        reason = "strict: a non-finite input"
    if reason is not None:
        return original.fall_through(reason, log_probs, log_probs_base, log_probs_old, kl_estimator, unbiased_gradient)
    value = k3_penalty(log_probs.float(), log_probs_base.float(), cap=10.0)
    if not unbiased_gradient:
        return value
    squares = original(log_probs, log_probs_base, log_probs_old, "k2", True)
    return value.detach() + squares - squares.detach()


def _cannot_scan(rewards: Tensor, mask: Tensor | None, gamma: float, lam: float, *others: Tensor) -> str | None:
    tensors = [rewards, *others]
    if any(x.dim() != 2 or x.shape != rewards.shape or not x.is_floating_point() for x in tensors):
        return "shapes other than [S, L], or integers"
    if any(x.dtype.itemsize < 4 for x in tensors) or not has_kernels(*tensors, mask):
        return "16-bit inputs, or another device"
    if mask is not None and (mask.shape != rewards.shape or any_true(is_not_binary(mask))):
        return "a mask that weights tokens"
    return None if 0 <= gamma <= 1 and 0 <= lam <= 1 else "gamma or lambda outside [0, 1]"


def _chosen(values: Tensor, mask: Tensor | None) -> Tensor:
    return values.detach() if mask is None else torch.where(mask.bool(), values.detach(), 0.0)


def get_advantages_and_returns(
    self: Any, values: Tensor, rewards: Tensor, action_mask: Tensor, gamma: float, lambd: float, *, original: Original
) -> Any:
    """GAE that steps over masked tokens, which have value and reward 0, with the discount, as there."""
    reason = _cannot_scan(rewards, action_mask, gamma, lambd, values)
    if reason is not None:
        return original.fall_through(reason, self, values, rewards, action_mask, gamma, lambd)
    dtype = computed_dtype(values, rewards)
    chosen = [_chosen(x, action_mask).to(dtype) for x in (rewards, values)]
    return tuple(ops.gae(*chosen, gamma=float(gamma), lam=float(lambd)))


def get_cumulative_returns(self: Any, rewards: Tensor, action_mask: Tensor, gamma: float, *, original: Original) -> Any:
    """Discounted returns that step over masked tokens, which have reward 0, with the discount, as there."""
    reason = _cannot_scan(rewards, action_mask, gamma, 1.0)
    if reason is not None:
        return original.fall_through(reason, self, rewards, action_mask, gamma)
    return ops.discounted_returns(_chosen(rewards, action_mask), gamma=float(gamma))


_UTILS, _LOSS, _MAKER = "openrlhf.models.utils", "openrlhf.models.loss", "openrlhf.trainer.ppo_utils.experience_maker"
_TOTALS = "action_mask=None, dp_size=1, batch_num_tokens=None, global_batch_size=None"
SEAMS = (
    Seam("logprobs", _UTILS, "log_probs_from_logits", "logits, labels, temperature=1.0", log_probs_from_logits),
    Seam("entropy", _UTILS, "compute_entropy", "logits", compute_entropy),
    Seam(
        "kl",
        _UTILS,
        "compute_approx_kl",
        "log_probs, log_probs_base, log_probs_old=None, kl_estimator='k1', unbiased_gradient=False",
        compute_approx_kl,
        ("1aa20ac441228e96",),
    ),
    Seam(
        "aggregate_loss",
        _LOSS,
        "aggregate_loss",
        "loss, loss_mask, token_level_loss=True, dp_size=1, batch_num_tokens=None, global_batch_size=None",
        aggregate_loss,
        ("cfc652fc72b86752",),
    ),
    Seam(
        "policy_loss",
        _LOSS,
        "PolicyLoss.forward",
        "self, log_probs, old_log_probs, advantages, "
        + _TOTALS.replace("dp_size", "rollout_log_probs=None, dp_size", 1),
        policy_loss,
        ("207b2f9506c3bea6",),
    ),
    Seam(
        "value_loss",
        _LOSS,
        "ValueLoss.forward",
        "self, values, old_values, returns, " + _TOTALS,
        value_loss,
        ("ae385596ae472536",),
    ),
    Seam(
        "gae",
        _MAKER,
        "RemoteExperienceMaker.get_advantages_and_returns",
        "self, values, rewards, action_mask, gamma, lambd",
        get_advantages_and_returns,
        ("a97e6d1840c289c1",),
    ),
    Seam(
        "returns",
        _MAKER,
        "RemoteExperienceMaker.get_cumulative_returns",
        "self, rewards, action_mask, gamma",
        get_cumulative_returns,
        ("e10aa1131ffe1f64",),
    ),
    Seam(
        "karmarkar_karp",
        "openrlhf.utils.seqlen_balancing",
        "karmarkar_karp",
        "seqlen_list, k_partitions, equal_size",
        karmarkar_karp,
    ),
)


def apply(*, only: Collection[str] | None = None, strict: bool = False) -> Patches:
    """Replace OpenRLHF's functions at these seams in this process; docs/integrations.md says what each honours.

    Args:
        only: names of seams; None: all.
        strict: OpenRLHF's own convention where ours differs on purpose.

    Raises:
        ValueError, MissingPackageError, UnsupportedVersionError, PatchError: see `apply_seams`.
    """
    return apply_seams("openrlhf", "0.11.2", SEAMS, only, strict)
