"""One picture per bench: a panel for each case, a bar for each provider, and the floor at copy bandwidth."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BAR_INCHES, PANEL_INCHES, WIDTH_INCHES = 0.28, 0.75, 9.0
BASELINE, OURS, FLOOR = "#9aa3ad", "#2563ab", "#b3261e"


def missing_matplotlib() -> str | None:
    """Why nothing can be drawn; None where it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed (pip install matplotlib)"
    return None


def draw_rows(path: Path, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw median times with the range from best to worst; the format follows the suffix of `path`."""
    from matplotlib.figure import Figure  # an optional package; Figure needs no display

    cases = {case: list(of_case) for case, of_case in itertools.groupby(rows, key=lambda row: str(row["case"]))}
    heights = [PANEL_INCHES + BAR_INCHES * len(of_case) for of_case in cases.values()]
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 0.4), layout="constrained")
    panels = figure.subplots(len(cases), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (case, of_case) in zip(panels, cases.items(), strict=True):
        _draw_case(axes, case, of_case)
    figure.suptitle(f"{title}: median ms; black: best to worst run; red: the bytes at copy bandwidth", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_case(axes: Any, case: str, rows: Sequence[Mapping[str, Any]]) -> None:
    names = [str(row["provider"]) for row in rows]
    medians = [row["median_ms"] for row in rows]
    longest = max(medians)
    below = [row["median_ms"] - row["best_ms"] for row in rows]
    above = [row["worst_ms"] - row["median_ms"] for row in rows]
    colors = [BASELINE if at == 0 else OURS for at in range(len(rows))]
    axes.barh(range(len(rows)), medians, xerr=(below, above), color=colors, height=0.65, ecolor="#444444")
    if rows[0]["copy_share"]:
        axes.axvline(medians[0] * rows[0]["copy_share"], color=FLOOR, linewidth=1)
    for at, row in enumerate(rows):
        axes.annotate(
            f" {row['median_ms']:.3g} ms, {row['speedup']:.3g}x",
            (min(row["worst_ms"], 1.15 * longest), at),
            fontsize=7,
            verticalalignment="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * longest)  # one disturbed run must not squeeze the bars: its line leaves the picture
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(case, fontsize=8, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
