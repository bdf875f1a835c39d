"""What each estimator makes of the policy gradient in expectation, computed by the ops that training uses.

For rewards 0 and 1 and beta = 0, with J the expected reward, Q and V the exact values, p(x) the success rate and T(x)
the mean length of a prompt:

    estimator       E[advantage | s, a]                  E[gradient of the loss]
    reinforce       Q                                    -grad J
    rloo            Q - V(x)                             -grad J
    remax           Q - V_greedy(x)                      -grad J
    ppo             Q - V(s)                             -grad J      if the critic is exact and gamma = 1
    orz             Q - critic(s)                        -grad J      for any critic
    dr_grpo         (M-1)/M (Q - V(x))                   -(M-1)/M grad J
    reinforce++     (Q - mu) / sigma              (*)    -1/sigma grad J                          (*)
    grpo_r1         (Q - p) / sqrt(p(1-p))        (*)    -E[r grad log pi / sqrt(p(1-p))]         (*)
    grpo_original                                        -E[(r-p) grad log pi / (T sqrt(p(1-p)))] (*)
    dapo            (Q - p) / (T(x) sqrt(p(1-p))) (*)    -E[r grad log pi / (T(x) sqrt(p(1-p)))]  (*)

(*) as the group, or the batch of reinforce++, grows: the error halves when it doubles.

The baseline p of grpo_r1 drops out of the gradient because E[grad log pi] = 0. That of grpo_original does not: the
length of the response is weighted with it, and E[grad log pi / T] = grad E[1/T].
"""

import itertools

import pytest
import torch

from areal_core import ops
from areal_core.estimators import Case, TreeMDP, evaluate, example, expected_advantages, multisets
from areal_core.estimators.exact import loss_gradient
from areal_core.estimators.survey import exact_critic

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
    values = mdp.values(logits)[:, None]
    root, greedy = (x[prompt_of_states(mdp)][:, None] for x in (mdp.success(logits), mdp.greedy_rewards(logits)))
    share = (group_size - 1) / group_size
    return [
        (Case("reinforce"), q, 1.0),
        (Case("rloo"), q - root, 1.0),
        (Case("remax", greedy_baseline=True), q - greedy, 1.0),
        *((Case("ppo", critic=exact_critic, arguments={"lam": lam}), q - values, 1.0) for lam in (0.0, 0.3, 0.95, 1.0)),
        (Case("orz", critic=exact_critic), q - values, 1.0),
        (Case("orz", critic=wrong_critic), q - wrong_critic(mdp, logits)[:, None], 1.0),
        (Case("dr_grpo"), share * (q - root), share),
    ]


def wrong_critic(mdp, logits):
    return torch.linspace(-1, 2, mdp.num_states, dtype=torch.float64)


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_exact_rows(mdp_and_logits, group_size):
    mdp, logits = mdp_and_logits
    gradient = mdp.policy_gradient(logits)
    for estimator, advantage, share in exact_rows(mdp, logits, group_size):
        moments = evaluate(estimator, mdp, logits, group_size=group_size)
        assert torch.allclose(moments.advantage, advantage, rtol=0, atol=EXACT), estimator.name
        assert torch.allclose(moments.gradient, -share * gradient, rtol=0, atol=EXACT), estimator.name


@pytest.mark.parametrize(("k", "group_size"), [(2, 3), (2, 5), (3, 5)])
def test_pass_at_k_follows_the_gradient_of_the_best_of_k(mdp_and_logits, k, group_size):
    """Undivided: (1/k - 1/M) times the gradient of the probability that one of k is right."""
    mdp, logits = mdp_and_logits
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((1 - (1 - mdp.success(leaf)) ** k).mean(), leaf)
    case = Case("pass_at_k", arguments={"k": k, "std_level": "none"})
    moments = evaluate(case, mdp, logits, group_size=group_size)
    assert torch.allclose(moments.gradient, -(1 / k - 1 / group_size) * gradient, rtol=0, atol=EXACT)


