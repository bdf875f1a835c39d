"""What the results of an evaluation say: estimates with intervals for every model on every data set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from areal_core.errors import ConfigError
from areal_core.evaluate.answers import Answering, votes
from areal_core.evaluate.data import DataSet
from areal_core.evaluate.metrics import Estimate, bootstrap, is_right, majority_at_k, pass_at_k
from areal_core.evaluate.results import ModelSource, Response, Results, SamplingSettings

__all__ = ["CONFIDENCE", "Cell", "Summary", "check_k", "summarize"]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Cell:
    """A model on a data set.

    pass_at, maj_at: by k, 1 among them; maj_at is empty where the task cannot say what a response answers.
    reward: mean reward. gain: pass@1 minus that of the first model, problem by problem; None for the first.
    tokens: of a response. truncated: share of responses that were cut. failed: responses whose verifier failed, counted
        as wrong.
    shares: share of right responses to each problem.
    """

    model: str
    data: str
    problems: int
    pass_at: Mapping[int, Estimate]
    maj_at: Mapping[int, Estimate]
    reward: Estimate
    gain: Estimate | None
    tokens: Estimate
    truncated: Estimate
    failed: int
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Summary:
    """An evaluation: `cells[model, data]`, the models and data sets in their order, and how responses were sampled."""

    models: tuple[str, ...]
    data: tuple[str, ...]
    settings: SamplingSettings
    cells: Mapping[tuple[str, str], Cell]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "sampling": asdict(self.settings),
            "confidence": CONFIDENCE,
            "models": list(self.models),
            "data": list(self.data),
            "cells": [asdict(cell) for cell in self.cells.values()],
        }


def check_k(ks: Sequence[int], samples: int) -> tuple[int, ...]:
    """The ks in ascending order, 1 among them; raises ConfigError for one outside 1 to `samples`."""
    for k in ks:
        if not 1 <= k <= samples:
            raise ConfigError(f"--k: expected numbers from 1 to --samples = {samples}, got {k}")
    return tuple(sorted({1, *ks}))


def summarize(
    results: Results,
    models: Sequence[ModelSource],
    data_sets: Sequence[DataSet],
    settings: SamplingSettings,
    ks: Sequence[int],
) -> Summary:
    """Compute every cell.

    Raises: KeyError when a problem has no results; ConfigError for a k outside 1 to the samples of a problem.
    """
    ks = check_k(ks, settings.samples)
    cells: dict[tuple[str, str], Cell] = {}
    for data in data_sets:
        first: Cell | None = None
        for model in models:
            cell = _cell(model.label, data, results.of(model.label, data.label), ks, first)
            cells[model.label, data.label] = cell
            first = first or cell
    return Summary(tuple(m.label for m in models), tuple(d.label for d in data_sets), settings, cells)


def _cell(model: str, data: DataSet, rows: Sequence[Sequence[Response]], ks: Sequence[int], first: Cell | None) -> Cell:
    rewards = np.array([[math.nan if r.reward is None else r.reward for r in row] for row in rows])
    right, samples = is_right(rewards), rewards.shape[1]
    shares = right.mean(axis=1)
    quantities: dict[str, Any] = {
        "reward": np.nan_to_num(rewards).mean(axis=1),
        "tokens": [np.mean([r.tokens for r in row]) for row in rows],
        "truncated": [np.mean([r.finish == "length" for r in row]) for row in rows],
    }
    if first is not None:
        quantities["gain"] = shares - np.array(first.shares)
    for k in ks:
        quantities[f"pass@{k}"] = pass_at_k(right.sum(axis=1), samples, k)
        if isinstance(data.task, Answering):
            answers = [votes([r.answer for r in row], w) for row, w in zip(rows, right.tolist(), strict=True)]
            quantities[f"maj@{k}"] = [
                majority_at_k(a, w.astype(float).tolist(), k) for a, w in zip(answers, right, strict=True)
            ]
    estimates = dict(zip(quantities, bootstrap([*quantities.values()], confidence=CONFIDENCE), strict=True))
    return Cell(
        model=model,
        data=data.label,
        problems=len(rows),
        pass_at={k: estimates[f"pass@{k}"] for k in ks},
        maj_at={k: estimates[f"maj@{k}"] for k in ks if f"maj@{k}" in estimates},
        reward=estimates["reward"],
        gain=estimates.get("gain"),
        tokens=estimates["tokens"],
        truncated=estimates["truncated"],
        failed=int(np.isnan(rewards).sum()),
        shares=tuple(shares.tolist()),
    )
