"""The pictures of the page, as SVG whose colours come from its style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

import numpy as np

from areal_core.evaluate.metrics import Estimate, pass_at_k
from areal_core.evaluate.summary import Cell, Summary
from areal_core.evaluate.table import shorten
from areal_core.telemetry import svg

__all__ = ["draw_curves", "draw_intervals", "draw_problems", "model_class", "solved_counts"]

_COLOURS = 5
_MOST_CELLS = 400  # of a row of problems; more are averaged with their neighbours


def model_class(index: int) -> str:
    """The style class that gives a model its colour."""
    return f"m{index % _COLOURS}"


def draw_intervals(summary: Summary, data: str) -> str:
    """pass@1 of every model with its interval."""
    cells = [summary.cells[model, data] for model in summary.models]
    width, left, right, row = 520, 158, 494, 24
    bottom = 10 + row * len(cells)
    top_value = min(1.0, 1.1 * max(_top(cell.pass_at[1]) for cell in cells) or 1.0)
    x = svg.scale(0.0, top_value, left, right)
    parts = []
    for tick in svg.ticks(0.0, top_value, 5):
        parts.append(svg.line(x(tick), 6, x(tick), bottom, "grid"))
        parts.append(svg.text(x(tick), bottom + 15, f"{100 * tick:g}%", "soft", "middle"))
    for index, cell in enumerate(cells):
        y = 10 + row * (index + 0.5)
        parts.append(svg.text(left - 10, y + 4, shorten(cell.model), "ink", "end"))
        parts.append(_whisker(x, y, cell.pass_at[1], model_class(index)))
    return _picture(width, bottom + 20, f"pass@1 on {data}", parts)


def draw_curves(summary: Summary, data: str) -> str:
    """pass@k for every k as a line, maj@k where it was asked for as a dashed one."""
    cells = [summary.cells[model, data] for model in summary.models]
    samples = summary.settings.samples
    width, left, right, top, bottom = 520, 44, 506, 10, 220
    x = svg.scale(0.0, math.log2(samples), left, right)
    y = svg.scale(0.0, 1.0, bottom, top)
    parts = []
    for tick in svg.ticks(0.0, 1.0, 5):
        parts.append(svg.line(left, y(tick), right, y(tick), "grid"))
        parts.append(svg.text(left - 8, y(tick) + 4, f"{100 * tick:g}%", "soft", "end"))
    for k in [1 << power for power in range(samples.bit_length())]:
        parts.append(svg.text(x(math.log2(k)), bottom + 16, str(k), "soft", "middle"))
    parts.append(svg.text(right, bottom + 32, "k, responses", "unit", "end"))
    for index, cell in enumerate(cells):
        right_ones = np.rint(np.array(cell.shares) * samples).astype(int)
        chances = [float(pass_at_k(right_ones, samples, k).mean()) for k in range(1, samples + 1)]
        kind = model_class(index)
        parts.append(_group(kind, svg.polyline([(x(math.log2(k)), y(c)) for k, c in enumerate(chances, 1)], "line")))
        votes = [(x(math.log2(k)), y(estimate.value)) for k, estimate in cell.maj_at.items()]
        if len(votes) > 1:
            parts.append(_group(kind, svg.polyline(votes, "dashed") + "".join(svg.dot(*v, "dot") for v in votes)))
    return _picture(width, bottom + 44, f"pass@k and maj@k on {data}", parts)


def draw_problems(summary: Summary, data: str) -> str:
    """A row a model, a column a problem: the more responses are right, the darker. The hardest for all stand last."""
    cells = [summary.cells[model, data] for model in summary.models]
    shares = np.array([cell.shares for cell in cells])
    order = np.argsort(-shares.mean(axis=0), kind="stable")
    bins = [part for part in np.array_split(order, min(len(order), _MOST_CELLS)) if len(part)]
    width, left, right, row = 1080, 158, 1076, 24
    step = (right - left) / len(bins)
    box = step * 0.94 if step > 8 else step
    parts = []
    for index, cell in enumerate(cells):
        y = 4 + row * index
        parts.append(svg.text(left - 10, y + 14, shorten(cell.model), "ink", "end"))
        boxes = "".join(
            f'<rect class="share" x="{left + step * column:.2f}" y="{y}" width="{box:.2f}" height="{row - 5}" '
            f'fill-opacity="{0.06 + 0.94 * float(shares[index, part].mean()):.3f}"/>'
            for column, part in enumerate(bins)
        )
        parts.append(_group(model_class(index), boxes))
    return _picture(width, 4 + row * len(cells), f"share of right responses to each problem of {data}", parts)


def solved_counts(cell: Cell) -> tuple[int, int, int]:
    """Problems solved always, sometimes and never."""
    always, never = sum(share == 1 for share in cell.shares), sum(share == 0 for share in cell.shares)
    return always, cell.problems - always - never, never


def _top(estimate: Estimate) -> float:
    return estimate.value if math.isnan(estimate.high) else estimate.high


def _whisker(x: Callable[[float], float], y: float, estimate: Estimate, kind: str) -> str:
    parts = svg.dot(x(estimate.value), y, "dot")
    if not math.isnan(estimate.low):
        low, high = x(estimate.low), x(estimate.high)
        parts += svg.line(low, y, high, y, "end")
        parts += "".join(svg.line(end, y - 4, end, y + 4, "end") for end in (low, high))
    return _group(kind, parts)


def _group(kind: str, content: str) -> str:
    return f'<g class="{kind}">{content}</g>'


def _picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img"><title>{html.escape(title)}</title>{"".join(parts)}</svg>'
