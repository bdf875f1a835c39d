"""What each advantage estimator does to the gradient in expectation, and how noisy it is, without sampling.

On a small tree MDP (`TreeMDP`) every response and every group of responses can be listed with its probability
(`outcomes`), so that the expectation and the variance of an estimator (`evaluate`), computed by the very ops that
training uses, are exact. `areal-core estimators` draws the result.
"""

from areal_core.estimators.exact import Case, GradientMoments, evaluate, expected_advantages
from areal_core.estimators.groups import Groups, multisets, outcomes
from areal_core.estimators.tree_mdp import Responses, TreeMDP, example

__all__ = [
    "Case",
    "GradientMoments",
    "Groups",
    "Responses",
    "TreeMDP",
    "evaluate",
    "example",
    "expected_advantages",
    "multisets",
    "outcomes",
]
