import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_core.telemetry import Tracer, read_trace
from areal_core.telemetry.timeline import Segment, TimelineRow, build_timeline, coarsen, flatten


def span(name, start, end, **args):
    return {"ph": "X", "name": name, "ts": start, "dur": end - start, "args": args}


def pieces(segments):
    return [(segment.name, segment.start_us, segment.end_us) for segment in segments]


def test_nested_spans_show_the_innermost():
    spans = [span("step", 0, 100), span("forward", 10, 40), span("attention", 20, 30), span("backward", 60, 100)]
    assert pieces(flatten(spans)) == [
        ("step", 0, 10), ("forward", 10, 20), ("attention", 20, 30), ("forward", 30, 40), ("step", 40, 60),
        ("backward", 60, 100),
    ]  # fmt: skip


def test_of_spans_that_begin_together_the_shorter_is_inside():
    recorded_at_their_ends = [span("inner", 0, 30), span("outer", 0, 100)]
    assert pieces(flatten(recorded_at_their_ends)) == [("inner", 0, 30), ("outer", 30, 100)]


def test_overlapping_spans_show_the_later_one():
    assert pieces(flatten([span("b", 5, 15), span("a", 0, 10)])) == [("a", 0, 5), ("b", 5, 15)]


def test_details_are_text():
    (segment,) = flatten([span("generate", 0, 1, version=3, note="warm", tokens=12345)])
    assert segment.detail == "version 3, note warm, tokens 12.3k"


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=25))
def test_flatten_covers_each_moment_once_with_the_span_that_began_last(intervals):
    spans = [span(str(number), start, start + length) for number, (start, length) in enumerate(intervals)]
    segments = flatten(spans)
    assert all(left.end_us <= right.start_us for left, right in itertools.pairwise(segments))
    assert all(segment.end_us > segment.start_us for segment in segments)
    shown = {moment: segment.name for segment in segments for moment in range(segment.start_us, segment.end_us)}
    for moment in range(81):
        covering = [s for s in spans if s["ts"] <= moment < s["ts"] + s["dur"]]
        assert (moment in shown) == bool(covering)
        if covering:
            began = next(s["ts"] for s in spans if s["name"] == shown[moment])
            assert began == max(s["ts"] for s in covering)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30), st.sampled_from("abc")), min_size=1, max_size=30),
    st.integers(1, 50),
)
def test_coarsen_keeps_order_and_shows_what_takes_most_of_a_cell(parts, cells):
    segments, time = [], 0
    for gap, length, name in parts:
        segments.append(Segment(time + gap, time + gap + length, name, ""))
        time += gap + length
    coarse = coarsen(segments, time, cells)
    assert len(coarse) <= cells
    assert all(left.end_us <= right.start_us for left, right in itertools.pairwise(coarse))
    for number in range(cells):
        low, high = number * time / cells, (number + 1) * time / cells
        covered = {"": high - low}
        for segment in segments:
            overlap = max(0.0, min(segment.end_us, high) - max(segment.start_us, low))
            covered[segment.name] = covered.get(segment.name, 0.0) + overlap
            covered[""] -= overlap
        middle = (low + high) / 2
        shown = next((s.name for s in coarse if s.start_us <= middle < s.end_us), "")
        if high - low >= 2:  # edges are rounded to whole microseconds
            assert covered[shown] >= max(covered.values()) - 1e-6


def test_rows_processes_and_moments(tmp_path):
    path = tmp_path / "trace.json"
    with Tracer(path, "trainer", clock=lambda: 500) as tracer:
        tracer.add_spans("trainer", [("loop", "wait", 1_000, 300, None), ("loop", "optimizer", 1_300, 100, None)])
        tracer.add_spans("generator 0", [("loop", "generate", 1_000, 350, None), ("loop", "idle", 1_450, 50, None)])
        tracer.add_spans("generator 0", [("reward", "verify", 1_200, 10, None)])
        tracer.instant("publish v1", "publish")
    timeline = build_timeline(read_trace(path))
    assert [(row.process, row.track) for row in timeline.rows] == [
        ("generator 0", "loop"), ("generator 0", "reward"), ("trainer", "loop"),
    ]  # fmt: skip
    assert timeline.duration_us == 1_000
    assert timeline.instants == [(0, "publish v1")]
    assert [row.track for row in timeline.generator_rows()] == ["loop"]
    row = timeline.busiest_row("generator 0")
    assert row.seconds == pytest.approx({"generate": 350e-6, "idle": 50e-6})
    assert row.untraced_seconds == pytest.approx(100e-6)


def test_events_of_other_programs_that_lack_a_time_are_left_out():
    events = [
        {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 5},
        {"ph": "X", "name": "b", "pid": 1, "tid": 1},
        {"ph": "X", "name": "c", "pid": 1, "tid": 1, "ts": "soon"},
        {"ph": "i", "pid": 1, "tid": 1, "ts": 5},
        {"ph": "X", "name": "d", "pid": 1, "tid": 1, "ts": 6, "dur": 4},
    ]
    timeline = build_timeline(events)
    assert pieces(timeline.rows[0].segments) == [("d", 1, 5)]
    assert timeline.instants == []


def test_an_empty_trace():
    timeline = build_timeline([])
    assert (timeline.rows, timeline.instants, timeline.duration_us) == ([], [], 0)
    assert TimelineRow("trainer", "loop", []).untraced_seconds == 0
