"""Who was busy with what, and when: the spans of a trace as one row of disjoint segments per process and track."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from areal_core.telemetry.format import compact
from areal_core.telemetry.jsonl import Row

IDLE_NAMES = frozenset({"idle", "wait"})


class Segment(NamedTuple):
    """A piece of time in which a row did one thing; times in microseconds since the start of the trace."""

    start_us: int
    end_us: int
    name: str
    detail: str


class Instant(NamedTuple):
    """A moment, in microseconds since the start of the trace."""

    time_us: int
    name: str


@dataclass(frozen=True)
class TimelineRow:
    """What one track of one process did; the segments are disjoint and in order."""

    process: str
    track: str
    segments: list[Segment]

    @property
    def seconds(self) -> dict[str, float]:
        """Time spent under each name, the longest first."""
        totals: dict[str, float] = {}
        for segment in self.segments:
            totals[segment.name] = totals.get(segment.name, 0.0) + (segment.end_us - segment.start_us) / 1e6
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    @property
    def untraced_seconds(self) -> float:
        """Time between the first and the last segment that no segment covers."""
        if not self.segments:
            return 0.0
        extent = (self.segments[-1].end_us - self.segments[0].start_us) / 1e6
        return max(0.0, extent - sum(self.seconds.values()))


@dataclass(frozen=True)
class Timeline:
    """All rows of a trace and its moments; `duration_us` runs from the first event to the end of the last."""

    rows: list[TimelineRow]
    instants: list[Instant]
    duration_us: int
    dropped: int

    def busiest_row(self, process: str) -> TimelineRow | None:
        """The row of a process that has the most time in it."""
        rows = [row for row in self.rows if row.process == process]
        return max(rows, key=lambda row: sum(row.seconds.values()), default=None)

    def generator_rows(self) -> list[TimelineRow]:
        """The main row of every process that is called a generator."""
        names = dict.fromkeys(row.process for row in self.rows if row.process.startswith("generator"))
        return [row for name in names if (row := self.busiest_row(name)) is not None]


def build_timeline(events: Sequence[Row]) -> Timeline:
    """Arrange trace events. Where spans of a track overlap, the one that began last counts.

    Events that lack a time or a track, as only other programs write them, are left out.
    """
    events = [event for event in events if event["ph"] == "M" or _is_timed(event)]
    processes, tracks, dropped = _names(events)
    spans: dict[tuple[int, int], list[Row]] = {}
    moments: list[Row] = []
    for event in events:
        if event["ph"] == "X":
            spans.setdefault((event["pid"], event["tid"]), []).append(event | {"dur": event.get("dur", 0)})
        elif event["ph"] == "i":
            moments.append(event)
    timed = [event for row in spans.values() for event in row] + moments
    start_us = min((event["ts"] for event in timed), default=0)
    end_us = max((event["ts"] + event.get("dur", 0) for event in timed), default=0)
    rows = [
        TimelineRow(processes.get(pid, str(pid)), tracks.get((pid, tid), ""), flatten(row, start_us))
        for (pid, tid), row in sorted(spans.items())
    ]
    rows.sort(key=lambda row: not row.process.startswith("generator"))  # what is generated comes before what is trained
    instants = sorted(Instant(event["ts"] - start_us, event["name"]) for event in moments)
    return Timeline(rows, instants, end_us - start_us, dropped)


def flatten(spans: Iterable[Row], origin_us: int = 0) -> list[Segment]:
    """Turn nested or overlapping spans of one track into disjoint segments; the span that began last wins."""
    segments: list[Segment] = []
    open_spans: list[tuple[int, str, str]] = []  # end, name, detail
    cursor = 0

    def emit_until(time_us: int) -> None:
        nonlocal cursor
        while open_spans:
            end, name, detail = open_spans[-1]
            upto = min(end, time_us)
            if upto > cursor:
                segments.append(Segment(cursor, upto, name, detail))
                cursor = upto
            if end > time_us:
                return
            open_spans.pop()

    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        start = int(span["ts"]) - origin_us
        emit_until(start)
        cursor = max(cursor, start)
        open_spans.append((start + int(span["dur"]), span["name"], _detail(span.get("args"))))
    emit_until(max((end for end, _, _ in open_spans), default=0))
    return segments


def profile(segments: Sequence[Segment], duration_us: int, cells: int, names: Sequence[str]) -> npt.NDArray[np.float64]:
    """Share of each of `cells` equal cells of the time that each name takes: an array [cells, names]."""
    edges = np.linspace(0, duration_us, cells + 1)
    before = [_time_before(edges, [segment for segment in segments if segment.name == name]) for name in names]
    return np.diff(np.stack(before, axis=1), axis=0) / (duration_us / cells)


def coarsen(segments: Sequence[Segment], duration_us: int, cells: int) -> list[Segment]:
    """Draw segments on a grid of `cells` equal cells; each cell shows what took most of it, gaps included."""
    names = sorted({segment.name for segment in segments})
    edges = np.linspace(0, duration_us, cells + 1)
    shares = profile(segments, duration_us, cells, names)
    gap = 1 - shares.sum(axis=1, keepdims=True)
    winner = np.argmax(np.hstack([shares, gap]), axis=1)
    changes = np.flatnonzero(np.diff(winner)) + 1
    runs = zip([0, *changes.tolist()], [*changes.tolist(), cells], strict=True)
    return [
        Segment(int(edges[first]), int(edges[last]), names[winner[first]], "")
        for first, last in runs
        if winner[first] < len(names)
    ]


def _time_before(times: npt.NDArray[np.float64], segments: Sequence[Segment]) -> npt.NDArray[np.float64]:
    """How much of the segments lies before each time."""
    if not segments:
        return np.zeros_like(times)
    bounds = np.array([(s.start_us, s.end_us) for s in segments], dtype=np.float64)
    total = np.concatenate([[0.0], np.cumsum(bounds[:, 1] - bounds[:, 0])])
    knots = np.stack([total[:-1], total[1:]], axis=1).ravel()
    return np.asarray(np.interp(times, bounds.ravel(), knots), dtype=np.float64)


def _is_timed(event: Row) -> bool:
    numbers = [event.get(key) for key in ("pid", "tid", "ts")] + [event.get("dur", 0)]
    return isinstance(event.get("name"), str) and all(isinstance(n, (int, float)) and n >= 0 for n in numbers)


def _names(events: Sequence[Row]) -> tuple[dict[int, str], dict[tuple[int, int], str], int]:
    processes: dict[int, str] = {}
    tracks: dict[tuple[int, int], str] = {}
    dropped = 0
    for event in events:
        if event["ph"] != "M":
            continue
        if event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            tracks[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["name"] == "areal_dropped":
            dropped = event["args"]["events"]
    return processes, tracks, dropped


def _detail(args: Mapping[str, Any] | None) -> str:
    if not args:
        return ""
    return ", ".join(f"{key} {compact(value) or value}" for key, value in list(args.items())[:6])
