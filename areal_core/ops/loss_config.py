"""Which policy loss: every variant of `ppo_loss` is a setting of one configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

# The order of each is the order of the enumeration in csrc/ops/loss/loss.h.
OBJECTIVES = ("ppo", "cispo", "sapo", "gmpo", "reinforce")
RATIO_LEVELS = ("token", "sequence", "sequence_product", "off")
BEHAVIOR_LEVELS = ("token", "sequence", "geometric")
BEHAVIOR_MODES = ("truncate", "mask", "icepop")
KL_ESTIMATORS = ("k1", "k2", "k3", "k3_unbiased")
AGGREGATIONS = ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant")

_CHOICES = {
    "objective": OBJECTIVES,
    "ratio_level": RATIO_LEVELS,
    "behavior_level": BEHAVIOR_LEVELS,
    "behavior_mode": BEHAVIOR_MODES,
    "kl_estimator": KL_ESTIMATORS,
    "aggregation": AGGREGATIONS,
}

# What the papers use. A preset changes the loss alone: advantages are `compute_advantages`' part.
_PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Proximal policy optimization, arXiv 1707.06347; with behavior logprobs decoupled PPO, arXiv 2110.00641.
    "ppo": {},
    # DeepSeekMath, arXiv 2402.03300: mean over sequences of their token means, KL in the loss.
    "grpo": {"kl_coef": 0.04, "aggregation": "sequence_mean_token_mean"},
    # DAPO, arXiv 2503.14476: clip-higher, token mean, no KL.
    "dapo": {"clip_high": 0.28},
    # Understanding R1-Zero-like training, arXiv 2503.20783: the sum over tokens divided by a constant.
    "dr_grpo": {"aggregation": "constant"},
    # Group sequence policy optimization, arXiv 2507.18071.
    "gspo": {
        "ratio_level": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence_mean_token_mean",
    },
    # Geometric-mean policy optimization, arXiv 2507.20673: token ratios clipped to (e^-0.4, e^0.4).
    "gmpo": {
        "objective": "gmpo",
        "ratio_level": "sequence",
        "clip_low": 1 - math.exp(-0.4),
        "clip_high": math.exp(0.4) - 1,
        "aggregation": "sequence_mean_token_mean",
    },
    # MiniMax-M1, arXiv 2506.13585: no lower bound; the upper bound of 5 is that of ScaleRL, arXiv 2510.13786.
    "cispo": {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    # Soft adaptive policy optimization, arXiv 2511.20347.
    "sapo": {"objective": "sapo", "aggregation": "sequence_mean_token_mean"},
    # Second-moment trust policy optimization, arXiv 2510.01161: give keep_mask = m2po_mask(...).
    "m2po": {"objective": "reinforce", "m2po_threshold": 0.04},
    # Truncated importance sampling between trainer and generator (Yao et al. 2025), on top of clip-higher.
    "tis": {"clip_high": 0.28, "behavior_cap": 2.0},
    # IcePop (Ling team 2025, arXiv 2510.18855): tokens whose behavior weight leaves [0.5, 5] are dropped.
    "icepop": {"behavior_mode": "icepop", "behavior_low": 0.5, "behavior_cap": 5.0},
    # The plain policy gradient -A log p.
    "reinforce": {"objective": "reinforce", "ratio_level": "off"},
    # On-policy distillation: the reverse KL to a teacher as the advantage (give advantages of 0 for it alone).
    "distill": {"objective": "reinforce", "distill_coef": 1.0},
}


@dataclass(frozen=True)
class PPOLossConfig:
    """Which policy loss: every variant is a setting of these parameters.

    Args:
        clip_low: the ratio u to the proximal policy is clipped below at 1 - clip_low, in [0, 1]; objectives "ppo",
            "cispo" and "gmpo".
        clip_high: and above at 1 + clip_high; None: the same as clip_low.
        dual_clip: > 1; where the advantage is negative a term is at most dual_clip * |advantage|; "ppo". None: off.
        ratio_level: what u is. "token": the token's ratio. "sequence": exp of the mean log-ratio over the live tokens
            of its sequence (GSPO). "sequence_product": exp of the sum. "off": no ratio; "reinforce" alone.
        behavior_cap: upper bound of the behavior weight w = exp(proximal - behavior). None: no bound.
        behavior_low: lower bound, below which "mask" and "icepop" drop a token. None: no bound.
        behavior_mode: "truncate" (a weight above the cap becomes the cap), "mask" (the policy term of a token whose
            weight is out of bounds is dropped; the token still counts in the normalizer) or "icepop" ("mask" with
            both bounds required).
        behavior_level: what w is. "token"; "sequence": exp of the summed log-ratio of the sequence; "geometric": exp
            of its mean. Bounds apply to that weight.
        kl_coef: weight of the KL penalty to the reference policy; needs ref_logprobs.
        kl_estimator: of KL(current || reference): "k1", "k2", "k3", or "k3_unbiased": k3 times the ratio of the current
            policy to the one that produced the tokens (w u, u of the token), through which the gradient flows too.
        entropy_coef: weight of the entropy bonus; needs entropy.
        aggregation: the weight of a token, and what the normalizer is unless given. "token_mean": 1, live tokens.
            "sequence_mean_token_sum": 1, live sequences (those with a live token). "sequence_mean_token_mean": 1 /
            live tokens of its sequence, live sequences. "constant": 1, to be given (Dr.GRPO).
        objective: with A the advantage, the policy term is w times
            "ppo": -min(u A, clip(u) A);
            "cispo": -sg(clip(u)) A logprob, sg the stop-gradient;
            "sapo": -A (4 / tau) sigmoid(tau (u - 1)), tau = tau_positive where A > 0, else tau_negative;
            "gmpo": -A times the geometric mean over the sequence of token ratios, each clipped above where A > 0 and
            below where A < 0; ratio_level "sequence";
            "reinforce": -u A, and -A logprob with ratio_level "off".
        tau_positive: > 0, "sapo".
        tau_negative: > 0, "sapo".
        distill_coef: weight of on-policy distillation: the advantage gains distill_coef * (teacher - proximal), the
            negative reverse KL of the token; needs teacher_logprobs.
        m2po_threshold: > 0; the second moment above which `m2po_mask` drops tokens; needs keep_mask. None: off.

    Raises:
        ValueError: a value out of range, an unknown name, or options that exclude each other or have no effect.
        TypeError: what is no number where one is needed.

    Source: PPO, arXiv 1707.06347; decoupled PPO, 2110.00641; dual clip, 1912.09729; clip-higher, DAPO, 2503.14476;
    GRPO, 2402.03300; Dr.GRPO, 2503.20783; GSPO, 2507.18071; GMPO, 2507.20673; CISPO, MiniMax-M1, 2506.13585; SAPO,
    2511.20347; M2PO, 2510.01161; truncation of behavior weights, Yao et al. (2025); IcePop, 2510.18855; k1, k2 and k3,
    Schulman, http://joschu.net/blog/kl-approx.html; ratio-weighted k3, DeepSeek-V3.2, 2512.02556; on-policy
    distillation, GKD, 2306.13649.
    """

    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio_level: str = "token"
    behavior_cap: float | None = None
    behavior_low: float | None = None
    behavior_mode: str = "truncate"
    behavior_level: str = "token"
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    aggregation: str = "token_mean"
    objective: str = "ppo"
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    distill_coef: float = 0.0
    m2po_threshold: float | None = None

    @staticmethod
    def preset(name: str, **changes: Any) -> PPOLossConfig:
        """Settings of a paper by name, some of them changed: `PPOLossConfig.preset("gspo", entropy_coef=0.01)`.

        Raises:
            ValueError: an unknown name; the text lists the known ones.
        """
        if name not in _PRESETS:
            raise ValueError(f"PPOLossConfig: expected preset in {tuple(_PRESETS)}, got {name!r}")
        return replace(PPOLossConfig(**_PRESETS[name]), **changes)

    def __post_init__(self) -> None:
        """Check every field."""
        for field in fields(PPOLossConfig):
            value = getattr(self, field.name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not (field.name in _CHOICES or is_number or (value is None and field.default is None)):
                raise TypeError(f"PPOLossConfig: expected {field.name} a number, got {value!r}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"PPOLossConfig: expected {name} in {choices}, got {getattr(self, name)!r}")
        self._check("clip_low", 0 <= self.clip_low <= 1, "in [0, 1]")
        self._check("clip_high", self.clip_high is None or 0 <= self.clip_high < math.inf, ">= 0 and finite")
        self._check("dual_clip", self.dual_clip is None or 1 < self.dual_clip < math.inf, "> 1 and finite")
        self._check("behavior_cap", self.behavior_cap is None or 0 < self.behavior_cap < math.inf, "> 0 and finite")
        cap = math.inf if self.behavior_cap is None else self.behavior_cap
        self._check("behavior_low", self.behavior_low is None or 0 <= self.behavior_low <= cap, "in [0, behavior_cap]")
        for name in ("kl_coef", "entropy_coef", "distill_coef"):
            self._check(name, math.isfinite(getattr(self, name)), "finite")
        for name in ("tau_positive", "tau_negative"):
            self._check(name, 0 < getattr(self, name) < math.inf, "> 0 and finite")
        self._check("m2po_threshold", self.m2po_threshold is None or self.m2po_threshold > 0, "> 0")
        self._check_objective()
        self._check_behavior()

    def _check(self, name: str, valid: bool, expected: str) -> None:
        if not valid:
            raise ValueError(f"PPOLossConfig: expected {name} {expected}, got {getattr(self, name)!r}")

    def _check_objective(self) -> None:
        suffix = f"with objective = {self.objective!r}"
        if self.objective == "gmpo":
            self._check("ratio_level", self.ratio_level == "sequence", f"= 'sequence' {suffix}")
        if self.objective != "reinforce":
            self._check("ratio_level", self.ratio_level != "off", f"other than 'off' {suffix}")
        if self.objective != "ppo":
            self._check("dual_clip", self.dual_clip is None, f"= None {suffix}")
        if self.objective in ("sapo", "reinforce"):
            self._check_unused(("clip_low", "clip_high"), suffix)
        if self.objective != "sapo":
            self._check_unused(("tau_positive", "tau_negative"), suffix)

    def _check_unused(self, names: tuple[str, ...], suffix: str) -> None:
        """Refuse what would have no effect. (An estimator whose coefficient is 0 for now may stay set.)"""
        for field in fields(PPOLossConfig):
            if field.name in names:
                unset = getattr(self, field.name) == field.default
                self._check(field.name, unset, f"= {field.default} {suffix}, which does not use it")

    def _check_behavior(self) -> None:
        if self.behavior_mode == "truncate" and self.behavior_low is not None:
            raise ValueError(
                "PPOLossConfig: expected behavior_low = None with behavior_mode = 'truncate' (a lower bound needs "
                f"'mask' or 'icepop'), got {self.behavior_low}"
            )
        if self.behavior_mode == "mask" and self.behavior_cap is None and self.behavior_low is None:
            raise ValueError(
                "PPOLossConfig: expected behavior_cap or behavior_low with behavior_mode = 'mask', got None"
            )
        if self.behavior_mode == "icepop" and (self.behavior_cap is None or self.behavior_low is None):
            raise ValueError(
                "PPOLossConfig: expected behavior_low and behavior_cap with behavior_mode = 'icepop', got "
                f"{self.behavior_low} and {self.behavior_cap}"
            )

    @property
    def needs_sequences(self) -> bool:
        """Whether the loss depends on where sequences end: on cu_seqlens."""
        return (
            self.ratio_level in ("sequence", "sequence_product")
            or self.behavior_level != "token"
            or self.aggregation in ("sequence_mean_token_sum", "sequence_mean_token_mean")
        )

    def _native(self) -> tuple[float | int, ...]:
        """Give the scalar arguments of the native op, in its order."""
        return (
            OBJECTIVES.index(self.objective),
            RATIO_LEVELS.index(self.ratio_level),
            1.0 - self.clip_low,
            1.0 + (self.clip_low if self.clip_high is None else self.clip_high),
            math.inf if self.dual_clip is None else self.dual_clip,
            self.tau_positive,
            self.tau_negative,
            BEHAVIOR_LEVELS.index(self.behavior_level),
            0 if self.behavior_mode == "truncate" else 1,
            0.0 if self.behavior_low is None else self.behavior_low,
            math.inf if self.behavior_cap is None else self.behavior_cap,
            KL_ESTIMATORS.index(self.kl_estimator),
            self.kl_coef,
            self.entropy_coef,
            self.distill_coef,
            AGGREGATIONS.index(self.aggregation),
        )
