"""Trajectories and groups of them: what generators hand to the trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """All finished samples of one prompt, in order of sample_index.

    greedy is the response of greedy decoding, where the estimator asks for one (ReMax); it is not trained on.
    """

    group_id: int
    prompt: str
    problem_index: int
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None = None

    @property
    def oldest_version(self) -> int:
        """The version of the oldest token in the group."""
        return min(t.oldest_version for t in self.trajectories)


@dataclass(eq=False)
class PendingGroup:
    """A group from its admission until it is consumed: `size` samples, and a greedy one where `wants_greedy`."""

    group_id: int
    problem: Problem
    problem_index: int
    prompt_ids: npt.NDArray[np.int32]
    admitted_at: int
    size: int
    wants_greedy: bool = False
    samples: dict[int, Trajectory] = field(default_factory=dict)  # by sample_index
    greedy: Trajectory | None = None

    @property
    def missing(self) -> list[int]:
        """Indices of the samples still to come."""
        return [k for k in range(self.size) if k not in self.samples]

    @property
    def lacks_greedy(self) -> bool:
        """Whether the greedy response is still to come."""
        return self.wants_greedy and self.greedy is None

    @property
    def complete(self) -> bool:
        """Whether everything is there."""
        return len(self.samples) == self.size and not self.lacks_greedy

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it; its problem is made again from `problem_index`."""
        return {
            "group_id": self.group_id,
            "problem_index": self.problem_index,
            "admitted_at": self.admitted_at,
            "samples": [vars(trajectory) for trajectory in self.samples.values()],
            "greedy": None if self.greedy is None else vars(self.greedy),
        }

    def load_samples(self, state: Mapping[str, Any]) -> None:
        """Take the samples of a `state_dict`, as far as the group wants them."""
        self.samples = {row["sample_index"]: Trajectory(**row) for row in state["samples"]}
        if self.wants_greedy and state.get("greedy") is not None:
            self.greedy = Trajectory(**state["greedy"])

    def finished(self) -> Group:
        """The group, once it is complete."""
        ordered = tuple(self.samples[k] for k in sorted(self.samples))
        return Group(self.group_id, self.problem.prompt, self.problem_index, ordered, self.greedy)


@dataclass
class RolloutCounters:
    """What went wrong on the way, as totals over the run."""

    bad_problems: int = 0
    failed_samples: int = 0
    dropped_groups: int = 0
    requeued_samples: int = 0
    generator_restarts: int = 0
