"""Configuration of how responses are sampled: groups and their staleness, and the generators."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from areal_core.rl.config_checks import require as _require

__all__ = ["GenerateConfig", "RolloutConfig"]


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
        reward_workers: processes that verify, for each generator; 0: the generator itself, which does not decode
            meanwhile and can only interrupt verifiers in Python.
    """

    group_size: int = 8
    batch_groups: int = 32
    eta: float = 4.0
    pipeline_depth: float = 1.0
    on_stale: Literal["withhold", "drop", "resubmit"] = "withhold"
    truncated: Literal["keep", "mask", "penalise"] = "keep"
    reward_timeout_s: float = 5.0
    reward_workers: int = 0

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
        _require(self.reward_workers >= 0, "rollout.reward_workers", ">= 0", self.reward_workers)
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
