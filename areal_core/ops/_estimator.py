"""The parts an advantage estimator is declared by, and which of them go together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

_CHOICES: dict[str, tuple[Any, ...]] = {
    "mean_level": ("none", "group", "batch"),
    "std_level": ("none", "group", "batch"),
    "leave_one_out": (False, True),
    "leave_one_out_std": (False, True),
    "length_weighted": (False, True),
    "greedy_baseline": (False, True),
    "divide_by_mean": (False, True),
    "per_reward": (False, True),
    "rescale_by_signal": (False, True),
    "critic": (False, True),
    "discounted": (False, True),
    "kl": ("none", "token", "sequence", "to_go"),
    "kl_estimator": ("k1", "k2", "k3"),
    "length_norm": ("none", "sequence", "group"),
    "whiten": (False, True),
    "ddof": (0, 1),
    "eps_in_root": (False, True),
    "singleton": ("zero", "raw"),
}


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator, declared: a score for each sequence, and how its tokens get it.

    score  s = (r - baseline) / scale, with r the reward of the sequence
    token  A_t = s / length, or the scan from the end of the sequence that carries s back, or GAE against a critic

    Attributes:
        mean_level: the baseline is the mean reward of the "group" or of the "batch"; "none": 0.
        std_level: scale is the standard deviation of the "group" or of the "batch"; "none": 1.
        leave_one_out: the mean is that of the other sequences.
        leave_one_out_std: the standard deviation is that of the rest of the group; where they are equal, scale is 1.
        length_weighted: the group mean weights each sequence by its live tokens.
        greedy_baseline: the baseline is the reward of the greedy response.
        divide_by_mean: scale is mean + eps.
        per_reward: rewards are [S, R]; each of the R is scored by itself, and the scores are added up.
        k: compare not rewards but the best of k that a sequence is part of with the best of any k of its group (with
            mean_level "group"; std_level: of that best). 0: off.
        rescale_by_signal: scores are multiplied by sequences / sequences in groups whose rewards differ.
        critic: GAE against values, with the score as the terminal reward.
        discounted: gamma applies (and lam with a critic); without, they are 1.
        kl: where beta acts: "sequence": on r, through the KL summed over the sequence; "to_go": on the rewards of the
            tokens, so that a token answers for the KL from it on; "token": on the advantage, like the gradient of k3.
        kl_estimator: of the KL in the rewards: "k1", "k2" or "k3" (see kl_penalty).
        length_norm: divide by the live tokens of the "sequence", or by their mean over the "group".
        whiten: normalise the advantages of all live tokens to mean 0 and variance 1, across ranks.
        ddof, eps, eps_in_root: of every standard deviation: sqrt(squares / (n - ddof)) + eps, or with eps in the root.
        singleton: what a group of one gives: "zero", or "raw", its reward.
    """

    mean_level: str = "none"
    std_level: str = "none"
    leave_one_out: bool = False
    leave_one_out_std: bool = False
    length_weighted: bool = False
    greedy_baseline: bool = False
    divide_by_mean: bool = False
    per_reward: bool = False
    k: int = 0
    rescale_by_signal: bool = False
    critic: bool = False
    discounted: bool = False
    kl: str = "none"
    kl_estimator: str = "k1"
    length_norm: str = "none"
    whiten: bool = False
    ddof: int = 1
    eps: float = 1e-6
    eps_in_root: bool = False
    singleton: str = "zero"

    def __post_init__(self) -> None:
        for field in ("k", "eps"):
            if not isinstance(getattr(self, field), Real):
                raise TypeError(f"Estimator: expected {field} a number, got {getattr(self, field)!r}")
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(f"Estimator: expected {field} in {choices}, got {getattr(self, field)!r}")
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"Estimator: expected eps >= 0 and finite, got {self.eps}")
        if self.k < 0 or int(self.k) != self.k:
            raise ValueError(f"Estimator: expected k >= 0, got {self.k!r}")
        grouped_mean = self.mean_level == "group"
        plain = not (self.leave_one_out or self.leave_one_out_std or self.length_weighted or self.divide_by_mean)
        for field, is_wrong, wanted in (
            ("leave_one_out", self.leave_one_out and self.mean_level == "none", "a mean_level"),
            ("leave_one_out_std", self.leave_one_out_std and self.std_level != "group", "std_level = 'group'"),
            ("length_weighted", self.length_weighted and not grouped_mean, "mean_level = 'group'"),
            ("length_weighted", self.length_weighted and self.leave_one_out, "no leave_one_out"),
            ("divide_by_mean", self.divide_by_mean and self.mean_level == "none", "a mean_level"),
            ("divide_by_mean", self.divide_by_mean and self.std_level != "none", "no std_level"),
            ("k", self.k > 0 and not (grouped_mean and plain), "mean_level = 'group' and its plain mean"),
            ("k", self.k > 0 and self.std_level == "batch", "std_level 'group' or 'none'"),
            ("rescale_by_signal", self.rescale_by_signal and not self.is_relative, "a mean_level or std_level"),
            ("rescale_by_signal", self.rescale_by_signal and self.k > 0, "k = 0"),
            ("critic", self.critic and self.kl not in ("none", "to_go"), "kl 'none' or 'to_go'"),
            ("discounted", self.discounted and not self.is_scan, "a critic or kl = 'to_go'"),
            ("length_norm", self.length_norm != "none" and self.is_scan, "neither critic nor kl = 'to_go'"),
        ):
            if is_wrong:
                raise ValueError(f"Estimator: expected {wanted} with {field} = {getattr(self, field)!r}")

    @property
    def is_relative(self) -> bool:
        """Whether the score of a sequence depends on other sequences."""
        return (self.mean_level, self.std_level) != ("none", "none")

    @property
    def is_scan(self) -> bool:
        """Whether tokens of one sequence differ in their advantage by a scan over time."""
        return self.critic or self.kl == "to_go"

    @property
    def needs_groups(self) -> bool:
        """Whether group_ids matter."""
        return "group" in (self.mean_level, self.std_level, self.length_norm) or self.rescale_by_signal
