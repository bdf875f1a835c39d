"""What each estimator makes of the policy gradient in expectation, computed by the ops that training uses.

For rewards 0 and 1 and beta = 0, with J the expected reward, Q and V the exact values, p(x) the success rate and T(x)
the mean length of a prompt:

    estimator       E[advantage | s, a]                  E[gradient of the loss]
    reinforce       Q                                    -grad J
    rloo            Q - V(x)                             -grad J
    dr_grpo         (M-1)/M (Q - V(x))                   -(M-1)/M grad J
    grpo_r1         (Q - p) / sqrt(p(1-p))        (*)    -E[r grad log pi / sqrt(p(1-p))]         (*)
    grpo_original                                        -E[(r-p) grad log pi / (T sqrt(p(1-p)))] (*)

(*) as the group grows: the error halves when M doubles.

The baseline p of grpo_r1 drops out of the gradient because E[grad log pi] = 0. That of grpo_original does not: the
length of the response is weighted with it, and E[grad log pi / T] = grad E[1/T].
"""

import itertools

import pytest
import torch

from areal_core.estimators import Estimator, TreeMDP, evaluate, example, expected_advantages
from areal_core.estimators.exact import loss_gradient

EXACT = 1e-10
POPULATION = {"ddof": 0, "eps": 0.0}  # std is sqrt(p(1-p)) of the group, as in the theory


@pytest.fixture
def mdp_and_logits():
    return example()


def prompt_of_states(mdp: TreeMDP):
    """int64 [num_states]."""
    owner = torch.zeros(mdp.num_states, dtype=torch.int64)
    prompts = mdp.responses.prompts.repeat_interleave(mdp.responses.lengths)
    return owner.scatter(0, mdp.responses.states, prompts)


def exact_rows(mdp: TreeMDP, logits, group_size):
    """(estimator, E[advantage | s, a], share of -grad J in E[gradient]) of every estimator that has an exact one."""
    q = mdp.q_values(logits)
    root = mdp.success(logits)[prompt_of_states(mdp)][:, None]
    share = (group_size - 1) / group_size
    return [
        (Estimator("reinforce"), q, 1.0),
        (Estimator("rloo"), q - root, 1.0),
        (Estimator("dr_grpo"), share * (q - root), share),
    ]


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_exact_rows(mdp_and_logits, group_size):
    mdp, logits = mdp_and_logits
    gradient = mdp.policy_gradient(logits)
    for estimator, advantage, share in exact_rows(mdp, logits, group_size):
        moments = evaluate(estimator, mdp, logits, group_size=group_size)
        assert torch.allclose(moments.advantage, advantage, rtol=0, atol=EXACT), estimator.name
        assert torch.allclose(moments.gradient, -share * gradient, rtol=0, atol=EXACT), estimator.name


# -- As the group grows ------------------------------------------------------------------------------------------------


def kinds(mdp: TreeMDP, logits, prompt):
    """The kinds of responses to a prompt: probabilities, rewards and lengths, and the kind of each response."""
    own = mdp.responses.prompts == prompt
    signature = torch.stack((mdp.responses.rewards[own], mdp.responses.lengths[own].double()), 1)
    unique, kind = signature.unique(dim=0, return_inverse=True)
    probabilities = torch.zeros(len(unique), dtype=torch.float64).index_add(0, kind, mdp.probabilities(logits)[own])
    return probabilities, unique[:, 0].contiguous(), unique[:, 1].long(), kind


def expected_gradient(name, mdp: TreeMDP, logits, group_size, **options):
    """E[gradient of the loss] at group sizes out of reach of `evaluate`, and E[advantage] of each response."""
    advantages = torch.zeros(len(mdp.responses.rewards), dtype=torch.float64)
    for prompt in range(mdp.num_prompts):
        *kind_facts, kind = kinds(mdp, logits, prompt)
        own = mdp.responses.prompts == prompt
        advantages[own] = expected_advantages(name, *kind_facts, group_size, **options)[kind]
    weighted = (advantages * mdp.probabilities(logits) / mdp.num_prompts).repeat_interleave(mdp.responses.lengths)
    leaf = logits.clone().requires_grad_()
    logprobs = mdp.token_logprobs(leaf)
    (gradient,) = torch.autograd.grad(logprobs, leaf, loss_gradient(logprobs, weighted, 1))
    return gradient, advantages


