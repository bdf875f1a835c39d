"""A stretch of the timeline as SVG, and the timelines of several runs under each other on one scale of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_core.telemetry import svg
from areal_core.telemetry.assets import asset
from areal_core.telemetry.facts import TRAINER_PHASES, generator_idle, token_rate, trainer_idle
from areal_core.telemetry.format import compact, percent
from areal_core.telemetry.jsonl import replace_file
from areal_core.telemetry.run_data import RunData, read_run
from areal_core.telemetry.timeline import IDLE_NAMES, Segment, TimelineRow, coarsen

_ROW = 20
_STEP = 24
_STEPS = 8
_GENERATORS = 6
_CELLS = 2000
_KNOWN = frozenset(("generate", "weight_update", *IDLE_NAMES, *TRAINER_PHASES))  # names that summary.css colours


def plot_timelines(runs: Mapping[str, str | Path], path: str | Path) -> Path:
    """Draw a stretch of each run, one scale of time for all, e.g. {"synchronous": a, "asynchronous": b}.

    Args:
        runs: title -> folder of the run.
        path: where to write the SVG picture.

    Raises:
        FileNotFoundError: a folder does not exist.
        ValueError: `runs` is empty, or a run has no trace.
    """
    data = {title: read_run(run_dir) for title, run_dir in runs.items()}
    rows = {title: strip_rows(run) for title, run in data.items()}
    missing = [title for title, found in rows.items() if not found]
    if missing or not rows:
        raise ValueError(f"plot_timelines: expected runs with a trace, got none in {missing or dict(runs)}")
    starts = {title: few_steps(found[-1])[0] for title, found in rows.items()}
    length = max(end - start for start, end in (few_steps(found[-1]) for found in rows.values()))
    every_row = [row for found in rows.values() for row in found]
    parts = strip_keys(every_row, 936, 28)
    top = 72.0
    for title, found in rows.items():
        parts.append(svg.text(20, top - 12, title, "ink title"))
        parts.append(svg.text(936, top - 12, _facts(data[title]), "soft number", "end"))
        parts += draw_strip(found, starts[title], starts[title] + length, 118, 868, top, relative=True)
        top += strip_height(len(found)) + 44
    picture = svg.document(960, round(top - 30), "Timelines", asset("summary.css"), parts)
    replace_file(Path(path), picture.encode())
    return Path(path)


def strip_rows(run: RunData) -> list[TimelineRow]:
    """The main rows of at most six generators, and of the trainer below them."""
    rows = run.timeline.generator_rows()[:_GENERATORS]
    trainer = run.timeline.busiest_row("trainer")
    found = rows if trainer is None else [*rows, trainer]
    return [row for row in found if row.segments]


def strip_height(rows: int) -> int:
    """Height of a strip of that many rows with its axis, in pixels."""
    return rows * _STEP + 20


def few_steps(row: TimelineRow) -> tuple[float, float]:
    """A stretch of a few training steps from the middle of the run, or all of a short one."""
    first, last = row.segments[0].start_us, row.segments[-1].end_us
    begins = [segment.start_us for segment in row.segments if segment.name == "wait"]
    if len(begins) < _STEPS + 4:
        return first, last
    middle = int(len(begins) * 0.45)
    return begins[middle], begins[min(middle + _STEPS, len(begins) - 1)]


def draw_strip(
    rows: Sequence[TimelineRow],
    start: float,
    end: float,
    left: float,
    right: float,
    top: float,
    relative: bool = False,
) -> list[str]:
    """Rows from `start` to `end` (microseconds) with their idle shares; `relative` times count from `start`."""
    x = svg.scale(start, end, left, right)
    parts: list[str] = []
    for index, row in enumerate(rows):
        y = top + index * _STEP
        visible = _clip(row.segments, start, end)
        parts.append(svg.rect(left, y, right - left, _ROW, "untraced"))
        for segment in _drawable(visible, start, end):
            kind = segment.name if segment.name in _KNOWN else "other"
            parts.append(svg.rect(x(segment.start_us), y, x(segment.end_us) - x(segment.start_us), _ROW, kind))
        parts.append(svg.text(left - 8, y + 14, row.process, "ink", "end"))
        parts.append(svg.text(right + 8, y + 14, f"idle {percent(_idle(visible)) or '-'}", "soft number"))
    zero = start if relative else 0.0
    for mark in svg.ticks((start - zero) / 1e6, (end - zero) / 1e6, 6):
        parts.append(
            svg.text(x(mark * 1e6 + zero), top + len(rows) * _STEP + 14, f"{mark:g} s", "soft number", "middle")
        )
    return parts


def strip_keys(rows: Sequence[TimelineRow], right: float, y: float) -> list[str]:
    """The colours of what the rows show, in one line that ends at `right`."""
    names = dict.fromkeys(name for row in rows for name in row.seconds if name not in IDLE_NAMES and name in _KNOWN)
    parts: list[str] = []
    for name in reversed([*names, "idle"]):
        label = "forward/backward" if name == "forward_backward" else name.replace("_", " ")
        right -= 6.2 * len(label)
        parts += [svg.rect(right - 14, y - 9, 10, 10, name), svg.text(right, y, label)]
        right -= 28
    return parts


def _facts(run: RunData) -> str:
    rate = token_rate(run, "trained")
    facts = [
        None if rate is None else f"trains {compact(rate)} tokens/s",
        _named("generators idle", generator_idle(run)),
        _named("trainer idle", trainer_idle(run)),
    ]
    return " · ".join(fact for fact in facts if fact is not None)


def _named(name: str, share: float | None) -> str | None:
    return None if share is None else f"{name} {percent(share)}"


def _clip(segments: Sequence[Segment], start: float, end: float) -> list[Segment]:
    """The visible parts of segments."""
    return [
        s._replace(start_us=int(max(s.start_us, start)), end_us=int(min(s.end_us, end)))
        for s in segments
        if s.end_us > start and s.start_us < end
    ]


def _drawable(segments: Sequence[Segment], start: float, end: float) -> Sequence[Segment]:
    """The segments; on a grid finer than pixels when there are more of them than that."""
    if len(segments) <= _CELLS:
        return segments
    moved = [s._replace(start_us=int(s.start_us - start), end_us=int(s.end_us - start)) for s in segments]
    grid = coarsen(moved, int(end - start), _CELLS)
    return [s._replace(start_us=int(s.start_us + start), end_us=int(s.end_us + start)) for s in grid]


def _idle(segments: Sequence[Segment]) -> float | None:
    seconds = TimelineRow("", "", list(segments)).seconds
    total = sum(seconds.values())
    return sum(value for name, value in seconds.items() if name in IDLE_NAMES) / total if total else None
