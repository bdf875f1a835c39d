import json
import os
import signal
import threading

import pytest

from areal_core.telemetry import SpanRecorder, Tracer, now_us, read_trace


class FakeClock:
    def __init__(self, now=1_000):
        self.now = now

    def __call__(self):
        return self.now


def events_of(path):
    return [event for event in read_trace(path) if event["ph"] != "M"]


def names_of(path, kind):
    return [event["args"]["name"] for event in read_trace(path) if event["ph"] == "M" and event["name"] == kind]


def test_a_closed_trace_is_strict_json(tmp_path):
    clock = FakeClock()
    with Tracer(tmp_path / "trace.json", "trainer", clock=clock) as tracer:
        with tracer.span("wait", "loop", step=3):
            clock.now += 250
        tracer.instant("publish v12", "publish", version=12)
        tracer.counter("slots", {"running": 12, "waiting": 3})
        tracer.counter("queue", 4)
        tracer.add_spans(
            "generator 0", [("loop", "generate", 1_100, 90, {"tokens": 7}), ("loop", "idle", 1_190, 5, None)]
        )
    events = json.loads((tmp_path / "trace.json").read_text())
    assert events == read_trace(tmp_path / "trace.json")
    by_name = {event["name"]: event for event in events}
    assert by_name["wait"] | {"pid": 0, "tid": 0} == {
        "ph": "X", "name": "wait", "ts": 1_000, "dur": 250, "pid": 0, "tid": 0, "args": {"step": 3},
    }  # fmt: skip
    assert (by_name["publish v12"]["ph"], by_name["publish v12"]["ts"]) == ("i", 1_250)
    assert by_name["slots"]["args"] == {"running": 12, "waiting": 3}
    assert by_name["queue"]["args"] == {"value": 4}
    assert by_name["generate"]["pid"] == by_name["idle"]["pid"] != by_name["wait"]["pid"]
    assert "args" not in by_name["idle"]
    assert names_of(tmp_path / "trace.json", "process_name") == ["trainer", "generator 0"]
    assert names_of(tmp_path / "trace.json", "thread_name") == ["loop", "publish", "loop"]


def test_a_span_whose_body_raises_is_recorded_with_the_error(tmp_path):
    with Tracer(tmp_path / "trace.json", "trainer") as tracer, pytest.raises(KeyError), tracer.span("wait", "loop"):
        raise KeyError("x")
    (event,) = events_of(tmp_path / "trace.json")
    assert event["args"] == {"error": "KeyError"}


def test_a_killed_process_leaves_a_readable_trace(tmp_path):
    path = tmp_path / "trace.json"
    child = os.fork()
    if child == 0:
        tracer = Tracer(path, "trainer")
        for index in range(10):
            with tracer.span(f"span {index}", "loop"):
                pass
        tracer.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [event["name"] for event in events_of(path)] == [f"span {index}" for index in range(10)]
    with pytest.raises(json.JSONDecodeError):
        json.loads(path.read_text())  # it was not closed: the case this test is about
    with Tracer(path, "trainer") as tracer:
        tracer.instant("resume", "loop")
    assert json.loads(path.read_text())[-1]["name"] == "resume"


@pytest.mark.parametrize("cut", range(0, 910, 7))
def test_a_trace_cut_anywhere_can_be_read_and_continued(tmp_path, cut):
    path = tmp_path / "trace.json"
    with Tracer(path, "trainer", clock=FakeClock(), wall_clock=FakeClock()) as tracer:
        for index in range(4):
            tracer.add_spans("trainer", [("loop", f"first {index}", index, 1, None)])
    content = path.read_bytes()
    assert len(content) < 903  # so that the longest cut leaves nothing
    path.write_bytes(content[: max(0, len(content) - cut)])
    kept = [event["name"] for event in events_of(path)]
    assert kept == [f"first {index}" for index in range(len(kept))]
    with Tracer(path, "trainer", clock=FakeClock(), wall_clock=FakeClock()) as tracer:
        tracer.add_spans("trainer", [("loop", "second", 9, 1, None)])
    assert [event["name"] for event in json.loads(path.read_text()) if event["ph"] != "M"] == [*kept, "second"]


def test_a_continued_trace_keeps_its_processes_and_tracks(tmp_path):
    path = tmp_path / "trace.json"
    for _ in range(3):
        with Tracer(path, "trainer") as tracer:
            tracer.instant("a", "loop")
            tracer.add_spans("generator 0", [("loop", "generate", now_us(), 1, None)])
    assert names_of(path, "process_name") == ["trainer", "generator 0"]
    assert names_of(path, "thread_name") == ["loop", "loop"]
    assert len({(event["pid"], event["tid"]) for event in events_of(path)}) == 2


