"""Evaluation of a policy on held-out problems: pass@1 averaged over samples."""

from areal_core.evaluate.policy import EvaluationResult, evaluate_policy

__all__ = ["EvaluationResult", "evaluate_policy"]
