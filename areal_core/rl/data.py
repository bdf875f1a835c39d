"""Trajectories and groups of them: what generators hand to the trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from areal_core.tasks import Problem

__all__ = ["Group", "PendingGroup", "RolloutCounters", "Trajectory"]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One sampled response, token ids exactly as they were sampled.

    Attributes:
        prompt_ids: int32 [P].
        response_ids: int32 [R], the stop token included when there was one.
        logprobs: float32 [R], log-probability of each response token under the distribution it was sampled from.
        versions: int64 [R], policy version that produced each response token.
        finish_reason: "stop" or "length".
        reward: verified reward; NaN when the verifier failed (the sample is excluded).
        group_id: samples of one prompt share it; increases in order of admission.
        sample_index: place in the group, 0 .. group_size-1.
    """

    prompt_ids: npt.NDArray[np.int32]
    response_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    finish_reason: str
    reward: float
    group_id: int
    sample_index: int

    @property
    def failed(self) -> bool:
        """Whether the verifier raised or timed out."""
        return math.isnan(self.reward)

    @property
    def oldest_version(self) -> int:
        """The version of its oldest response token."""
        return int(self.versions.min()) if self.versions.size else 0


@dataclass(frozen=True, eq=False)
class Group:
    """All finished samples of one prompt, in order of sample_index."""

    group_id: int
    prompt: str
    problem_index: int
    trajectories: tuple[Trajectory, ...]

    @property
    def oldest_version(self) -> int:
        """The version of the oldest token in the group."""
        return min(t.oldest_version for t in self.trajectories)


@dataclass(eq=False)
class PendingGroup:
    """A group from its admission until it is consumed."""

    group_id: int
    problem: Problem
    problem_index: int
    prompt_ids: npt.NDArray[np.int32]
    admitted_at: int
    samples: dict[int, Trajectory] = field(default_factory=dict)  # by sample_index

    def finished(self, group_size: int) -> Group | None:
        """The group, once all samples are there."""
        if len(self.samples) < group_size:
            return None
        ordered = tuple(self.samples[k] for k in sorted(self.samples))
        return Group(self.group_id, self.problem.prompt, self.problem_index, ordered)


@dataclass
class RolloutCounters:
    """What went wrong on the way, as totals over the run."""

    bad_problems: int = 0
    failed_samples: int = 0
    dropped_groups: int = 0
    requeued_samples: int = 0
    generator_restarts: int = 0
