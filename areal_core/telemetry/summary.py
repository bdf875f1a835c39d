"""A run in one picture: accuracy, response length, token ages, and the timeline of generators and trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from areal_core.telemetry import svg
from areal_core.telemetry.assets import asset
from areal_core.telemetry.facts import eta, staleness_counts
from areal_core.telemetry.format import compact, duration
from areal_core.telemetry.jsonl import replace_file
from areal_core.telemetry.run_data import RunData, read_run
from areal_core.telemetry.series import build_curves, smooth
from areal_core.telemetry.svg import Box
from areal_core.telemetry.timeline_svg import draw_strip, few_steps, strip_height, strip_keys, strip_rows

WIDTH = 960
_POINTS = 300

Shown = Callable[[float], str]


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
    rows = strip_rows(run)
    strip_top = 232
    height = strip_top + 24 + strip_height(len(rows)) + 12 if rows else strip_top
    accuracy = [Curve("reward/accuracy", "training", "train"), Curve("eval/accuracy_greedy", "greedy", "eval")]
    length = [Curve("response/tokens_mean", "training", "train"), Curve("eval/response_tokens_mean", "greedy", "eval")]
    parts = [
        *_curve_panel(run, Box(56, 44, 310, 190), "Accuracy", accuracy, _percent),
        *_curve_panel(run, Box(374, 44, 628, 190), "Response length, tokens", length, _plain),
        *_age_panel(run, Box(692, 44, 936, 190)),
    ]
    if rows:
        start, end = few_steps(rows[-1])
        parts += [
            svg.text(20, strip_top + 8, f"{duration((end - start) / 1e6)} of the run", "ink title"),
            *strip_keys(rows, WIDTH - 24, strip_top + 8),
            *draw_strip(rows, start, end, 118, 868, strip_top + 24),
        ]
    return svg.document(WIDTH, height, f"Run {run.name}", asset("summary.css"), parts)


def _curve_panel(run: RunData, box: Box, title: str, lines: Sequence[Curve], shown: Shown) -> list[str]:
    curves = build_curves(run.metrics, _POINTS, [curve.key for curve in lines])
    known = [curve for curve in lines if curve.key in curves.values]
    parts = [svg.text(box.left - 36, box.top - 22, title, "ink title")]
    if not known:
        return [*parts, _empty(box)]
    numbers = [value for curve in known for value in curves.values[curve.key] if value is not None]
    top = 1.0 if shown is _percent else max(numbers) * 1.06
    first = 0.0 if curves.steps[0] <= max(1.0, 0.05 * curves.steps[-1]) else curves.steps[0]
    x = svg.scale(first, curves.steps[-1], box.left, box.right)
    y = svg.scale(min(0.0, *numbers), max(top, 1e-9), box.bottom, box.top)
    for level in svg.ticks(min(0.0, *numbers), top, 4):
        parts += [
            svg.line(box.left, y(level), box.right, y(level), "grid"),
            svg.text(box.left - 6, y(level) + 4, shown(level), "soft number", "end"),
        ]
    parts += _step_axis(first, curves.steps[-1], x, box)
    key_x = box.right
    for curve in reversed(known):
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


def _percent(value: float) -> str:
    return f"{100 * value:g}%"


def _plain(value: float) -> str:
    return compact(value) or ""


def _step_axis(first: float, last: float, x: Callable[[float], float], box: Box) -> list[str]:
    marks = svg.ticks(first, last, 4)
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
            svg.text(box.left - 6, y(level) + 4, _percent(level), "soft number", "end"),
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


def _empty(box: Box) -> str:
    return svg.text((box.left + box.right) / 2, (box.top + box.bottom) / 2, "nothing recorded", "soft", "middle")
