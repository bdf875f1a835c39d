"""Configuration of a run: frozen dataclasses, filled from YAML and `key=value` overrides.

Every field is checked when its section is built; an unknown key or a bad value raises `ConfigError`, whose text
names the key as the user wrote it (``rollout.eta``). See docs/configuration.md for what each field does.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from areal_core.errors import ConfigError

__all__ = [
    "AdvantageConfig",
    "CheckpointConfig",
    "Config",
    "EvaluateConfig",
    "GenerateConfig",
    "LossConfig",
    "ModelConfig",
    "RolloutConfig",
    "TaskConfig",
    "TelemetryConfig",
    "TrainConfig",
]

Objective = Literal["decoupled", "naive", "uncorrected"]


def _require(condition: bool, key: str, expected: str, value: object) -> None:
    if not condition:
        raise ConfigError(f"{key}: expected {expected}, got {value!r}")


@dataclass(frozen=True)
class ModelConfig:
    """Where the policy starts: a Hugging Face directory, or the name of a bundled one (``chain_policy``)."""

    path: str = "chain_policy"


@dataclass(frozen=True)
class TaskConfig:
    """The task by name, and its own options (`areal_core.tasks.get_task`)."""

    name: str = "chain_arithmetic"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling of groups and the staleness rules.

    Attributes:
        group_size: responses sampled for one prompt (G).
        batch_groups: prompts in one training batch (B).
        eta: bound on the version age of a token when it is trained on; 0 is synchronous, inf unbounded.
        pipeline_depth: batches sampled ahead of the one in training; sampling runs min(eta, pipeline_depth) ahead.
        on_stale: what happens to a group with tokens older than eta (possible only after a resume): withhold those
            tokens from the loss, drop the group, or drop it and sample its prompt again.
        truncated: what a response cut by max_new_tokens is worth: its reward as verified (keep), none, its tokens
            masked from the loss (mask), or a reward of 0 (penalise).
        reward_timeout_s: seconds a verifier may take before its sample is excluded.
    """

    group_size: int = 8
    batch_groups: int = 32
    eta: float = 4.0
    pipeline_depth: float = 1.0
    on_stale: Literal["withhold", "drop", "resubmit"] = "withhold"
    truncated: Literal["keep", "mask", "penalise"] = "keep"
    reward_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        _require(self.group_size >= 1, "rollout.group_size", ">= 1", self.group_size)
        _require(self.batch_groups >= 1, "rollout.batch_groups", ">= 1", self.batch_groups)
        for key in ("eta", "pipeline_depth"):
            value = getattr(self, key)
            whole = value == math.inf or (value >= 0 and value == int(value))
            _require(whole, f"rollout.{key}", "a whole number >= 0, or inf", value)
        _require(
            self.batches_ahead < math.inf,
            "rollout.pipeline_depth",
            "a whole number when rollout.eta is inf (what else would pace sampling?)",
            self.pipeline_depth,
        )
        timeout = self.reward_timeout_s
        _require(0 < timeout < math.inf, "rollout.reward_timeout_s", "a finite number > 0", timeout)

    @property
    def batches_ahead(self) -> float:
        """Batches that may be sampled ahead of the one in training; at most eta, so ages stay within the bound."""
        return min(self.eta, self.pipeline_depth)


@dataclass(frozen=True)
class GenerateConfig:
    """Generator processes and how they sample.

    Attributes:
        generators: number of generator processes.
        threads: compute threads of each.
        max_slots: sequences decoded at once by one generator; 0 picks group_size * batch_groups / generators.
        on_update: what a new version does to sequences in flight: recompute their KV cache under the new weights, keep
            it, or finish them on the old weights.
        max_context: tokens of prompt and response together, which sizes the KV cache; 0: what the model allows. Longer
            prompts are excluded and counted.
        steps_per_poll: decode steps between looks at the version counter and the request pipe.
        max_restarts: generator deaths tolerated before the run fails.
        stall_timeout_s: seconds without a sign of life after which a generator counts as dead.
    """

    engine: Literal["embedded"] = "embedded"
    generators: int = 1
    threads: int = 1
    max_slots: int = 0
    max_context: int = 0
    max_new_tokens: int = 24
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    on_update: Literal["recompute", "keep", "finish"] = "recompute"
    steps_per_poll: int = 1
    max_restarts: int = 8
    stall_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for key in ("generators", "threads", "max_new_tokens", "steps_per_poll"):
            _require(getattr(self, key) >= 1, f"generate.{key}", ">= 1", getattr(self, key))
        for key in ("max_slots", "max_context", "top_k", "max_restarts"):
            _require(getattr(self, key) >= 0, f"generate.{key}", ">= 0", getattr(self, key))
        _require(
            0 < self.temperature < math.inf,
            "generate.temperature",
            "finite and > 0 (the policy gradient needs sampling)",
            self.temperature,
        )
        _require(0 < self.top_p <= 1, "generate.top_p", "in (0, 1]", self.top_p)
        _require(self.stall_timeout_s > 0, "generate.stall_timeout_s", "> 0", self.stall_timeout_s)


