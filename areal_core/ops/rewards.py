"""Rewards before the advantages: scaling, clipping, length penalty, KL to the reference, and groups without signal."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_core.ops._dispatch import as_int64, call
from areal_core.ops._packed import as_mask, check_offsets, packed_tokens

_ops = torch.ops.areal_core
_ORDERS = ("scale_first", "bias_first")
_KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True)
class RewardConfig:
    """What shape_rewards does to rewards, in this order; the defaults do nothing.

    Attributes:
        scaling, bias, order: "scale_first": scaling r + bias; "bias_first": scaling (r + bias).
        clip: (lowest, highest) reward.
        max_tokens: longest response; with overlong_buffer, longer ones cost overlong_penalty (soft_overlong_penalty).
        overlong_buffer: tokens before max_tokens over which the penalty grows; 0: off.
        overlong_penalty: what a response of max_tokens and more costs.
        kl_coef, kl_estimator: kl_coef times the KL to the reference policy is taken off each token's reward.
    """

    scaling: float = 1.0
    bias: float = 0.0
    order: str = "scale_first"
    clip: tuple[float, float] | None = None
    max_tokens: int = 0
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    kl_coef: float = 0.0
    kl_estimator: str = "k1"

    def __post_init__(self) -> None:
        _check("RewardConfig", "order", self.order in _ORDERS, f"in {_ORDERS}", self.order)
        _check(
            "RewardConfig",
            "kl_estimator",
            self.kl_estimator in _KL_ESTIMATORS,
            f"in {_KL_ESTIMATORS}",
            self.kl_estimator,
        )
        for name in ("scaling", "bias", "overlong_penalty", "kl_coef"):
            _check("RewardConfig", name, math.isfinite(getattr(self, name)), "finite", getattr(self, name))
        _check("RewardConfig", "kl_coef", self.kl_coef >= 0, ">= 0", self.kl_coef)
        is_interval = self.clip is None or (len(self.clip) == 2 and self.clip[0] <= self.clip[1])
        _check("RewardConfig", "clip", is_interval, "(low, high) with low <= high", self.clip)
        _check("RewardConfig", "overlong_buffer", self.overlong_buffer >= 0, ">= 0", self.overlong_buffer)
        fits = self.overlong_buffer == 0 or self.max_tokens >= self.overlong_buffer
        _check("RewardConfig", "max_tokens", fits, f">= overlong_buffer = {self.overlong_buffer}", self.max_tokens)
        unused = self.overlong_buffer == 0 and (self.max_tokens != 0 or self.overlong_penalty != 1.0)
        _check("RewardConfig", "overlong_buffer", not unused, "> 0 with max_tokens or overlong_penalty", 0)


class ShapedRewards(NamedTuple):
    """What compute_advantages takes as rewards and token_rewards."""

    rewards: Tensor
    """[S]."""
    token_rewards: Tensor | None
    """[T], 0 where masked; None: no token has a reward of its own."""


def shape_rewards(
    rewards: Tensor,
    config: RewardConfig,
    *,
    cu_seqlens: Tensor | None = None,
    loss_mask: Tensor | None = None,
    token_rewards: Tensor | None = None,
    logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
) -> ShapedRewards:
    """Scale and clip the rewards of sequences, penalise their length, and take the KL off the rewards of tokens.

    Args:
        rewards: [S], float32 or float64, other dtypes are converted to float32.
        config: what to do.
        cu_seqlens: int32 or int64 [S+1]; None: the per-token tensors are padded [S, L].
        loss_mask: bool or number [T], nonzero = live. None: every token is live.
        token_rewards: same dtype [T], of a process reward model or of turns (see turn_ends); passed on with the KL
            taken off.
        logprobs, ref_logprobs: same dtype [T], nats, needed with kl_coef; no gradient.

    Returns:
        ShapedRewards(rewards, token_rewards).

    Masked tokens are never read. NaN, a failed sample, stays NaN. The penalty counts live tokens. Take the KL off here,
    or give beta to compute_advantages; not both.

    Raises:
        ValueError: wrong shape, or an input that is missing or would be ignored.
        TypeError: wrong dtype.
    """
    op = "shape_rewards"
    tokens = {
        "loss_mask": as_mask(loss_mask),
        "token_rewards": token_rewards,
        "logprobs": logprobs,
        "ref_logprobs": ref_logprobs,
    }
    if config.kl_coef == 0 and ref_logprobs is not None:
        raise ValueError(f"{op}: expected ref_logprobs = None with kl_coef = 0, which does not use it, got a tensor")
    if config.kl_coef != 0 and (logprobs is None or ref_logprobs is None):
        raise ValueError(f"{op}: expected logprobs and ref_logprobs with kl_coef = {config.kl_coef}, got None")
    shaped = scale_rewards(rewards, scaling=config.scaling, bias=config.bias, order=config.order)
    if config.clip is not None:
        shaped = shaped.clamp(*config.clip)  # NaN stays
    if config.overlong_buffer > 0:
        offsets, flat, shape = packed_tokens(op, cu_seqlens, tokens)
        if rewards.shape != (offsets.numel() - 1,) or rewards.device != offsets.device:
            raise ValueError(
                f"{op}: expected rewards of shape {[offsets.numel() - 1]} on the device of cu_seqlens, "
                f"got {list(rewards.shape)} on {rewards.device}"
            )
        count = shape.numel() if shape is not None else int(offsets[-1])
        lengths = call(_ops.live_tokens.default, offsets, flat["loss_mask"], count)
        penalty = soft_overlong_penalty(lengths, config.max_tokens, config.overlong_buffer)
        shaped = shaped + (config.overlong_penalty * penalty).to(shaped.dtype)
    if config.kl_coef == 0:
        token_rewards = _live_or_zero(op, token_rewards, loss_mask)
    else:
        assert logprobs is not None
        token_rewards = _token_rewards(tokens, -config.kl_coef, config.kl_estimator).reshape(logprobs.shape)
    return ShapedRewards(shaped, token_rewards)


def scale_rewards(rewards: Tensor, *, scaling: float = 1.0, bias: float = 0.0, order: str = "scale_first") -> Tensor:
    """scaling r + bias with order "scale_first", scaling (r + bias) with order "bias_first".

    Args:
        rewards: any shape, float32 or float64, other dtypes are converted to float32; no gradient flows.
        scaling: factor.
        bias: summand.
        order: which comes first.

    Returns:
        Tensor like rewards; NaN stays NaN.

    Raises:
        ValueError: unknown order.

    Source: "scale_first" is r~ of AReaL's documentation of GRPO, "bias_first" what its code computes.
    """
    _check("scale_rewards", "order", order in _ORDERS, f"in {_ORDERS}", order)
    rewards = rewards.detach() if rewards.dtype == torch.float64 else rewards.detach().to(torch.float32)
    return scaling * rewards + bias if order == "scale_first" else scaling * (rewards + bias)


def soft_overlong_penalty(lengths: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """0 up to max_tokens - buffer_tokens, from there falling linearly to -1 at max_tokens, and -1 beyond.

    Args:
        lengths: response tokens, any shape, any number.
        max_tokens: length from which on the penalty is -1.
        buffer_tokens: > 0, tokens over which it grows.

    Returns:
        Tensor of the shape of lengths, float32, or float64 for float64 lengths.

    Raises:
        ValueError: buffer_tokens out of (0, max_tokens].

    Source: DAPO, arXiv 2503.14476, eq. 13.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"soft_overlong_penalty: expected buffer_tokens in (0, max_tokens = {max_tokens}], got {buffer_tokens}"
        )
    lengths = lengths if lengths.dtype == torch.float64 else lengths.to(torch.float32)
    return ((max_tokens - buffer_tokens - lengths) / buffer_tokens).clamp(-1.0, 0.0)


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, *, loss_mask: Tensor | None = None, estimator: str = "k1"
) -> Tensor:
    """Per-token estimate of the KL to the reference policy, from the sampled token alone.

    With d = log pi - log pi_ref clamped to [-20, 20]: d (k1), d^2 / 2 (k2), e^-d - 1 + d (k3).

    Args:
        logprobs: float32 or float64, any shape, nats; no gradient flows.
        ref_logprobs: same, of the reference policy.
        loss_mask: bool or number, same shape, nonzero = live. None: every token is live.
        estimator: "k1" (unbiased, of either sign), "k2" (biased, >= 0) or "k3" (unbiased, >= 0).

    Returns:
        Tensor like logprobs; 0 where masked.

    Masked tokens are never read. Two equal logprobs, -inf included, give 0; NaN gives NaN.

    Raises:
        ValueError: unknown estimator, wrong shape.
        TypeError: wrong dtype.

    Source: Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    _check("kl_penalty", "estimator", estimator in _KL_ESTIMATORS, f"in {_KL_ESTIMATORS}", estimator)
    tokens = {
        "loss_mask": as_mask(loss_mask),
        "token_rewards": None,
        "logprobs": logprobs,
        "ref_logprobs": ref_logprobs,
    }
    return _token_rewards(tokens, 1.0, estimator).reshape(logprobs.shape)


@dataclass(frozen=True)
class AdaptiveKL:
    """KL coefficient that follows a target: update() gives the controller for the next batch.

    coef' = coef (1 + clip(kl / target - 1, -0.2, 0.2) min(samples / horizon, 1))

    Attributes:
        coef: the coefficient, > 0: RewardConfig.kl_coef or beta.
        target: wanted KL of a sequence, nats, > 0.
        horizon: samples over which the coefficient changes by its limit of 20 %, > 0.

    Source: Ziegler et al., arXiv 1909.08593, sec. 2.2.
    """

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        for name in ("coef", "target", "horizon"):
            value = getattr(self, name)
            _check("AdaptiveKL", name, 0 < value < math.inf, "> 0 and finite", value)

    def update(self, kl: float, samples: int) -> AdaptiveKL:
        """The controller after a batch of so many samples, whose sequences had this KL on average.

        Raises:
            ValueError: a KL that is not a number, a negative number of samples.
        """
        _check("AdaptiveKL", "samples", samples >= 0, ">= 0", samples)
        _check("AdaptiveKL", "kl", not math.isnan(kl), "a number", kl)
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * min(samples / self.horizon, 1.0)))


class GroupFilter(NamedTuple):
    """Which groups carry a gradient."""

    mask: Tensor
    """Bool [S]: the sequences of kept groups that did not fail."""
    group_ids: Tensor
    """Int64, ascending: the kept groups. On a GPU reading it waits for the device."""


def filter_groups(rewards: Tensor, group_ids: Tensor, *, min_samples: int = 2) -> GroupFilter:
    """Drop the groups without signal: those whose rewards are all equal, of which no mean-based estimator learns.

    Args:
        rewards: [S], float32 or float64, other dtypes are converted to float32.
        group_ids: integer [S], equal within a group; groups of any size, in any order.
        min_samples: >= 2; groups with fewer samples that did not fail are dropped too. With the size that was asked
            for, groups that lost a sample are dropped; with 2, whatever is left of a group is used.

    Returns:
        GroupFilter(mask, group_ids).

    NaN is a failed sample: it is left out, and the rest of its group stays. A group of one has no signal. Equal means
    equal bit for bit: rewards that rounding told apart are kept. Infinities compare like numbers.

    Raises:
        ValueError: wrong shape, min_samples below 2.
        TypeError: wrong dtype.

    Source: dynamic sampling, DAPO, arXiv 2503.14476, eq. 11.
    """
    _check("filter_groups", "min_samples", min_samples >= 2, ">= 2", min_samples)
    values = rewards.detach() if rewards.dtype == torch.float64 else rewards.detach().to(torch.float32)
    ids = as_int64(group_ids, "filter_groups", "group_ids")
    if rewards.dim() != 1 or ids.shape != rewards.shape or ids.device != rewards.device:
        raise ValueError(
            "filter_groups: expected rewards and group_ids of shape [S] on one device, "
            f"got {list(rewards.shape)} and {list(ids.shape)} on {rewards.device} and {ids.device}"
        )
    sorted_ids, order = torch.sort(ids, stable=True)
    neutral: tuple[Any, ...] = (0, 0, False, False, False, False, 0, 0.0, False, False)
    mask = call(_ops.group_scores.default, values.contiguous(), None, sorted_ids, order, None, *neutral)[2]
    if min_samples > 2:
        _, index = torch.unique(ids, return_inverse=True)
        counts = torch.zeros_like(index).scatter_add_(0, index, (~values.isnan()).to(index.dtype))
        mask = mask & (counts[index] >= min_samples)
    return GroupFilter(mask, torch.unique(ids[mask]))


def turn_ends(loss_mask: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The last live token of every turn: where the rewards of a multi-turn conversation belong.

    A turn is a run of live tokens; masked ones (prompts, tool output) and the ends of sequences separate turns.

    Args:
        loss_mask: bool or number [T], nonzero = live.
        cu_seqlens: int32 or int64 [S+1]. None: loss_mask is padded [S, L].

    Returns:
        Bool like loss_mask, one True a turn: `token_rewards[turn_ends(mask, cu)] = rewards_of_turns`, in order.

    Raises:
        ValueError: neither cu_seqlens nor a 2-D mask.
    """
    offsets, flat, _ = packed_tokens("turn_ends", cu_seqlens, {"loss_mask": as_mask(loss_mask)})
    live = flat["loss_mask"]
    assert live is not None
    if cu_seqlens is not None and live.dim() != 1:
        raise ValueError(f"turn_ends: expected loss_mask of shape [T] with cu_seqlens, got {list(live.shape)}")
    check_offsets("turn_ends", offsets, live.numel(), live.device)
    last = torch.zeros(live.numel() + 1, dtype=torch.bool, device=live.device)
    last[offsets] = True  # the token after a sequence starts another, or is past the end
    follows = torch.cat([live[1:], live.new_zeros(1)]) if live.numel() else live
    return (live & (last[1:] | ~follows)).reshape(loss_mask.shape)


