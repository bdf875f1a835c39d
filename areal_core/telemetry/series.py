"""Metrics as curves with a bounded number of points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_core.telemetry.format import finite
from areal_core.telemetry.jsonl import Row


@dataclass(frozen=True)
class Curves:
    """All numeric metrics over a common axis of points, each the mean of `bucket_steps` consecutive steps.

    Attributes:
        steps, times: mean step and mean `time_s` of each point.
        values: metric -> mean at each point; None where no step of the point has it.
        low, high: metric -> smallest and largest value at each point; empty when a point is a single step.
    """

    steps: list[float]
    times: list[float | None]
    values: dict[str, list[float | None]]
    low: dict[str, list[float | None]]
    high: dict[str, list[float | None]]
    bucket_steps: int


def build_curves(metrics: Sequence[Row], max_points: int, only: Sequence[str] | None = None) -> Curves:
    """Gather the numeric metrics, averaging consecutive steps until at most `max_points` points are left.

    `only` names the metrics to gather; None stands for all.
    """
    size = max(1, -(-len(metrics) // max_points))
    buckets = [metrics[first : first + size] for first in range(0, len(metrics), size)]
    found = dict.fromkeys(key for row in metrics for key in row) if only is None else only
    keys = [key for key in found if key not in ("step", "time_s")]
    columns = {key: [_numbers(bucket, key) for bucket in buckets] for key in keys}
    columns = {key: column for key, column in columns.items() if any(column)}
    spread = columns if size > 1 else {}
    return Curves(
        steps=[sum(row["step"] for row in bucket) / len(bucket) for bucket in buckets],
        times=[_mean(_numbers(bucket, "time_s")) for bucket in buckets],
        values={key: [_mean(numbers) for numbers in column] for key, column in columns.items()},
        low={key: [min(numbers, default=None) for numbers in column] for key, column in spread.items()},
        high={key: [max(numbers, default=None) for numbers in column] for key, column in spread.items()},
        bucket_steps=size,
    )


def age_shares(metrics: Sequence[Row], max_points: int, max_ages: int) -> tuple[list[float], list[list[float]]]:
    """Share of trained tokens by version age over the steps: (step of each point, shares of age 0, 1, ...).

    Ages of `max_ages` - 1 and more are added up in the last entry.
    """
    rows = [row for row in metrics if isinstance(row.get("staleness/histogram"), list)]
    size = max(1, -(-len(rows) // max_points))
    steps: list[float] = []
    shares: list[list[float]] = []
    for first in range(0, len(rows), size):
        bucket = rows[first : first + size]
        counts = [0.0] * max_ages
        for row in bucket:
            for age, count in enumerate(row["staleness/histogram"]):
                counts[min(age, max_ages - 1)] += finite(count) or 0.0
        total = sum(counts)
        if total > 0:
            steps.append(sum(row["step"] for row in bucket) / len(bucket))
            shares.append([count / total for count in counts])
    return steps, shares


def smooth(values: Sequence[float | None], window: int) -> list[float | None]:
    """Centred moving average over `window` points; missing values are left out of it and stay missing."""
    half = window // 2
    return [
        None if value is None else _mean([v for v in values[max(0, index - half) : index + half + 1] if v is not None])
        for index, value in enumerate(values)
    ]


def _numbers(rows: Sequence[Row], key: str) -> list[float]:
    return [number for row in rows if (number := finite(row.get(key))) is not None]


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None
