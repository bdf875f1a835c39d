"""The policy loss as its definition reads, in plain fp64 torch: the oracle of `areal_core.ops.loss`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def log_ratio(p: Tensor, q: Tensor) -> Tensor:
    """Log p - log q, clamped; 0 where both are -inf."""
    both = (p == q) & p.isinf()
    difference = torch.where(both, 0.0, p) - torch.where(both, 0.0, q)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(y: Tensor) -> Tensor:
    """exp(y) - 1 - y, by its series near 0."""
    series = torch.zeros_like(y)
    for n in range(20, 1, -1):
        series = series + y.clamp(-1, 1) ** n / math.factorial(n)
    return torch.where(y.abs() < 0.5, series, torch.expm1(y) - y)


def ppo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    behavior_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    normalizer: float | None = None,
    config: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Give the loss (fp64, differentiable) and the statistics by name. Only live tokens are looked at."""
    live = loss_mask.bool()

    def pick(x: Tensor) -> Tensor:
        return x[live].double()

    logp, prox, adv = pick(logprobs), pick(proximal_logprobs).detach(), pick(advantages).detach()
    behavior = None if behavior_logprobs is None else pick(behavior_logprobs).detach()
    ref = None if ref_logprobs is None else pick(ref_logprobs).detach()
    ent = None if entropy is None else pick(entropy)
    count = int(live.sum())

    log_u = log_ratio(logp, prox)
    u = log_u.exp()
    log_w = torch.zeros_like(prox) if behavior is None else log_ratio(prox, behavior)
    raw_weight = log_w.exp()
    cap = math.inf if config.behavior_cap is None else config.behavior_cap
    low = 0.0 if config.behavior_low is None else config.behavior_low
    capped, dropped = torch.zeros_like(live[live]), torch.zeros_like(live[live])
    if config.behavior_mode == "truncate":
        capped = raw_weight > cap
        weight = raw_weight.clamp(max=cap)
    else:
        dropped = (raw_weight > cap) | (raw_weight < low)
        weight = torch.where(dropped, 0.0, raw_weight)

    high = config.clip_low if config.clip_high is None else config.clip_high
    unclipped = u * adv
    clipped = u.clamp(1 - config.clip_low, 1 + high) * adv
    # torch.minimum splits the gradient at a tie; the unclipped branch is ours.
    objective = torch.where(unclipped <= clipped, unclipped, clipped)
    dual = torch.zeros_like(capped)
    if config.dual_clip is not None:
        floor = config.dual_clip * adv
        dual = (adv < 0) & (unclipped < floor)
        objective = torch.where(dual, floor, objective)
    policy = -weight * objective
    term = policy
    if ref is not None:
        y = log_ratio(ref, logp)
        kl = {"k1": -y, "k2": y * y / 2, "k3": torch.expm1(y) - y}[config.kl_estimator]
        term = term + config.kl_coef * kl
    if ent is not None:
        term = term - config.entropy_coef * ent
    loss = term.sum() / (count or 1 if normalizer is None else normalizer)

    def mean(x: Tensor | None) -> Tensor:
        return torch.zeros((), dtype=torch.float64) if x is None or count == 0 else x.detach().double().mean()

    zero = torch.zeros((), dtype=torch.float64)
    log_ref = None if ref is None else log_ratio(ref, logp)
    stats = {
        "loss": mean(term),
        "policy_loss": mean(policy),
        "ratio_mean": mean(u),
        "clip_fraction_low": mean((u < 1 - config.clip_low) & (adv < 0)),
        "clip_fraction_high": mean((u > 1 + high) & (adv > 0)),
        "clip_fraction_dual": mean(dual),
        "kl_proximal_current_k1": mean(-log_u),
        "kl_proximal_current_k3": mean(k3(log_u)),
        "kl_behavior_proximal_k1": mean(-log_w),
        "kl_behavior_proximal_k3": mean(k3(log_w)),
        "kl_current_reference_k1": mean(None if log_ref is None else -log_ref),
        "kl_current_reference_k3": mean(None if log_ref is None else k3(log_ref)),
        "behavior_weight_mean": mean(raw_weight),
        "behavior_capped_fraction": mean(capped),
        "behavior_masked_fraction": mean(dropped),
        "entropy": mean(ent),
        "live_tokens": torch.tensor(float(count), dtype=torch.float64),
        "ratio_min": u.detach().min() if count else zero,
        "ratio_max": u.detach().max() if count else zero,
        "behavior_weight_max": raw_weight.max() if count else zero,
        "effective_sample_size": weight.sum() ** 2 / (weight**2).sum() if bool((weight > 0).any()) else zero,
    }
    return loss, {name: value.detach() for name, value in stats.items()}
