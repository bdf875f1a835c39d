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


class Sequences:
    """Which sequence each live token belongs to, and sums over them."""

    def __init__(self, cu_seqlens: Tensor | None, live: Tensor) -> None:
        cu = torch.tensor([0, len(live)]) if cu_seqlens is None else cu_seqlens.long()
        ids = torch.repeat_interleave(torch.arange(len(cu) - 1), cu.diff())
        self.ids, self.size = ids[live], len(cu) - 1
        self.lengths = self.sum(torch.ones(len(self.ids), dtype=torch.float64))
        self.live = 0 if cu_seqlens is None else int((self.lengths > 0).sum())

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the live tokens of each sequence [S]."""
        return torch.zeros(self.size, dtype=torch.float64).index_add(0, self.ids, x)

    def spread(self, x: Tensor) -> Tensor:
        """Give the value of its sequence to each live token."""
        return x[self.ids]

    def combine(self, log: Tensor, level: str) -> Tensor:
        """The log-ratio of a level, spread over the tokens: its own, or the clamped sum or mean of its sequence."""
        if level in ("token", "off"):
            return log
        total = self.sum(log)
        if level == "sequence_mean":
            total = total / self.lengths.clamp(min=1)
        return self.spread(total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def policy_terms(
    config: Any, sequences: Sequences, log_u: Tensor, logp: Tensor, adv: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The policy term before the behavior weight, the ratio, and where it is clipped."""
    low = 1 - config.clip_low
    high = 1 + (config.clip_low if config.clip_high is None else config.clip_high)
    level = {"sequence": "sequence_mean"}.get(config.ratio_level, config.ratio_level)
    no = torch.zeros_like(adv, dtype=torch.bool)
    clips = {"low": no, "high": no, "dual": no}
    if config.objective == "gmpo":
        log_low, log_high = math.log(low) if low > 0 else -MAX_LOG_RATIO, math.log(high)
        clips = {"low": (adv < 0) & (log_u < log_low), "high": (adv >= 0) & (log_u > log_high), "dual": no}
        held = torch.where(clips["low"], log_low, torch.where(clips["high"], log_high, log_u))
        u = sequences.combine(held, level).exp()
        return -u * adv, u, clips
    u = sequences.combine(log_u, level).exp()
    if config.objective == "cispo":
        clips = {"low": u < low, "high": u > high, "dual": no}
        return -u.clamp(low, high).detach() * adv * logp, u, clips
    if config.objective == "sapo":
        tau = torch.full_like(adv, config.tau_negative).masked_fill(adv > 0, config.tau_positive)
        return -adv * 4 / tau * torch.sigmoid(tau * (u - 1)), u, clips
    if config.objective == "reinforce":
        return -adv * (logp if config.ratio_level == "off" else u), u, clips
    unclipped = u * adv
    clipped = u.clamp(low, high) * adv
    # torch.minimum splits the gradient at a tie; the unclipped branch is ours.
    objective = torch.where(unclipped <= clipped, unclipped, clipped)
    clips = {"low": (u < low) & (adv < 0), "high": (u > high) & (adv > 0), "dual": no}
    if config.dual_clip is not None:
        floor = config.dual_clip * adv
        clips["dual"] = (adv < 0) & (unclipped < floor)
        objective = torch.where(clips["dual"], floor, objective)
    return -objective, u, clips


