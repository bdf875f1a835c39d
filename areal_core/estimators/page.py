"""The survey as one HTML page that needs nothing but itself."""

from __future__ import annotations

import html
import re
from typing import NamedTuple

from areal_core import __version__
from areal_core.estimators import figure
from areal_core.estimators.assets import asset
from areal_core.estimators.survey import LAMBDA, NUM_PROMPTS, Row, Survey
from areal_core.telemetry.assets import asset as report_asset

# What the pictures are drawn in, and the variable of the style sheet that follows the theme.
_VARIABLES = {
    figure.BLUE: "--e-blue",
    figure.ORANGE: "--e-orange",
    figure.GREEN: "--e-green",
    figure.PURPLE: "--e-purple",
    figure.INK: "--ink",
    figure.SOFT: "--soft",
    figure.FAINT: "--faint",
    figure.GRID: "--e-grid",
}
# Inches, of panels that share a row with two others or with one.
_SIZES = {"weights": (3.9, 3.1), "dots": (5.2, 3.3), "critic": (5.2, 3.1)}
_ROWS: dict[figure.Draw, str] = {
    figure.draw_direction: "dots",
    figure.draw_noise: "dots",
    figure.draw_lambda: "critic",
    figure.draw_reward_share: "critic",
}


class Column(NamedTuple):
    """Heading and unit of a column of the table."""

    name: str
    unit: str


COLUMNS = (
    Column("estimator", ""),
    Column("angle", "deg"),
    Column("length", "of ∇J"),
    Column("bias", "of ∇J"),
    Column("easy", "weight"),
    Column("medium", "weight"),
    Column("hard", "weight"),
    Column("noise", "std/mean"),
    Column("variance", ""),
)


def table_rows(survey: Survey) -> list[tuple[str, ...]]:
    """The table of estimators as text, one tuple of cells for each, in the order of COLUMNS."""
    return [
        (
            row.label,
            f"{row.angle_deg:.1f}" if row.angle_deg > 1e-6 else "0",
            f"{row.length:.3f}",
            "0" if is_unbiased(row) else f"{row.bias:.3f}",
            *(f"{weight:.3f}" for weight in row.prompt_weights),
            f"{row.noise:.3f}",
            f"{row.variance:.4f}",
        )
        for row in survey.rows
    ]


def is_unbiased(row: Row) -> bool:
    """Whether the expected gradient is the policy gradient, up to rounding."""
    return row.bias <= 1e-9


def table_note(survey: Survey) -> str:
    """What the columns of the table mean."""
    prompts = ", ".join(f"{p:.2f}" for p in survey.success)
    return (
        "E[g] is the expected gradient step, ∇J that of the expected reward. Angle between the two; length "
        "|E[g]| / |∇J|; bias |E[g] − ∇J| / |∇J|; weight: how many times the share of a prompt in ∇J is in E[g], for "
        f"success rates {prompts}; noise and variance (trace of the covariance) of a batch of {NUM_PROMPTS} prompts "
        f"with {survey.group_size} responses each. PPO with λ = {LAMBDA:g} and γ = 1; an untrained critic says 1/2 in "
        "every state."
    )


def render_page(survey: Survey) -> str:
    """The page as HTML.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    exact = ", ".join(row.label for row in survey.rows if is_unbiased(row))
    slots = {
        "style": report_asset("report.css") + asset("page.css"),
        "group_size": str(survey.group_size),
        "exact": html.escape(exact),
        "table": _table(survey),
        "table_note": html.escape(table_note(survey)),
        "prompts": "".join(
            f'<tr><td>{name}</td><td class="number">{p:.3f}</td><td class="number">{tokens:.2f}</td></tr>'
            for name, p, tokens in zip(("easy", "medium", "hard"), survey.success, survey.lengths, strict=True)
        ),
        "footer": f"Written by areal_core {html.escape(__version__)}.",
    }
    for draw in figure.PANELS:
        picture = figure.panel_svg(draw, survey, *_SIZES[_ROWS.get(draw, "weights")])
        slots[draw.__name__] = _themed(picture, draw.__name__)
    first, *rest = asset("page.html").split("<!--slot:")
    pieces = [piece.split("-->", 1) for piece in rest]
    return first + "".join(slots[name] + after for name, after in pieces)


def _table(survey: Survey) -> str:
    heads = "".join(
        f"<th{' class=number' if index else ''}>{html.escape(name)}<br><small>{html.escape(unit)}</small></th>"
        for index, (name, unit) in enumerate(COLUMNS)
    )
    body = ""
    for row, cells in zip(survey.rows, table_rows(survey), strict=True):
        kind = ' class="exact"' if is_unbiased(row) else ""
        numbers = "".join(f'<td class="number">{html.escape(cell)}</td>' for cell in cells[1:])
        body += f"<tr{kind}><td>{html.escape(cells[0])}</td>{numbers}</tr>"
    return f'<table class="plain"><tr>{heads}</tr>{body}</table>'


def _themed(svg: str, prefix: str) -> str:
    """A picture as part of the page: ids of its own, colours that follow the theme, a size that follows the column."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    head, body = svg.split(">", 1)
    svg = re.sub(r' (width|height)="[^"]*"', "", head) + ">" + body
    for reference in (' id="', "url(#", 'href="#'):
        svg = svg.replace(reference, f"{reference}{prefix}-")
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg
