"""What follows from the expectations: which prompts and responses are favoured, what a critic does, who is noisy."""

import math

import pytest
import torch

from areal_core import ops
from areal_core.estimators import Case, TreeMDP, evaluate, example, expected_advantages
from areal_core.estimators.survey import (
    exact_critic,
    long_answers,
    prompt_critic,
    reward_weight,
    success_weight,
    untrained_critic,
)

POPULATION = {"ddof": 0, "eps": 0.0}


@pytest.fixture
def mdp_and_logits():
    return example()


# -- Prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo_r1", "dapo"])
def test_easy_and_hard_prompts_weigh_more(name):
    """The weight of grad p is 1/sqrt(p(1-p)) up to 1/M: least at p = 1/2, the same at p and 1-p."""
    for p in (0.1, 0.3, 0.5, 0.8):
        limit = 1 / math.sqrt(p * (1 - p))
        errors = [success_weight(name, p, size, **POPULATION) / limit - 1 for size in (100, 200)]
        assert abs(errors[1]) < 0.03
        assert errors[1] / errors[0] == pytest.approx(0.5, abs=0.06)
    weights = [success_weight(name, p, 8, **POPULATION) for p in (0.1, 0.3, 0.5, 0.7, 0.9)]
    assert weights[0] > weights[1] > weights[2] < weights[3] < weights[4]
    assert weights == pytest.approx(weights[::-1], rel=1e-12)


@pytest.mark.parametrize("group_size", [2, 3])
def test_groups_of_two_and_three_have_one_spread(mdp_and_logits, group_size):
    """Unless all agree, their standard deviation is the same whatever the rewards: grpo_r1 is rloo, scaled."""
    mdp, logits = mdp_and_logits
    grpo, rloo = (evaluate(Case(name), mdp, logits, group_size=group_size).gradient for name in ("grpo_r1", "rloo"))
    scales = grpo / rloo
    assert torch.allclose(scales, scales[0, 0], rtol=1e-10)


def test_unbiased_estimators_weigh_prompts_alike():
    for p in (0.1, 0.5, 0.9):
        assert success_weight("rloo", p, 5) == pytest.approx(1, abs=1e-12)
        assert success_weight("dr_grpo", p, 5) == pytest.approx(4 / 5, abs=1e-12)


def kinds_of_three(short, long):
    """A wrong response, a short right one, a long right one."""
    probabilities = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    return probabilities, torch.tensor([0.0, 1, 1], dtype=torch.float64), torch.tensor([long, short, long])


def test_original_grpo_favours_short_correct_responses():
    _, short, long = expected_advantages("grpo_original", *kinds_of_three(2, 10), 6, **POPULATION).tolist()
    assert short / long == pytest.approx(10 / 2, rel=1e-12)
    for name in ("grpo_r1", "dr_grpo", "rloo", "dapo"):
        options = POPULATION if name in ("grpo_r1", "dapo") else {}
        _, short, long = expected_advantages(name, *kinds_of_three(2, 10), 6, **options).tolist()
        if name == "dapo":  # whoever is in a group with short responses shares their mean length
            assert 1 < short / long < 1.3
        else:
            assert short == pytest.approx(long, rel=1e-12)


def test_original_grpo_spares_long_wrong_responses():
    probabilities = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    rewards, lengths = torch.tensor([1.0, 0, 0], dtype=torch.float64), torch.tensor([4, 2, 10])
    _, short, long = expected_advantages("grpo_original", probabilities, rewards, lengths, 6, **POPULATION).tolist()
    assert short < long < 0
    assert short / long == pytest.approx(5, rel=1e-12)


def test_dapo_favours_prompts_with_short_answers():
    """Two prompts alike but for the length of their answers."""

    def ratio(name):
        weights = []
        for length in (3, 12):
            halves, rewards = torch.tensor([0.5, 0.5]).double(), torch.tensor([0.0, 1.0]).double()
            lengths = torch.tensor([length] * 2)
            wrong, right = expected_advantages(name, halves, rewards, lengths, 6, **POPULATION).tolist()
            weights.append(right - wrong)
        return weights[0] / weights[1]

    assert ratio("dapo") == pytest.approx(4, rel=1e-12)
    assert ratio("grpo_r1") == pytest.approx(1, rel=1e-12)


# -- Critic ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lam", "gamma"), [(0.9, 1.0), (0.8, 0.95), (1.0, 0.9), (1.0, 1.0)])
def test_ppo_is_the_formula_of_reward_and_values(lam, gamma):
    """(lam gamma)^(T-1-t) r + sum over t' > t of (1/lam - 1) (lam gamma)^(t'-t) V(t') - V(t)."""
    values = torch.tensor([0.3, -0.2, 0.9, 0.5, 0.1], dtype=torch.float64)
    advantages = ops.compute_advantages(
        "ppo",
        rewards=torch.tensor([1.0], dtype=torch.float64),
        cu_seqlens=torch.tensor([0, 5]),
        values=values,
        lam=lam,
        gamma=gamma,
    )
    for t in range(5):
        estimate = (lam * gamma) ** (4 - t)
        estimate += sum(
            (1 / lam - 1) * (lam * gamma) ** (later - t) * float(values[later]) for later in range(t + 1, 5)
        )
        assert float(advantages[t]) == pytest.approx(estimate - float(values[t]), abs=1e-12)


