"""What a training step reports: one dictionary of plain numbers, the same keys in every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_core import ops
from areal_core.rl.batch import Batch
from areal_core.rl.data import Group

__all__ = ["data_metrics", "loss_metrics", "mean_metrics", "update_metrics"]

_LOSS_NAMES = {
    "loss": "loss",
    "entropy": "entropy",
    "ratio_mean": "ratio_mean",
    "ratio_max": "ratio_max",
    "kl_proximal_behavior": "kl_behavior_proximal_k3",
    "kl_current_proximal": "kl_proximal_current_k3",
    "behavior_weight_mean": "behavior_weight_mean",
    "behavior_weight_max": "behavior_weight_max",
    "behavior_capped_fraction": "behavior_capped_fraction",
    "kl_current_reference": "kl_current_reference_k3",
}


def data_metrics(groups: Sequence[Group], batch: Batch) -> dict[str, Any]:
    """Rewards, lengths and ages of the usable samples, and what was left out.

    reward/accuracy is the share of rewards of at least 1. Ages are those of live tokens; staleness/histogram[a] counts
    the live tokens of age a.
    """
    given = sum(len(group.trajectories) for group in groups)
    ages = batch.ages[batch.live]
    return {
        "reward/mean": _mean(batch.rewards),
        "reward/accuracy": _mean(batch.rewards >= 1.0),
        "response/tokens_mean": _mean(batch.lengths),
        "response/truncated_fraction": _mean(batch.truncated),
        "staleness/mean": _mean(ages),
        "staleness/max": float(ages.max(initial=0)),
        "staleness/histogram": np.bincount(ages).tolist() if len(ages) else [],
        "count/groups": float(len(groups)),
        "count/excluded": float(given - batch.samples),
        "count/withheld_tokens": float(len(batch.live) - batch.live.sum()),
        "count/zero_variance_groups": float(batch.zero_variance.sum()),
    }


def loss_metrics(stats: Sequence[ops.PPOLossStats]) -> dict[str, float]:
    """Means and maxima over all live tokens of the step, each mini-batch measured as it was trained."""
    if not stats:
        return {f"loss/{name}": 0.0 for name in (*_LOSS_NAMES, "clip_fraction")} | {"tokens/trained": 0.0}
    summary = ops.PPOLossStats.merge(stats).finalize()._asdict()
    metrics = {f"loss/{name}": float(summary[source]) for name, source in _LOSS_NAMES.items()}
    metrics["loss/clip_fraction"] = sum(float(summary[f"clip_fraction_{side}"]) for side in ("low", "high", "dual"))
    metrics["tokens/trained"] = float(summary["live_tokens"])
    return metrics


def update_metrics(norms: Sequence[float], rate: float) -> dict[str, float]:
    """Learning rate, mean norm of the finite gradients before clipping, and updates skipped for one that was not."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    return {
        "optim/learning_rate": rate,
        "optim/grad_norm": _mean(np.asarray(finite)),
        "optim/updates": float(len(finite)),
        "count/nonfinite_updates": float(len(norms) - len(finite)),
    }


def mean_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each entry over the mini-batches of a step."""
    return {name: _mean([part[name] for part in parts]) for name in parts[0]} if parts else {}


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else 0.0
