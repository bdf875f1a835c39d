"""The report of a run: one HTML file that needs nothing but itself."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from areal_core import __version__
from areal_core.telemetry.assets import asset
from areal_core.telemetry.facts import gather_facts, gather_settings, nonfinite_notes, summarize
from areal_core.telemetry.format import compact, duration, finite
from areal_core.telemetry.jsonl import replace_file
from areal_core.telemetry.report_data import MAX_EVENTS, report_json
from areal_core.telemetry.run_data import RunData, read_run
from areal_core.telemetry.summary import draw_summary

REPORT_FILE = "report.html"
SUMMARY_FILE = "summary.svg"

_SCRIPTS = ("base.js", "curves.js", "staleness.js", "timeline.js", "samples.js", "main.js")
_COUNTS_OF_STEPS = (
    ("groups trained on", "count/groups"),
    ("groups without contrast (all rewards equal)", "count/zero_variance_groups"),
    ("tokens generated", "tokens/generated"),
    ("tokens trained on", "tokens/trained"),
    ("tokens withheld from the loss", "count/withheld_tokens"),
    ("sequences interrupted by an update", "count/interrupted"),
    ("samples excluded", "count/excluded"),
    ("updates skipped, gradient not finite", "count/nonfinite_updates"),
)
_COUNTS_SO_FAR = (
    ("samples whose verifier failed", "count/failed_samples"),
    ("problems left out", "count/bad_problems"),
    ("groups dropped", "count/dropped_groups"),
    ("samples sampled again", "count/requeued_samples"),
    ("generator restarts", "count/generator_restarts"),
)


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into the folder of a run and return its path.

    Works on what is there: an interrupted run, missing files and damaged lines give a report that says so.

    Raises:
        FileNotFoundError: `run_dir` is no folder.
    """
    run = read_run(run_dir)
    path = Path(run_dir) / REPORT_FILE
    replace_file(path, render_report(run).encode("utf-8", errors="xmlcharrefreplace"))
    return path


def report_command(run_dir: str | Path) -> int:
    """`areal-core report RUN_DIR`: write the report and the summary picture, and print where they are."""
    run = read_run(run_dir)
    picture = Path(run_dir) / SUMMARY_FILE
    replace_file(picture, draw_summary(run).encode())
    print(summarize(run))
    print(f"report: {write_report(run_dir)}")
    print(f"picture: {picture}")
    return 0


def render_report(run: RunData) -> str:
    """The report as HTML."""
    slots = {
        "title": html.escape(run.name),
        "summary": html.escape(summarize(run)),
        "problems": "".join(
            f'<p class="note warning">{html.escape(text)}.</p>' for text in (*run.problems, *nonfinite_notes(run))
        ),
        "facts": "".join(
            f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}<small>{html.escape(note)}</small></dd></div>"
            for label, value, note in gather_facts(run)
        ),
        "settings": " ".join(
            f"<span>{html.escape(label)} <b>{html.escape(value)}</b></span>" for label, value in gather_settings(run)
        ),
        "record": _record(run),
        "footer": f"Written by areal_core {html.escape(__version__)}.",
        "picture": draw_summary(run),
        "style": asset("report.css"),
        "script": "(() => {\n'use strict';\n" + "\n".join(asset(name) for name in _SCRIPTS) + "\n})();",
        "data": report_json(run),
    }
    # One pass over the template: text that comes from the run is never searched for slots.
    first, *rest = asset("report.html").split("<!--slot:")
    pieces = [piece.split("-->", 1) for piece in rest]
    return first + "".join(slots[name] + after for name, after in pieces)


def _record(run: RunData) -> str:
    totals = [(label, sum(run.values(key))) for label, key in _COUNTS_OF_STEPS if run.values(key)]
    totals += [(label, max(run.values(key))) for label, key in _COUNTS_SO_FAR if run.values(key)]
    counts = [(label, compact(total) or "") for label, total in totals]
    parts = [
        '<div class="record">',
        f"<div><h3>Counts over the run</h3>{_table(counts, number_columns=(1,)) or _nothing()}</div>",
        f"<div><h3>Events</h3>{_event_table(run) or _nothing()}</div>",
        "</div>",
    ]
    if run.config_text:
        parts.append(f"<details><summary>Configuration</summary><pre>{html.escape(run.config_text)}</pre></details>")
    return "".join(parts)


def _event_table(run: RunData) -> str:
    shown = run.events[-MAX_EVENTS:]
    rows = [
        (
            compact_step(event.get("step")),
            duration(event.get("time_s")) or "",
            str(event.get("kind", "event")).replace("_", " "),
            str(event.get("text", "")),
        )
        for event in shown
    ]
    left_out = len(run.events) - len(shown)
    note = f'<p class="note">{left_out} earlier events are left out.</p>' if left_out else ""
    return _table(rows, number_columns=(0, 1), head=("step", "time", "event", "")) + note


def compact_step(value: object) -> str:
    """A step as a whole number; empty when unknown."""
    step = finite(value)
    return "" if step is None else f"{step:.0f}"


def _table(rows: Sequence[Iterable[str]], number_columns: Sequence[int] = (), head: Sequence[str] = ()) -> str:
    if not rows:
        return ""

    def line(cells: Iterable[str], tag: str) -> str:
        kinds = [' class="number"' if index in number_columns else "" for index in range(len(tuple(rows[0])))]
        return "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    head_row = f"<tr>{line(head, 'th')}</tr>" if head else ""
    return f'<table class="plain">{head_row}{body}</table>'


def _nothing() -> str:
    return '<p class="empty">Nothing was recorded.</p>'
