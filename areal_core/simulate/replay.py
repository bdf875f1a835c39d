"""A recorded run, simulated from its own step times and response lengths, beside what really happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_core.errors import DataError
from areal_core.simulate.cluster import simulate
from areal_core.simulate.config import (
    ClusterConfig,
    GenerateConfig,
    LengthConfig,
    RolloutConfig,
    SimulateConfig,
    TrainConfig,
)
from areal_core.simulate.costs import Costs, DecodeCost
from areal_core.simulate.lengths import Lengths
from areal_core.simulate.result import Simulation
from areal_core.telemetry.jsonl import Row
from areal_core.telemetry.run_data import RunData, read_run

__all__ = ["Replay", "Seen", "replay"]

_TRAIN = ("pack", "proximal", "critic", "forward_backward", "optimizer")
_SIMULATED_STEPS = 400
_SKIPPED_STEPS = 20


@dataclass(frozen=True)
class Seen:
    """Throughput, idle shares and ages, of a run or of its simulation.

    Attributes:
        step_s: seconds of a step, evaluation and checkpoints left out.
        generated_per_s: response tokens generated per second.
        ages: shares of the response tokens of a batch by version age.
    """

    step_s: float
    generated_per_s: float
    generator_idle: float
    trainer_idle: float
    ages: list[float]

    @property
    def mean_age(self) -> float:
        """Mean version age."""
        return sum(age * share for age, share in enumerate(self.ages))


@dataclass(frozen=True)
class Replay:
    """What a run measured and what its simulation says, over `steps` steps of the run from `first_step` on."""

    first_step: int
    steps: int
    measured: Seen
    simulated: Seen

    @property
    def age_distance(self) -> float:
        """Share of the tokens that would have to change their age for the two histograms to agree."""
        size = max(len(self.measured.ages), len(self.simulated.ages))
        padded = [np.pad(seen.ages, (0, size - len(seen.ages))) for seen in (self.measured, self.simulated)]
        return float(np.abs(padded[0] - padded[1]).sum() / 2)


def replay(run_dir: str | Path, seed: int = 0) -> Replay:
    """Simulate the second half of a run, in which response lengths hardly change any more.

    Decode steps cost what the run's generators needed per token; a batch costs what one of the run's batches, drawn at
    random, cost; lengths are drawn from the run's samples.

    Raises:
        FileNotFoundError: `run_dir` is no folder.
        DataError: it holds no run, fewer than eight steps, or steps without times.
    """
    run = read_run(run_dir)
    if not run.config or len(run.metrics) < 8:
        raise DataError(f"replay: expected a run of at least 8 steps in {run_dir}, got {len(run.metrics)}")
    rows = [row for row in run.metrics[len(run.metrics) // 2 :] if "time/generate_s" in row]
    if len(rows) < 4 or not sum(_column(rows, "time/generate_s")) > 0:
        raise DataError(f"replay: expected steps with times of the generators in {run_dir}, got none")
    config = _config(run, seed)
    result = simulate(config, _costs(rows, config.generators), _lengths(run, rows, config.generate.max_new_tokens))
    return Replay(int(rows[0]["step"]), len(rows), _measured(rows), _simulated(result))


def _config(run: RunData, seed: int) -> SimulateConfig:
    def setting(key: str, kind: type[Any]) -> Any:
        value = run.setting(key)
        if value is None:
            raise DataError(f"replay: expected {key} in config.yaml of the run, got none")
        return kind(value)

    generators, slots = setting("generate.generators", int), setting("generate.max_slots", int)
    rollout = RolloutConfig(
        group_size=setting("rollout.group_size", int),
        batch_groups=setting("rollout.batch_groups", int),
        eta=setting("rollout.eta", float),
        pipeline_depth=setting("rollout.pipeline_depth", float),
    )
    return SimulateConfig(
        seed=seed,
        steps=_SIMULATED_STEPS,
        skip_steps=_SKIPPED_STEPS,
        cluster=ClusterConfig(gpus=generators + 1, generator_share=generators / (generators + 1)),
        lengths=LengthConfig(prompt=0),
        rollout=rollout,
        generate=GenerateConfig(
            max_slots=slots or max(1, rollout.batch_groups * rollout.group_size // generators),
            max_new_tokens=setting("generate.max_new_tokens", int),
            on_update=setting("generate.on_update", str),
            dispatch="group",
        ),
        train=TrainConfig(minibatches=1),
    )


def _costs(rows: Sequence[Row], generators: int) -> Costs:
    # Verifiers run in the generators; their seconds are part of time/generate_s.
    token_s = sum(_column(rows, "time/generate_s")) / sum(_column(rows, "tokens/generated"))
    train = np.asarray([sum(_value(row, f"time/{phase}_s") for phase in _TRAIN) for row in rows])

    def train_s(_lengths: npt.NDArray[np.int64], rng: np.random.Generator) -> float:
        return float(rng.choice(train))

    return Costs(
        decode=DecodeCost(step_s=0.0, sequence_s=token_s, context_s=0.0, prompt_token_s=0.0),
        train_s=train_s,
        publish_s=float(np.mean(_column(rows, "time/publish_s"))),
        pause_s=float(np.mean(_column(rows, "time/weight_update_s"))) / generators,
        other_s=float(np.mean(_column(rows, "time/other_s"))),
    )


def _lengths(run: RunData, rows: Sequence[Row], longest: int) -> Lengths:
    """Of the samples of the same steps, scaled to the mean of all responses: only a few of a step are recorded."""
    first = int(rows[0]["step"])
    seen = np.asarray([len(row["tokens"]) for row in run.samples if row.get("step", 0) >= first and row["tokens"]])
    mean = float(np.mean(_column(rows, "response/tokens_mean")))
    if not seen.size:
        seen = np.asarray([mean])
    scaled = np.maximum(np.rint(seen * (mean / seen.mean())), 1).astype(np.int64)
    return Lengths(LengthConfig(prompt=0), longest, seen=scaled)


def _measured(rows: Sequence[Row]) -> Seen:
    waited = sum(_column(rows, "time/wait_s"))
    seconds = waited + sum(_value(row, f"time/{phase}_s") for row in rows for phase in (*_TRAIN, "publish", "other"))
    spans = [sum(_value(row, f"time/{phase}_s") for phase in (*_TRAIN, "wait", "publish", "other")) for row in rows]
    ages = np.zeros(max(len(row["staleness/histogram"]) for row in rows))
    for row in rows:
        counts = row["staleness/histogram"]
        ages[: len(counts)] += counts
    return Seen(
        step_s=seconds / len(rows),
        generated_per_s=sum(_column(rows, "tokens/generated")) / seconds,
        generator_idle=float(np.average(_column(rows, "idle/generator"), weights=spans)),
        trainer_idle=waited / seconds,
        ages=(ages / ages.sum()).tolist(),
    )


def _simulated(result: Simulation) -> Seen:
    return Seen(
        step_s=result.step_s,
        generated_per_s=result.generated_per_s,
        generator_idle=result.generator_idle,
        trainer_idle=result.trainer_idle,
        ages=result.ages.tolist(),
    )


def _column(rows: Sequence[Row], key: str) -> list[float]:
    return [_value(row, key) for row in rows]


def _value(row: Mapping[str, Any], key: str) -> float:
    return float(row.get(key) or 0.0)
