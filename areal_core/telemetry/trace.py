"""A trace of all loops of a run in the Chrome/Perfetto format (open it at ui.perfetto.dev).

The file is a JSON array with one event per line. Each line is complete in itself, so a run that dies leaves a readable
file (viewers accept the missing bracket) and a resumed run appends to it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from areal_core.telemetry.jsonl import Row, json_value, parse_object

TRACE_FILE = "trace.json"

# (track, name, start_us, duration_us, args): what a process sends to the one that owns the Tracer.
Span: TypeAlias = tuple[str, str, int, int, Mapping[str, Any] | None]

_FLUSH_EVENTS = 256
_FLUSH_US = 1_000_000
_CLOCK_TOLERANCE_US = 1_000_000  # wall clocks are corrected now and then; less than this is no reboot


def now_us() -> int:
    """Microseconds of the monotonic clock, which all processes of a machine share."""
    return time.monotonic_ns() // 1000


def _wall_us() -> int:
    return time.time_ns() // 1000


class SpanRecorder:
    """Collects the spans of a process that has no Tracer of its own; `drain` hands them over, oldest first.

    It holds at most `capacity` spans; of more, the oldest are dropped and counted in `dropped`.
    """

    def __init__(self, capacity: int = 65536, clock: Callable[[], int] = now_us) -> None:
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._clock = clock
        self.dropped = 0

    def add(self, track: str, name: str, start_us: int, duration_us: int, **args: Any) -> None:
        """Record a span whose times are known."""
        self.dropped += len(self._spans) == self._spans.maxlen
        self._spans.append((track, name, start_us, duration_us, args or None))

    @contextmanager
    def span(self, name: str, track: str, **args: Any) -> Iterator[None]:
        """Record the time the body takes, also when it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(track, name, start, self._clock() - start, **args)

    def drain(self) -> list[Span]:
        """Return what was recorded since the last call."""
        spans: list[Span] = []
        while self._spans:
            spans.append(self._spans.popleft())
        return spans


class Tracer:
    """Writes spans, instants and counters of this process, and spans received from others, to one trace file.

    Args:
        path: the trace file; when it exists, the trace goes on behind its last whole event.
        process_name: name of this process in the trace, e.g. "trainer".
        max_events: events the file may hold; later ones are dropped and counted in `dropped`, so that a long run
            does not write gigabytes (an event takes about 100 bytes). A step of a small run has about 20 events.
        clock, wall_clock: microseconds, monotonic and since 1970; tests replace them.

    All methods may be called from any thread. Events are written at least once a second while events arrive.
    """

    def __init__(
        self,
        path: str | Path,
        process_name: str,
        max_events: int = 250_000,
        clock: Callable[[], int] = now_us,
        wall_clock: Callable[[], int] = _wall_us,
    ) -> None:
        self._process = process_name
        self._max_events = max_events
        self._clock = clock
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._process_ids: dict[str, int] = {}
        self._track_ids: dict[tuple[str, str], int] = {}
        self._events = 0
        self._shift_us = 0
        self._first_line = True
        self.dropped = 0
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        epoch_us = wall_clock() - clock()  # the moment the monotonic clock read zero
        if path.exists() and path.stat().st_size > 0:
            self._continue(path, epoch_us)
        self._file = path.open("ab")
        if self._first_line:
            self._file.write(b"[\n")
        self._write_metadata("areal_clock", self._process_id(process_name), 0, epoch_us=epoch_us - self._shift_us)
        self._flush_locked()

    @contextmanager
    def span(self, name: str, track: str, **args: Any) -> Iterator[None]:
        """Record the time the body takes, also when it raises (the span then carries the type of the error)."""
        start = self._clock()
        try:
            yield
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            self.add_spans(self._process, [(track, name, start, self._clock() - start, args)])

    def instant(self, name: str, track: str, **args: Any) -> None:
        """Record a moment on a track, e.g. "publish v12"."""
        event: Row = {"ph": "i", "s": "t", "name": name, "ts": self._clock() + self._shift_us}
        with self._lock:
            self._append(event, self._process, track, args)

    def counter(self, name: str, values: float | Mapping[str, float]) -> None:
        """Record the value of a counter, or of several that are drawn stacked, e.g. {"running": 12, "waiting": 3}."""
        series = values if isinstance(values, Mapping) else {"value": values}
        event: Row = {"ph": "C", "name": name, "ts": self._clock() + self._shift_us}
        with self._lock:
            self._append(event, self._process, None, series)

    def add_spans(self, process: str, spans: Iterable[Span]) -> None:
        """Record spans of a process of this machine, e.g. those that a `SpanRecorder` in "generator 0" drained."""
        with self._lock:
            for track, name, start_us, duration_us, args in spans:
                event: Row = {"ph": "X", "name": name, "ts": start_us + self._shift_us, "dur": duration_us}
                self._append(event, process, track, args)

    def flush(self) -> None:
        """Hand everything recorded so far to the operating system."""
        with self._lock:
            self._flush_locked()

    def close(self) -> None:
        """Write the rest and the closing bracket; a second call does nothing. Later events are dropped and counted."""
        with self._lock:
            if self._file.closed:
                return
            if self.dropped:
                self._write_metadata("areal_dropped", self._process_id(self._process), 0, events=self.dropped)
            self._flush_locked()
            self._file.write(b"]\n")
            self._file.close()

    def __enter__(self) -> Tracer:
        """Return the tracer itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close the file."""
        self.close()

    def _append(self, event: Row, process: str, track: str | None, args: Mapping[str, Any] | None) -> None:
        if self._events >= self._max_events or self._file.closed:
            self.dropped += 1
            return
        event["pid"] = self._process_id(process)
        event["tid"] = 0 if track is None else self._track_id(process, track)
        if args:
            event["args"] = json_value(args)
        self._write_line(event)
        self._events += 1
        if len(self._lines) >= _FLUSH_EVENTS or self._clock() - self._flushed_us >= _FLUSH_US:
            self._flush_locked()

    def _process_id(self, process: str) -> int:
        if process not in self._process_ids:
            pid = self._process_ids[process] = len(self._process_ids) + 1
            self._write_metadata("process_name", pid, 0, name=process)
            self._write_metadata("process_sort_index", pid, 0, sort_index=pid)
        return self._process_ids[process]

    def _track_id(self, process: str, track: str) -> int:
        key = (process, track)
        if key not in self._track_ids:
            tid = self._track_ids[key] = sum(known == process for known, _ in self._track_ids) + 1
            self._write_metadata("thread_name", self._process_ids[process], tid, name=track)
            self._write_metadata("thread_sort_index", self._process_ids[process], tid, sort_index=tid)
        return self._track_ids[key]

    def _write_metadata(self, kind: str, pid: int, tid: int, **args: Any) -> None:
        self._write_line({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})

    def _write_line(self, event: Row) -> None:
        comma = "" if self._first_line else ","
        self._lines.append(f"{comma}{json.dumps(event, separators=(',', ':'), default=str)}\n")
        self._first_line = False

    def _flush_locked(self) -> None:
        self._file.write("".join(self._lines).encode())
        self._file.flush()
        self._lines.clear()
        self._flushed_us = self._clock()

    def _continue(self, path: Path, epoch_us: int) -> None:
        """Cut the bracket or a torn line off, and take over names, counts and the time base of the file."""
        os.truncate(path, _end_of_events(path))
        for event in read_trace(path):
            self._first_line = False
            args = event.get("args") or {}
            if event["ph"] != "M":
                self._events += 1
            elif event["name"] == "process_name":
                self._process_ids[args["name"]] = event["pid"]
            elif event["name"] == "thread_name":
                process = next(name for name, pid in self._process_ids.items() if pid == event["pid"])
                self._track_ids[process, args["name"]] = event["tid"]
            elif event["name"] == "areal_dropped":
                self.dropped = args["events"]
            elif event["name"] == "areal_clock":
                # After a reboot, or on another machine, the monotonic clock starts anew: move our times behind the old.
                shift = epoch_us - args["epoch_us"]
                self._shift_us = shift if abs(shift) > _CLOCK_TOLERANCE_US else 0
        if self._first_line:  # nothing but a bracket, or less
            os.truncate(path, 0)


def read_trace(path: str | Path) -> list[Row]:
    """Read the events of a trace file, closed or not; lines that are not whole events are left out."""
    events: list[Row] = []
    path = Path(path)
    if not path.exists():
        return events
    with path.open("rb") as file:
        for line in file:
            event = _parse_event(line)
            if event is not None:
                events.append(event)
    return events


def _parse_event(line: bytes) -> Row | None:
    if not line.endswith(b"\n"):  # torn, or about to be continued
        return None
    event = parse_object(line.strip().strip(b","))
    return event if event is not None and "ph" in event else None


def _end_of_events(path: Path) -> int:
    """Byte offset behind the last whole event (behind the opening bracket when there is none; 0 without one)."""
    end = position = 0
    with path.open("rb") as file:
        for line in file:
            position += len(line)
            if line == b"[\n" or _parse_event(line) is not None:
                end = position
    return end
