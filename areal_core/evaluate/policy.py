"""Sample responses to a set of prompts and average what their verifier says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from areal_core.generate.engine import Engine, GeneratedSample, GenerateRequest, SamplingParams

__all__ = ["EvaluationResult", "evaluate_policy"]

_STEPS_PER_CALL = 64


@dataclass(frozen=True)
class EvaluationResult:
    """pass@1 and what it was measured on.

    Attributes:
        accuracy: mean reward over problems, each averaged over its samples (0 where the verifier failed).
        standard_error: of accuracy, over problems.
        response_tokens_mean: tokens of a response, stop token included.
        truncated_fraction: responses cut by max_new_tokens.
        problems: number of problems.
        samples: responses per problem.
        rewards: float64 [problems, samples], 0 where the verifier failed.
    """

    accuracy: float
    standard_error: float
    response_tokens_mean: float
    truncated_fraction: float
    problems: int
    samples: int
    rewards: npt.NDArray[np.float64] = field(repr=False)


def evaluate_policy(
    engine: Engine,
    prompts: Sequence[npt.NDArray[np.int32]],
    score: Callable[[int, GeneratedSample], float],
    sampling: SamplingParams,
    *,
    samples: int = 1,
) -> EvaluationResult:
    """pass@1 of the weights loaded in `engine`.

    Args:
        engine: idle engine; its weights do not change during the call.
        prompts: token ids int32 [P] of each problem.
        score: reward of a response to the problem of an index; NaN counts as 0.
        sampling: temperature 0 is greedy.
        samples: responses per problem.

    Raises:
        ValueError: no prompts, samples < 1, or an engine with work left.
    """
    if not prompts or samples < 1:
        raise ValueError(f"evaluate_policy: expected prompts and samples >= 1, got {len(prompts)} and {samples}")
    if engine.num_active + engine.num_waiting > 0:
        raise ValueError("evaluate_policy: expected an idle engine, got one with requests in flight")
    for index, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(index, prompt, samples, sampling))
    rewards = np.zeros((len(prompts), samples))
    tokens = truncated = 0
    while engine.num_active + engine.num_waiting > 0:
        for sample in engine.decode(_STEPS_PER_CALL):
            reward = score(sample.request_id, sample)
            rewards[sample.request_id, sample.sample_index] = 0.0 if math.isnan(reward) else reward
            tokens += len(sample.token_ids)
            truncated += sample.finish_reason == "length"
    per_problem = rewards.mean(axis=1)
    count = len(prompts) * samples
    return EvaluationResult(
        accuracy=float(per_problem.mean()),
        standard_error=float(per_problem.std(ddof=1) / math.sqrt(len(prompts))) if len(prompts) > 1 else math.nan,
        response_tokens_mean=tokens / count,
        truncated_fraction=truncated / count,
        problems=len(prompts),
        samples=samples,
        rewards=rewards,
    )
