"""Evaluation of policies: what training looks at on the way, and models side by side (`areal-core eval`)."""

from areal_core.evaluate.answers import Answering, answer_of, votes
from areal_core.evaluate.metrics import Estimate, bootstrap, is_right, majority_at_k, pass_at_k
from areal_core.evaluate.policy import EvaluationResult, evaluate_policy

__all__ = [
    "Answering",
    "Estimate",
    "EvaluationResult",
    "answer_of",
    "bootstrap",
    "evaluate_policy",
    "is_right",
    "majority_at_k",
    "pass_at_k",
    "votes",
]
