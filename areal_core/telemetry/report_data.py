"""What the scripts of the report draw, as one JSON value of bounded size."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from areal_core.telemetry import facts
from areal_core.telemetry.format import finite
from areal_core.telemetry.jsonl import Row
from areal_core.telemetry.run_data import RunData
from areal_core.telemetry.series import age_shares, build_curves
from areal_core.telemetry.timeline import Timeline, TimelineRow, coarsen

MAX_POINTS = 1500
MAX_SEGMENTS = 60_000
MAX_INSTANTS = 4_000
MAX_EVENTS = 400
MAX_SAMPLES = 64
MAX_SAMPLE_TOKENS = 2_000
MAX_TOKENS = 40_000
MAX_AGES = 12


def report_json(run: RunData) -> str:
    """The data as JSON that can stand inside a <script> element: no character can end it."""
    text = json.dumps(report_data(run), separators=(",", ":"), allow_nan=False)  # ASCII: lone surrogates are escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def report_data(run: RunData) -> dict[str, Any]:
    """Everything the figures need, thinned out to a bounded size."""
    return {
        "name": run.name,
        "curves": _curves(run),
        "events": [_event(event) for event in run.events[-MAX_EVENTS:]],
        "staleness": _staleness(run),
        "timeline": _timeline(run.timeline),
        "shares": _shares(run),
        "samples": _samples(run),
    }


def _curves(run: RunData) -> dict[str, Any]:
    curves = build_curves(run.metrics, MAX_POINTS)
    return {
        "steps": _rounded(curves.steps, 7),
        "times": _rounded(curves.times, 7),
        "values": {key: _rounded(values) for key, values in curves.values.items()},
        "low": {key: _rounded(values, 4) for key, values in curves.low.items()},
        "high": {key: _rounded(values, 4) for key, values in curves.high.items()},
        "bucket": curves.bucket_steps,
    }


def _event(event: Row) -> dict[str, Any]:
    return {
        "step": finite(event.get("step")),
        "time": finite(event.get("time_s")),
        "kind": str(event.get("kind", "event")),
        "text": str(event.get("text", "")),
    }


def _staleness(run: RunData) -> dict[str, Any]:
    counts = facts.staleness_counts(run)
    steps, shares = age_shares(run.metrics, 200, MAX_AGES)
    bound = facts.eta(run)
    used = max((age for row in shares for age, share in enumerate(row) if share > 0), default=0) + 1
    return {
        "counts": counts,
        "eta": None if bound is None or math.isinf(bound) else bound,
        "unbounded": bound is not None and math.isinf(bound),
        "steps": _rounded(steps, 7),
        "shares": [_rounded(row[:used], 4) for row in shares],
        "withheld": sum(run.values("count/withheld_tokens")),
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    """Rows of segments as flat lists: gap before, duration (both µs), name, detail."""
    names = list(dict.fromkeys(segment.name for row in timeline.rows for segment in row.segments))
    details = _Strings(MAX_SEGMENTS)
    budget = max(1000, MAX_SEGMENTS // max(len(timeline.rows), 1))
    stride = max(1, -(-len(timeline.instants) // MAX_INSTANTS))
    return {
        "duration": timeline.duration_us,
        "names": names,
        "rows": [_timeline_row(row, timeline.duration_us, budget, names, details) for row in timeline.rows],
        "instants": [list(instant) for instant in timeline.instants[::stride]],
        "details": details.values,
        "dropped": timeline.dropped,
    }


def _timeline_row(
    row: TimelineRow, duration_us: int, budget: int, names: Sequence[str], details: _Strings
) -> dict[str, Any]:
    coarse = len(row.segments) > budget
    segments = coarsen(row.segments, duration_us, budget) if coarse else row.segments
    numbers = {name: index for index, name in enumerate(names)}
    flat: list[int] = []
    end = 0
    for segment in segments:
        flat += [
            segment.start_us - end,
            segment.end_us - segment.start_us,
            numbers[segment.name],
            details.index(segment.detail),
        ]
        end = segment.end_us
    return {
        "process": row.process,
        "track": row.track,
        "flat": flat,
        "resolution": duration_us / budget if coarse else 0,
    }


class _Strings:
    """Texts by number, each stored once; -1 stands for the empty text and for what is beyond the capacity."""

    def __init__(self, capacity: int) -> None:
        self._numbers: dict[str, int] = {}
        self._capacity = capacity

    def index(self, text: str) -> int:
        if not text or (text not in self._numbers and len(self._numbers) >= self._capacity):
            return -1
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def values(self) -> list[str]:
        return list(self._numbers)


def _shares(run: RunData) -> list[dict[str, Any]]:
    bars = [("trainer", facts.trainer_seconds(run)), ("generators", facts.generator_seconds(run))]
    return [
        {"title": title, "seconds": {name: round(value, 6) for name, value in seconds.items()}}
        for title, seconds in bars
        if seconds
    ]


def _samples(run: RunData) -> list[dict[str, Any]]:
    """Samples spread evenly over the run, first and last included, until the budget of tokens is spent."""
    chosen = _spread(run.samples, MAX_SAMPLES)
    longest = MAX_TOKENS // max(len(chosen), 1)
    versions = {row["step"]: finite(row.get("version")) for row in run.metrics}
    return [_sample(row, versions, min(longest, MAX_SAMPLE_TOKENS)) for row in chosen]


def _sample(row: Row, versions: dict[int, float | None], longest: int) -> dict[str, Any]:
    step = finite(row.get("step"))
    own = [int(finite(version) or 0) for version in row.get("versions") or []]
    consumed = finite(row.get("version"))
    if consumed is None and step is not None:
        consumed = versions.get(int(step))
    return {
        "step": step,
        "group": finite(row.get("group")),
        "prompt": str(row.get("prompt", ""))[:4_000],
        "tokens": [str(token) for token in row["tokens"][:longest]],
        "versions": own[:longest],
        "logprobs": _rounded([finite(value) for value in row.get("logprobs") or []][:longest], 4),
        "version": max([*own, int(consumed or 0)]),
        "length": len(row["tokens"]),
        "reward": finite(row.get("reward")),
        "advantage": finite(row.get("advantage")),
        "finish": str(row.get("finish_reason", "")),
    }


def _spread(items: Sequence[Row], count: int) -> list[Row]:
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _rounded(values: Sequence[float | None], digits: int = 5) -> list[float | int | None]:
    """Numbers with that many significant digits; whole ones as integers, which are shorter."""
    rounded = [None if value is None else finite(float(f"{value:.{digits}g}")) for value in values]
    return [int(v) if v is not None and v == int(v) and abs(v) < 1e9 else v for v in rounded]
