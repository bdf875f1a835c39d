"""The exact quantities that the theory is checked against, each against a second way to get it."""

import itertools

import pytest
import torch

from areal_core.estimators import Case, TreeMDP, evaluate, example, multisets, outcomes
from areal_core.estimators.exact import loss_gradient


@pytest.fixture
def mdp_and_logits():
    return example()


def test_the_responses_of_a_tree():
    mdp = TreeMDP([(1, (0, 1)), (0, 1)])
    responses = mdp.responses
    assert (mdp.num_states, mdp.num_actions, mdp.num_prompts) == (3, 2, 2)
    assert responses.cu_seqlens.tolist() == [0, 1, 3, 5, 6, 7]
    assert responses.states.tolist() == [0, 0, 1, 0, 1, 2, 2]
    assert responses.actions.tolist() == [0, 1, 0, 1, 1, 0, 1]
    assert responses.rewards.tolist() == [1, 0, 1, 0, 1]
    assert responses.prompts.tolist() == [0, 0, 0, 1, 1]
    uniform = torch.zeros(3, 2, dtype=torch.float64)
    assert mdp.probabilities(uniform).tolist() == pytest.approx([0.5, 0.25, 0.25, 0.5, 0.5])
    assert mdp.success(uniform).tolist() == pytest.approx([0.75, 0.5])
    assert mdp.mean_length(uniform).tolist() == pytest.approx([1.5, 1])
    assert mdp.objective(uniform) == pytest.approx(0.625)
    assert mdp.q_values(uniform).flatten().tolist() == pytest.approx([1, 0.5, 0, 1, 0, 1])
    preferring_second = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    assert mdp.greedy_rewards(preferring_second).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt"),
        ([()], "actions in every state, got 0"),
        ([(1, 0), (1, 0, 1)], "2 actions in every state, got 3"),
        ([(1, (0, 1, 1))], "2 actions in every state, got 3"),
        ([(1, 2)], "reward 0 or 1, got 2"),
    ],
)
def test_what_is_no_tree_is_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        TreeMDP(prompts)


def test_the_example_is_what_it_says(mdp_and_logits):
    mdp, logits = mdp_and_logits
    easy, medium, hard = mdp.success(logits).tolist()
    assert easy > 0.8 > 0.6 > medium > 0.4 > 0.2 > hard > 0.05
    assert mdp.greedy_rewards(logits).tolist() == [1, 1, 0]
    assert mdp.mean_length(logits).diff().abs().min() > 0.3
    for prompt in range(3):
        own = mdp.responses.prompts == prompt
        assert set(mdp.responses.rewards[own].tolist()) == {0, 1}


def test_values_and_gradient(mdp_and_logits):
    """The policy gradient by autograd is that of the theorem: sum over states of visits x policy x advantage."""
    mdp, logits = mdp_and_logits
    values, q = mdp.values(logits), mdp.q_values(logits)
    assert torch.allclose(values[mdp.roots], mdp.success(logits), rtol=1e-14)
    owner = torch.arange(len(mdp.responses.rewards)).repeat_interleave(mdp.responses.lengths)
    visits = torch.zeros(mdp.num_states, dtype=torch.float64)
    visits.index_add_(0, mdp.responses.states, mdp.probabilities(logits)[owner])
    theorem = visits[:, None] * logits.softmax(-1) * (q - values[:, None]) / mdp.num_prompts
    assert torch.allclose(mdp.policy_gradient(logits), theorem, rtol=0, atol=1e-15)
    assert torch.autograd.gradcheck(mdp.objective, logits.clone().requires_grad_())


def test_multisets_are_all_draws():
    probabilities = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    groups = multisets(probabilities, 4)
    assert len(groups.members) == 15
    by_members = {tuple(m): 0.0 for m in groups.members.tolist()}
    for draw in itertools.product(range(3), repeat=4):
        by_members[tuple(sorted(draw))] += float(probabilities[list(draw)].prod())
    assert groups.probabilities.tolist() == pytest.approx(list(by_members.values()), rel=1e-13)


