"""Every group that can be drawn, with its probability."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from areal_core.estimators.tree_mdp import TreeMDP


class Groups(NamedTuple):
    """Outcomes of a draw.

    members: int64 [N, size], what was drawn, in some order.
    probabilities: float64 [N], summing to 1.
    """

    members: Tensor
    probabilities: Tensor


def multisets(probabilities: Tensor, size: int) -> Groups:
    """Every multiset of `size` independent draws from a finite distribution, float64 [K].

    There are (K + size - 1 choose size); the estimators do not depend on the order within a group.
    """
    drawn = list(itertools.combinations_with_replacement(range(len(probabilities)), size))
    members = torch.tensor(drawn, dtype=torch.int64).reshape(-1, size)
    run = torch.ones(len(members), dtype=torch.float64)  # 1, 2, .. along equal members: the product is counts!
    log_weights = torch.full((len(members),), math.lgamma(size + 1), dtype=torch.float64)
    for position in range(size):
        if position > 0:
            run = torch.where(members[:, position] == members[:, position - 1], run + 1, 1.0)
        log_weights += probabilities[members[:, position]].log() - run.log()
    return Groups(members, log_weights.exp())


def outcomes(mdp: TreeMDP, logits: Tensor, group_size: int, num_prompts: int = 1) -> Groups:
    """Every batch of `num_prompts` prompts, drawn independently, with `group_size` responses each.

    members are indices into `mdp.responses`, [N, num_prompts * group_size], group by group.
    """
    responses, members, weights = mdp.probabilities(logits), [], []
    for prompt in range(mdp.num_prompts):
        own = (mdp.responses.prompts == prompt).nonzero().squeeze(1)
        group = multisets(responses[own], group_size)
        members.append(own[group.members])
        weights.append(group.probabilities / mdp.num_prompts)
    groups = Groups(torch.cat(members), torch.cat(weights))
    if num_prompts == 1:
        return groups
    batches = multisets(groups.probabilities, num_prompts)
    return Groups(groups.members[batches.members].flatten(1), batches.probabilities)
