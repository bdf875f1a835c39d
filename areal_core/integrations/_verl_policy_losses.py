"""The policy losses of verl's registry on `ops.ppo_loss`, whose settings they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_core import ops
from areal_core.integrations._adapters import (
    NotOursError,
    Reduction,
    any_true,
    check_tokens,
    computed_dtype,
    live_mean,
    row_offsets,
)
from areal_core.integrations._patch import Original
from areal_core.integrations._verl_losses import reduction_of
from areal_core.ops import PPOLossConfig, PPOLossStats

Metrics = dict[str, Tensor]
_BATCH_INFO = {"dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor"}


class Tokens(NamedTuple):
    """The inputs of a policy loss, all [S, L] and of one dtype."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor  # times the rollout weights, where those are not 0
    live: Tensor
    keep: Tensor | None  # where the rollout weights are not 0

    @property
    def log_ratio(self) -> Tensor:
        """Of live tokens, without gradient; 0 where masked."""
        return torch.where(self.live, self.logprobs.detach() - self.old, 0.0)


# variant(tokens, reduction, config, strict) -> (loss, metrics)
Variant = Callable[[Tokens, Reduction, Any, bool], tuple[Tensor, Metrics]]


def policy_loss(
    *, default_mode: str = "token-mean", fixed_mode: str | None = None, row_weights: bool = False
) -> Callable[[Variant], Callable[..., Any]]:
    """Decorate a variant into an adapter of verl's policy losses.

    default_mode: loss_agg_mode unless the caller gives one; fixed_mode: whatever the caller gives; row_weights: the
    rollout weights are their geometric mean over the row.
    """

    def decorate(variant: Variant) -> Callable[..., Any]:
        def adapter(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str = default_mode,
            config: Any = None,
            rollout_is_weights: Tensor | None = None,
            *,
            original: Original,
        ) -> Any:
            weights = rollout_is_weights
            try:
                check_tokens(response_mask, log_prob, old_log_prob, advantages, weights, strict=original.strict)
                if weights is not None and row_weights:
                    weights = _geometric_mean(weights, response_mask.bool())
                tokens = _weighted_tokens(log_prob, old_log_prob, advantages, response_mask, weights)
                reduction = reduction_of(fixed_mode or loss_agg_mode, response_mask, **_batch_info(config))
                loss, metrics = variant(tokens, reduction, config, original.strict)
            except NotOursError as reason:
                arguments = (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config)
                return original.fall_through(str(reason), *arguments, rollout_is_weights)
            values = torch.stack([x.double() for x in metrics.values()]).tolist() if metrics else []  # one wait
            return loss, {f"actor/{name}": value for name, value in zip(metrics, values, strict=True)}

        adapter.__doc__ = variant.__doc__
        return adapter

    return decorate


def _batch_info(config: Any) -> dict[str, Any]:
    if not hasattr(config, "global_batch_info"):
        raise NotOursError("no actor config")
    info = dict(config.global_batch_info)
    if unknown := sorted(set(info) - _BATCH_INFO):
        raise NotOursError(f"global_batch_info {unknown}")
    return info


def _geometric_mean(weights: Tensor, live: Tensor) -> Tensor:
    """Of each row, with verl's guards, at every token of it."""
    logs = torch.where(live, (weights + 1e-10).log(), 0.0).sum(1, keepdim=True)
    return (logs / (live.sum(1, keepdim=True) + 1e-8)).exp().expand_as(weights)


def _weighted_tokens(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | None) -> Tokens:
    """Fold the rollout weights, which are >= 0, into the advantages.

    A weight of 0 leaves the advantage and drops the policy term instead: the fractions of clipped tokens count it.
    """
    dtype = computed_dtype(logprobs, old, advantages, weights)
    keep = None
    if weights is not None:
        keep = weights != 0
        advantages = torch.where(keep, advantages * weights, advantages)
    return Tokens(logprobs.to(dtype), old.to(dtype), advantages.to(dtype), mask.bool(), keep)


def _clip_range(config: Any) -> tuple[float, float]:
    """clip_ratio_low and _high as ours: no ratio is below 0."""
    low, high = (config.clip_ratio if x is None else x for x in (config.clip_ratio_low, config.clip_ratio_high))
    if not (low >= 0 and high >= 0):
        raise NotOursError("a negative clip_ratio")
    return min(float(low), 1.0), float(high)


