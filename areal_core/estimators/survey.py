"""The numbers behind `areal-core estimators`: every estimator on the example, and curves that isolate one effect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_core import ops
from areal_core.estimators.exact import Case, Critic, evaluate, expected_advantages
from areal_core.estimators.tree_mdp import Node, TreeMDP, example

NUM_PROMPTS = 2  # per batch
POPULATION = {"ddof": 0, "eps": 0.0}  # std is sqrt(p(1-p)) of the group
LAMBDA = 0.95
LENGTH = 32  # tokens of the responses that others are compared with


def exact_critic(mdp: TreeMDP, logits: Tensor) -> Tensor:
    """V(s)."""
    return mdp.values(logits)


def prompt_critic(mdp: TreeMDP, logits: Tensor) -> Tensor:
    """The value of the prompt in all states of its responses: right on average, blind to progress."""
    responses, values = mdp.responses, torch.zeros(mdp.num_states, dtype=torch.float64)
    values[responses.states] = mdp.success(logits)[responses.prompts.repeat_interleave(responses.lengths)]
    return values


def untrained_critic(mdp: TreeMDP, logits: Tensor) -> Tensor:
    """1/2 everywhere."""
    return torch.full((mdp.num_states,), 0.5, dtype=torch.float64)


CASES = (
    Case("reinforce", "REINFORCE"),
    # One batch is one group here, so that statistics over the batch are asked for as those of a group.
    Case(
        "reinforce",
        "REINFORCE++",
        whole_batch=True,
        arguments={"mean_level": "group", "std_level": "group", **POPULATION},
    ),
    Case("rloo", "RLOO"),
    Case("remax", "ReMax", greedy_baseline=True),
    Case("ppo", "PPO (exact critic)", critic=exact_critic, arguments={"lam": LAMBDA}),
    Case("ppo", "PPO (untrained)", critic=untrained_critic, arguments={"lam": LAMBDA}),
    Case("orz", "ORZ (exact critic)", critic=exact_critic),
    Case("orz", "ORZ (untrained)", critic=untrained_critic),
    Case("dr_grpo", "Dr.GRPO"),
    Case("grpo_r1", "GRPO (R1)", arguments=POPULATION),
    Case("grpo_original", "GRPO (original)", arguments=POPULATION),
    Case("dapo", "DAPO", arguments=POPULATION),
    Case("maxrl", "MaxRL", arguments={"eps": 0.0}),
    Case("opo", "OPO"),
)


@dataclass(frozen=True)
class Row:
    """What one estimator makes of the policy gradient on the example; g is minus the gradient of its loss.

    Attributes:
        label: of the estimator.
        angle_deg: between E[g] and grad J, degrees.
        length: |E[g]| / |grad J|.
        bias: |E[g] - grad J| / |grad J|.
        prompt_weights: for each prompt, how many times its share of grad J is in E[g].
        noise: standard deviation of g for a batch, divided by |E[g]|.
        variance: trace of the covariance of g for a batch.
    """

    label: str
    angle_deg: float
    length: float
    bias: float
    prompt_weights: tuple[float, ...]
    noise: float
    variance: float


@dataclass(frozen=True)
class Curve:
    """A labelled line."""

    label: str
    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Survey:
    """Everything that is shown.

    Attributes:
        group_size: M, responses per prompt.
        success, lengths: p(x) and T(x), in tokens, of the example's prompts.
        rows: one for each of CASES.
        by_success: weight of a prompt's gradient against its success rate p.
        by_response_length: weight of a correct response against its length, relative to LENGTH tokens.
        by_prompt_length: weight of a prompt's gradient against its mean length, relative to LENGTH tokens.
        by_lambda: bias of PPO against lambda, with three critics.
        reward_share: weight of the reward in the advantage against the tokens from there to the end.
    """

    group_size: int
    success: list[float]
    lengths: list[float]
    rows: list[Row]
    by_success: list[Curve]
    by_response_length: list[Curve]
    by_prompt_length: list[Curve]
    by_lambda: list[Curve]
    reward_share: list[Curve]


def take_survey(group_size: int = 8) -> Survey:
    """Compute everything; seconds for group_size = 8.

    Raises:
        ValueError: group_size not in [2, 8]: a group of one has no contrast, and the number of groups explodes.
    """
    if not 2 <= group_size <= 8:
        raise ValueError(f"expected a group size in [2, 8], got {group_size}")
    mdp, logits = example()
    return Survey(
        group_size=group_size,
        success=mdp.success(logits).tolist(),
        lengths=mdp.mean_length(logits).tolist(),
        rows=[compare(case, mdp, logits, group_size) for case in CASES],
        by_success=_by_success(group_size),
        by_response_length=_by_response_length(group_size),
        by_prompt_length=_by_prompt_length(group_size),
        by_lambda=_by_lambda(),
        reward_share=_reward_share(),
    )


def compare(case: Case, mdp: TreeMDP, logits: Tensor, group_size: int) -> Row:
    """Moments of a case, in terms of the policy gradient."""
    moments = evaluate(case, mdp, logits, group_size=group_size, num_prompts=NUM_PROMPTS)
    estimate, truth = -moments.gradient, mdp.policy_gradient(logits)
    weights = []
    for prompt in range(mdp.num_prompts):
        own = torch.zeros(mdp.num_states, dtype=torch.bool)
        own[mdp.responses.states[(mdp.responses.prompts == prompt).repeat_interleave(mdp.responses.lengths)]] = True
        weights.append(float((estimate[own] * truth[own]).sum() / truth[own].square().sum()))
    return Row(
        label=case.label,
        angle_deg=angle_deg(estimate, truth),
        length=float(estimate.norm() / truth.norm()),
        bias=float((estimate - truth).norm() / truth.norm()),
        prompt_weights=tuple(weights),
        noise=math.sqrt(moments.variance) / float(estimate.norm()),
        variance=moments.variance,
    )


def angle_deg(a: Tensor, b: Tensor) -> float:
    """Angle between two vectors in degrees, accurate for small ones too."""
    a, b = a / a.norm(), b / b.norm()
    return math.degrees(2 * math.atan2(float((a - b).norm()), float((a + b).norm())))


# -- Curves ------------------------------------------------------------------------------------------------------------


def success_weight(name: str, success: float, group_size: int, **options: float) -> float:
    """w in E[g] = w grad p(x), for a prompt of success rate p whose responses are of one length, here 1 token."""
    wrong, right = _two_kinds(name, success, 1, group_size, **options)
    return right - wrong


def _two_kinds(name: str, success: float, length: int, group_size: int, **options: float) -> tuple[float, float]:
    probabilities = torch.tensor([1 - success, success], dtype=torch.float64)
    rewards, lengths = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.full((2,), length)
    wrong, right = expected_advantages(name, probabilities, rewards, lengths, group_size, **options).tolist()
    return wrong, right


def _by_success(group_size: int) -> list[Curve]:
    grid = [0.02 + 0.01 * index for index in range(97)]

    def curve(label: str, name: str, **options: float) -> Curve:
        return Curve(label, grid, [success_weight(name, p, group_size, **options) for p in grid])

    return [
        curve("RLOO", "rloo"),
        curve("Dr.GRPO", "dr_grpo"),
        curve("GRPO", "grpo_r1", **POPULATION),
        curve("MaxRL", "maxrl", eps=0.0),
        Curve("GRPO, M → ∞", grid, [1 / math.sqrt(p * (1 - p)) for p in grid]),
        Curve("MaxRL, M → ∞", grid, [1 / p for p in grid]),
    ]


def _by_response_length(group_size: int) -> list[Curve]:
    tokens = [round(4 * 2 ** (index / 4)) for index in range(25)]

    def weight(name: str, length: int) -> float:
        kinds = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)  # wrong; right; right, of the length in question
        rewards = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
        size = torch.tensor([LENGTH, LENGTH, length])
        _, usual, asked = expected_advantages(name, kinds, rewards, size, group_size, **POPULATION).tolist()
        return float(asked / usual)

    return [
        Curve(label, [float(t) for t in tokens], [weight(name, t) for t in tokens])
        for label, name in (("GRPO (original)", "grpo_original"), ("GRPO (R1)", "grpo_r1"))
    ]


def _by_prompt_length(group_size: int) -> list[Curve]:
    tokens = [round(4 * 2 ** (index / 4)) for index in range(25)]

    def weight(name: str, length: int) -> float:
        wrong, right = _two_kinds(name, 0.5, length, group_size, **POPULATION)
        return right - wrong

    return [
        Curve(label, [float(t) for t in tokens], [weight(name, t) / weight(name, LENGTH) for t in tokens])
        for label, name in (("DAPO", "dapo"), ("GRPO (R1)", "grpo_r1"))
    ]


def long_answers() -> tuple[TreeMDP, Tensor]:
    """One prompt with responses of 1 to 12 tokens, right from 7 tokens on: the value rises along the way."""
    node: Node = (1, 0)
    for reward in (1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0):  # of stopping, from the last state to the first
        node = (node, reward)
    mdp = TreeMDP((node,))
    logits = torch.zeros(mdp.num_states, 2, dtype=torch.float64)
    logits[:, 0] = 1.5  # mostly goes on
    return mdp, logits


def _by_lambda() -> list[Curve]:
    mdp, logits = long_answers()
    truth = mdp.policy_gradient(logits)
    grid = [0.5 + 0.025 * index for index in range(21)]

    def bias(critic: Critic, lam: float) -> float:
        case = Case("ppo", critic=critic, arguments={"lam": lam})
        gradient = evaluate(case, mdp, logits, group_size=1).gradient
        return float((gradient + truth).norm() / truth.norm())

    critics: Sequence[tuple[str, Critic]] = (
        ("untrained: V = 1/2", untrained_critic),
        ("V = p(x) in every state", prompt_critic),
        ("exact: V = V(s)", exact_critic),
    )
    return [Curve(label, grid, [bias(critic, lam) for lam in grid]) for label, critic in critics]


def reward_weight(lam: float, tokens: int) -> list[float]:
    """How much a reward of 1 adds to the PPO advantage of each token of a response, from the last to the first."""
    cu_seqlens = torch.tensor([0, tokens, 2 * tokens])
    advantages = ops.compute_advantages(
        "ppo",
        rewards=torch.tensor([0.0, 1.0], dtype=torch.float64),
        cu_seqlens=cu_seqlens,
        group_ids=torch.tensor([0, 0]),
        values=torch.full((2 * tokens,), 0.5, dtype=torch.float64),
        lam=lam,
    ).view(2, tokens)
    weights: list[float] = (advantages[1] - advantages[0]).flip(0).tolist()
    return weights


def _reward_share() -> list[Curve]:
    distances = [float(t) for t in range(1, 257)]  # the last token has 1 to go
    return [Curve(f"λ = {lam:g}", distances, reward_weight(lam, 256)) for lam in (1.0, 0.99, 0.95, 0.9)]
