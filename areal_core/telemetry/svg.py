"""Just enough SVG for the summary picture: scales, ticks, text and lines."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A rectangle of the picture, in pixels."""

    left: float
    top: float
    right: float
    bottom: float


def document(width: int, height: int, title: str, style: str, parts: Sequence[str]) -> str:
    """A standalone SVG picture on paper."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>{html.escape(title)}</title><style>{style}</style>'
        f'<rect class="paper" width="{width}" height="{height}" rx="8"/>' + "\n".join(parts) + "</svg>\n"
    )


def text(x: float, y: float, content: str, kind: str = "soft", anchor: str = "start") -> str:
    """Text whose baseline starts, is centred or ends at (x, y)."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A filled rectangle."""
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.1f}" width="{max(width, 0):.2f}" height="{max(height, 0):.1f}"/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def polyline(points: Sequence[tuple[float, float]], kind: str) -> str:
    """A line through points."""
    return f'<path class="{kind}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>' if points else ""


def dot(x: float, y: float, kind: str) -> str:
    """A small filled circle."""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>'


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers between low and high."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """The linear map that takes low to start and high to end; low = high maps to the middle."""
    if not high > low:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)
