"""Configuration of a run: frozen dataclasses, filled from YAML and `key=value` overrides.

Every field is checked when its section is built; an unknown key or a bad value raises `ConfigError`, whose text
names the key as the user wrote it (``rollout.eta``). See docs/configuration.md for what each field does.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from areal_core.errors import ConfigError
from areal_core.ops import get_estimator
from areal_core.rl.config_algorithm import (
    AdvantageConfig,
    CriticConfig,
    LossConfig,
    ReferenceConfig,
    RewardConfig,
    TeacherConfig,
)
from areal_core.rl.config_checks import require as _require
from areal_core.rl.config_sampling import GenerateConfig, RolloutConfig

__all__ = [
    "AdvantageConfig",
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "EvaluateConfig",
    "GenerateConfig",
    "LossConfig",
    "ModelConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RolloutConfig",
    "TaskConfig",
    "TeacherConfig",
    "TelemetryConfig",
    "TrainConfig",
]


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
    """Evaluation of a pinned version on held-out problems, every `every` steps (0: never), before and after.

    k: also record pass@k and, where the task can tell answers, maj@k for each of these, and the 95 % interval of the
        sampled accuracy.
    """

    every: int = 25
    problems: int = 256
    samples: int = 1
    temperature: float = 1.0
    k: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(self.every >= 0, "evaluate.every", ">= 0", self.every)
        for key in ("problems", "samples"):
            _require(getattr(self, key) >= 1, f"evaluate.{key}", ">= 1", getattr(self, key))
        _require(self.temperature > 0, "evaluate.temperature", "> 0", self.temperature)
        fits = all(1 <= k <= self.samples for k in self.k)
        _require(fits, "evaluate.k", f"numbers from 1 to evaluate.samples = {self.samples}", list(self.k))


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
    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
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

        if (self.loss.distill_coef != 0) != (self.teacher.path is not None):
            expected = "a policy with loss.distill_coef" if self.loss.distill_coef else "null without loss.distill_coef"
            raise ConfigError(f"teacher.path: expected {expected}, got {self.teacher.path!r}")
        if self.reference.path is not None and not self.needs_reference:
            raise ConfigError(
                "reference.path: expected null without advantage.beta, reward.kl_coef or loss.kl_coef, "
                f"got {self.reference.path!r}"
            )
        estimator = get_estimator(self.advantage.name, **self.advantage.options)
        least = max(estimator.k, 2 if estimator.mean_level == "group" and estimator.singleton == "zero" else 1)
        _require(
            self.rollout.group_size >= least or self.loss.distill_coef != 0,
            "rollout.group_size",
            f">= {least} with advantage.name={self.advantage.name}, which gives smaller groups no advantage",
            self.rollout.group_size,
        )
        if not self.needs_critic:
            for item in dataclasses.fields(CriticConfig):
                value = getattr(self.critic, item.name)
                expected = f"{item.default} with advantage.name={self.advantage.name}, which has no critic"
                _require(value == item.default, f"critic.{item.name}", expected, value)
        if self.loss.m2po_threshold is not None and self.loss.proximal != "recompute":
            raise ConfigError(f"loss.proximal: expected recompute with loss.m2po_threshold, got {self.loss.proximal!r}")

    def check_resumes(self, identity: Mapping[str, Any]) -> None:
        """Raise ConfigError naming a setting that differs from the `identity` of the run being resumed."""
        for key, now in self.identity.items():
            if key in identity and identity[key] != now:
                raise ConfigError(f"{key}: a resumed run must keep its value {identity[key]!r}, got {now!r}")

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage estimator has a critic."""
        return get_estimator(self.advantage.name).critic

    @property
    def needs_greedy(self) -> bool:
        """Whether every group needs a greedy response too."""
        return get_estimator(self.advantage.name).greedy_baseline

    @property
    def needs_reference(self) -> bool:
        """Whether a KL penalty to the reference policy is set."""
        return self.needs_policy_logprobs or self.loss.kl_coef != 0

    @property
    def needs_policy_logprobs(self) -> bool:
        """Whether advantages depend on the KL of the policy before the step, so that its logprobs are needed."""
        return self.advantage.beta != 0 or self.reward.kl_coef != 0

    @property
    def needs_all_proximal(self) -> bool:
        """Whether proximal logprobs are needed of every token before the first mini-batch."""
        return self.needs_policy_logprobs or self.loss.m2po_threshold is not None

    @property
    def policy_starts_at(self) -> int:
        """First batch that trains the policy; those before it train the critic alone."""
        return self.critic.warmup_steps if self.needs_critic else 0

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that groups in flight depend on, by key: they cannot change when a run is resumed."""
        task = json.dumps([self.task.name, self.task.options], sort_keys=True, default=str)
        return {"seed": self.seed, "task": task, "rollout.group_size": self.rollout.group_size}

    def to_dict(self) -> dict[str, Any]:
        """A plain mapping that `load_config` reads back to an equal Config."""
        return dataclasses.asdict(self)
