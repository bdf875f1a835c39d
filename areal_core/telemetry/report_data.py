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
from areal_core.telemetry.timeline import Segment, Timeline, TimelineRow, profile

MAX_POINTS = 1500
MAX_SEGMENTS = 60_000
MAX_CELLS = 1_200
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
    """Rows of segments; of a long run excerpts, and for the whole of it the shares of time in equal cells."""
    names = list(dict.fromkeys(segment.name for row in timeline.rows for segment in row.segments))
    details = _Strings()
    excerpts = _excerpts(timeline)
    cells = min(MAX_CELLS, 12 * MAX_CELLS // max(len(timeline.rows), 1)) if excerpts else 0
    stride = max(1, -(-len(timeline.instants) // MAX_INSTANTS))
    return {
        "duration": timeline.duration_us,
        "names": names,
        "rows": [
            {
                "process": row.process,
                "track": row.track,
                "flat": _flat(_within(row.segments, excerpts), names, details),
                "profile": _permille(row, timeline.duration_us, cells, names) if cells else [],
            }
            for row in timeline.rows
        ],
        "excerpts": excerpts,
        "instants": [list(instant) for instant in timeline.instants[::stride]],
        "details": details.values,
        "dropped": timeline.dropped,
    }


def _excerpts(timeline: Timeline) -> list[tuple[int, int]]:
    """Stretches at the beginning, in the middle and at the end that the budget of segments allows; [] means all."""
    total = sum(len(row.segments) for row in timeline.rows)
    length = timeline.duration_us / 3
    excerpts: list[tuple[int, int]] = []
    while total > MAX_SEGMENTS:
        length *= 0.9 * min(1.0, MAX_SEGMENTS / total)
        starts = (0, (timeline.duration_us - length) / 2, timeline.duration_us - length)
        excerpts = [(int(start), int(start + length)) for start in starts]
        total = sum(len(_within(row.segments, excerpts)) for row in timeline.rows)
    return excerpts


def _within(segments: Sequence[Segment], excerpts: Sequence[tuple[int, int]]) -> Sequence[Segment]:
    if not excerpts:
        return segments
    return [s for s in segments if any(s.end_us > start and s.start_us < end for start, end in excerpts)]


def _flat(segments: Sequence[Segment], names: Sequence[str], details: _Strings) -> list[int]:
    """Four numbers for each segment: gap before it, duration (both in microseconds), name, detail."""
    numbers = {name: index for index, name in enumerate(names)}
    flat: list[int] = []
    end = 0
    for segment in segments:
        gap, duration = segment.start_us - end, segment.end_us - segment.start_us
        flat += [gap, duration, numbers[segment.name], details.index(segment.detail)]
        end = segment.end_us
    return flat


def _permille(row: TimelineRow, duration_us: int, cells: int, names: Sequence[str]) -> list[int]:
    shares = profile(row.segments, duration_us, cells, names)
    return [round(1000 * share) for share in shares.ravel().tolist()]


class _Strings:
    """Texts by number, each stored once; -1 stands for the empty text."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def index(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers)) if text else -1

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
    chosen = _spread(sorted(run.samples, key=lambda row: finite(row.get("step")) or 0), MAX_SAMPLES)
    longest = MAX_TOKENS // max(len(chosen), 1)
    versions = {row["step"]: finite(row.get("version")) for row in run.metrics}
    return [_sample(row, versions, min(longest, MAX_SAMPLE_TOKENS)) for row in chosen]


def _sample(row: Row, versions: dict[int, float | None], longest: int) -> dict[str, Any]:
    step = finite(row.get("step"))
    own = [int(finite(version) or 0) for version in row.get("versions") or []]
    published = versions.get(int(step)) if step is not None else None
    trained_at = int(published) - 1 if published is not None else 0
    return {
        "step": step,
        "group": finite(row.get("group")),
        "prompt": str(row.get("prompt", ""))[:4_000],
        "tokens": [str(token) for token in row["tokens"][:longest]],
        "versions": own[:longest],
        "logprobs": _rounded([finite(value) for value in row.get("logprobs") or []][:longest], 4),
        "version": max([*own, trained_at]),
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