def _loss(tokens: Tokens, reduction: Reduction, **options: Any) -> tuple[Tensor, PPOLossStats]:
    out = ops.ppo_loss(
        tokens.logprobs.reshape(-1),
        tokens.old.reshape(-1),
        tokens.advantages.reshape(-1),
        tokens.live.reshape(-1),
        keep_mask=None if tokens.keep is None else tokens.keep.reshape(-1),
        cu_seqlens=row_offsets(tokens.live),
        normalizer=reduction.normalizer,
        config=PPOLossConfig(aggregation=reduction.aggregation, **options),
    )
    return reduction.finish(out.loss), out.stats


def _metrics(clipped: Tensor, kl: Tensor, lower: Tensor | None = None) -> Metrics:
    return {
        "pg_clipfrac": clipped,
        "ppo_kl": kl,
        "pg_clipfrac_lower": torch.zeros_like(clipped) if lower is None else lower,
    }


@policy_loss()
def vanilla(tokens: Tokens, reduction: Reduction, config: Any, strict: bool) -> tuple[Tensor, Metrics]:
    """PPO with two clips."""
    low, high = _clip_range(config)
    dual = config.get("clip_ratio_c", 3.0)
    if not dual > 1:
        raise NotOursError("clip_ratio_c not above 1")
    loss, stats = _loss(tokens, reduction, clip_low=low, clip_high=high, dual_clip=float(dual))
    x = stats.finalize()
    return loss, _metrics(x.clip_fraction_low + x.clip_fraction_high, x.kl_proximal_current_k1, x.clip_fraction_dual)


@policy_loss(default_mode="seq-mean-token-mean")
def gspo(tokens: Tokens, reduction: Reduction, config: Any, strict: bool) -> tuple[Tensor, Metrics]:
    """GSPO's token variant: a token has the ratio of its sequence, and the gradient of its own advantage.

    Token ratios with log = logprob - sg(logprob) + mean log-ratio, at most 10, as verl writes it.
    """
    low, high = _clip_range(config)
    log_ratio = tokens.log_ratio
    mean = log_ratio.sum(1, keepdim=True) / tokens.live.sum(1, keepdim=True).clamp(min=1)
    shared = (tokens.logprobs - tokens.logprobs.detach() + mean).clamp(max=10.0)
    alike = tokens._replace(logprobs=shared, old=torch.zeros_like(tokens.old))
    loss, stats = _loss(alike, reduction, clip_low=low, clip_high=high)
    x = stats.finalize()
    return loss, _metrics(x.clip_fraction_low + x.clip_fraction_high, live_mean(-log_ratio, tokens.live))


@policy_loss(default_mode="seq-mean-token-mean", fixed_mode="seq-mean-token-mean")
def sapo(tokens: Tokens, reduction: Reduction, config: Any, strict: bool) -> tuple[Tensor, Metrics]:
    """SAPO's soft gates."""
    taus = (float(config.tau_pos), float(config.tau_neg))
    if not min(taus) > 0:
        raise NotOursError("a tau not above 0")
    loss, stats = _loss(tokens, reduction, objective="sapo", tau_positive=taus[0], tau_negative=taus[1])
    kl = stats.finalize().kl_proximal_current_k1
    return loss, _metrics(torch.zeros_like(kl), kl)


@policy_loss()
def cispo(tokens: Tokens, reduction: Reduction, config: Any, strict: bool) -> tuple[Tensor, Metrics]:
    """CISPO with both bounds."""
    low, high = _clip_range(config)
    loss, stats = _loss(tokens, reduction, objective="cispo", clip_low=low, clip_high=high)
    x = stats.finalize()
    return loss, _metrics(x.clip_fraction_low + x.clip_fraction_high, x.kl_proximal_current_k1)


@policy_loss()
def gpg(tokens: Tokens, reduction: Reduction, config: Any, strict: bool) -> tuple[Tensor, Metrics]:
    """The plain policy gradient."""
    return _loss(tokens, reduction, objective="reinforce", ratio_level="off")[0], {}