# -- As the group grows ------------------------------------------------------------------------------------------------


def kinds(mdp: TreeMDP, logits, prompt):
    """The kinds of responses to a prompt: probabilities, rewards and lengths, and the kind of each response."""
    own = mdp.responses.prompts == prompt
    signature = torch.stack((mdp.responses.rewards[own], mdp.responses.lengths[own].double()), 1)
    unique, kind = signature.unique(dim=0, return_inverse=True)
    probabilities = torch.zeros(len(unique), dtype=torch.float64).index_add(0, kind, mdp.probabilities(logits)[own])
    return probabilities, unique[:, 0].contiguous(), unique[:, 1].long(), kind


def gradient_of(mdp: TreeMDP, logits, advantages):
    """E[gradient of the loss] where responses have these advantages, float64 [S]."""
    weighted = (advantages * mdp.probabilities(logits) / mdp.num_prompts).repeat_interleave(mdp.responses.lengths)
    leaf = logits.clone().requires_grad_()
    logprobs = mdp.token_logprobs(leaf)
    return torch.autograd.grad(logprobs, leaf, loss_gradient(logprobs, weighted, 1))[0]


def expected_gradient(name, mdp: TreeMDP, logits, group_size, **options):
    """E[gradient of the loss] at group sizes out of reach of `evaluate`, and E[advantage] of each response."""
    advantages = torch.zeros(len(mdp.responses.rewards), dtype=torch.float64)
    for prompt in range(mdp.num_prompts):
        *kind_facts, kind = kinds(mdp, logits, prompt)
        own = mdp.responses.prompts == prompt
        advantages[own] = expected_advantages(name, *kind_facts, group_size, **options)[kind]
    return gradient_of(mdp, logits, advantages), advantages


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
        moments = evaluate(Case(name), mdp, logits, group_size=4)
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


def test_dapo_weighs_prompts_by_their_spread_and_mean_length(few_kinds):
    mdp, logits = few_kinds
    weights = 1 / (spread(mdp, logits) * mdp.mean_length(logits)[mdp.responses.prompts])
    limit = -mdp.expectation_gradient(mdp.responses.rewards * weights, logits)
    errors = limit_errors("dapo", mdp, logits, limit)
    assert_halves(errors)
    assert errors[-1] < 0.01


def test_opo_becomes_the_policy_gradient(few_kinds):
    """Its baseline, the reward weighted by length, contains the response itself."""
    mdp, logits = few_kinds
    tokens = mdp.responses.lengths.double()
    baseline = mdp.per_prompt(tokens * mdp.responses.rewards, logits) / mdp.mean_length(logits)
    limit_advantage = mdp.responses.rewards - baseline[mdp.responses.prompts]
    limit = -mdp.policy_gradient(logits)
    gradient_errors, advantage_errors = [], []
    for group_size in (16, 32, 64):
        gradient, advantages = expected_gradient("opo", mdp, logits, group_size)
        gradient_errors.append(float((gradient - limit).norm() / limit.norm()))
        advantage_errors.append(float((advantages - limit_advantage).norm() / limit_advantage.norm()))
    for errors in (gradient_errors, advantage_errors):
        assert_halves(errors)
        assert errors[-1] < 0.02


@pytest.mark.parametrize("name", ["grpo_r1", "dapo"])
def test_limits_of_the_advantage(few_kinds, name):
    mdp, logits = few_kinds
    prompts = prompt_of_states(mdp)
    success = mdp.success(logits)[prompts][:, None]
    length = mdp.mean_length(logits)[prompts][:, None] if name == "dapo" else 1
    limit = (mdp.q_values(logits) - success) / (length * (success * (1 - success)).sqrt())
    errors = []
    for group_size in (16, 32, 64):
        _, advantages = expected_gradient(name, mdp, logits, group_size, **POPULATION)
        errors.append(float((advantage_of_pairs(mdp, logits, advantages) - limit).norm() / limit.norm()))
    assert_halves(errors)
    assert errors[-1] < 0.01