def _check(op: str, name: str, condition: bool, wanted: str, got: object) -> None:
    if not condition:
        raise ValueError(f"{op}: expected {name} {wanted}, got {got!r}")


def _live_or_zero(op: str, token_rewards: Tensor | None, loss_mask: Tensor | None) -> Tensor | None:
    if token_rewards is None or loss_mask is None:
        return token_rewards
    if token_rewards.shape != loss_mask.shape:
        raise ValueError(
            f"{op}: expected token_rewards of shape {list(loss_mask.shape)}, got {list(token_rewards.shape)}"
        )
    return torch.where(loss_mask.to(torch.bool), token_rewards, 0.0)


def _token_rewards(tokens: dict[str, Tensor | None], factor: float, estimator: str) -> Tensor:
    """token_rewards + factor kl of the live tokens, flat; shapes must agree."""
    shape = next(x.shape for name, x in tokens.items() if x is not None and name == "logprobs")
    for name, x in tokens.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"kl_penalty: expected {name} of shape {list(shape)}, got {list(x.shape)}")
    flat = {name: None if x is None else x.detach().reshape(-1).contiguous() for name, x in tokens.items()}
    result: Tensor = call(
        _ops.token_rewards.default,
        flat["token_rewards"],
        flat["logprobs"],
        flat["ref_logprobs"],
        flat["loss_mask"],
        -factor,
        _KL_ESTIMATORS.index(estimator),
    )
    return result
