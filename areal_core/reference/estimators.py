"""The table of advantage estimators as it reads, one formula a name, in plain fp64: the oracle of compute_advantages.

Nothing is shared between estimators but the numbers of a sequence, so that an error of composition cannot hide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Sequence:
    """A sequence that did not fail: its numbers per live token, and the sequences of its group, itself included."""

    reward: float
    greedy: float
    tokens: list[int]
    kl: list[float]
    """log pi / pi_ref, clamped to [-20, 20]."""
    values: list[float]
    group: list[Sequence]

    @property
    def length(self) -> int:
        """Live tokens."""
        return len(self.tokens)

    def kl_from(self, t: int) -> float:
        """Sum over the live tokens from the t-th on."""
        return sum(self.kl[t:])

    def rewards(self) -> list[float]:
        """Of the group."""
        return [s.reward for s in self.group]

    def has_equals(self) -> bool:
        """Whether all rewards of the group are equal, as those of a group of one are."""
        return len(set(self.rewards())) == 1

    def over_the_others(self, number: Callable[[Sequence], float]) -> list[float]:
        """The number of each other sequence of the group."""
        return [number(s) for s in self.group if s is not self]


def mean(numbers: list[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(numbers) / len(numbers)


def std(numbers: list[float]) -> float:
    """With n - 1 in the denominator."""
    centre = mean(numbers)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in numbers) / (len(numbers) - 1))


def z_score(s: Sequence) -> float:
    """(r - mean) / (std + 1e-6); 0 if nothing differs."""
    return 0.0 if s.has_equals() else (s.reward - mean(s.rewards())) / (std(s.rewards()) + 1e-6)


def centred(s: Sequence) -> float:
    """r - mean; 0 if nothing differs."""
    return 0.0 if s.has_equals() else s.reward - mean(s.rewards())


def gae(s: Sequence, gamma: float, lam: float, beta: float) -> list[float]:
    """sum over t' >= t of (gamma lam)^(t' - t) delta_t'."""
    deltas = []
    for t, value in enumerate(s.values):
        is_last = t == s.length - 1
        after = 0.0 if is_last else s.values[t + 1]
        deltas.append((s.reward if is_last else 0.0) - beta * s.kl[t] + gamma * after - value)
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, s.length)) for t in range(s.length)]


def gradient_term(s: Sequence, t: int, beta: float) -> float:
    """beta (pi_ref / pi - 1)."""
    return beta * math.expm1(-s.kl[t])


def regularised(s: Sequence, beta: float) -> float:
    """r - beta times the KL of the whole sequence."""
    return s.reward - beta * s.kl_from(0)


def rloo(s: Sequence, beta: float) -> float:
    """The regularised reward less that of the others."""
    if len({regularised(x, beta) for x in s.group}) == 1:
        return 0.0
    return regularised(s, beta) - mean(s.over_the_others(lambda x: regularised(x, beta)))


def maxrl(s: Sequence) -> float:
    """(r - mean) / mean."""
    return 0.0 if s.has_equals() else (s.reward - mean(s.rewards())) / (mean(s.rewards()) + 1e-6)


def opo(s: Sequence) -> float:
    """r - sum of T r / sum of T."""
    tokens = sum(x.length for x in s.group)
    if s.has_equals() or tokens == 0:
        return 0.0
    return s.reward - math.fsum(x.length * x.reward for x in s.group) / tokens


def pass_at_k(s: Sequence, k: int) -> float:
    """From the definition: all subsets of k are drawn."""
    if len(s.group) < k or s.has_equals():
        return 0.0
    subsets = list(itertools.combinations(s.group, k))
    best = [max(x.reward for x in subset) for subset in subsets]
    with_me = [b for b, subset in zip(best, subsets, strict=True) if any(x is s for x in subset)]
    if len(set(best)) == 1:
        return 0.0
    return (mean(with_me) - mean(best)) / math.sqrt(mean([(b - mean(best)) ** 2 for b in best]))


