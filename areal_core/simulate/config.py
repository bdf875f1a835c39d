"""Configuration of a simulation: frozen dataclasses, filled from YAML and `key=value` overrides like that of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from areal_core.rl.config_checks import require

__all__ = [
    "ClusterConfig",
    "GenerateConfig",
    "LengthConfig",
    "ModelConfig",
    "RolloutConfig",
    "SimulateConfig",
    "TrainConfig",
    "UpdateConfig",
]


@dataclass(frozen=True)
class ClusterConfig:
    """The GPUs.

    Attributes:
        gpus: all of them.
        generator_share: share of the GPUs that generate; the rest trains.
        colocated: all GPUs generate, then all train, in turns (a synchronous system); generator_share counts for
            nothing then, and rollout.eta must be 0.
        hbm_bytes_per_s: memory bandwidth of a GPU.
        memory_efficiency: share of it that decoding reaches.
        flops_per_s: dense matrix products in 16 bits, of a GPU.
        compute_efficiency: share of it that decoding and prompts reach.
    """

    gpus: int = 128
    generator_share: float = 0.75
    colocated: bool = False
    hbm_bytes_per_s: float = 3.35e12
    memory_efficiency: float = 0.7
    flops_per_s: float = 989e12
    compute_efficiency: float = 0.5

    def __post_init__(self) -> None:
        require(self.gpus >= 1, "cluster.gpus", ">= 1", self.gpus)
        require(0 < self.generator_share < 1, "cluster.generator_share", "in (0, 1)", self.generator_share)
        for key in ("hbm_bytes_per_s", "flops_per_s"):
            require(getattr(self, key) > 0, f"cluster.{key}", "> 0", getattr(self, key))
        for key in ("memory_efficiency", "compute_efficiency"):
            require(0 < getattr(self, key) <= 1, f"cluster.{key}", "in (0, 1]", getattr(self, key))


@dataclass(frozen=True)
class ModelConfig:
    """The model, by a public name, a config.json or a Hugging Face directory, and the bytes of a weight."""

    name: str = "qwen2.5-1.5b"
    bytes_per_weight: float = 2.0

    def __post_init__(self) -> None:
        require(self.bytes_per_weight > 0, "model.bytes_per_weight", "> 0", self.bytes_per_weight)


@dataclass(frozen=True)
class LengthConfig:
    """How long prompts and responses are, in tokens.

    Attributes:
        prompt: tokens of a prompt.
        mean, sigma: of the lognormal distribution of responses before generate.max_new_tokens cuts them; sigma is that
            of the logarithm.
        correlation: share of the variance of the logarithm that responses to one prompt have in common.
        run: folder of a run; its samples.jsonl gives the distribution then, and the settings above must be left alone.
    """

    prompt: int = 512
    mean: float = 6000.0
    sigma: float = 1.0
    correlation: float = 0.0
    run: str | None = None

    def __post_init__(self) -> None:
        require(self.prompt >= 0, "lengths.prompt", ">= 0", self.prompt)
        require(self.mean >= 1, "lengths.mean", ">= 1", self.mean)
        require(0 <= self.sigma < 10, "lengths.sigma", "in [0, 10)", self.sigma)
        require(0 <= self.correlation <= 1, "lengths.correlation", "in [0, 1]", self.correlation)
        if self.run is not None:
            for key in ("mean", "sigma", "correlation"):
                default = type(self).__dataclass_fields__[key].default
                value = getattr(self, key)
                require(value == default, f"lengths.{key}", f"{default} with lengths.run", value)


@dataclass(frozen=True)
class RolloutConfig:
    """Groups, batches and the staleness gate, as in a run: see `areal_core.rl.config_sampling`."""

    group_size: int = 16
    batch_groups: int = 512
    eta: float = 4.0
    pipeline_depth: float = 4.0

    def __post_init__(self) -> None:
        for key in ("group_size", "batch_groups"):
            require(getattr(self, key) >= 1, f"rollout.{key}", ">= 1", getattr(self, key))
        for key in ("eta", "pipeline_depth"):
            value = getattr(self, key)
            require(
                value == math.inf or (value >= 0 and value == int(value)),
                f"rollout.{key}",
                "a whole number >= 0, or inf",
                value,
            )
        require(
            self.batches_ahead < math.inf,
            "rollout.pipeline_depth",
            "a whole number when rollout.eta is inf",
            self.pipeline_depth,
        )

    @property
    def batches_ahead(self) -> float:
        """Batches that may be sampled ahead of the one in training."""
        return min(self.eta, self.pipeline_depth)


@dataclass(frozen=True)
class GenerateConfig:
    """The generators.

    Attributes:
        gpus_per_generator: tensor parallel size of an engine.
        max_slots: sequences that an engine decodes at once.
        max_new_tokens: where responses are cut.
        step_overhead_s: seconds of a decode step besides reading weights and cache and computing.
        on_update: what a new version does to sequences in flight, as in a run; `drain` is an engine that cannot be
            interrupted: it takes nothing new in, finishes what it has, and only then loads the weights.
        dispatch: whether the samples of a group are spread over engines, or stay together.
    """

    gpus_per_generator: int = 1
    max_slots: int = 512
    max_new_tokens: int = 27_648
    step_overhead_s: float = 2e-3
    on_update: Literal["recompute", "keep", "finish", "drain"] = "recompute"
    dispatch: Literal["sample", "group"] = "sample"

    def __post_init__(self) -> None:
        for key in ("gpus_per_generator", "max_slots", "max_new_tokens"):
            require(getattr(self, key) >= 1, f"generate.{key}", ">= 1", getattr(self, key))
        require(
            0 <= self.step_overhead_s < math.inf, "generate.step_overhead_s", "finite and >= 0", self.step_overhead_s
        )


@dataclass(frozen=True)
class TrainConfig:
    """The trainer.

    Attributes:
        gpus_per_replica: GPUs that hold one copy of the model (tensor times pipeline parallel size).
        pipeline_stages: of them, stages that micro-batches pass one after the other.
        minibatches: optimizer steps for one batch.
        microbatching: `dynamic` packs sequences up to max_tokens_per_microbatch; `fixed` cuts the sequences of a
            replica into `microbatches` parts of equal number, whatever their lengths.
        microbatch_overhead_s: seconds of one pass of a micro-batch through a stage besides computing.
        tflops_per_gpu: what forward and backward reach.
        proximal: whether log-probabilities are computed once more before the first optimizer step.
        step_overhead_s: seconds of an optimizer step besides (gradient reduction, optimizer).
    """

    gpus_per_replica: int = 1
    pipeline_stages: int = 1
    minibatches: int = 4
    microbatching: Literal["dynamic", "fixed"] = "dynamic"
    max_tokens_per_microbatch: int = 32_768
    microbatches: int = 32
    microbatch_overhead_s: float = 0.0
    tflops_per_gpu: float = 400.0
    proximal: bool = True
    step_overhead_s: float = 0.5

    def __post_init__(self) -> None:
        for key in ("gpus_per_replica", "pipeline_stages", "minibatches", "max_tokens_per_microbatch", "microbatches"):
            require(getattr(self, key) >= 1, f"train.{key}", ">= 1", getattr(self, key))
        divides = self.gpus_per_replica % self.pipeline_stages == 0
        require(divides, "train.pipeline_stages", "a divisor of train.gpus_per_replica", self.pipeline_stages)
        require(self.tflops_per_gpu > 0, "train.tflops_per_gpu", "> 0", self.tflops_per_gpu)
        for key in ("microbatch_overhead_s", "step_overhead_s"):
            require(0 <= getattr(self, key) < math.inf, f"train.{key}", "finite and >= 0", getattr(self, key))


@dataclass(frozen=True)
class UpdateConfig:
    """How new weights reach the generators.

    Attributes:
        publish_s: seconds of the trainer from the end of a batch until the new version can be loaded.
        pause_s: seconds that a generator stands still to load it.
        switch_s: seconds between generating and training, each way, when both share the GPUs.
        other_s: seconds of the trainer after that, before it takes the next batch (records, checkpoints).
    """

    publish_s: float = 2.0
    pause_s: float = 1.0
    switch_s: float = 5.0
    other_s: float = 0.0

    def __post_init__(self) -> None:
        for key in ("publish_s", "pause_s", "switch_s", "other_s"):
            require(0 <= getattr(self, key) < math.inf, f"update.{key}", "finite and >= 0", getattr(self, key))


@dataclass(frozen=True)
class SimulateConfig:
    """A whole simulation.

    Attributes:
        steps: training batches.
        skip_steps: steps at the start that throughput, idle shares and ages leave out: the pipeline fills.
    """

    seed: int = 0
    steps: int = 60
    skip_steps: int = 10
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lengths: LengthConfig = field(default_factory=LengthConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)

    def __post_init__(self) -> None:
        require(self.steps >= 1, "steps", ">= 1", self.steps)
        require(
            0 <= self.skip_steps < self.steps, "skip_steps", f"0 to {self.steps - 1}, less than steps", self.skip_steps
        )
        if self.cluster.colocated:
            require(self.rollout.batches_ahead == 0, "rollout.eta", "0 with cluster.colocated", self.rollout.eta)
        samples = self.rollout.batch_groups * self.rollout.group_size
        require(self.train.minibatches <= samples, "train.minibatches", f"at most {samples}", self.train.minibatches)
        for key, gpus, size in (
            ("generate.gpus_per_generator", self.generator_gpus, self.generate.gpus_per_generator),
            ("train.gpus_per_replica", self.train_gpus, self.train.gpus_per_replica),
        ):
            require(size <= gpus, key, f"at most the {gpus} GPUs that do this", size)

    @property
    def generator_gpus(self) -> int:
        """GPUs that generate; at least one on either side."""
        cluster = self.cluster
        return (
            cluster.gpus
            if cluster.colocated
            else min(max(round(cluster.gpus * cluster.generator_share), 1), cluster.gpus - 1)
        )

    @property
    def train_gpus(self) -> int:
        """GPUs that train."""
        return self.cluster.gpus if self.cluster.colocated else self.cluster.gpus - self.generator_gpus

    @property
    def generators(self) -> int:
        """Engines that generate."""
        return self.generator_gpus // self.generate.gpus_per_generator

    @property
    def replicas(self) -> int:
        """Copies of the model that train."""
        return self.train_gpus // self.train.gpus_per_replica
