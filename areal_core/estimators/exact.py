"""Exact expectation and variance of what an estimator makes of a policy gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from areal_core import ops
from areal_core.estimators.groups import Groups, multisets, outcomes
from areal_core.estimators.tree_mdp import Responses, TreeMDP

Critic = Callable[[TreeMDP, Tensor], Tensor]  # (mdp, logits) -> value of each state, float64 [num_states]

_RESPONSES_AT_ONCE = 200_000  # bounds memory: about 100 MB


@dataclass(frozen=True)
class Case:
    """An estimator of `ops.compute_advantages` together with what it is given.

    Args:
        name: of `ops.compute_advantages`.
        label: what people call it; the name when empty.
        critic: gives the values of an estimator that has a critic.
        greedy_baseline: give it the reward of the greedy response.
        whole_batch: it normalises over the batch, so that prompts are not independent of each other.
        arguments: further arguments of `ops.compute_advantages`.
    """

    name: str
    label: str = ""
    critic: Critic | None = None
    greedy_baseline: bool = False
    whole_batch: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def advantages(self, mdp: TreeMDP, logits: Tensor, batch: Responses, group_ids: Tensor) -> Tensor:
        """float64 [T], token advantages of a batch of responses, group_ids: int64 [S]."""
        inputs: dict[str, Any] = {}
        if self.critic is not None:
            inputs["values"] = self.critic(mdp, logits)[batch.states]
        if self.greedy_baseline:
            inputs["greedy_rewards"] = mdp.greedy_rewards(logits)[batch.prompts]
        return ops.compute_advantages(
            self.name,
            rewards=batch.rewards,
            cu_seqlens=batch.cu_seqlens,
            group_ids=group_ids,
            **inputs,
            **self.arguments,
        )


@dataclass(frozen=True)
class GradientMoments:
    """Exact moments over all batches.

    Attributes:
        advantage: float64 [num_states, num_actions], E[advantage of a token | its state and action].
        gradient: float64 [num_states, num_actions], E[gradient of the loss].
        variance: trace of the covariance of the gradient of the loss.
    """

    advantage: Tensor
    gradient: Tensor
    variance: float


def evaluate(case: Case, mdp: TreeMDP, logits: Tensor, *, group_size: int = 4, num_prompts: int = 1) -> GradientMoments:
    """Moments for an on-policy batch of `num_prompts` prompts, drawn independently, with `group_size` responses each.

    The loss is `ops.ppo_loss` divided by the number of responses: the mean over responses of the sum over tokens. An
    estimator that treats prompts independently is evaluated on one prompt; its variance is then that of one prompt
    divided by their number.
    """
    enumerated = num_prompts if case.whole_batch else 1
    batches = outcomes(mdp, logits, group_size, enumerated)
    scores = _token_scores(mdp, logits)
    gradient, square = torch.zeros_like(logits), 0.0
    summed, visited = scores.new_zeros(logits.numel()), scores.new_zeros(logits.numel())
    for batch in _split(batches):
        responses, tokens, outcome = _pack(mdp, batch)
        group_ids = torch.arange(len(responses.rewards)) // group_size
        advantages = case.advantages(mdp, logits, responses, _unit_of_statistics(case, group_ids, enumerated))
        per_token = loss_gradient(mdp.token_logprobs(logits)[tokens], advantages, batch.members.shape[1])
        gradients = scores.new_zeros(len(batch.members) * mdp.num_states, mdp.num_actions)
        gradients.index_add_(0, outcome * mdp.num_states + responses.states, per_token[:, None] * scores[tokens])
        gradients = gradients.view(-1, *logits.shape)
        gradient += torch.einsum("n,nsa->sa", batch.probabilities, gradients)
        square += float(batch.probabilities @ gradients.square().sum((1, 2)))
        pair, weight = responses.states * mdp.num_actions + responses.actions, batch.probabilities[outcome]
        summed.index_add_(0, pair, weight * advantages)
        visited.index_add_(0, pair, weight)
    variance = (square - float(gradient.square().sum())) * enumerated / num_prompts
    return GradientMoments((summed / visited).view_as(logits), gradient, variance)


def _token_scores(mdp: TreeMDP, logits: Tensor) -> Tensor:
    """float64 [T, num_actions], gradient of each token's log-probability in the logits of its state, the only ones."""
    rows = logits.detach()[mdp.responses.states].requires_grad_()
    logprobs = rows.log_softmax(-1).gather(1, mdp.responses.actions[:, None])
    (scores,) = torch.autograd.grad(logprobs.sum(), rows)
    return scores


def loss_gradient(logprobs: Tensor, advantages: Tensor, normalizer: int) -> Tensor:
    """float64 [T], gradient of `ops.ppo_loss` on policy with respect to the log-probabilities of the tokens."""
    logprobs = logprobs.detach().requires_grad_()
    every_token = torch.ones_like(logprobs, dtype=torch.bool)
    loss = ops.ppo_loss(logprobs, logprobs.detach(), advantages, every_token, normalizer=normalizer).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return gradient


def _unit_of_statistics(case: Case, group_ids: Tensor, num_prompts: int) -> Tensor:
    """Which responses share statistics: all outcomes are evaluated in one call, so a batch is a group of its own."""
    return group_ids // num_prompts if case.whole_batch else group_ids


def _split(groups: Groups) -> list[Groups]:
    rows = max(1, _RESPONSES_AT_ONCE // groups.members.shape[1])
    parts = zip(torch.split(groups.members, rows), torch.split(groups.probabilities, rows), strict=True)
    return [Groups(*part) for part in parts]


def _pack(mdp: TreeMDP, groups: Groups) -> tuple[Responses, Tensor, Tensor]:
    """The responses of all outcomes packed, the token of `mdp.responses` each token is, and the outcome it is of."""
    responses, tokens = mdp.responses.take(groups.members.flatten())
    owner = torch.arange(len(groups.members)).repeat_interleave(groups.members.shape[1])
    return responses, tokens, owner.repeat_interleave(responses.lengths)


def expected_advantages(
    name: str, probabilities: Tensor, rewards: Tensor, lengths: Tensor, group_size: int, **options: Any
) -> Tensor:
    """Expected advantage of a response by its kind, over the other responses of its group.

    Where an estimator looks at rewards and lengths only, responses with the same reward and length are one kind, and
    far larger groups can be enumerated than of single responses.

    Args:
        name: of `ops.compute_advantages`.
        probabilities: float64 [K], of each kind.
        rewards: float64 [K].
        lengths: int64 [K], tokens, at least 1.
        group_size: M.
        options: further arguments of `ops.compute_advantages`.

    Returns:
        float64 [K].
    """
    groups = multisets(probabilities, group_size)
    kinds = groups.members.flatten()
    cu_seqlens = torch.cat((lengths.new_zeros(1), lengths[kinds].cumsum(0)))
    advantages = ops.compute_advantages(
        name,
        rewards=rewards[kinds],
        cu_seqlens=cu_seqlens,
        group_ids=torch.arange(len(groups.members)).repeat_interleave(group_size),
        **options,
    )[cu_seqlens[:-1]]
    weighted = groups.probabilities.repeat_interleave(group_size) * advantages
    return torch.zeros_like(probabilities).index_add(0, kinds, weighted) / (group_size * probabilities)
