"""Advantage estimators as their definitions read, in plain fp64 torch: the oracle of `areal_core.ops.advantages`."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: float, loss_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Loop over the live tokens of each sequence, last first."""
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    returns = torch.zeros_like(advantages)
    bounds = cu_seqlens.tolist()
    for begin, end in itertools.pairwise(bounds):
        advantage = next_value = 0.0
        for t in range(end - 1, begin - 1, -1):
            if loss_mask is not None and not loss_mask[t]:
                continue
            value = float(values[t])
            advantage = float(rewards[t]) + gamma * next_value - value + gamma * lam * advantage
            next_value = value
            advantages[t], returns[t] = advantage, advantage + value
    return advantages, returns


def group_scores(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    mean_level: str = "none",
    std_level: str = "none",
    leave_one_out: bool = False,
    leave_one_out_std: bool = False,
    divide_by_mean: bool = False,
    ddof: int = 1,
    eps: float = 1e-6,
    eps_in_root: bool = False,
    singleton: str = "zero",
) -> Tensor:
    """(reward - baseline) / scale of each sequence, from the rewards of its group or of the batch; NaN if it failed."""
    rewards = rewards.double()
    valid = ~rewards.isnan()
    scores = torch.full_like(rewards, torch.nan)
    for i in range(len(rewards)):
        if not valid[i]:
            continue
        sets = {"group": rewards[valid & (group_ids == group_ids[i])], "batch": rewards[valid]}
        used = [sets[level] for level in (mean_level, std_level) if level != "none"]
        score = rewards[i]
        if any(len(s) == 1 for s in used):
            score = rewards[i] if singleton == "raw" else torch.zeros_like(score)
        elif any(bool((s == s[0]).all()) for s in used):
            score = torch.zeros_like(score)
        else:
            if mean_level != "none":
                members = sets[mean_level]
                others = (members.sum() - rewards[i]) / (len(members) - 1)
                score = rewards[i] - (others if leave_one_out else members.mean())
                if divide_by_mean:
                    score = score / (members.mean() + eps)
            if std_level != "none":
                members = sets[std_level]
                if leave_one_out_std:
                    members = rewards[valid & (group_ids == group_ids[i]) & (torch.arange(len(rewards)) != i)]
                    if len(members) <= ddof or bool((members == members[0]).all()):
                        scores[i] = score  # nothing to measure it by
                        continue
                variance = members.var(correction=ddof)
                score = score / ((variance + eps).sqrt() if eps_in_root else variance.sqrt() + eps)
        scores[i] = score
    return scores


def spread(
    scores: Tensor,
    cu_seqlens: Tensor,
    loss_mask: Tensor,
    *,
    logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    divide_by_length: bool = False,
) -> Tensor:
    """Each sequence's score over its live tokens, plus beta (pi_ref / pi - 1), divided by their number if asked.

    Nothing for a failed sequence, whose score is NaN.
    """
    advantages = torch.zeros(loss_mask.shape, dtype=torch.float64)
    bounds = cu_seqlens.tolist()
    for s, (begin, end) in enumerate(itertools.pairwise(bounds)):
        length = int(loss_mask[begin:end].bool().sum())
        for t in range(begin, end):
            if not loss_mask[t] or scores[s].isnan():
                continue
            advantage = float(scores[s])
            if logprobs is not None and ref_logprobs is not None:
                difference = (ref_logprobs[t].double() - logprobs[t].double()).clamp(-20, 20)
                advantage += beta * float(torch.expm1(difference))
            advantages[t] = advantage / (length if divide_by_length else 1)
    return advantages


def log_ratio_sums(logprobs: Tensor, ref_logprobs: Tensor, cu_seqlens: Tensor, loss_mask: Tensor) -> Tensor:
    """Sum of log pi - log pi_ref over the live tokens of each sequence."""
    bounds = cu_seqlens.tolist()
    sums = []
    for begin, end in itertools.pairwise(bounds):
        live = loss_mask[begin:end].bool()
        difference = logprobs[begin:end][live].double() - ref_logprobs[begin:end][live].double()
        sums.append(difference.clamp(-20, 20).sum())
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64)