@pytest.mark.parametrize(("uptime", "wall"), [(50, 9_000_000), (10_000_000, 9_000_000)])
def test_a_reboot_does_not_move_time_back(tmp_path, uptime, wall):
    """The second process starts 9 s after the first by the wall clock, whatever its monotonic clock reads."""
    path = tmp_path / "trace.json"
    with Tracer(path, "trainer", clock=FakeClock(5_000_000), wall_clock=FakeClock(0)) as tracer:
        tracer.instant("first", "loop")
    for _ in range(2):  # a third start in the same boot goes on with the same shift
        with Tracer(path, "trainer", clock=FakeClock(uptime), wall_clock=FakeClock(wall)) as tracer:
            tracer.instant("later", "loop")
            tracer.add_spans("generator 0", [("loop", "generate", uptime, 1, None)])
    assert {event["name"]: event["ts"] for event in events_of(path)} == {
        "first": 5_000_000,
        "later": 14_000_000,
        "generate": 14_000_000,
    }


def test_the_same_boot_is_not_shifted_by_a_clock_correction(tmp_path):
    path = tmp_path / "trace.json"
    for now, wall in ((5_000_000, 0), (8_000_000, 3_400_000)):
        with Tracer(path, "trainer", clock=FakeClock(now), wall_clock=FakeClock(wall)) as tracer:
            tracer.instant("tick", "loop")
    assert [event["ts"] for event in events_of(path)] == [5_000_000, 8_000_000]


def test_events_beyond_the_cap_are_dropped_and_counted(tmp_path):
    path = tmp_path / "trace.json"
    with Tracer(path, "trainer", max_events=5) as tracer:
        for index in range(8):
            tracer.instant(str(index), "loop")
        assert tracer.dropped == 3
    assert [event["name"] for event in events_of(path)] == ["0", "1", "2", "3", "4"]
    assert read_trace(path)[-1]["args"] == {"events": 3}
    with Tracer(path, "trainer", max_events=5) as tracer:  # the cap is on the file, not on the process
        tracer.instant("late", "loop")
        assert tracer.dropped == 4


def test_events_after_close_are_counted_not_written(tmp_path):
    tracer = Tracer(tmp_path / "trace.json", "trainer")
    tracer.close()
    tracer.instant("late", "loop")
    tracer.close()
    assert tracer.dropped == 1
    assert events_of(tmp_path / "trace.json") == []


def test_events_reach_the_disk_within_a_second(tmp_path):
    clock = FakeClock()
    tracer = Tracer(tmp_path / "trace.json", "trainer", clock=clock)
    tracer.instant("early", "loop")
    clock.now += 1_000_000
    tracer.instant("late", "loop")
    assert [event["name"] for event in events_of(tmp_path / "trace.json")] == ["early", "late"]
    tracer.close()


def test_a_trace_does_not_pile_up_in_memory(tmp_path):
    tracer = Tracer(tmp_path / "trace.json", "trainer", clock=FakeClock())
    tracer.add_spans("generator 0", [("loop", "generate", index, 1, None) for index in range(1_000)])
    assert len(events_of(tmp_path / "trace.json")) >= 744
    tracer.close()


def test_threads_write_whole_events(tmp_path):
    path = tmp_path / "trace.json"
    with Tracer(path, "trainer") as tracer:

        def work(track):
            for index in range(300):
                with tracer.span("work", track, index=index):
                    pass

        threads = [threading.Thread(target=work, args=(f"thread {number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    assert len(events) == 1200
    assert all([e["args"]["index"] for e in events if e["tid"] == tid] == list(range(300)) for tid in (1, 2, 3, 4))


def test_recorder_hands_spans_over_once(tmp_path):
    clock = FakeClock()
    recorder = SpanRecorder(clock=clock)
    with recorder.span("generate", "loop", version=3):
        clock.now += 40
    recorder.add("loop", "idle", 1_040, 2)
    spans = recorder.drain()
    assert spans == [("loop", "generate", 1_000, 40, {"version": 3}), ("loop", "idle", 1_040, 2, None)]
    assert recorder.drain() == []


def test_recorder_is_bounded():
    recorder = SpanRecorder(capacity=2)
    for start in range(5):
        recorder.add("loop", "generate", start, 1)
    assert [span[2] for span in recorder.drain()] == [3, 4]
    assert recorder.dropped == 3


def test_no_trace_reads_as_no_events(tmp_path):
    assert read_trace(tmp_path / "absent.json") == []