def normalised(batch: list[list[float]]) -> list[list[float]]:
    """(A - mean) / sqrt(var + 1e-8) over all tokens."""
    tokens = [a for advantages in batch for a in advantages]
    if len(set(tokens)) <= 1:
        return [[0.0] * len(advantages) for advantages in batch]
    scale = math.sqrt(std(tokens) ** 2 + 1e-8)
    return [[(a - mean(tokens)) / scale for a in advantages] for advantages in batch]


def advantages_of(name: str, batch: list[Sequence], beta: float, gamma: float, lam: float) -> list[list[float]]:
    """Per sequence, per live token. gamma and lam are those of ppo."""

    def each(formula: Callable[[Sequence, int], float]) -> list[list[float]]:
        return [[formula(s, t) for t in range(s.length)] for s in batch]

    signal = sum(not s.has_equals() for s in batch)
    table: dict[str, Callable[[], list[list[float]]]] = {
        "reinforce": lambda: each(lambda s, t: s.reward - beta * s.kl_from(0)),
        "reinforce_kl": lambda: each(lambda s, t: s.reward - beta * s.kl_from(t)),
        "reinforce_pp": lambda: normalised(each(lambda s, t: s.reward - beta * s.kl_from(t))),
        "reinforce_pp_baseline": lambda: normalised(each(lambda s, t: centred(s) - beta * s.kl_from(t))),
        "rloo": lambda: each(lambda s, t: rloo(s, beta)),
        "remax": lambda: each(lambda s, t: s.reward - s.greedy - beta * s.kl_from(t)),
        "ppo": lambda: [gae(s, gamma, lam, beta) for s in batch],
        "orz": lambda: each(lambda s, t: s.reward - s.values[t]),
        "grpo_original": lambda: each(lambda s, t: (z_score(s) + gradient_term(s, t, beta)) / s.length),
        "grpo_r1": lambda: each(lambda s, t: z_score(s) + gradient_term(s, t, beta)),
        "dapo": lambda: each(lambda s, t: z_score(s) / mean([x.length for x in s.group])),
        "dr_grpo": lambda: each(lambda s, t: centred(s)),
        "opo": lambda: each(lambda s, t: opo(s)),
        "gpg": lambda: each(lambda s, t: centred(s) * len(batch) / max(signal, 1)),
        "maxrl": lambda: each(lambda s, t: maxrl(s)),
        "pass_at_k": lambda: each(lambda s, t: pass_at_k(s, 4)),
    }
    return table[name]()


def compute_advantages(
    name: str,
    *,
    rewards: Tensor,
    cu_seqlens: Tensor,
    group_ids: Tensor,
    loss_mask: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    values: Tensor,
    greedy_rewards: Tensor,
    beta: float = 0.0,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Tensor:
    """Float64 [T]; 0 at masked tokens and in failed sequences, whose reward is NaN."""
    groups: dict[int, list[Sequence]] = {}
    batch = []
    bounds = itertools.pairwise(cu_seqlens.tolist())
    for s, (begin, end) in enumerate(bounds):
        tokens = [t for t in range(begin, end) if loss_mask[t]]
        kl = (logprobs[tokens].double() - ref_logprobs[tokens].double()).clamp(-20, 20).tolist()
        group = groups.setdefault(int(group_ids[s]), [])
        reward, greedy = float(rewards[s]), float(greedy_rewards[s])
        sequence = Sequence(reward, greedy, tokens, kl, values[tokens].double().tolist(), group)
        if not math.isnan(sequence.reward):
            group.append(sequence)
            batch.append(sequence)
    result = torch.zeros(len(loss_mask), dtype=torch.float64)
    for sequence, advantages in zip(batch, advantages_of(name, batch, beta, gamma, lam), strict=True):
        result[sequence.tokens] = torch.tensor(advantages, dtype=torch.float64)
    return result