# -- REINFORCE++: statistics of the batch ------------------------------------------------------------------------------


def test_reinforce_with_statistics_of_the_batch(mdp_and_logits):
    """Normalised by sequences: with the batch as the one group."""
    mdp, logits = mdp_and_logits
    mean = float(mdp.objective(logits))
    sigma = (mean * (1 - mean)) ** 0.5
    advantage_errors, gradient_errors = [], []
    for batch_size in (16, 32, 64):
        levels = {"mean_level": "group", "std_level": "group"}
        probabilities, rewards = torch.tensor([1 - mean, mean], dtype=torch.float64), torch.tensor([0.0, 1.0]).double()
        one_token = torch.ones(2, dtype=torch.int64)
        kind = expected_advantages("reinforce", probabilities, rewards, one_token, batch_size, **levels, **POPULATION)
        advantages = kind[mdp.responses.rewards.long()]
        limit = (mdp.q_values(logits) - mean) / sigma
        advantage_errors.append(float((advantage_of_pairs(mdp, logits, advantages) - limit).norm() / limit.norm()))
        limit = -mdp.policy_gradient(logits) / sigma
        gradient_errors.append(float((gradient_of(mdp, logits, advantages) - limit).norm() / limit.norm()))
    for errors in (advantage_errors, gradient_errors):
        assert_halves(errors)
        assert errors[-1] < 0.02


def test_a_batch_is_the_one_group_of_its_own():
    arguments = {"rewards": torch.tensor([1.0, 0, 1, 0, 0, 1]).double(), "cu_seqlens": torch.arange(7)}
    batch = ops.compute_advantages(
        "reinforce", group_ids=torch.arange(6) // 2, mean_level="batch", std_level="batch", **POPULATION, **arguments
    )
    group = ops.compute_advantages(
        "reinforce",
        group_ids=torch.zeros(6, dtype=torch.int64),
        mean_level="group",
        std_level="group",
        **POPULATION,
        **arguments,
    )
    assert torch.allclose(batch, group, rtol=1e-14)
    assert batch.tolist() == pytest.approx([1, -1, 1, -1, -1, 1])


def test_reinforce_pp_normalises_over_tokens():
    """reinforce_pp normalises the advantages of all tokens of the batch: mu and sigma weigh responses by length."""
    mdp = TreeMDP([(1, (0, 1)), (1, (1, 0))])
    logits = torch.tensor([[-0.4, 0.5], [0.3, -0.1], [0.2, 0.5], [0.6, -0.5]], dtype=torch.float64)
    responses, weights = mdp.responses, mdp.probabilities(logits) / 2
    signature = torch.stack((responses.rewards, responses.lengths.double()), 1)
    unique, kind = signature.unique(dim=0, return_inverse=True)
    probabilities = torch.zeros(len(unique), dtype=torch.float64).index_add(0, kind, weights)
    tokens = weights * responses.lengths
    mean = float((tokens * responses.rewards).sum() / tokens.sum())
    limit = -mdp.policy_gradient(logits) / (mean * (1 - mean)) ** 0.5
    errors = []
    for batch_size in (16, 32, 64):
        batches = multisets(probabilities, batch_size)
        total = torch.zeros_like(probabilities)
        for members, probability in zip(batches.members, batches.probabilities, strict=True):
            cu_seqlens = torch.cat((torch.zeros(1), unique[members, 1].cumsum(0))).long()
            advantages = ops.compute_advantages(
                "reinforce_pp", rewards=unique[members, 0], cu_seqlens=cu_seqlens, ddof=0, eps=0.0
            )
            total.index_add_(0, members, probability * advantages[cu_seqlens[:-1]])
        gradient = gradient_of(mdp, logits, (total / (batch_size * probabilities))[kind])
        errors.append(float((gradient - limit).norm() / limit.norm()))
    assert_halves(errors)
