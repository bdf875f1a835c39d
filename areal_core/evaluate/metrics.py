"""pass@k, maj@k and their confidence intervals, from n responses to each of P problems."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

__all__ = ["Estimate", "bootstrap", "is_right", "majority_at_k", "pass_at_k"]

Floats = npt.NDArray[np.float64]

MAX_EXACT_SAMPLES = 256  # above, majority_at_k draws subsets
_DRAWN_SUBSETS = 10_000
_RESAMPLED_VALUES = 1 << 21  # drawn at once, 16 MiB of indices


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its confidence interval; the interval of a single problem is NaN."""

    value: float
    low: float
    high: float


def is_right(rewards: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Which responses are right: those of reward 1 (or more). NaN, the mark of a verifier that failed, is wrong."""
    return np.asarray(np.asarray(rewards, np.float64) >= 1.0)


def pass_at_k(right: npt.ArrayLike, samples: int, k: int) -> Floats:
    """The chance that one of k responses is right, unbiased: 1 - C(n - c, k) / C(n, k) for c right ones among n.

    Args:
        right: int [...], right responses to each problem.
        samples: n, responses to each problem.
        k: responses drawn without replacement.

    Returns: float64 [...], each in [0, 1]. The quotient is a product of factors in [0, 1]; nothing overflows or
        cancels. k = 1 gives c / n.
    Raises: ValueError for k outside 1 to n, or counts outside 0 to n.
    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code".
    """
    _check_k("pass_at_k", k, samples)
    counts = np.asarray(right)
    if counts.size and not (counts.min() >= 0 and counts.max() <= samples):
        raise ValueError(f"pass_at_k: expected 0 to {samples} right responses, got {counts.min()} to {counts.max()}")
    drawn = np.arange(samples)
    # C(n - c, k) / C(n, k) is the product of (n - k - j) / (n - j) over j < c, and 0 from c > n - k on.
    miss = np.cumprod(np.maximum(samples - k - drawn, 0) / (samples - drawn))
    chances: Floats = 1.0 - np.concatenate([[1.0], miss])
    return np.asarray(chances[counts], np.float64)


def majority_at_k(answers: Sequence[str | None], rewards: Sequence[float], k: int, *, seed: int = 0) -> float:
    """The expected reward of the answer that most of k responses give, the k drawn from n without replacement.

    Exact up to n = MAX_EXACT_SAMPLES (sums of non-negative terms over the ways to draw the votes), else the mean over
    10,000 drawn subsets.

    Args:
        answers: what each of the n responses answers, as equal texts for equal answers; None has no vote.
        rewards: of each response; an answer is worth the mean reward of its responses, which a verifier that looks at
            the answer alone makes 0 or 1.
        k: votes.
        seed: of drawn subsets.

    Returns: the expectation, ties broken at random with equal chances; k responses without any answer count 0.
    Raises: ValueError for k outside 1 to n, or for unequal numbers of answers and rewards.
    """
    samples = len(answers)
    if len(rewards) != samples:
        raise ValueError(f"majority_at_k: expected a reward for each of {samples} answers, got {len(rewards)}")
    _check_k("majority_at_k", k, samples)
    counts = Counter(answer for answer in answers if answer is not None)
    worth = dict.fromkeys(counts, 0.0)
    for answer, reward in zip(answers, rewards, strict=True):
        if answer is not None:
            worth[answer] += reward / counts[answer]
    silent = samples - counts.total()
    if samples > MAX_EXACT_SAMPLES:
        votes = [*counts.values(), silent]
        return _drawn_majority(votes, np.array([*worth.values(), 0.0]), k, np.random.default_rng(seed))
    return sum(
        worth[answer] * _win_chance(count, tuple(sorted((counts - Counter({answer: count})).values())), silent, k)
        for answer, count in counts.items()
        if worth[answer] != 0.0
    )


@lru_cache(maxsize=4096)  # many problems have the same counts
def _win_chance(count: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """The chance that `count` responses of one answer win a vote of k; ties are shared out."""
    samples = count + sum(others) + silent
    total = 0.0
    for votes in range(1, min(count, k) + 1):
        # ways[t, v]: to draw v votes of the others so that t of them tie with `votes`, and none has more.
        ways = np.zeros(((k - votes) // votes + 1, k - votes + 1))
        ways[0, 0] = 1.0
        for other in others:
            ways = _with_rival(ways, other, votes)
        ways = _convolved(ways, silent, k - votes)
        total += math.comb(count, votes) * float((ways[:, k - votes] / np.arange(1, len(ways) + 1)).sum())
    return total / math.comb(samples, k)


def _with_rival(ways: Floats, count: int, votes: int) -> Floats:
    """`ways` after one more answer with `count` responses has drawn at most `votes` of them."""
    result = _convolved(ways, count, votes - 1)
    if count >= votes and votes < ways.shape[1]:
        result[1:, votes:] += math.comb(count, votes) * ways[:-1, : ways.shape[1] - votes]
    return result


def _convolved(ways: Floats, count: int, most: int) -> Floats:
    """`ways` after 0 to `most` of `count` responses are drawn besides."""
    result: Floats = ways.copy()
    width = ways.shape[1]
    for drawn in range(1, min(count, most, width - 1) + 1):
        result[:, drawn:] += math.comb(count, drawn) * ways[:, : width - drawn]
    return result


def _drawn_majority(counts: Sequence[int], worth: Floats, k: int, rng: np.random.Generator) -> float:
    """The mean worth of the winners of drawn votes; the last count is of responses without an answer."""
    votes = rng.multivariate_hypergeometric(counts, k, size=_DRAWN_SUBSETS, method="marginals")
    most = votes[:, :-1].max(axis=1, initial=0, keepdims=True)
    winners = (votes[:, :-1] == most) & (most > 0)
    shares = winners / np.maximum(winners.sum(axis=1, keepdims=True), 1)
    return float((shares @ worth[:-1]).mean())


def bootstrap(
    values: npt.ArrayLike, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> list[Estimate]:
    """Means over problems with BCa bootstrap intervals; problems are what is drawn anew.

    Bias-corrected and accelerated percentiles, which follow the skew of few problems with rates near 0 or 1. Where all
    problems have one value the interval is that value: resampling knows nothing else. The samples of a problem are
    averaged before, so an interval covers both which problems were asked and which responses were drawn.

    Args:
        values: float [M, P], M quantities of the same P problems; all are resampled together.
        confidence: share of intervals that should hold the true mean.
        resamples: drawn sets of problems.
        seed: of the draws; equal inputs give equal intervals.

    Raises: ValueError for no problems, values that are not finite, or a confidence outside (0, 1).
    Source: Efron 1987, "Better Bootstrap Confidence Intervals".
    """
    table = np.atleast_2d(np.asarray(values, np.float64))
    problems = table.shape[1]
    if problems == 0 or not np.isfinite(table).all():
        raise ValueError(f"bootstrap: expected finite values of at least 1 problem, got {values!r}")
    if not 0.0 < confidence < 1.0 or resamples < 1:
        raise ValueError(
            f"bootstrap: expected confidence in (0, 1) and resamples >= 1, got {confidence} and {resamples}"
        )
    if problems == 1:
        return [Estimate(float(row[0]), math.nan, math.nan) for row in table]
    rng = np.random.default_rng(seed)
    means = np.empty((len(table), resamples))
    step = max(1, _RESAMPLED_VALUES // problems)
    for start in range(0, resamples, step):
        drawn = rng.integers(problems, size=(min(step, resamples - start), problems))
        for row, quantity in enumerate(table):
            means[row, start : start + len(drawn)] = quantity[drawn].mean(axis=1)
    return [_interval(row, resampled, confidence) for row, resampled in zip(table, means, strict=True)]


def _interval(values: Floats, means: Floats, confidence: float) -> Estimate:
    mean = float(values.mean())
    spread = values - mean  # of the jackknife means, times P - 1, which cancels below
    if not (values != values[0]).any():
        return Estimate(mean, mean, mean)
    normal = NormalDist()
    # Sums in another order differ in the last bits; means that near count as equal, half below and half above.
    tolerance = 1e-12 * max(1.0, abs(mean))
    below = (means < mean - tolerance).mean() + 0.5 * (abs(means - mean) <= tolerance).mean()
    bias = normal.inv_cdf(min(max(float(below), 0.5 / len(means)), 1 - 0.5 / len(means)))
    acceleration = float((spread**3).sum()) / (6.0 * float((spread**2).sum()) ** 1.5)

    def position(share: float) -> float:
        shifted = bias + normal.inv_cdf(share)
        return normal.cdf(bias + shifted / (1.0 - acceleration * shifted))

    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [position(tail), position(1.0 - tail)])
    return Estimate(mean, float(low), float(high))


def _check_k(name: str, k: int, samples: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"{name}: expected k from 1 to the {samples} samples of a problem, got {k}")
