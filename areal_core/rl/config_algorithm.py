"""Configuration of what is optimised: advantages with critic, reference and teacher, and the policy loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from areal_core import ops
from areal_core.errors import ConfigError
from areal_core.ops import PPOLossConfig, estimators, get_estimator
from areal_core.rl.config_checks import require as _require

__all__ = ["AdvantageConfig", "CriticConfig", "LossConfig", "ReferenceConfig", "RewardConfig", "TeacherConfig"]

Proximal = Literal["recompute", "loglinear", "behavior"]


@dataclass(frozen=True)
class RewardConfig(ops.RewardConfig):
    """Shaping of verified rewards: every field of `areal_core.ops.RewardConfig`, and a target for its KL coefficient.

    Attributes:
        kl_target: KL of a response, in nats, towards which kl_coef is adapted from batch to batch; null: kl_coef stays.
        kl_horizon: samples over which kl_coef changes by at most 20 %.
    """

    kl_target: float | None = None
    kl_horizon: float = 10000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.kl_target is None or self.kl_target > 0, "reward.kl_target", "> 0 or null", self.kl_target)
        _require(self.kl_target is None or self.kl_coef > 0, "reward.kl_coef", "> 0 with kl_target", self.kl_coef)
        _require(self.kl_horizon > 0, "reward.kl_horizon", "> 0", self.kl_horizon)


@dataclass(frozen=True)
class ReferenceConfig:
    """The reference policy of KL penalties, loaded when one is set; path: as model.path, null the starting policy."""

    path: str | None = None


@dataclass(frozen=True)
class TeacherConfig:
    """The teacher of `loss.distill_coef`; path: as model.path, with the vocabulary of the policy."""

    path: str | None = None


@dataclass(frozen=True)
class CriticConfig:
    """The value model of estimators with a critic (ppo, orz): a copy of the starting policy with a scalar head.

    Attributes:
        learning_rate: of its AdamW, whose other settings are the policy's.
        clip: values move at most this far from those before the step before their loss stops falling; null: no bound.
        warmup_steps: first batches, which train the critic alone.
    """

    learning_rate: float = 1e-3
    clip: float | None = 0.5
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, "critic.learning_rate", "> 0", self.learning_rate)
        _require(self.clip is None or self.clip > 0, "critic.clip", "> 0 or null", self.clip)
        _require(self.warmup_steps >= 0, "critic.warmup_steps", ">= 0", self.warmup_steps)


@dataclass(frozen=True)
class LossConfig(PPOLossConfig):
    """The policy loss: every field of `areal_core.ops.PPOLossConfig`, and where proximal logprobs come from.

    Attributes:
        behavior_cap: as in PPOLossConfig, with a default that bounds the weights of stale tokens.
        proximal: "recompute" (decoupled: the policy before the step, computed when the batch arrives), "loglinear"
            (decoupled: interpolated between behaviour and current logprobs by the version of each token, for free) or
            "behavior" (naive PPO: the ratio is taken to the behaviour policy; no behaviour weights).
    """

    behavior_cap: float | None = 5.0
    proximal: Proximal = "recompute"

    def __post_init__(self) -> None:
        super().__post_init__()
        weighs = self.behavior_low is not None or self.behavior_mode != "truncate" or self.behavior_level != "token"
        _require(
            self.decoupled or not weighs,
            "loss.proximal",
            "recompute or loglinear with behaviour weights (loss.behavior_low, behavior_mode, behavior_level)",
            self.proximal,
        )

    @staticmethod
    def expand_preset(values: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the key `preset` of a file, a name of `PPOLossConfig.preset`, by what it sets; other keys win.

        Raises:
            ConfigError: an unknown name.
        """
        rest = dict(values)
        name = rest.pop("preset", None)
        if name is None:
            return rest
        try:
            preset = asdict(PPOLossConfig.preset(name))
        except ValueError as error:
            raise ConfigError(f"loss.preset: {str(error).partition('expected preset ')[2] or error}") from None
        plain = asdict(PPOLossConfig())
        return {key: value for key, value in preset.items() if value != plain[key]} | rest

    @property
    def decoupled(self) -> bool:
        """Whether behaviour weights apply."""
        return self.proximal != "behavior"

    @property
    def title(self) -> str:
        """A few words for headings."""
        if self.objective == "reinforce" and not self.decoupled:
            return "uncorrected policy gradient"
        return f"{'decoupled' if self.decoupled else 'naive'} {self.objective.upper()}"


@dataclass(frozen=True)
class AdvantageConfig:
    """The advantage estimator (`areal_core.ops.compute_advantages`).

    Attributes:
        name: one of `areal_core.ops.estimators()`.
        beta: weight of the KL to the reference policy, where the estimator puts it.
        gamma, lam: discount per token, and lambda of GAE.
        drop_zero_variance: leave groups whose rewards are all equal out of the update; null: where neither advantage
            nor KL, entropy or teacher would give them a gradient.
        options: parts of the estimator to replace (ddof, eps, ...).
    """

    name: str = "grpo_r1"
    beta: float = 0.0
    gamma: float = 1.0
    lam: float = 1.0
    drop_zero_variance: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.name in estimators(), "advantage.name", f"one of {', '.join(estimators())}", self.name)
        for key in ("gamma", "lam"):
            _require(0 <= getattr(self, key) <= 1, f"advantage.{key}", "in [0, 1]", getattr(self, key))
        _require(math.isfinite(self.beta), "advantage.beta", "a finite number", self.beta)
        try:
            estimator = get_estimator(self.name, **self.options)
        except (TypeError, ValueError) as error:  # "get_estimator: expected <what>, got ..."
            raise ConfigError(f"advantage.options: {str(error).partition(': ')[2] or error}") from None
        uses = {
            "beta": (0.0, estimator.kl != "none"),
            "gamma": (1.0, estimator.discounted),
            "lam": (1.0, estimator.discounted and estimator.critic),
        }
        for key, (neutral, used) in uses.items():
            value = getattr(self, key)
            expected = f"{neutral:g} with advantage.name={self.name}, which does not use it"
            _require(used or value == neutral, f"advantage.{key}", expected, value)
