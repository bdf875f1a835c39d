"""The survey as pictures: seven panels, together as PNG or one by one as SVG."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal_core.errors import MissingPackageError
from areal_core.estimators.survey import LENGTH, NUM_PROMPTS, Curve, Row, Survey

# Colours that stay apart for colour-blind readers; lines differ in dashes too, and every line carries its name.
BLUE, ORANGE, GREEN, PURPLE = "#0a66a8", "#c2510c", "#0b7a5c", "#8a4fa3"
INK, SOFT, FAINT, GRID, PAPER = "#1d1d1f", "#5f5e5a", "#8d8b86", "#e6e4de", "#fdfcfa"
SOLID, DASHED, DOTTED, DASHDOT = "-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1.2, 2))
Style = tuple[str, Any]
Draw = Callable[[Any, Survey], None]  # of one panel, into matplotlib axes

_SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same picture everywhere
    "font.size": 8,
    "text.color": INK,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "areal_core",  # the same input gives the same bytes
}


def require_matplotlib() -> None:
    """Raise MissingPackageError, which says how to install it, where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            "the pictures need matplotlib, which is not installed: pip install matplotlib"
        ) from error


def save_png(survey: Survey, path: Path, dpi: int = 160) -> None:
    """All panels on one page of 12.2 x 7.4 inches.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(12.2, 7.4), facecolor=PAPER)
        for draw, (left, bottom, right, top) in PANELS.items():
            axes = figure.add_axes((left, bottom, right - left, top - bottom))
            draw(axes, survey)
            if draw is draw_noise:
                axes.set_yticks([])  # the names stand at the panel to the left
        figure.savefig(path, dpi=dpi, metadata={"Software": None})


def panel_svg(draw: Draw, survey: Survey, width: float, height: float) -> str:
    """One panel as SVG text, width and height in inches, on nothing, in the colours named above.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height), facecolor="none", layout="constrained")
        draw(figure.add_subplot(), survey)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


# -- Panels ------------------------------------------------------------------------------------------------------------


def draw_success(axes: Any, survey: Survey) -> None:
    """Weight of a prompt's gradient against its success rate."""
    styles: dict[str, Style] = {
        "RLOO": (INK, SOLID),
        "Dr.GRPO": (GREEN, DASHED),
        "GRPO": (BLUE, SOLID),
        "MaxRL": (ORANGE, DASHDOT),
        "GRPO, M → ∞": (BLUE, DOTTED),
        "MaxRL, M → ∞": (ORANGE, DOTTED),
    }
    curves = {curve.label: curve for curve in survey.by_success}
    for label, (colour, dashes) in styles.items():
        width = 1.1 if "∞" in label else 1.8
        axes.plot(curves[label].x, curves[label].y, color=colour, linestyle=dashes, linewidth=width)
    axes.set_yscale("log")
    _log_ticks(axes.yaxis, [0.5, 1, 2, 5, 10, 20, 50])
    axes.set_xlim(0, 1)
    lowest = (survey.group_size - 1) / survey.group_size  # of Dr.GRPO
    axes.set_ylim(0.7 * lowest, 60)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.set(xlabel="success rate p of the prompt", ylabel="weight w:  E[gradient] = w ∇p")
    axes.set_title(f"a  Which prompts count  (M = {survey.group_size})")
    share = f"{survey.group_size - 1}/{survey.group_size}"
    names = _Labels(axes)
    names.at(0.4, 1.0, "RLOO, REINFORCE, ReMax, ORZ: 1", INK, above=True)
    names.at(0.5, lowest, f"Dr.GRPO: {share}", GREEN, above=False)
    names.at(0.86, _value(curves["GRPO"], 0.86), "GRPO, DAPO", BLUE, above=False)
    names.at(0.99, curves["GRPO, M → ∞"].y[-1], "M → ∞: 1/√(p(1−p))", BLUE, above=True, align="right")
    maxrl = _value(curves["MaxRL"], 0.31)
    names.at(0.31, 1.1 * maxrl if maxrl > 1.5 else maxrl, "MaxRL", ORANGE, above=maxrl > 1.5, align="left")
    names.at(0.06, 24, "M → ∞: 1/p", ORANGE, above=True, align="left")