def advantage_of_pairs(mdp: TreeMDP, logits, advantages):
    """E[advantage | s, a] from that of each response."""
    pair = mdp.responses.states * mdp.num_actions + mdp.responses.actions
    weights = mdp.probabilities(logits).repeat_interleave(mdp.responses.lengths)
    per_token = advantages.repeat_interleave(mdp.responses.lengths)
    summed = torch.zeros(logits.numel(), dtype=torch.float64).index_add(0, pair, weights * per_token)
    return (summed / torch.zeros_like(summed).index_add(0, pair, weights)).view_as(logits)


def test_kinds_of_responses_give_the_same_as_responses(mdp_and_logits):
    mdp, logits = mdp_and_logits
    for name in ("rloo", "grpo_r1", "grpo_original"):
        gradient, advantages = expected_gradient(name, mdp, logits, 4)
        moments = evaluate(Estimator(name), mdp, logits, group_size=4)
        assert torch.allclose(gradient, moments.gradient, rtol=0, atol=1e-13)
        assert torch.allclose(advantage_of_pairs(mdp, logits, advantages), moments.advantage, rtol=0, atol=1e-13)


def assert_halves(errors):
    """Errors at doubling group sizes: each about half of the one before, so the limit is right and the rate 1/M."""
    for before, after in itertools.pairwise(errors):
        assert 0.45 < after / before < 0.55, errors


@pytest.fixture
def few_kinds():
    """Three prompts of different success and mean length, with three kinds of responses each."""
    mdp = TreeMDP([(1, (0, 1)), (0, (1, 0)), ((0, 1), 1)])
    logits = [[-0.4, 0.5], [0.3, -0.1], [0.2, 0.5], [0.6, -0.5], [0.1, 0.4], [0.2, -0.3]]
    return mdp, torch.tensor(logits, dtype=torch.float64)


def spread(mdp: TreeMDP, logits):
    """sqrt(p(1-p)) of the prompt of each response."""
    success = mdp.success(logits)[mdp.responses.prompts]
    return (success * (1 - success)).sqrt()


def limit_errors(name, mdp, logits, limit):
    sizes = (16, 32, 64)
    gradients = [expected_gradient(name, mdp, logits, size, **POPULATION)[0] for size in sizes]
    return [float((gradient - limit).norm() / limit.norm()) for gradient in gradients]


def test_grpo_r1_weighs_prompts_by_their_spread(few_kinds):
    mdp, logits = few_kinds
    limit = -mdp.expectation_gradient(mdp.responses.rewards / spread(mdp, logits), logits)
    errors = limit_errors("grpo_r1", mdp, logits, limit)
    assert_halves(errors)
    assert errors[-1] < 0.01
    gradient, _ = expected_gradient("grpo_r1", mdp, logits, 16, **POPULATION)
    policy_gradient = mdp.policy_gradient(logits)
    cosine = float(-(gradient * policy_gradient).sum() / (gradient.norm() * policy_gradient.norm()))
    assert cosine < 0.999, "not the direction of the policy gradient"


def test_grpo_original_weighs_responses_by_their_length(few_kinds):
    mdp, logits = few_kinds
    weights = 1 / (spread(mdp, logits) * mdp.responses.lengths)
    success = mdp.success(logits)[mdp.responses.prompts]
    limit = -mdp.expectation_gradient((mdp.responses.rewards - success) * weights, logits)
    errors = limit_errors("grpo_original", mdp, logits, limit)
    assert_halves(errors)
    assert errors[-1] < 0.01
    without_baseline = -mdp.expectation_gradient(mdp.responses.rewards * weights, logits)
    assert min(limit_errors("grpo_original", mdp, logits, without_baseline)) > 0.4


def test_the_advantage_of_grpo_r1(few_kinds):
    mdp, logits = few_kinds
    success = mdp.success(logits)[prompt_of_states(mdp)][:, None]
    limit = (mdp.q_values(logits) - success) / (success * (1 - success)).sqrt()
    errors = []
    for group_size in (16, 32, 64):
        _, advantages = expected_gradient("grpo_r1", mdp, logits, group_size, **POPULATION)
        errors.append(float((advantage_of_pairs(mdp, logits, advantages) - limit).norm() / limit.norm()))
    assert_halves(errors)
    assert errors[-1] < 0.01