@dataclass(frozen=True)
class LossConfig:
    """Parameters of the policy loss; names and meaning as in `areal_core.ops.PPOLossConfig`.

    `objective` chooses the three policies: decoupled recomputes the proximal logprobs and weighs by
    proximal/behavior; naive clips against the behaviour policy; uncorrected is the plain policy gradient.
    """

    objective: Objective = "decoupled"
    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    behavior_cap: float | None = 5.0
    behavior_mode: Literal["truncate", "mask"] = "truncate"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        _require(0 < self.clip_low < 1, "loss.clip_low", "in (0, 1)", self.clip_low)
        _require(self.clip_high is None or self.clip_high > 0, "loss.clip_high", "> 0 or null", self.clip_high)
        _require(self.dual_clip is None or self.dual_clip > 1, "loss.dual_clip", "> 1 or null", self.dual_clip)
        _require(
            self.behavior_cap is None or self.behavior_cap >= 1, "loss.behavior_cap", ">= 1 or null", self.behavior_cap
        )


@dataclass(frozen=True)
class AdvantageConfig:
    """Advantage estimator by name (`areal_core.ops.compute_advantages`) and its options."""

    name: str = "grpo_r1"
    drop_zero_variance: bool = True
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation.

    Attributes:
        steps: training batches, one weight version each.
        minibatches: optimizer steps per batch.
        max_tokens_per_microbatch: strict cap on packed tokens (prompt and response) in one forward pass.
        lr_warmup_steps: batches over which the learning rate rises linearly.
        threads: compute threads of the trainer.
    """

    steps: int = 150
    learning_rate: float = 1e-4
    lr_warmup_steps: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    minibatches: int = 4
    max_tokens_per_microbatch: int = 8192
    threads: int = 1

    def __post_init__(self) -> None:
        for key in ("steps", "minibatches", "max_tokens_per_microbatch", "threads"):
            _require(getattr(self, key) >= 1, f"train.{key}", ">= 1", getattr(self, key))
        _require(self.learning_rate > 0, "train.learning_rate", "> 0", self.learning_rate)
        _require(self.lr_warmup_steps >= 0, "train.lr_warmup_steps", ">= 0", self.lr_warmup_steps)
        _require(self.weight_decay >= 0, "train.weight_decay", ">= 0", self.weight_decay)
        _require(self.grad_clip > 0, "train.grad_clip", "> 0 (inf: off)", self.grad_clip)
        _require(all(0 <= b < 1 for b in self.betas), "train.betas", "two numbers in [0, 1)", self.betas)


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation of a pinned version on held-out problems, every `every` steps (0: never), before and after."""

    every: int = 25
    problems: int = 256
    samples: int = 1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _require(self.every >= 0, "evaluate.every", ">= 0", self.every)
        for key in ("problems", "samples"):
            _require(getattr(self, key) >= 1, f"evaluate.{key}", ">= 1", getattr(self, key))
        _require(self.temperature > 0, "evaluate.temperature", "> 0", self.temperature)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints every `every` steps (0: only at the end and on Ctrl-C); the newest `keep` stay."""

    every: int = 50
    keep: int = 2

    def __post_init__(self) -> None:
        _require(self.every >= 0, "checkpoint.every", ">= 0", self.every)
        _require(self.keep >= 1, "checkpoint.keep", ">= 1", self.keep)


@dataclass(frozen=True)
class TelemetryConfig:
    """What a run writes besides metrics.jsonl, and how it shows progress."""

    tensorboard: bool = True
    trace: bool = True
    report: bool = True
    samples_per_step: int = 2
    progress: Literal["auto", "live", "plain", "none"] = "auto"

    def __post_init__(self) -> None:
        _require(self.samples_per_step >= 0, "telemetry.samples_per_step", ">= 0", self.samples_per_step)


@dataclass(frozen=True)
class Config:
    """A whole run. `run_dir` receives metrics, trace, samples, checkpoints and the report."""

    run_dir: str = "runs/chain"
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        batch = self.rollout.batch_groups
        _require(
            self.train.minibatches <= batch * self.rollout.group_size,
            "train.minibatches",
            f"at most rollout.batch_groups * rollout.group_size = {batch * self.rollout.group_size}",
            self.train.minibatches,
        )

    def check_resumes(self, identity: Mapping[str, Any]) -> None:
        """Raise ConfigError naming a setting that differs from the `identity` of the run being resumed."""
        for key, now in self.identity.items():
            if key in identity and identity[key] != now:
                raise ConfigError(f"{key}: a resumed run must keep its value {identity[key]!r}, got {now!r}")

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that groups in flight depend on, by key: they cannot change when a run is resumed."""
        task = json.dumps([self.task.name, self.task.options], sort_keys=True, default=str)
        return {"seed": self.seed, "task": task, "rollout.group_size": self.rollout.group_size}

    def to_dict(self) -> dict[str, Any]:
        """A plain mapping that `load_config` reads back to an equal Config."""
        return dataclasses.asdict(self)