def draw_response_length(axes: Any, survey: Survey) -> None:
    """Weight of a correct response against its length."""
    styles: dict[str, Style] = {"GRPO (original)": (PURPLE, SOLID), "GRPO (R1)": (BLUE, DASHED)}
    _draw_lengths(axes, survey.by_response_length, styles)
    axes.set(xlabel="tokens of a correct response", ylabel=f"its weight, relative to {LENGTH} tokens")
    axes.set_title("b  Short correct responses")
    names = _Labels(axes)
    names.at(11, 5.2, "GRPO (original): 1/T", PURPLE, align="left")
    names.at(256, 1.0, "GRPO (R1),\nDAPO, Dr.GRPO", BLUE, above=True, align="right")


def draw_prompt_length(axes: Any, survey: Survey) -> None:
    """Weight of a prompt against the mean length of its responses."""
    styles: dict[str, Style] = {"DAPO": (ORANGE, SOLID), "GRPO (R1)": (BLUE, DASHED)}
    _draw_lengths(axes, survey.by_prompt_length, styles)
    axes.set(xlabel="mean response length of a prompt, tokens", ylabel=f"its weight, relative to {LENGTH} tokens")
    axes.set_title("c  Prompts with short answers")
    names = _Labels(axes)
    names.at(11, 5.2, "DAPO, GRPO (original): 1/T", ORANGE, align="left")
    names.at(256, 1.0, "GRPO (R1),\nDr.GRPO", BLUE, above=True, align="right")


def draw_direction(axes: Any, survey: Survey) -> None:
    """Angle between the expected and the true gradient, a dot for each estimator."""
    rows = _ranked(survey)
    _draw_dots(axes, rows, [row.angle_deg for row in rows], lambda value: f"{value:.1f}°" if value > 1e-6 else "0")
    axes.set(xlabel="degrees from ∇J")
    axes.set_title("d  Direction")


def draw_noise(axes: Any, survey: Survey) -> None:
    """Relative standard deviation of the gradient of a batch, a dot for each estimator."""
    rows = _ranked(survey)
    _draw_dots(axes, rows, [row.noise for row in rows], lambda value: f"{value:.2f}")
    axes.set(xlabel=f"std / |mean|, {NUM_PROMPTS} × {survey.group_size} responses")
    axes.set_title("e  Noise")


def draw_lambda(axes: Any, survey: Survey) -> None:
    """Bias of PPO against lambda, for three critics."""
    styles = dict(
        zip((c.label for c in survey.by_lambda), ((ORANGE, SOLID), (PURPLE, DASHED), (INK, SOLID)), strict=True)
    )
    for curve in survey.by_lambda:
        colour, dashes = styles[curve.label]
        axes.plot(curve.x, curve.y, color=colour, linestyle=dashes)
    axes.plot([1], [0], "o", color=INK, markersize=5, clip_on=False, zorder=5)
    top = max(max(curve.y) for curve in survey.by_lambda)
    axes.set_xlim(0.5, 1)
    axes.set_ylim(0, 1.12 * top)
    axes.set_xticks([0.5, 0.75, 1], ["0.5", "0.75", "1"])
    names = _Labels(axes)
    untrained, blind, exact = survey.by_lambda
    names.at(0.52, 0.8 * _value(untrained, 0.6), untrained.label, ORANGE, above=False, align="left")
    names.at(0.72, _value(blind, 0.72), blind.label, PURPLE, align="left")
    names.at(0.51, 0.0, exact.label, INK, align="left")
    names.at(0.95, 0.0, "ORZ: λ = 1", INK, align="right")
    axes.set(xlabel="λ of PPO (γ = 1)", ylabel="bias |E[g] − ∇J| / |∇J|")
    axes.set_title("f  A wrong critic")


