"""What a simulation found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_core.simulate.config import SimulateConfig

__all__ = ["Simulation", "Step"]


@dataclass(frozen=True, eq=False)
class Step:
    """One training batch; times in seconds since the start.

    Attributes:
        began: the version it trains was published.
        waited: seconds that the trainer had nothing to do.
        batch_at, trained_at, published_at: the batch was complete, trained on, and the next version published.
        tokens: prompts and responses of the batch.
        generated_tokens: response tokens that all generators produced from `began` to `published_at`.
        generator_idle: share of that time in which a generator had nothing to do, on average.
        interrupted: sequences that the version found in flight and interrupted.
        ages: int64 [A], response tokens of the batch by version age.
    """

    began: float
    waited: float
    batch_at: float
    trained_at: float
    published_at: float
    tokens: int
    generated_tokens: int
    generator_idle: float
    interrupted: int
    ages: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Simulation:
    """All steps, and where the groups went: submitted = steps * batch + pending, none is dropped.

    Attributes:
        submitted_groups: admitted by the gate.
        pending_groups: not yet trained on; finished_groups of them wait for the trainer.
    """

    config: SimulateConfig
    steps: list[Step]
    submitted_groups: int
    finished_groups: int
    pending_groups: int

    @property
    def trained_groups(self) -> int:
        """Groups that were in a batch."""
        return len(self.steps) * self.config.rollout.batch_groups

    @property
    def steady(self) -> list[Step]:
        """The steps after the first skip_steps."""
        return self.steps[self.config.skip_steps :]

    @property
    def seconds(self) -> float:
        """From the start to the last publication."""
        return self.steps[-1].published_at

    @property
    def step_s(self) -> float:
        """Mean seconds of a steady step."""
        return (self.steady[-1].published_at - self.steady[0].began) / len(self.steady)

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained on per second, prompts included, of steady steps."""
        return sum(step.tokens for step in self.steady) / len(self.steady) / self.step_s

    @property
    def generated_per_s(self) -> float:
        """Response tokens generated per second, of steady steps."""
        return sum(step.generated_tokens for step in self.steady) / len(self.steady) / self.step_s

    @property
    def generator_idle(self) -> float:
        """Share of the time in which a generator has nothing to do, of steady steps."""
        spans = [step.published_at - step.began for step in self.steady]
        idle = [step.generator_idle for step in self.steady]
        return float(np.average(idle, weights=spans))

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainer waits for a batch, of steady steps."""
        return float(np.mean([step.waited for step in self.steady]) / self.step_s)

    @property
    def train_s(self) -> float:
        """Mean seconds of training on a batch."""
        return float(np.mean([step.trained_at - step.batch_at for step in self.steady]))

    @property
    def ages(self) -> npt.NDArray[np.float64]:
        """Shares of the steady response tokens by version age."""
        total = np.zeros(max(step.ages.size for step in self.steady))
        for step in self.steady:
            total[: step.ages.size] += step.ages
        return np.asarray(np.trim_zeros(total, "b") / total.sum())

    @property
    def mean_age(self) -> float:
        """Mean version age of the tokens trained on."""
        return float(np.arange(self.ages.size) @ self.ages)

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "steps": len(self.steps),
            "hours": self.seconds / 3600,
            "step_s": self.step_s,
            "train_s": self.train_s,
            "tokens_per_s": self.tokens_per_s,
            "generated_per_s": self.generated_per_s,
            "generator_idle": self.generator_idle,
            "trainer_idle": self.trainer_idle,
            "mean_age": self.mean_age,
            "max_age": self.ages.size - 1,
            "ages": self.ages.tolist(),
            "generators": self.config.generators,
            "replicas": self.config.replicas,
            "groups": {
                "submitted": self.submitted_groups,
                "trained": self.trained_groups,
                "finished": self.finished_groups,
                "in_flight": self.pending_groups - self.finished_groups,
                "dropped": 0,
            },
        }