def behavior_weights(
    config: Any, sequences: Sequences, prox: Tensor, behavior: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Token log-weights, weights before and after their bounds, and which tokens are capped and masked."""
    log_w = torch.zeros_like(prox) if behavior is None else log_ratio(prox, behavior)
    level = {"geometric": "sequence_mean"}.get(config.behavior_level, config.behavior_level)
    raw = sequences.combine(log_w, level).exp()
    cap = math.inf if config.behavior_cap is None else config.behavior_cap
    low = 0.0 if config.behavior_low is None else config.behavior_low
    no = torch.zeros_like(raw, dtype=torch.bool)
    if config.behavior_mode == "truncate":
        return log_w, raw, raw.clamp(max=cap), raw > cap, no
    dropped = (raw > cap) | (raw < low)
    return log_w, raw, torch.where(dropped, 0.0, raw), no, dropped


def ppo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    behavior_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    teacher_logprobs: Tensor | None = None,
    keep_mask: Tensor | None = None,
    versions: Tensor | None = None,
    current_version: int = 0,
    cu_seqlens: Tensor | None = None,
    normalizer: float | None = None,
    config: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Give the loss (fp64, differentiable) and the statistics by name. Only live tokens are looked at."""
    live = loss_mask.bool()
    count = int(live.sum())
    sequences = Sequences(cu_seqlens, live)

    def pick(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[live].double()

    logp, prox, adv = logprobs[live].double(), proximal_logprobs[live].double().detach(), advantages[live].double()
    behavior, ref, ent, teacher = (pick(x) for x in (behavior_logprobs, ref_logprobs, entropy, teacher_logprobs))
    log_u = log_ratio(logp, prox)
    log_teacher = None if teacher is None else log_ratio(teacher, prox)
    if log_teacher is not None:
        adv = adv + config.distill_coef * log_teacher
    log_w, raw_weight, bounded, capped, dropped = behavior_weights(config, sequences, prox, behavior)
    kept = torch.ones_like(prox) if keep_mask is None else keep_mask[live].bool().double()
    weight = bounded * kept
    term, u, clips = policy_terms(config, sequences, log_u, logp, adv)
    policy = term = weight * term
    log_ref = None if ref is None else log_ratio(ref, logp)
    if log_ref is not None:
        kl = {
            "k1": -log_ref,
            "k2": log_ref * log_ref / 2,
            "k3": torch.expm1(log_ref) - log_ref,
            "k3_unbiased": bounded * log_u.exp() * (torch.expm1(log_ref) - log_ref),
        }[config.kl_estimator]
        term = term + config.kl_coef * kl
    if ent is not None:
        term = term - config.entropy_coef * ent
    token_weight = torch.ones_like(prox)
    if config.aggregation == "sequence_mean_token_mean":
        token_weight = sequences.spread(1 / sequences.lengths.clamp(min=1))
    total = sequences.live if config.aggregation.startswith("sequence") else count
    loss = (token_weight * term).sum() / (total or 1 if normalizer is None else normalizer)

    zero = torch.zeros((), dtype=torch.float64)

    def mean(x: Tensor | None) -> Tensor:
        return zero if x is None or count == 0 else x.detach().double().mean()

    age = None if versions is None else torch.where(versions >= 0, current_version - versions, 0)[live].double()
    stats = {
        "loss": (token_weight * term).sum() / max(total, 1),
        "policy_loss": (token_weight * policy).sum() / max(total, 1),
        "ratio_mean": mean(u),
        "clip_fraction_low": mean(clips["low"]),
        "clip_fraction_high": mean(clips["high"]),
        "clip_fraction_dual": mean(clips["dual"]),
        "kl_proximal_current_k1": mean(-log_u),
        "kl_proximal_current_k3": mean(k3(log_u)),
        "kl_behavior_proximal_k1": mean(-log_w),
        "kl_behavior_proximal_k3": mean(k3(log_w)),
        "kl_current_reference_k1": mean(None if log_ref is None else -log_ref),
        "kl_current_reference_k3": mean(None if log_ref is None else k3(log_ref)),
        "kl_proximal_teacher_k1": mean(None if log_teacher is None else -log_teacher),
        "kl_proximal_teacher_k3": mean(None if log_teacher is None else k3(log_teacher)),
        "behavior_weight_mean": mean(raw_weight),
        "behavior_capped_fraction": mean(capped),
        "behavior_masked_fraction": mean(dropped),
        "dropped_fraction": mean(kept == 0),
        "entropy": mean(ent),
        "staleness_mean": mean(age),
        "live_tokens": torch.tensor(float(count), dtype=torch.float64),
        "live_sequences": torch.tensor(float(sequences.live), dtype=torch.float64),
        "ratio_min": u.detach().min() if count else zero,
        "ratio_max": u.detach().max() if count else zero,
        "behavior_weight_max": raw_weight.max() if count else zero,
        "staleness_max": age.max().clamp(min=0) if age is not None and count else zero,
        "effective_sample_size": weight.sum() ** 2 / (weight**2).sum() if bool((weight > 0).any()) else zero,
    }
    return loss, {name: value.detach() for name, value in stats.items()}