@pytest.mark.parametrize(("group_size", "num_prompts"), [(1, 1), (3, 1), (2, 2)])
def test_outcomes_cover_every_batch(mdp_and_logits, group_size, num_prompts):
    mdp, logits = mdp_and_logits
    batches = outcomes(mdp, logits, group_size, num_prompts)
    assert batches.members.shape[1] == group_size * num_prompts
    assert batches.probabilities.sum() == pytest.approx(1, rel=1e-12)
    prompts = mdp.responses.prompts[batches.members].view(-1, num_prompts, group_size)
    assert (prompts == prompts[..., :1]).all(), "a group answers one prompt"
    counts = torch.zeros(len(batches.members), len(mdp.responses.rewards), dtype=torch.float64)
    counts.scatter_add_(1, batches.members, torch.ones_like(batches.members, dtype=torch.float64))
    expected = mdp.probabilities(logits) / mdp.num_prompts * group_size * num_prompts
    assert torch.allclose(batches.probabilities @ counts, expected, rtol=1e-12)


def ordered_moments(estimator, mdp, logits, group_size):
    """Mean and variance of the gradient over ordered groups, one backward pass through the policy for each."""
    mean, square = torch.zeros_like(logits), 0.0
    probabilities = mdp.probabilities(logits)
    for prompt in range(mdp.num_prompts):
        own = (mdp.responses.prompts == prompt).nonzero().squeeze(1).tolist()
        for draw in itertools.product(own, repeat=group_size):
            batch, tokens = mdp.responses.take(torch.tensor(draw))
            leaf = logits.clone().requires_grad_()
            logprobs = mdp.token_logprobs(leaf)[tokens]
            group_ids = torch.full((group_size,), 7)
            advantages = estimator.advantages(mdp, logits, batch, group_ids)
            scale = loss_gradient(logprobs, advantages, group_size)
            (gradient,) = torch.autograd.grad(logprobs, leaf, scale)
            weight = float(probabilities[list(draw)].prod()) / mdp.num_prompts
            mean += weight * gradient
            square += weight * float(gradient.square().sum())
    return mean, square - float(mean.square().sum())


@pytest.mark.parametrize("estimator", [Case("rloo"), Case("grpo_original")], ids=lambda e: e.name)
def test_moments_are_those_of_ordered_draws(mdp_and_logits, estimator):
    mdp, logits = mdp_and_logits
    moments = evaluate(estimator, mdp, logits, group_size=2)
    mean, variance = ordered_moments(estimator, mdp, logits, 2)
    assert torch.allclose(moments.gradient, mean, rtol=1e-12, atol=1e-15)
    assert moments.variance == pytest.approx(variance, rel=1e-12)


def test_the_variance_is_that_of_the_mean_over_prompts(mdp_and_logits):
    """Prompts treated independently: enumerating two of them gives half the variance of one."""
    mdp, logits = mdp_and_logits
    one = evaluate(Case("reinforce"), mdp, logits, group_size=2)
    enumerated = evaluate(Case("reinforce", whole_batch=True), mdp, logits, group_size=2, num_prompts=2)
    assert enumerated.variance == pytest.approx(one.variance / 2, rel=1e-12)
    assert evaluate(Case("reinforce"), mdp, logits, group_size=2, num_prompts=2).variance == pytest.approx(
        one.variance / 2, rel=1e-12
    )
    assert torch.allclose(enumerated.gradient, one.gradient, rtol=1e-12)


def test_large_enumerations_come_in_parts(mdp_and_logits, monkeypatch):
    mdp, logits = mdp_and_logits
    whole = evaluate(Case("rloo"), mdp, logits, group_size=3)
    monkeypatch.setattr("areal_core.estimators.exact._RESPONSES_AT_ONCE", 10)
    parts = evaluate(Case("rloo"), mdp, logits, group_size=3)
    assert torch.allclose(whole.gradient, parts.gradient, rtol=1e-12)
    assert torch.allclose(whole.advantage, parts.advantage, rtol=1e-12)
    assert parts.variance == pytest.approx(whole.variance, rel=1e-12)
