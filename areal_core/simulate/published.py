"""Numbers published for AReaL, and what the simulator says of them.

Source: Fu et al. (2025), AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language Reasoning; the
steps of the two mathematics runs and the lengths of the coding runs from the announcement of its version 0.3, the
parallel layouts from its benchmark scripts. docs/simulator.md says what was assumed where nothing is published.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from areal_core.reshard.models import load_model
from areal_core.simulate.cluster import simulate
from areal_core.simulate.config import (
    ClusterConfig,
    GenerateConfig,
    LengthConfig,
    ModelConfig,
    RolloutConfig,
    SimulateConfig,
    TrainConfig,
    UpdateConfig,
)
from areal_core.simulate.costs import train_seconds
from areal_core.simulate.lengths import Lengths

__all__ = ["CONSTANTS", "RUNS", "Comparison", "Constants", "Run", "compare_published", "hours"]

_PROMPT = 256
_LONGEST_PROMPT = 1024  # what the context keeps free for it
_STAGES = {
    "math": (8192, 16_384, 24_576),
    "code": (28_672,),
}  # context of prompt and response, equal shares of the steps
_STEPS = 18
_SKIPPED = 8


@dataclass(frozen=True)
class Constants:
    """What is not published, one value for all runs; fitted to the hours of the runs marked `calibrated`.

    Attributes:
        step_overhead_s: seconds of a decode step besides memory and computing.
        mean_tokens: mean of the lognormal distribution of responses, before the context cuts them.
        sequence_s: seconds of a step in which the trainer does not compute (weights through storage, rewards,
            controller), for each sequence of the batch.
        code_steps: batches of the coding runs; those of the mathematics runs are known.
    """

    step_overhead_s: float
    mean_tokens: float
    sequence_s: float
    code_steps: float


CONSTANTS = Constants(step_overhead_s=0.00465, mean_tokens=2787.0, sequence_s=0.00326, code_steps=548.0)


@dataclass(frozen=True)
class Run:
    """One row of the comparison of synchronous and asynchronous training.

    Attributes:
        tflops: of a GPU with dynamic micro-batches; for 14B, which is not published, between its neighbours.
        fixed_tflops: the same with 32 micro-batches of equal numbers of sequences; 0 where it is not published.
        engine: GPUs of a generator. replica, stages: GPUs of a copy of the model in training, pipeline stages.
    """

    model: str
    task: Literal["math", "code"]
    nodes: int
    synchronous_h: float
    asynchronous_h: float
    tflops: float
    fixed_tflops: float
    engine: int
    replica: int
    stages: int
    calibrated: bool


RUNS = {
    "1.5B": Run("qwen2.5-1.5b", "math", 16, 41.0, 14.8, 427, 404, 1, 2, 2, True),
    "7B": Run("qwen2.5-7b", "math", 24, 57.7, 25.4, 455, 303, 1, 4, 4, False),
    "14B": Run("qwen2.5-14b", "code", 32, 48.8, 21.9, 420, 0, 4, 8, 8, True),
    "32B": Run("qwen2.5-32b", "code", 48, 51.1, 31.1, 388, 283, 8, 16, 8, False),
}


@dataclass(frozen=True)
class Comparison:
    """A published number beside the simulated one; `kind` says whether constants were fitted to it."""

    what: str
    unit: str
    published: float
    simulated: float
    kind: Literal["calibrated", "predicted"]

    @property
    def error(self) -> float:
        """Relative error of the simulated number."""
        return self.simulated / self.published - 1


def compare_published(constants: Constants = CONSTANTS) -> list[Comparison]:
    """All published numbers beside the simulated ones; takes some seconds."""
    return [
        *compare_hours(constants),
        *compare_eta(constants),
        *compare_interruption(constants),
        *compare_packing(constants),
    ]


def compare_hours(constants: Constants = CONSTANTS) -> list[Comparison]:
    """Hours of the four runs, synchronous and asynchronous."""
    rows = []
    for name, run in RUNS.items():
        kind: Literal["calibrated", "predicted"] = "calibrated" if run.calibrated else "predicted"
        for synchronous, published in ((True, run.synchronous_h), (False, run.asynchronous_h)):
            how = "synchronous" if synchronous else "asynchronous"
            what = f"{name} on {run.nodes} nodes, {how}"
            rows.append(Comparison(what, "h", published, hours(run, constants, synchronous=synchronous), kind))
    return rows


def compare_eta(constants: Constants = CONSTANTS) -> list[Comparison]:
    """Throughput of 1.5B on 8 GPUs, 8k context, batches of 64 x 16, by eta."""
    config = _config(RUNS["1.5B"], constants, context=8192, groups=64)
    rows = []
    for eta, published in ((0, 27.1), (1, 47.8), (4, 49.0), (16, 52.0)):
        small = replace(
            config,
            steps=60,
            skip_steps=20,
            cluster=replace(config.cluster, gpus=8),
            rollout=replace(config.rollout, eta=eta, pipeline_depth=eta),
        )
        rate = simulate(small).tokens_per_s / 1e3
        rows.append(Comparison(f"1.5B on 8 GPUs, eta {eta}", "k tokens/s", published, rate, "predicted"))
    return rows


def compare_interruption(constants: Constants = CONSTANTS) -> list[Comparison]:
    """Generation throughput with interruptible generation over that without, on 4 nodes.

    The trainer takes no time here: otherwise it, not generation, sets the pace.
    """
    rows = []
    for name, published in (("1.5B", 1.12), ("7B", 1.17)):
        config = _config(RUNS[name], constants, context=_STAGES["code"][0])
        config = replace(
            config,
            steps=40,
            skip_steps=15,
            cluster=replace(config.cluster, gpus=32),
            train=replace(config.train, tflops_per_gpu=1e6, step_overhead_s=0.0),
            update=replace(config.update, publish_s=0.0),
        )
        waiting = replace(config, generate=replace(config.generate, on_update="drain"))
        gain = simulate(config).generated_per_s / simulate(waiting).generated_per_s
        rows.append(Comparison(f"{name} on 4 nodes, interruptible", "x", published, gain, "predicted"))
    return rows


def compare_packing(constants: Constants = CONSTANTS) -> list[Comparison]:
    """TFLOP/s of a GPU with 32 fixed micro-batches, from that with dynamic ones."""
    rows = []
    for name, run in RUNS.items():
        if not run.fixed_tflops:
            continue
        config = _config(run, constants, context=_STAGES["math"][-1])
        rng = np.random.default_rng(0)
        drawn = Lengths(config.lengths, config.generate.max_new_tokens).draw(512, 16, rng).ravel() + _PROMPT
        model = load_model(run.model)
        dynamic = replace(config.train, pipeline_stages=run.stages, step_overhead_s=0.0)
        fixed = replace(dynamic, microbatching="fixed")
        seconds = [train_seconds(drawn, model, train, config.replicas, rng) for train in (dynamic, fixed)]
        reached = run.tflops * seconds[0] / seconds[1]
        rows.append(Comparison(f"{name}, 32 fixed micro-batches", "TFLOP/s", run.fixed_tflops, reached, "predicted"))
    return rows


def hours(run: Run, constants: Constants, *, synchronous: bool) -> float:
    """Hours of all steps, the stages of the context in equal shares."""
    steps = 1000 if run.task == "math" else constants.code_steps
    seconds = []
    for context in _STAGES[run.task]:
        config = _config(run, constants, context=context)
        if synchronous:
            rollout = replace(config.rollout, eta=0.0)
            config = replace(config, cluster=replace(config.cluster, colocated=True), rollout=rollout)
        seconds.append(simulate(config).step_s)
    return float(np.mean(seconds)) * steps / 3600


def _config(run: Run, constants: Constants, *, context: int, groups: int = 512) -> SimulateConfig:
    return SimulateConfig(
        steps=_STEPS,
        skip_steps=_SKIPPED,
        cluster=ClusterConfig(gpus=8 * run.nodes, generator_share=0.75, memory_efficiency=0.8),
        model=ModelConfig(run.model),
        lengths=LengthConfig(prompt=_PROMPT, mean=constants.mean_tokens, sigma=1.0),
        rollout=RolloutConfig(group_size=16, batch_groups=groups, eta=4, pipeline_depth=4),
        generate=GenerateConfig(
            gpus_per_generator=run.engine,
            max_new_tokens=context - _LONGEST_PROMPT,
            step_overhead_s=constants.step_overhead_s,
        ),
        # The published TFLOP/s are measured ones: what the pipeline loses is in them.
        train=TrainConfig(gpus_per_replica=run.replica, minibatches=4, tflops_per_gpu=run.tflops),
        update=UpdateConfig(publish_s=constants.sequence_s * groups * 16),
    )
