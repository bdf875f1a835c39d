"""A tree-shaped MDP: a language model in miniature, whose responses can all be listed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, Union

import torch
from torch import Tensor

# A state: for each action the state that it leads to, or the reward, 0 or 1, with which the response ends there.
Node: TypeAlias = tuple[Union["Node", int], ...]


@dataclass(frozen=True)
class Responses:
    """Responses as a packed batch, in the layout of the ops.

    Attributes:
        states, actions: int64 [T], what each token was chosen in and what was chosen.
        cu_seqlens: int64 [S+1].
        rewards: float64 [S], 0 or 1.
        prompts: int64 [S], which prompt is answered.
    """

    states: Tensor
    actions: Tensor
    cu_seqlens: Tensor
    rewards: Tensor
    prompts: Tensor

    @property
    def lengths(self) -> Tensor:
        """int64 [S], tokens."""
        return self.cu_seqlens.diff()

    @property
    def last(self) -> Tensor:
        """int64 [S], the position of each last token."""
        return self.cu_seqlens[1:] - 1

    def sum_tokens(self, x: Tensor) -> Tensor:
        """[T] -> [S], the sum over the tokens of each response; differentiable."""
        owner = torch.arange(len(self.rewards)).repeat_interleave(self.lengths)
        return x.new_zeros(len(self.rewards)).index_add(0, owner, x)

    def take(self, chosen: Tensor) -> tuple[Responses, Tensor]:
        """Pack the responses `chosen`, int64 [N], repeats allowed; also int64 [T'], where each token was here."""
        lengths = self.lengths[chosen]
        cu_seqlens = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        shift = (self.cu_seqlens[:-1][chosen] - cu_seqlens[:-1]).repeat_interleave(lengths)
        tokens = shift + torch.arange(int(cu_seqlens[-1]))
        taken = Responses(
            self.states[tokens], self.actions[tokens], cu_seqlens, self.rewards[chosen], self.prompts[chosen]
        )
        return taken, tokens


class TreeMDP:
    """Prompts drawn uniformly, each answered token by token along a tree, under a tabular softmax policy.

    The policy is a tensor of logits, float64 [num_states, num_actions]; functions of it are differentiable. States are
    numbered in the order of a walk through the prompts, so that a state comes before those it leads to.

    Args:
        prompts: the first state of each prompt; every state has the same number of actions.

    Raises:
        ValueError: no prompt, states of different or no actions, or a reward other than 0 and 1.
    """

    def __init__(self, prompts: Sequence[Node]) -> None:
        if not prompts:
            raise ValueError("TreeMDP: expected at least one prompt, got none")
        self.num_prompts = len(prompts)
        self.num_actions = len(prompts[0])
        self.roots: list[int] = []
        self._next: list[list[int]] = []  # state x action -> state, or -1 - reward at the end of a response
        for prompt in prompts:
            self.roots.append(len(self._next))
            self._add(prompt)
        self.num_states = len(self._next)
        self.responses = self._list_responses()

    def _add(self, node: Node) -> int:
        if len(node) != self.num_actions or not node:
            raise ValueError(f"TreeMDP: expected {max(self.num_actions, 1)} actions in every state, got {len(node)}")
        state, row = len(self._next), [0] * len(node)
        self._next.append(row)
        for action, child in enumerate(node):
            if isinstance(child, tuple):
                row[action] = self._add(child)
            elif child in (0, 1):
                row[action] = -1 - child
            else:
                raise ValueError(f"TreeMDP: expected reward 0 or 1, got {child!r}")
        return state

    def _walk(self, state: int, path: tuple[tuple[int, int], ...]) -> Iterator[tuple[tuple[tuple[int, int], ...], int]]:
        for action, following in enumerate(self._next[state]):
            here = (*path, (state, action))
            if following < 0:
                yield here, -1 - following
            else:
                yield from self._walk(following, here)

    def _list_responses(self) -> Responses:
        found = [(x, path, reward) for x, root in enumerate(self.roots) for path, reward in self._walk(root, ())]
        steps = torch.tensor([step for _, path, _ in found for step in path])
        lengths = torch.tensor([0, *(len(path) for _, path, _ in found)])
        return Responses(
            states=steps[:, 0].contiguous(),
            actions=steps[:, 1].contiguous(),
            cu_seqlens=lengths.cumsum(0),
            rewards=torch.tensor([reward for *_, reward in found], dtype=torch.float64),
            prompts=torch.tensor([x for x, *_ in found]),
        )

    def token_logprobs(self, logits: Tensor) -> Tensor:
        """float64 [T], log-probability of each token of `responses`."""
        return logits.log_softmax(-1)[self.responses.states, self.responses.actions]

    def probabilities(self, logits: Tensor) -> Tensor:
        """float64 [S], probability of each of `responses` given its prompt."""
        return self.responses.sum_tokens(self.token_logprobs(logits)).exp()

    def per_prompt(self, x: Tensor, logits: Tensor) -> Tensor:
        """float64 [num_prompts], expectation of `x`, float64 [S], over the responses to each prompt."""
        weighted = self.probabilities(logits) * x
        return weighted.new_zeros(self.num_prompts).index_add(0, self.responses.prompts, weighted)

    def success(self, logits: Tensor) -> Tensor:
        """float64 [num_prompts], p(x): probability of reward 1."""
        return self.per_prompt(self.responses.rewards, logits)

    def mean_length(self, logits: Tensor) -> Tensor:
        """float64 [num_prompts], T(x), tokens."""
        return self.per_prompt(self.responses.lengths.double(), logits)

    def objective(self, logits: Tensor) -> Tensor:
        """J, 0-d: expected reward of a random prompt."""
        return self.success(logits).mean()

    def expectation_gradient(self, x: Tensor, logits: Tensor) -> Tensor:
        """Gradient of the expectation of `x`, float64 [S], held constant, over all responses; like the logits."""
        logits = logits.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.per_prompt(x, logits).mean(), logits)
        return gradient

    def policy_gradient(self, logits: Tensor) -> Tensor:
        """Gradient of J, [num_states, num_actions]."""
        return self.expectation_gradient(self.responses.rewards, logits)

    def q_values(self, logits: Tensor) -> Tensor:
        """float64 [num_states, num_actions], probability of reward 1 after an action."""
        policy, q = logits.softmax(-1), torch.zeros_like(logits)
        for state in reversed(range(self.num_states)):
            for action, following in enumerate(self._next[state]):
                q[state, action] = -1 - following if following < 0 else policy[following] @ q[following]
        return q

    def values(self, logits: Tensor) -> Tensor:
        """float64 [num_states], probability of reward 1 from a state on."""
        return (logits.softmax(-1) * self.q_values(logits)).sum(-1)

    def greedy_rewards(self, logits: Tensor) -> Tensor:
        """float64 [num_prompts], reward of the response that takes the most probable action everywhere."""
        rewards = []
        for state in self.roots:
            while state >= 0:
                state = self._next[state][int(logits[state].argmax())]
            rewards.append(float(-1 - state))
        return torch.tensor(rewards, dtype=torch.float64)


def example() -> tuple[TreeMDP, Tensor]:
    """An easy, a medium and a hard prompt, answered in 1 to 3 tokens, and the logits of a policy in mid-training.

    Greedy decoding solves the first two. Short and long responses are right and wrong on each prompt, and the mean
    lengths of the prompts differ.
    """
    easy: Node = (1, (0, (1, 0)))
    medium: Node = ((1, 0), (0, 1))
    hard: Node = (0, (1, (0, 1)))
    logits = [
        *[[0.8, 0.0], [-0.9, 0.4], [0.6, -0.2]],
        *[[0.3, -0.2], [0.4, -0.3], [0.2, -0.1]],
        *[[-0.4, 0.4], [-1.6, 1.0], [1.3, -0.9]],
    ]
    return TreeMDP((easy, medium, hard)), torch.tensor(logits, dtype=torch.float64)
