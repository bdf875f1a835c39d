"""Numbers as people read them; all functions take anything and return None for what is no finite number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

_BARS = "▁▂▃▄▅▆▇█"


def finite(value: Any) -> float | None:
    """`value` as a float, or None when it is missing, NaN, infinite or no number at all."""
    if value is None or isinstance(value, (str, bytes)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        return None
    return number if math.isfinite(number) else None


def compact(value: Any) -> str | None:
    """Three significant digits and a unit of thousands: 0.0123, 4.56, 789, 12.3k, 4.5M."""
    number = finite(value)
    if number is None:
        return None
    if number == int(number) and abs(number) < 1000:
        return str(int(number))
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.3g}"


def percent(value: Any) -> str | None:
    """A fraction as a percentage."""
    number = finite(value)
    if number is None:
        return None
    return f"{100 * number:.1f}%" if abs(number) < 0.9995 else f"{100 * number:.0f}%"


def duration(value: Any) -> str | None:
    """Seconds as 0.8 s, 42 s, 3:07 min or 1:02:03 h."""
    number = finite(value)
    if number is None:
        return None
    if number < 9.95:
        return f"{number:.1f} s"
    seconds = round(number)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60}:{seconds % 60:02d} min"
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} h"


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of at most `width` characters, from the smallest to the largest value; each is the mean of its share."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [index * len(values) // width for index in range(width + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)