@policy_loss(default_mode="seq-mean-token-sum")
def _reinforce(tokens: Tokens, reduction: Reduction, config: Any, strict: bool) -> tuple[Tensor, Metrics]:
    loss, _ = _loss(tokens, reduction, objective="reinforce", ratio_level="off")
    return loss, {"ppo_kl": live_mean(-tokens.log_ratio, tokens.live)}


def reinforce(rollout_log_prob: Tensor, *args: Any, original: Original, **kwargs: Any) -> Any:
    """The plain policy gradient against the policy of the rollout."""
    return _reinforce(rollout_log_prob, *args, original=original, **kwargs)


@policy_loss(fixed_mode="token-sum", row_weights=True)
def geo_mean(tokens: Tokens, reduction: Reduction, config: Any, strict: bool) -> tuple[Tensor, Metrics]:
    """GMPO over all rows, whatever the mode; its clip range is one of log-ratios."""
    low, high = (config.clip_ratio if x is None else x for x in (config.clip_ratio_low, config.clip_ratio_high))
    if not (low >= 0 and high >= 0):
        raise NotOursError("a negative clip_ratio")
    bounds = torch.tensor([-low, high], dtype=torch.float64)
    clip = {"clip_low": -float(bounds[0].expm1()), "clip_high": float(bounds[1].expm1())}
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    if strict and any_true((log_ratio.abs() > 20).any(), ((advantages == 0) & tokens.live).any()):
        raise NotOursError("strict: log-ratios beyond 20, or an advantage of 0")
    rows = Reduction("sequence_mean_token_mean", max(len(advantages), 1))
    loss, _ = _loss(tokens, rows, objective="gmpo", ratio_level="sequence", **clip)
    clipped = log_ratio != log_ratio.clamp(-low, high)
    fractions = [live_mean(clipped & side, tokens.live) for side in (advantages > 0, advantages < 0)]
    return loss, _metrics(fractions[0], live_mean(-log_ratio, tokens.live), fractions[1])


def _divergence_masked(tokens: Tokens, reduction: Reduction, config: Any, valid: Tensor) -> tuple[Tensor, Metrics]:
    """DPPO: the truncated ratio, without gradient, on the tokens whose divergence is in bounds."""
    cap = float(config.get("clip_ratio_c", 20.0))
    if not cap >= 1:
        raise NotOursError("clip_ratio_c below 1")
    kept = tokens._replace(keep=valid if tokens.keep is None else valid & tokens.keep)
    loss, stats = _loss(kept, reduction, objective="cispo", clip_low=1.0, clip_high=cap - 1)
    above = (tokens.log_ratio.clamp_(max=20) > math.log(cap)) & valid
    outside = live_mean(~valid, tokens.live)
    return loss, _metrics(outside, stats.finalize().kl_proximal_current_k1, live_mean(above, tokens.live))


def _divergence_bounds(config: Any) -> tuple[Any, Any]:
    low, high = (config.clip_ratio if x is None else x for x in (config.clip_ratio_low, config.clip_ratio_high))
    return low, high


@policy_loss()
def dppo_tv(tokens: Tokens, reduction: Reduction, config: Any, strict: bool) -> tuple[Tensor, Metrics]:
    """DPPO with bounds on the binary total variation."""
    low, high = _divergence_bounds(config)
    moved = tokens.logprobs.detach().exp().sub_(tokens.old.exp())
    return _divergence_masked(
        tokens, reduction, config, torch.where(tokens.advantages > 0, moved <= high, moved >= -low)
    )


@policy_loss()
def dppo_kl(tokens: Tokens, reduction: Reduction, config: Any, strict: bool) -> tuple[Tensor, Metrics]:
    """DPPO with bounds on the binary KL divergence."""
    low, high = _divergence_bounds(config)
    new, old = tokens.logprobs.detach().exp(), tokens.old.exp()
    rest = 1 - old
    divergence = (rest + 1e-8).div_((1 - new).add_(1e-8)).log_().mul_(rest)
    divergence += (tokens.old - tokens.logprobs.detach()).mul_(old)
    valid = torch.where(tokens.advantages > 0, (divergence <= high) | (new <= old), (divergence <= low) | (new >= old))
    return _divergence_masked(tokens, reduction, config, valid)
