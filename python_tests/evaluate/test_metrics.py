"""Metrics against enumeration of every subset, and against values computed by hand."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.evaluate import metrics
from areal_core.evaluate.metrics import bootstrap, is_right, majority_at_k, pass_at_k


def enumerated_pass(right: int, samples: int, k: int) -> float:
    subsets = list(itertools.combinations(range(samples), k))
    return sum(any(i < right for i in subset) for subset in subsets) / len(subsets)


def enumerated_majority(answers: list[str | None], rewards: list[float], k: int) -> float:
    worth = {a: np.mean([r for b, r in zip(answers, rewards, strict=True) if a == b]) for a in answers if a is not None}
    total, subsets = 0.0, list(itertools.combinations(range(len(answers)), k))
    for subset in subsets:
        votes = Counter(answers[i] for i in subset if answers[i] is not None)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        total += sum(worth[answer] for answer in winners) / len(winners) if winners else 0.0
    return total / len(subsets)


# -- pass@k -----------------------------------------------------------------------------------------------------------


@given(st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(data):
    samples = data.draw(st.integers(1, 9))
    k = data.draw(st.integers(1, samples))
    chances = pass_at_k(np.arange(samples + 1), samples, k)
    assert chances == pytest.approx([enumerated_pass(c, samples, k) for c in range(samples + 1)], abs=1e-14)


def test_pass_at_k_by_hand():
    assert pass_at_k(1, 4, 2) == pytest.approx(1 / 2)  # 3 of 6 pairs hold the right one
    assert pass_at_k(2, 4, 2) == pytest.approx(5 / 6)
    assert pass_at_k(3, 4, 2) == 1.0
    assert pass_at_k([0, 1], 1, 1).tolist() == [0.0, 1.0]
    assert pass_at_k(32, 32, 8) == 1.0
    assert pass_at_k(0, 32, 8) == 0.0


@given(st.integers(1, 5000), st.data())
@settings(max_examples=50)
def test_pass_at_k_is_exact_where_binomials_overflow(samples, data):
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    expected = 1 - math.comb(samples - right, k) / math.comb(samples, k)  # integers, divided once
    assert float(pass_at_k(right, samples, k)) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 64), st.data())
@settings(max_examples=50)
def test_pass_at_k_grows_with_k_and_starts_at_the_share(samples, data):
    right = data.draw(st.integers(0, samples))
    chances = [float(pass_at_k(right, samples, k)) for k in range(1, samples + 1)]
    assert chances[0] == pytest.approx(right / samples, abs=1e-15)
    assert chances == sorted(chances)
    assert chances[-1] == float(right > 0)


@pytest.mark.parametrize(("right", "samples", "k"), [(1, 4, 5), (1, 4, 0), (5, 4, 1), (-1, 4, 1), (0, 0, 1)])
def test_pass_at_k_refuses(right, samples, k):
    with pytest.raises(ValueError, match="pass_at_k: expected"):
        pass_at_k(right, samples, k)


def test_a_response_is_right_at_the_full_reward_only():
    assert is_right([1.0, 0.999, 0.0, -1.0, math.nan, 5.0]).tolist() == [True, False, False, False, False, True]


# -- maj@k ------------------------------------------------------------------------------------------------------------

VOTES = st.lists(st.sampled_from([None, "a", "b", "c", "d"]), min_size=1, max_size=9)


@given(VOTES, st.data())
def test_majority_is_the_mean_over_all_subsets(answers, data):
    worth = data.draw(st.fixed_dictionaries({a: st.sampled_from([0.0, 1.0]) for a in [None, *"abcd"]}))
    k = data.draw(st.integers(1, len(answers)))
    rewards = [worth[answer] for answer in answers]
    expected = enumerated_majority(answers, rewards, k)
    assert majority_at_k(answers, rewards, k) == pytest.approx(expected, abs=1e-13)


@given(VOTES, st.data())
@settings(max_examples=30)
def test_an_answer_judged_differently_is_worth_its_mean(answers, data):
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(answers), max_size=len(answers)))
    k = data.draw(st.integers(1, len(answers)))
    expected = enumerated_majority(answers, rewards, k)
    assert majority_at_k(answers, rewards, k) == pytest.approx(expected, abs=1e-13)


def test_majority_by_hand():
    assert majority_at_k(["6"], [1.0], 1) == 1.0
    assert majority_at_k([None], [0.0], 1) == 0.0
    assert majority_at_k(["6", "6", "5"], [1.0, 1.0, 0.0], 3) == 1.0
    assert majority_at_k(["6", "5", "5"], [1.0, 0.0, 0.0], 3) == 0.0
    assert majority_at_k(["6", "5"], [1.0, 0.0], 2) == 0.5, "a tie is a coin"
    # Pairs of 6, 6, 5, 4: one of two sixes (1), four of a six and another (1/2), one without a six (0).
    assert majority_at_k(["6", "6", "5", "4"], [1.0, 1.0, 0.0, 0.0], 2) == pytest.approx(3 / 6)
    assert majority_at_k(["6", None, None], [1.0, 0.0, 0.0], 3) == 1.0, "who says nothing has no vote"


@pytest.mark.parametrize("k", [1, 5, 64, 300])
def test_drawn_votes_agree_with_exact_ones(k, monkeypatch):
    answers = ["a"] * 110 + ["b"] * 100 + ["c"] * 40 + [None] * 50
    rewards = [float(answer == "a") for answer in answers]
    drawn = majority_at_k(answers, rewards, k)
    monkeypatch.setattr(metrics, "MAX_EXACT_SAMPLES", 300)
    exact = majority_at_k(answers, rewards, k)
    assert drawn == pytest.approx(exact, abs=5 * 0.5 / math.sqrt(10_000))
    assert not np.isnan(exact)


def test_majority_of_one_is_the_share_and_of_many_answers_is_fast():
    answers = [str(index) for index in range(256)]
    rewards = [1.0] + [0.0] * 255
    assert majority_at_k(answers, rewards, 1) == pytest.approx(1 / 256)
    assert majority_at_k(answers, rewards, 128) == pytest.approx(1 / 256), "all tie, whoever is drawn"


@pytest.mark.parametrize(
    ("answers", "rewards", "k"), [(["a"], [1.0], 2), (["a"], [1.0], 0), (["a"], [], 1), ([], [], 1)]
)
def test_majority_refuses(answers, rewards, k):
    with pytest.raises(ValueError, match="majority_at_k: expected"):
        majority_at_k(answers, rewards, k)


# -- bootstrap --------------------------------------------------------------------------------------------------------


def test_equal_problems_have_an_interval_of_no_width_and_one_problem_has_none():
    (estimate,) = bootstrap([[1.0] * 30])
    assert (estimate.value, estimate.low, estimate.high) == (1.0, 1.0, 1.0)
    (estimate,) = bootstrap([[0.25]])
    assert estimate.value == 0.25
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)


def test_quantities_are_resampled_together_and_draws_are_seeded():
    values = np.random.default_rng(1).random((2, 40))
    both = bootstrap(values, seed=3)
    assert both == bootstrap(values, seed=3)
    assert both != bootstrap(values, seed=4)
    assert both[0] == bootstrap(values[0], seed=3)[0], "what else is asked for makes no difference"
    assert both[1] == bootstrap(values[1], seed=3)[0]


def test_chunks_make_no_difference(monkeypatch):
    values = np.random.default_rng(1).random((1, 40))
    whole = bootstrap(values, resamples=1000)
    monkeypatch.setattr(metrics, "_RESAMPLED_VALUES", 7 * 40)
    assert bootstrap(values, resamples=1000) == whole


def test_the_interval_mirrors_when_the_values_do():
    values = np.random.default_rng(2).random(50) ** 4
    (skewed,), (mirrored,) = bootstrap(values), bootstrap(1 - values)
    assert mirrored.low == pytest.approx(1 - skewed.high, abs=1e-12)
    assert mirrored.high == pytest.approx(1 - skewed.low, abs=1e-12)
    assert skewed.high - skewed.value > skewed.value - skewed.low, "longer on the side of the tail"


def test_the_interval_of_many_problems_is_the_normal_one():
    values = np.random.default_rng(3).normal(size=2000)
    (estimate,) = bootstrap(values)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert estimate.low == pytest.approx(values.mean() - half, abs=0.06 * half)
    assert estimate.high == pytest.approx(values.mean() + half, abs=0.06 * half)
    (wide,) = bootstrap(values, confidence=0.99)
    assert wide.high - wide.low == pytest.approx(2 * half * 2.576 / 1.96, rel=0.06)


def test_bca_agrees_with_a_plain_implementation():
    """The textbook formulas, one resample and one jackknife mean at a time."""
    values = np.random.default_rng(5).random(24) ** 3
    (estimate,) = bootstrap(values, resamples=500, seed=9)
    rng, normal = np.random.default_rng(9), metrics.NormalDist()
    means = [values[row].mean() for row in rng.integers(24, size=(500, 24))]
    bias = normal.inv_cdf(sum(m < values.mean() for m in means) / 500)
    jackknife = np.array([np.delete(values, i).mean() for i in range(24)])
    spread = jackknife.mean() - jackknife
    skew = (spread**3).sum() / (6 * (spread**2).sum() ** 1.5)
    ends = []
    for share in (0.025, 0.975):
        z = bias + normal.inv_cdf(share)
        ends.append(np.quantile(means, normal.cdf(bias + z / (1 - skew * z))))
    assert (estimate.low, estimate.high) == pytest.approx(ends, rel=1e-9)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """60 problems of chance Beta(1, 1), 4 samples each: 95 % of 200 intervals, give or take four standard errors."""
    rng, held = np.random.default_rng(11), 0
    for seed in range(200):
        shares = rng.binomial(4, rng.random(60)) / 4
        (estimate,) = bootstrap(shares, resamples=1000, seed=seed)
        held += estimate.low <= 0.5 <= estimate.high
    assert abs(held / 200 - 0.95) <= 4 * math.sqrt(0.95 * 0.05 / 200)


@pytest.mark.parametrize(
    ("values", "options"),
    [([[]], {}), ([[math.nan]], {}), ([[1.0, 2.0]], {"confidence": 1.0}), ([[1.0, 2.0]], {"resamples": 0})],
)
def test_bootstrap_refuses(values, options):
    with pytest.raises(ValueError, match="bootstrap: expected"):
        bootstrap(values, **options)
