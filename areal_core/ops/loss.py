"""Policy loss of packed sequences: decoupled PPO with its gradient and statistics in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_core.ops._dispatch import as_int64, call

_CHOICES = {
    "ratio_level": ("token",),
    "objective": ("ppo",),
    "aggregation": ("token_mean",),
    "behavior_level": ("token",),
    "behavior_mode": ("truncate", "mask", "icepop"),
    "kl_estimator": ("k1", "k2", "k3"),
}


@dataclass(frozen=True)
class PPOLossConfig:
    """Which policy loss: every variant is a setting of these parameters.

    Args:
        clip_low: the ratio to the proximal policy is clipped below at 1 - clip_low, in [0, 1].
        clip_high: and above at 1 + clip_high; None: the same as clip_low.
        dual_clip: > 1; where the advantage is negative a term is at most dual_clip * |advantage|. None: off.
        ratio_level: "token".
        behavior_cap: upper bound of the behavior weight exp(proximal - behavior). None: no bound.
        behavior_low: lower bound, below which "mask" and "icepop" drop a token. None: no bound.
        behavior_mode: "truncate" (a weight above the cap becomes the cap), "mask" (the policy term of a token whose
            weight is out of bounds is dropped; the token still counts in the normalizer) or "icepop" ("mask" with
            both bounds required).
        behavior_level: "token".
        kl_coef: weight of the KL penalty to the reference policy; needs ref_logprobs.
        kl_estimator: "k1", "k2" or "k3" of KL(current || reference).
        entropy_coef: weight of the entropy bonus; needs entropy.
        aggregation: "token_mean", the sum over live tokens divided by the normalizer.
        objective: "ppo".

    Raises:
        ValueError: a value out of range, or an option that is not implemented.
    """

    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio_level: str = "token"
    behavior_cap: float | None = None
    behavior_low: float | None = None
    behavior_mode: str = "truncate"
    behavior_level: str = "token"
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    aggregation: str = "token_mean"
    objective: str = "ppo"

    def __post_init__(self) -> None:
        """Check every field."""
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"PPOLossConfig: expected {name} in {choices}, got {getattr(self, name)!r}")
        self._check("clip_low", 0 <= self.clip_low <= 1, "in [0, 1]")
        self._check("clip_high", self.clip_high is None or 0 <= self.clip_high < math.inf, ">= 0 and finite")
        self._check("dual_clip", self.dual_clip is None or 1 < self.dual_clip < math.inf, "> 1 and finite")
        self._check("behavior_cap", self.behavior_cap is None or 0 < self.behavior_cap < math.inf, "> 0 and finite")
        cap = math.inf if self.behavior_cap is None else self.behavior_cap
        self._check("behavior_low", self.behavior_low is None or 0 <= self.behavior_low <= cap, "in [0, behavior_cap]")
        self._check("kl_coef", math.isfinite(self.kl_coef), "finite")
        self._check("entropy_coef", math.isfinite(self.entropy_coef), "finite")
        if self.behavior_mode == "truncate" and self.behavior_low is not None:
            raise ValueError(
                "PPOLossConfig: expected behavior_low = None with behavior_mode = 'truncate' (a lower bound needs "
                f"'mask' or 'icepop'), got {self.behavior_low}"
            )
        if self.behavior_mode == "mask" and self.behavior_cap is None and self.behavior_low is None:
            raise ValueError(
                "PPOLossConfig: expected behavior_cap or behavior_low with behavior_mode = 'mask', got None"
            )
        if self.behavior_mode == "icepop" and (self.behavior_cap is None or self.behavior_low is None):
            raise ValueError(
                "PPOLossConfig: expected behavior_low and behavior_cap with behavior_mode = 'icepop', got "
                f"{self.behavior_low} and {self.behavior_cap}"
            )

    def _check(self, name: str, valid: bool, expected: str) -> None:
        if not valid:
            raise ValueError(f"PPOLossConfig: expected {name} {expected}, got {getattr(self, name)}")

    def _native(self) -> tuple[float | int, ...]:
        """Give the scalar arguments of the native op, in its order."""
        return (
            1.0 - self.clip_low,
            1.0 + (self.clip_low if self.clip_high is None else self.clip_high),
            math.inf if self.dual_clip is None else self.dual_clip,
            0 if self.behavior_mode == "truncate" else 1,
            0.0 if self.behavior_low is None else self.behavior_low,
            math.inf if self.behavior_cap is None else self.behavior_cap,
            ("k1", "k2", "k3").index(self.kl_estimator),
            self.kl_coef,
            self.entropy_coef,
        )


class PPOLossSummary(NamedTuple):
    """Statistics over live tokens, each a float64 0-d tensor on the device; all 0 when no token is live.

    kl_<p>_<q>_k1 and _k3 estimate KL(p || q) in nats from samples of p. loss and policy_loss are token means,
    whatever normalizer scaled the loss. Behavior weights are those before capping; effective_sample_size, in tokens,
    is (sum w)^2 / sum w^2 of those after it. Entries whose input was not given are 0 (weights: 1).
    """

    loss: Tensor
    policy_loss: Tensor
    ratio_mean: Tensor
    clip_fraction_low: Tensor
    clip_fraction_high: Tensor
    clip_fraction_dual: Tensor
    kl_proximal_current_k1: Tensor
    kl_proximal_current_k3: Tensor
    kl_behavior_proximal_k1: Tensor
    kl_behavior_proximal_k3: Tensor
    kl_current_reference_k1: Tensor
    kl_current_reference_k3: Tensor
    behavior_weight_mean: Tensor
    behavior_capped_fraction: Tensor
    behavior_masked_fraction: Tensor
    entropy: Tensor
    live_tokens: Tensor
    ratio_min: Tensor
    ratio_max: Tensor
    behavior_weight_max: Tensor
    effective_sample_size: Tensor


# The layout of the raw tensor: enum Stat of csrc/ops/loss/loss.h.
_SUMS = (
    "live_tokens",
    "loss",
    "policy_loss",
    "ratio_mean",
    "clip_fraction_low",
    "clip_fraction_high",
    "clip_fraction_dual",
    "kl_proximal_current_k1",
    "kl_proximal_current_k3",
    "kl_behavior_proximal_k1",
    "kl_behavior_proximal_k3",
    "kl_current_reference_k1",
    "kl_current_reference_k3",
    "behavior_weight_mean",
    "applied_weight",
    "applied_weight_square",
    "behavior_capped_fraction",
    "behavior_masked_fraction",
    "entropy",
)
_MAXIMA = ("ratio_max", "negative_ratio_min", "behavior_weight_max")


class PPOLossStats(NamedTuple):
    """Statistics of a call as one float64 tensor: sums over live tokens, then maxima. No method synchronises.

    Micro-batches and ranks combine with `merge` and `all_reduce`; `finalize` then gives means, so that the result does
    not depend on how the batch was split.
    """

    raw: Tensor

    @staticmethod
    def merge(parts: Sequence[PPOLossStats]) -> PPOLossStats:
        """Combine the statistics of several calls (at least one)."""
        stacked = torch.stack([part.raw for part in parts])
        return PPOLossStats(torch.cat((stacked[:, : len(_SUMS)].sum(0), stacked[:, len(_SUMS) :].amax(0))))

    def all_reduce(self, group: Any = None) -> PPOLossStats:
        """Combine over the ranks of a torch.distributed group; every rank gets the result."""
        import torch.distributed as dist

        sums, maxima = self.raw[: len(_SUMS)].clone(), self.raw[len(_SUMS) :].clone()
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        return PPOLossStats(torch.cat((sums, maxima)))

    def finalize(self) -> PPOLossSummary:
        """Turn sums into means over live tokens."""
        sums, maxima = self.raw[: len(_SUMS)], self.raw[len(_SUMS) :]
        any_live = self.raw[0] > 0
        named = dict(zip(_SUMS, (sums / self.raw[0].clamp(min=1)).unbind(), strict=True))
        named |= zip(_MAXIMA, torch.where(any_live, maxima, torch.zeros_like(maxima)).unbind(), strict=True)
        named["live_tokens"] = self.raw[0]
        named["ratio_min"] = -named.pop("negative_ratio_min")
        weight, square = named.pop("applied_weight"), named.pop("applied_weight_square")
        size = self.raw[0] * weight * weight / square
        named["effective_sample_size"] = torch.where(square == 0, torch.zeros_like(size), size)
        return PPOLossSummary(**named)


class PPOLossOutput(NamedTuple):
    """The loss, a differentiable 0-d tensor, and the statistics of the call."""

    loss: Tensor
    stats: PPOLossStats


_DEFAULT_CONFIG = PPOLossConfig()


def ppo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    behavior_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    config: PPOLossConfig = _DEFAULT_CONFIG,
) -> PPOLossOutput:
    """Decoupled PPO loss over packed tokens, with its gradient and its statistics from a single pass.

    With u = exp(logprobs - proximal), w = exp(proximal - behavior) held constant and A the advantage:
    term = -w min(u A, clip(u, 1 - clip_low, 1 + clip_high) A) + kl_coef kl - entropy_coef entropy, and
    loss = sum of terms over live tokens / normalizer. Without behavior_logprobs w = 1: PPO against proximal_logprobs.

    Args:
        logprobs: float32 or float64 [T], nats, of the current policy; differentiable.
        proximal_logprobs: same dtype [T], of the policy before this update; no gradient, nor in any input below.
        advantages: same dtype [T].
        loss_mask: bool or number [T], nonzero = live.
        behavior_logprobs: same dtype [T], of the policy that produced the tokens.
        ref_logprobs: same dtype [T], of the reference policy: for kl_coef, and for statistics when that is 0.
        entropy: same dtype [T], nats, of the current policy; differentiable when entropy_coef is not 0.
        cu_seqlens: int32 or int64 [S+1], checked against T on the CPU, outside a compiled graph. Token-level losses
            do not depend on it.
        normalizer: > 0; number or one-element tensor (not read back). None: the live tokens of this call. Give the
            live tokens of the global batch, so that micro-batch losses add up to the loss of the batch.
        config: the variant.

    Returns:
        PPOLossOutput(loss, stats); see PPOLossStats.

    Masked tokens are never looked at: NaN or inf there changes no bit of loss, gradient or statistics, and their
    gradient is 0. With no live token loss and gradient are exactly 0. Log-ratios are clamped to [-20, 20] before exp,
    with gradient 0 beyond: a behavior logprob of -inf under a finite proximal one gives weight e^20 before capping or
    masking. Two logprobs of -inf have log-ratio 0, without gradient. NaN at a live token makes the loss NaN. At a clip
    edge the gradient is the unclipped one. Bitwise the same from run to run and for any number of threads; only once
    differentiable.

    Raises:
        ValueError: wrong shape or device, normalizer not > 0, or an option whose input is missing.
        TypeError: wrong dtype.

    Source: PPO, arXiv 1707.06347, eq. 7; decoupled objective, arXiv 2110.00641; dual clip, arXiv 1912.09729.
    """
    _check_inputs(behavior_logprobs, ref_logprobs, entropy, config)
    if cu_seqlens is not None:
        _check_cu_seqlens(as_int64(cu_seqlens, "ppo_loss", "cu_seqlens"), logprobs.shape[0] if logprobs.dim() else 0)
    optional = (behavior_logprobs, ref_logprobs, entropy)
    loss, stats, _, _ = call(
        torch.ops.areal_core.ppo_loss.default,
        logprobs.contiguous(),
        proximal_logprobs.contiguous(),
        advantages.contiguous(),
        loss_mask.to(torch.bool).contiguous(),
        *(None if x is None else x.contiguous() for x in optional),
        _normalizer_tensor(normalizer, logprobs),
        *config._native(),
    )
    return PPOLossOutput(loss, PPOLossStats(stats.detach()))


def _check_inputs(
    behavior_logprobs: Tensor | None, ref_logprobs: Tensor | None, entropy: Tensor | None, config: PPOLossConfig
) -> None:
    bounded = config.behavior_cap is not None or config.behavior_low is not None
    needs = (
        ("behavior_logprobs", behavior_logprobs, "behavior_cap or behavior_low", bounded),
        ("ref_logprobs", ref_logprobs, "kl_coef", config.kl_coef != 0),
        ("entropy", entropy, "entropy_coef", config.entropy_coef != 0),
    )
    for name, tensor, option, wanted in needs:
        if wanted and tensor is None:
            raise ValueError(f"ppo_loss: expected {name} with {option} set, got None")


def _check_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> None:
    """Check the layout, and its values where that does not wait for a GPU."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"ppo_loss: expected cu_seqlens [S+1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != tokens or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(
            f"ppo_loss: expected non-decreasing cu_seqlens from 0 to {tokens} (number of packed tokens), "
            f"got {cu_seqlens.tolist()}"
        )


def _normalizer_tensor(normalizer: float | Tensor | None, like: Tensor) -> Tensor | None:
    if normalizer is None:
        return None
    if isinstance(normalizer, Tensor):
        if normalizer.numel() != 1:
            raise ValueError(f"ppo_loss: expected normalizer with 1 element, got {normalizer.numel()}")
        return normalizer.detach().to(device=like.device, dtype=torch.float64).reshape(1)
    if not normalizer > 0:
        raise ValueError(f"ppo_loss: expected normalizer > 0, got {normalizer}")
    return torch.full((1,), float(normalizer), dtype=torch.float64, device=like.device)


def _fake(logprobs: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stats = logprobs.new_empty(len(_SUMS) + len(_MAXIMA), dtype=torch.float64)
    return logprobs.new_empty(()), stats, torch.empty_like(logprobs), logprobs.new_empty(())


class _OnceDifferentiable(torch.autograd.Function):
    """Passes a gradient on and refuses to be differentiated: the gradient of ppo_loss was computed, not recorded."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("ppo_loss: expected one backward pass; the op has no second derivative")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logprobs, _, _, loss_mask, _, _, entropy, *_, entropy_coef = inputs
    _, stats, grad_logprobs, scale = output
    ctx.mark_non_differentiable(stats, grad_logprobs, scale)
    ctx.entropy_coef = entropy_coef
    ctx.save_for_backward(logprobs, loss_mask, entropy, grad_logprobs, scale)


def _backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    logprobs, loss_mask, entropy, grad_logprobs, scale = ctx.saved_tensors
    sources = [x for x in (grad_loss, logprobs, entropy) if x is not None]
    grads: list[Tensor | None] = [None] * 17
    with torch.no_grad():
        factor = grad_loss * scale
        if ctx.needs_input_grad[0]:
            grads[0] = grad_logprobs * factor
        if ctx.needs_input_grad[6]:
            grads[6] = torch.where(loss_mask, -ctx.entropy_coef * factor, torch.zeros_like(factor))
    once: Any = _OnceDifferentiable.apply
    return tuple(None if grad is None else once(grad, *sources) for grad in grads)


torch.library.register_fake("areal_core::ppo_loss", _fake)
torch.library.register_autograd("areal_core::ppo_loss", _backward, setup_context=_setup_context)
