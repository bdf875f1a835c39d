"""A run in one picture: accuracy, response length, token ages, and the timeline of generators and trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from areal_core.telemetry import svg
from areal_core.telemetry.assets import asset
from areal_core.telemetry.facts import TRAINER_PHASES, eta, staleness_counts
from areal_core.telemetry.format import compact, duration, percent
from areal_core.telemetry.jsonl import replace_file
from areal_core.telemetry.run_data import RunData, read_run
from areal_core.telemetry.series import build_curves, smooth
from areal_core.telemetry.svg import Box
from areal_core.telemetry.timeline import IDLE_NAMES, Segment, TimelineRow, coarsen

WIDTH = 960
_POINTS = 300
_TIMELINE_STEPS = 8
_ROW = 20
_KNOWN = frozenset(("generate", "weight_update", *IDLE_NAMES, *TRAINER_PHASES))  # names that summary.css colours

Shown = Callable[[float], str | None]


class Curve(NamedTuple):
    """A metric, the word for it, and the style class it is drawn in."""

    key: str
    label: str
    kind: str


def plot_summary(run_dir: str | Path, path: str | Path) -> Path:
    """Draw a run as a standalone SVG picture and return its path; parts that were not recorded are left empty.

    Raises:
        FileNotFoundError: `run_dir` is no folder.
    """
    replace_file(Path(path), draw_summary(read_run(run_dir)).encode())
    return Path(path)


def draw_summary(run: RunData) -> str:
    """The picture as SVG text."""
    rows = _strip_rows(run)
    strip_top = 232
    height = strip_top + 34 + len(rows) * (_ROW + 4) + 40 if rows else strip_top
    accuracy = [Curve("reward/accuracy", "training", "train"), Curve("eval/accuracy_greedy", "greedy", "eval")]
    length = [Curve("response/tokens_mean", "training", "train"), Curve("eval/response_tokens_mean", "greedy", "eval")]
    parts = [
        *_curve_panel(run, Box(56, 44, 310, 190), "Accuracy", accuracy, percent),
        *_curve_panel(run, Box(374, 44, 628, 190), "Response length, tokens", length, compact),
        *_age_panel(run, Box(692, 44, 936, 190)),
    ]
    if rows:
        parts += _strip(rows, Box(118, strip_top + 24, 868, height - 42))
    return svg.document(WIDTH, height, f"Run {run.name}", asset("summary.css"), parts)


def _curve_panel(run: RunData, box: Box, title: str, lines: Sequence[Curve], shown: Shown) -> list[str]:
    curves = build_curves(run.metrics, _POINTS)
    known = [curve for curve in lines if curve.key in curves.values]
    parts = [svg.text(box.left - 36, box.top - 22, title, "ink title")]
    if not known:
        return [*parts, _empty(box)]
    numbers = [value for curve in known for value in curves.values[curve.key] if value is not None]
    top = 1.0 if shown is percent else max(numbers) * 1.06
    x = svg.scale(curves.steps[0], curves.steps[-1], box.left, box.right)
    y = svg.scale(min(0.0, *numbers), max(top, 1e-9), box.bottom, box.top)
    for level in svg.ticks(min(0.0, *numbers), top, 4):
        parts += [
            svg.line(box.left, y(level), box.right, y(level), "grid"),
            svg.text(box.left - 6, y(level) + 4, shown(level) or "", "soft number", "end"),
        ]
    parts += _step_axis(curves.steps, x, box)
    key_x = box.right
    for curve in known:
        values = curves.values[curve.key]
        sparse = sum(value is not None for value in values) < 0.5 * len(values)
        if sparse or len(values) < 2:
            points = [(x(s), y(v)) for s, v in zip(curves.steps, values, strict=True) if v is not None]
            parts += [svg.polyline(points, f"curve {curve.kind}"), *(svg.dot(*p, f"{curve.kind}-fill") for p in points)]
        else:
            smoothed = smooth(values, max(1, len(values) // 30))
            for series, kind in ((values, "raw"), (smoothed, "curve")):
                points = [(x(s), y(v)) for s, v in zip(curves.steps, series, strict=True) if v is not None]
                parts.append(svg.polyline(points, f"{kind} {curve.kind}"))
        parts.append(svg.text(key_x, box.top - 8, curve.label, f"{curve.kind}-fill", "end"))
        key_x -= 8 + 6.2 * len(curve.label)
    return parts


def _step_axis(steps: Sequence[float], x: Callable[[float], float], box: Box) -> list[str]:
    marks = svg.ticks(steps[0], steps[-1], 4)
    labels = [svg.text(x(mark), box.bottom + 16, f"{mark:g}", "soft number", "middle") for mark in marks]
    return [svg.line(box.left, box.bottom, box.right, box.bottom, "axis"), *labels]


def _age_panel(run: RunData, box: Box) -> list[str]:
    parts = [svg.text(box.left - 36, box.top - 22, "Token age when trained on, versions", "ink title")]
    counts = staleness_counts(run)
    if not sum(counts):
        return [*parts, _empty(box)]
    shares = [count / sum(counts) for count in counts]
    bound = eta(run)
    marked = bound is not None and bound + 1 <= 2 * len(counts) + 3
    bars = max(len(counts), 3, int(bound) + 1 if marked and bound is not None else 0)
    slot = (box.right - box.left) / bars
    y = svg.scale(0, max(shares) * 1.08, box.bottom, box.top)
    for level in svg.ticks(0, max(shares) * 1.08, 4):
        parts += [
            svg.line(box.left, y(level), box.right, y(level), "grid"),
            svg.text(box.left - 6, y(level) + 4, percent(level) or "", "soft number", "end"),
        ]
    every = math.ceil(16 / slot)
    for age in range(bars):
        share = shares[age] if age < len(shares) else 0.0
        left = box.left + slot * age
        parts.append(svg.rect(left + 0.12 * slot, y(share), 0.76 * slot, box.bottom - y(share), f"a{min(age, 7)}"))
        if age % every == 0:
            parts.append(svg.text(left + slot / 2, box.bottom + 16, str(age), "soft number", "middle"))
    parts.append(svg.line(box.left, box.bottom, box.right, box.bottom, "axis"))
    if marked and bound is not None:
        x = box.left + slot * (bound + 1)
        parts.append(svg.line(x, box.top - 6, x, box.bottom, "mark"))
        parts.append(svg.text(x - 5, box.top + 4, f"bound η = {bound:g}", "mark-text", "end"))
    return parts


def _strip_rows(run: RunData) -> list[TimelineRow]:
    """The main rows of at most six generators, and of the trainer below them."""
    rows = run.timeline.generator_rows()[:6]
    trainer = run.timeline.busiest_row("trainer")
    return rows if trainer is None else [*rows, trainer]


def _strip(rows: Sequence[TimelineRow], box: Box) -> list[str]:
    start, end = _few_steps(rows[-1])
    x = svg.scale(start, end, box.left, box.right)
    title = f"{duration((end - start) / 1e6)} of the run"
    parts = [svg.text(20, box.top - 16, title, "ink title"), *_keys(rows, box.top - 16)]
    for index, row in enumerate(rows):
        top = box.top + index * (_ROW + 4)
        parts.append(svg.rect(box.left, top, box.right - box.left, _ROW, "untraced"))
        visible = _clip(row.segments, start, end)
        for segment in visible:
            kind = segment.name if segment.name in _KNOWN else "other"
            parts.append(svg.rect(x(segment.start_us), top, x(segment.end_us) - x(segment.start_us), _ROW, kind))
        parts.append(svg.text(box.left - 8, top + 14, row.process, "ink", "end"))
        parts.append(svg.text(box.right + 8, top + 14, f"idle {percent(_idle(visible)) or '-'}", "soft number"))
    bottom = box.top + len(rows) * (_ROW + 4)
    for mark in svg.ticks(start / 1e6, end / 1e6, 6):
        parts.append(svg.text(x(mark * 1e6), bottom + 14, f"{mark:g} s", "soft number", "middle"))
    return parts


def _keys(rows: Sequence[TimelineRow], y: float) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row.seconds if name not in IDLE_NAMES and name in _KNOWN)
    words = {"forward_backward": "forward/backward"}
    parts: list[str] = []
    x = WIDTH - 24.0
    for name in reversed([*names, "idle"]):
        label = words.get(name, name.replace("_", " "))
        x -= 6.0 * len(label) + 12
        parts += [svg.rect(x - 14, y - 9, 10, 10, name), svg.text(x, y, label)]
        x -= 14
    return parts


def _few_steps(row: TimelineRow) -> tuple[float, float]:
    """A stretch of a few training steps from the middle of the run, or all of a short one."""
    first, last = row.segments[0].start_us, row.segments[-1].end_us
    begins = [segment.start_us for segment in row.segments if segment.name == "wait"]
    if len(begins) < _TIMELINE_STEPS + 4:
        return first, last
    middle = int(len(begins) * 0.45)
    return begins[middle], begins[min(middle + _TIMELINE_STEPS, len(begins) - 1)]


def _clip(segments: Sequence[Segment], start: float, end: float) -> list[Segment]:
    """The visible parts of segments; on a grid of half pixels when there are more of them than that."""
    inside = [
        Segment(int(max(s.start_us, start)), int(min(s.end_us, end)), s.name, "")
        for s in segments
        if s.end_us > start and s.start_us < end
    ]
    if len(inside) <= 2 * WIDTH:
        return inside
    moved = [s._replace(start_us=int(s.start_us - start), end_us=int(s.end_us - start)) for s in inside]
    grid = coarsen(moved, int(end - start), 2 * WIDTH)
    return [s._replace(start_us=int(s.start_us + start), end_us=int(s.end_us + start)) for s in grid]


def _idle(segments: Sequence[Segment]) -> float | None:
    seconds: Mapping[str, float] = TimelineRow("", "", list(segments)).seconds
    total = sum(seconds.values())
    return sum(value for name, value in seconds.items() if name in IDLE_NAMES) / total if total else None


def _empty(box: Box) -> str:
    return svg.text((box.left + box.right) / 2, (box.top + box.bottom) / 2, "nothing recorded", "soft", "middle")