def draw_reward_share(axes: Any, survey: Survey) -> None:
    """Weight of the reward in the advantage of a token against its distance from the end."""
    styles: list[Style] = [(INK, SOLID), (BLUE, SOLID), (PURPLE, DASHED), (ORANGE, DASHDOT)]
    names = _Labels(axes)
    for curve, (colour, dashes) in zip(survey.reward_share, styles, strict=True):
        axes.plot(curve.x, curve.y, color=colour, linestyle=dashes)
    for curve, (colour, _), (at, align) in zip(
        survey.reward_share, styles, ((15, "center"), (63, "right"), (30, "left"), (6, "right")), strict=True
    ):
        name = f"{curve.label} (ORZ)" if curve.label == "λ = 1" else curve.label
        names.at(at + 1, curve.y[at], f" {name} ", colour, above=align != "right", align=align)
    axes.set_xscale("log")
    axes.set_xlim(1, 256)
    _log_ticks(axes.xaxis, [1, 4, 16, 64, 256])
    axes.set_ylim(0, 1.12)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.set(xlabel="tokens to the end", ylabel="weight of the reward in the advantage")
    axes.set_title("g  Far from the end")


# -- Helpers -----------------------------------------------------------------------------------------------------------


class _Labels:
    """Names written at the lines they belong to."""

    def __init__(self, axes: Any) -> None:
        self.axes = axes

    def at(self, x: float, y: float, text: str, colour: str, above: bool = True, align: str = "center") -> None:
        self.axes.annotate(
            text,
            (x, y),
            xytext=(0, 4 if above else -4),
            textcoords="offset points",
            color=colour,
            ha=align,
            va="bottom" if above else "top",
            fontsize=8,
            annotation_clip=False,
        )


def _draw_lengths(axes: Any, curves: Sequence[Curve], styles: dict[str, Style]) -> None:
    for curve in curves:
        colour, dashes = styles[curve.label]
        axes.plot(curve.x, curve.y, color=colour, linestyle=dashes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(4, 256)
    axes.set_ylim(0.1, 10)
    _log_ticks(axes.xaxis, [4, 8, 16, 32, 64, 128, 256])
    _log_ticks(axes.yaxis, [0.125, 0.25, 0.5, 1, 2, 4, 8])


def _log_ticks(axis: Any, values: Sequence[float]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(values))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _ranked(survey: Survey) -> list[Row]:
    """Unbiased directions first, the quieter the higher."""
    return sorted(survey.rows, key=lambda row: (round(row.angle_deg, 3), row.noise))


def _draw_dots(axes: Any, rows: Sequence[Row], values: Sequence[float], shown: Callable[[float], str]) -> None:
    top = max(values)
    for index, (row, value) in enumerate(zip(rows, values, strict=True)):
        colour = INK if row.angle_deg < 1e-6 else ORANGE
        axes.plot([0, value], [index, index], color=colour, linewidth=1, alpha=0.45)
        axes.plot([value], [index], "o", color=colour, markersize=4.5, clip_on=False, zorder=5)
        axes.annotate(
            shown(value), (value, index), xytext=(6, 0), textcoords="offset points", va="center", fontsize=7, color=SOFT
        )
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.22 * top)
    axes.grid(axis="y", visible=False)


def _value(curve: Curve, x: float) -> float:
    for (x0, y0), (x1, y1) in itertools.pairwise(zip(curve.x, curve.y, strict=True)):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return math.nan


# The panels, and where each is in the picture of all: left, bottom, right, top.
PANELS: dict[Draw, tuple[float, float, float, float]] = {
    draw_success: (0.05, 0.59, 0.35, 0.94),
    draw_response_length: (0.425, 0.59, 0.655, 0.94),
    draw_prompt_length: (0.735, 0.59, 0.965, 0.94),
    draw_direction: (0.145, 0.075, 0.30, 0.46),
    draw_noise: (0.325, 0.075, 0.48, 0.46),
    draw_lambda: (0.555, 0.075, 0.745, 0.46),
    draw_reward_share: (0.805, 0.075, 0.975, 0.46),
}