def test_far_from_the_end_ppo_hears_the_critic_alone():
    weights = reward_weight(0.95, 200)
    assert weights == pytest.approx([0.95**tokens for tokens in range(200)], rel=1e-9)
    assert weights[-1] < 1e-4, "right or wrong makes no difference to the first token"
    assert reward_weight(1.0, 200) == pytest.approx([1] * 200)


@pytest.mark.parametrize("critic", [untrained_critic, prompt_critic])
def test_a_wrong_critic_biases_ppo_but_not_orz(critic):
    mdp, logits = long_answers()
    truth = mdp.policy_gradient(logits)

    def bias(case):
        return float((evaluate(case, mdp, logits, group_size=1).gradient + truth).norm() / truth.norm())

    biases = [bias(Case("ppo", critic=critic, arguments={"lam": lam})) for lam in (0.5, 0.9, 0.99)]
    assert biases[0] > biases[1] > biases[2] > 1e-3
    assert bias(Case("orz", critic=critic)) < 1e-12
    assert bias(Case("ppo", critic=exact_critic, arguments={"lam": 0.5})) < 1e-12
    assert bias(Case("ppo", critic=exact_critic, arguments={"lam": 0.9, "gamma": 0.9})) > 1e-3  # another aim


def test_only_ppo_disagrees_with_the_reward_about_a_token(mdp_and_logits):
    """All estimators but PPO give every token of a response the sign of its reward."""
    mdp, logits = mdp_and_logits
    responses, group_ids = mdp.responses, mdp.responses.prompts
    sign = (2 * responses.rewards - 1).repeat_interleave(responses.lengths)
    cases = [Case(name) for name in ("rloo", "dr_grpo", "grpo_r1", "grpo_original", "dapo")]
    for case in (*cases, Case("orz", critic=exact_critic), Case("remax", greedy_baseline=True)):
        advantages = case.advantages(mdp, logits, responses, group_ids)
        assert (advantages * sign >= 0).all(), case.name
    ppo = Case("ppo", critic=exact_critic, arguments={"lam": 0.5}).advantages(mdp, logits, responses, group_ids)
    assert (ppo * sign < 0).any(), "a step that lowers the value of a response that ends well"


# -- Noise -------------------------------------------------------------------------------------------------------------


def test_variances_of_the_unbiased_estimators(mdp_and_logits):
    """A baseline lowers the variance, one for each state more, and a critic that replaces the reward the most."""
    mdp, logits = mdp_and_logits
    cases = {
        "reinforce": Case("reinforce"),
        "rloo": Case("rloo"),
        "orz": Case("orz", critic=exact_critic),
        "ppo": Case("ppo", critic=exact_critic, arguments={"lam": 0.5}),
        "td": Case("ppo", critic=exact_critic, arguments={"lam": 0.0}),
    }
    variance = {name: evaluate(case, mdp, logits, group_size=4).variance for name, case in cases.items()}
    assert variance["reinforce"] > variance["rloo"] > variance["orz"] > variance["ppo"] > variance["td"] > 0


def test_the_baseline_of_a_pair_is_noisy(mdp_and_logits):
    mdp, logits = mdp_and_logits
    for group_size, quieter in ((2, "reinforce"), (4, "rloo")):
        variance = {n: evaluate(Case(n), mdp, logits, group_size=group_size).variance for n in ("reinforce", "rloo")}
        assert min(variance, key=variance.get) == quieter


def test_dr_grpo_is_rloo_scaled(mdp_and_logits):
    mdp, logits = mdp_and_logits
    rloo, dr_grpo = (evaluate(Case(name), mdp, logits, group_size=4) for name in ("rloo", "dr_grpo"))
    assert dr_grpo.variance == pytest.approx((3 / 4) ** 2 * rloo.variance, rel=1e-12)


def test_the_variance_of_one_step_in_closed_form():
    """One state, two actions, one of them right: the gradient is r (1{a} - pi)."""
    mdp = TreeMDP([(1, 0)])
    logits = torch.tensor([[0.7, 0.0]], dtype=torch.float64)
    p = float(logits.softmax(-1)[0, 0])
    gradient_square = 2 * (1 - p) ** 2  # |(1-p, -(1-p))|^2, with probability p
    expected = p * gradient_square - 2 * (p * (1 - p)) ** 2
    for group_size in (1, 4):
        moments = evaluate(Case("reinforce"), mdp, logits, group_size=group_size)
        assert moments.variance == pytest.approx(expected / group_size, rel=1e-12)
