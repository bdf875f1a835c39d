"""What variants of the policy loss make of the gradient: lengths on policy, behavior weights off policy."""

import math

import pytest
import torch

from areal_core import ops
from areal_core.estimators import example

POPULATION = {"ddof": 0, "eps": 0.0}


@pytest.fixture
def mdp_and_logits():
    return example()


def policy_loss(mdp, logprobs, advantages, normalizer=None, behavior=None, **options):
    return ops.ppo_loss(
        logprobs,
        logprobs.detach(),
        advantages,
        torch.ones_like(advantages, dtype=torch.bool),
        behavior_logprobs=behavior,
        cu_seqlens=mdp.responses.cu_seqlens,
        normalizer=normalizer,
        config=ops.PPOLossConfig(**options),
    ).loss


def on_policy_gradient(mdp, logits, advantages, **options):
    """Gradient in the log-probability of each token, over a batch that holds every response once."""
    logprobs = mdp.token_logprobs(logits).detach().requires_grad_()
    return torch.autograd.grad(policy_loss(mdp, logprobs, advantages, **options), logprobs)[0]


def group_advantages(mdp, name, **options):
    responses = mdp.responses
    return ops.compute_advantages(
        name, rewards=responses.rewards, cu_seqlens=responses.cu_seqlens, group_ids=responses.prompts, **options
    )


def test_on_policy_every_objective_is_the_policy_gradient(mdp_and_logits):
    mdp, logits = mdp_and_logits
    advantages = torch.linspace(-1, 1, int(mdp.responses.cu_seqlens[-1]), dtype=torch.float64)
    expected = -advantages / len(advantages)
    for options in (
        {},
        {"dual_clip": 2.0, "clip_high": 0.28},
        {"objective": "cispo"},
        {"objective": "sapo"},
        {"objective": "reinforce"},
        {"objective": "reinforce", "ratio_level": "off"},
    ):
        gradient = on_policy_gradient(mdp, logits, advantages, **options)
        assert torch.allclose(gradient, expected, rtol=1e-12), options


def test_on_policy_sequence_ratios_are_token_ratios(mdp_and_logits):
    """With one advantage for each sequence, and the mean over its tokens."""
    mdp, logits = mdp_and_logits
    advantages = group_advantages(mdp, "grpo_r1", **POPULATION)
    mean = {"aggregation": "sequence_mean_token_mean"}
    expected = on_policy_gradient(mdp, logits, advantages, **mean)
    for options in ({"ratio_level": "sequence"}, {"ratio_level": "sequence", "objective": "gmpo"}):
        assert torch.allclose(on_policy_gradient(mdp, logits, advantages, **options, **mean), expected, rtol=1e-12)


def test_the_ratio_of_whole_responses_knows_no_lengths(mdp_and_logits):
    """GRPO on pi(o|q) / pi_old(o|q), a term for each response: every token gets its advantage, divided by G alone."""
    mdp, logits = mdp_and_logits
    advantages = group_advantages(mdp, "grpo_r1", ddof=0, eps=1e-4, eps_in_root=True)
    options = {"ratio_level": "sequence_product", "aggregation": "sequence_mean_token_mean"}
    gradient = on_policy_gradient(mdp, logits, advantages, **options)
    assert torch.allclose(gradient, -advantages / len(mdp.responses.rewards), rtol=1e-12)


def test_length_weights_of_advantages_are_aggregations_of_the_loss(mdp_and_logits):
    """Original GRPO is the mean of sequence means; DAPO, for a batch of one group, the mean over tokens."""
    mdp, logits = mdp_and_logits
    summed = {"aggregation": "sequence_mean_token_sum"}
    by_loss = on_policy_gradient(mdp, logits, group_advantages(mdp, "grpo_r1"), aggregation="sequence_mean_token_mean")
    by_advantage = on_policy_gradient(mdp, logits, group_advantages(mdp, "grpo_original"), **summed)
    assert torch.allclose(by_loss, by_advantage, rtol=1e-12)
    one_group = {"group_ids": torch.zeros_like(mdp.responses.prompts)}
    batch = {"rewards": mdp.responses.rewards, "cu_seqlens": mdp.responses.cu_seqlens, **one_group}
    by_loss = on_policy_gradient(mdp, logits, ops.compute_advantages("grpo_r1", **batch), aggregation="token_mean")
    by_advantage = on_policy_gradient(mdp, logits, ops.compute_advantages("dapo", **batch), **summed)
    assert torch.allclose(by_loss, by_advantage, rtol=1e-12)


# -- Off policy --------------------------------------------------------------------------------------------------------


def stale_gradient(mdp, logits, stale_logits, advantages, **options):
    """Expected gradient in the logits, over responses of a stale policy; advantages float64 [T]."""
    probabilities = mdp.probabilities(stale_logits).repeat_interleave(mdp.responses.lengths) / mdp.num_prompts
    leaf = logits.clone().requires_grad_()
    behavior = mdp.token_logprobs(stale_logits)
    loss = policy_loss(mdp, mdp.token_logprobs(leaf), advantages * probabilities, 1, behavior, **options)
    return torch.autograd.grad(loss, leaf)[0]


def relative_error(gradient, truth):
    return float((gradient + truth).norm() / truth.norm())


def test_the_behavior_weight_of_the_sequence_removes_staleness(mdp_and_logits):
    """Decoupled PPO at pi = proximal, from samples of another policy, with the weight of the whole response: exact."""
    mdp, logits = mdp_and_logits
    stale = logits + torch.linspace(-0.8, 0.8, logits.numel(), dtype=torch.float64).view_as(logits).flip(1)
    truth = mdp.policy_gradient(logits)
    rewards = mdp.responses.rewards.repeat_interleave(mdp.responses.lengths)
    assert relative_error(stale_gradient(mdp, logits, stale, rewards, behavior_level="sequence"), truth) < 1e-12
    by_token = relative_error(stale_gradient(mdp, logits, stale, rewards), truth)
    assert by_token > 0.01, "the weight of the token alone does not correct the states and rewards around it"
    truncated = stale_gradient(mdp, logits, stale, rewards, behavior_level="sequence", behavior_cap=1.0)
    assert relative_error(truncated, truth) > 0.01, "a cap takes bias for variance"
    assert relative_error(stale_gradient(mdp, logits, logits, rewards), truth) < 1e-12


def test_the_bias_of_token_weights_is_of_first_order_in_staleness(mdp_and_logits):
    mdp, logits = mdp_and_logits
    direction = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits).flip(1)
    truth = mdp.policy_gradient(logits)
    rewards = mdp.responses.rewards.repeat_interleave(mdp.responses.lengths)
    errors = [relative_error(stale_gradient(mdp, logits, logits + s * direction, rewards), truth) for s in (2e-3, 1e-3)]
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.02)
    assert math.isfinite(errors[1])
    assert errors[1] < 0.01
