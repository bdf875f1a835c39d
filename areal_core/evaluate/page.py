"""An evaluation as one HTML page that needs nothing but itself, in the look of the reports."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from areal_core import __version__
from areal_core.evaluate import figure, table
from areal_core.evaluate.assets import asset
from areal_core.evaluate.data import DataSet
from areal_core.evaluate.results import Response, Results
from areal_core.evaluate.summary import CONFIDENCE, Summary
from areal_core.telemetry.assets import asset as report_asset
from areal_core.telemetry.format import percent

__all__ = ["render_page"]

_SHOWN_PROBLEMS = 3  # of each data set, with a response of every model
_SHOWN_LETTERS = 2000


def render_page(summary: Summary, data_sets: Sequence[DataSet], results: Results) -> str:
    """The page as HTML; texts of prompts and responses are shown as they are."""
    slots = {
        "style": report_asset("report.css") + asset("page.css"),
        "title": html.escape(_title(summary)),
        "caption": html.escape(table.caption(summary)),
        "overview": _overview(summary),
        "overview_note": _overview_note(summary),
        "intervals": _figures(summary, figure.draw_intervals),
        "curves": _curves(summary),
        "problems": _problems(summary),
        "details": "".join(_plain_table(detail) for detail in table.details(summary)),
        "responses": "".join(_responses(summary, data, results) for data in data_sets),
        "footer": f"Written by areal_core {html.escape(__version__)}.",
    }
    # One pass over the template: texts of models and data are never searched for slots.
    first, *rest = asset("page.html").split("<!--slot:")
    pieces = [piece.split("-->", 1) for piece in rest]
    return first + "".join(slots[name] + after for name, after in pieces)


def _title(summary: Summary) -> str:
    if len(summary.models) == 1:
        return f"{table.shorten(summary.models[0], 60)} on {', '.join(summary.data)}"
    return f"{len(summary.models)} models on {', '.join(summary.data)}"


def _overview(summary: Summary) -> str:
    best = {data: max(summary.cells[model, data].pass_at[1].value for model in summary.models) for data in summary.data}
    head = "<th>pass@1, %</th>" + "".join(f'<th class="number">{html.escape(data)}</th>' for data in summary.data)
    body = ""
    for model in summary.models:
        body += f"<tr><td>{html.escape(model)}</td>"
        for data in summary.data:
            estimate = summary.cells[model, data].pass_at[1]
            kind = " best" if len(summary.models) > 1 and estimate.value == best[data] else ""
            body += f'<td class="number{kind}">{_number(table.with_interval(estimate))}</td>'
        body += "</tr>"
    return f'<table class="results"><tr>{head}</tr>{body}</table>'


def _overview_note(summary: Summary) -> str:
    if len(summary.models) == 1:
        return ""
    return (
        "Bold: the highest of a data set. Intervals of models overlap more than their difference is uncertain, because "
        f"all answer the same problems; Details has the gain over {html.escape(summary.models[0])} with an interval of "
        "its own."
    )


def _figures(summary: Summary, draw: Callable[[Summary, str], str]) -> str:
    return "".join(
        f"<figure><figcaption>{html.escape(data)}</figcaption>{draw(summary, data)}</figure>" for data in summary.data
    )


def _curves(summary: Summary) -> str:
    if summary.settings.samples == 1:
        return '<p class="empty">One sample for each problem says nothing of more.</p>'
    note = (
        '<p class="note">Solid: pass@k, the chance that one of k responses is right, unbiased. Dashed: maj@k, the '
        "chance that the answer most of k responses give is right, ties broken at random. Where solid lines meet at "
        "large k, the models solve the same number of problems, and one of them more often.</p>"
    )
    return f'{_keys(summary)}<div class="plots">{_figures(summary, figure.draw_curves)}</div>{note}'


def _problems(summary: Summary) -> str:
    parts = []
    for data in summary.data:
        counts = []
        for model in summary.models:
            always, sometimes, never = figure.solved_counts(summary.cells[model, data])
            counts.append(f"{table.shorten(model)}: {always} always right, {sometimes} sometimes, {never} never")
        parts.append(
            f'<h3>{html.escape(data)}</h3><figure class="wide">{figure.draw_problems(summary, data)}</figure>'
            f'<p class="note">{html.escape("; ".join(counts))}.</p>'
        )
    note = "Share of right responses to each problem, the darker the more; problems in the order of their mean share."
    return f'<p class="note">{note}</p>' + "".join(parts)


def _keys(summary: Summary) -> str:
    keys = "".join(
        f'<span class="{figure.model_class(index)}"><span class="swatch"></span>{html.escape(model)}</span>'
        for index, model in enumerate(summary.models)
    )
    return f'<p class="keys">{keys}</p>'


def _plain_table(detail: table.Table) -> str:
    head = "".join(f"<th{' class=number' if i else ''}>{html.escape(cell)}</th>" for i, cell in enumerate(detail.head))
    body = ""
    for row in detail.rows:
        numbers = "".join(f'<td class="number">{_number(cell)}</td>' for cell in row[1:])
        body += f"<tr><td>{html.escape(row[0])}</td>{numbers}</tr>"
    note = f'<p class="note">Brackets: {CONFIDENCE:.0%} intervals. The stop token counts as one of a response.</p>'
    title = f"<h3>{html.escape(detail.title)}</h3>"
    return f'{title}<div class="scroll"><table class="plain"><tr>{head}</tr>{body}</table></div>{note}'


def _number(cell: str) -> str:
    value, _, interval = cell.partition(" ")
    return html.escape(value) + (f"<small>{html.escape(interval)}</small>" if interval else "")


def _responses(summary: Summary, data: DataSet, results: Results) -> str:
    parts = [f"<h3>{html.escape(data.label)}</h3>"]
    for index in _telling_problems(summary, data.label):
        problem = data.problems[index]
        parts.append(f'<p class="question">{html.escape(problem.prompt)}</p>')
        parts.append(f'<p class="note">reference answer {html.escape(problem.answer)}</p><div class="answer">')
        for model in summary.models:
            share = summary.cells[model, data.label].shares[index]
            parts.append(_response(model, share, results.rows[model, data.label, index]))
        parts.append("</div>")
    return "".join(parts)


def _response(model: str, share: float, responses: Sequence[Response]) -> str:
    shown = responses[0]
    text = shown.text if len(shown.text) <= _SHOWN_LETTERS else f"{shown.text[:_SHOWN_LETTERS]} …"
    end = "cut" if shown.finish == "length" else "ended"
    return (
        f"<article><p>{html.escape(table.shorten(model, 40))}: {percent(share)} of {len(responses)} right; the first, "
        f"{end} after {shown.tokens} tokens:</p>"
        f'<div class="sample-text">{html.escape(text)}</div></article>'
    )


def _telling_problems(summary: Summary, data: str) -> Iterator[int]:
    """Problems on which the models differ most; of one model, those it solves about half of the time."""
    shares = np.array([summary.cells[model, data].shares for model in summary.models])
    interest = np.ptp(shares, axis=0) if len(shares) > 1 else -abs(shares[0] - 0.5)
    yield from np.argsort(-interest, kind="stable")[:_SHOWN_PROBLEMS].tolist()
