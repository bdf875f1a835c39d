import builtins
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from areal_core.telemetry import EventLog, MetricsLog, SampleLog, read_metrics
from areal_core.telemetry.jsonl import read_json_lines, replace_file


def test_reads_back_what_was_logged(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.log({"step": 1, "reward/mean": torch.tensor(0.5), "staleness/histogram": np.array([3, 1]), "note": "warm"})
        log.log({"step": 2, "reward/mean": np.float32(0.25), "count/groups": np.int64(4)})
    assert read_metrics(tmp_path) == [
        {"step": 1, "reward/mean": 0.5, "staleness/histogram": [3, 1], "note": "warm"},
        {"step": 2, "reward/mean": 0.25, "count/groups": 4},
    ]


def test_every_line_is_on_disk_before_log_returns(tmp_path):
    log = MetricsLog(tmp_path, tensorboard=False)
    for step in range(3):
        log.log({"step": step})
        assert [row["step"] for row in read_metrics(tmp_path)] == list(range(step + 1))
    log.close()


@pytest.mark.parametrize(
    ("value", "name"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (torch.tensor(math.nan), "nan")]
)
def test_nonfinite_values_become_null_and_are_named(tmp_path, value, name):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.log({"step": 1, "optim/grad_norm": value, "absent": None, "loss/loss": 1.0})
    line = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert row["optim/grad_norm"] is None
    assert row["nonfinite"] == {"optim/grad_norm": name}


def test_nonfinite_values_inside_lists_become_null(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.log({"step": 1, "values": [1.0, math.nan]})
    assert read_metrics(tmp_path) == [{"step": 1, "values": [1.0, None]}]


def test_a_value_json_cannot_carry_raises_and_writes_nothing(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        with pytest.raises(TypeError):
            log.log({"step": 1, "bad": object()})
        log.log({"step": 1, "good": 1})
    assert read_metrics(tmp_path) == [{"step": 1, "good": 1}]


@pytest.mark.parametrize("step", [None, "3", 1.0, True])
def test_step_must_be_an_integer(tmp_path, step):
    with MetricsLog(tmp_path, tensorboard=False) as log, pytest.raises(ValueError, match="expected an integer step"):
        log.log({"step": step})


def test_step_must_grow(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.log({"step": 3})
        with pytest.raises(ValueError, match="expected step > 3, got 3"):
            log.log({"step": 3})


def write_steps(run_dir, steps, tail=b""):
    with MetricsLog(run_dir, tensorboard=False) as log:
        for step in steps:
            log.log({"step": step, "run": "first"})
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(tail)


def test_resume_cuts_what_lies_beyond_the_checkpoint(tmp_path):
    write_steps(tmp_path, range(1, 8))
    with MetricsLog(tmp_path, tensorboard=False, resume_step=5) as log:
        for step in (6, 7):
            log.log({"step": step, "run": "second"})
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["run"] for row in rows] == ["first"] * 5 + ["second"] * 2


def test_resume_goes_on_after_a_torn_line(tmp_path):
    write_steps(tmp_path, [1, 2], tail=b'{"step": 3, "ru')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    with MetricsLog(tmp_path, tensorboard=False, resume_step=2) as log:
        log.log({"step": 3})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]


def test_resume_refuses_a_step_that_is_in_the_history(tmp_path):
    write_steps(tmp_path, range(1, 4))
    with MetricsLog(tmp_path, tensorboard=False, resume_step=2) as log, pytest.raises(ValueError, match="step > 2"):
        log.log({"step": 2})


def test_a_crash_while_cutting_leaves_the_old_history(tmp_path, monkeypatch):
    write_steps(tmp_path, range(1, 4))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def no_space(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="no space left"):
        MetricsLog(tmp_path, tensorboard=False, resume_step=1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path):
    write_steps(tmp_path, [1])
    with pytest.raises(FileExistsError, match="pass resume_step"):
        MetricsLog(tmp_path, tensorboard=False)


def test_a_broken_line_in_the_middle_is_no_torn_tail(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(ValueError, match="broken line 2"):
        read_metrics(tmp_path)


def test_no_run_reads_as_no_steps(tmp_path):
    assert read_metrics(tmp_path / "absent") == []


def test_tensorboard_holds_scalars_and_the_histogram(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsLog(tmp_path) as log:
        for step in range(1, 6):
            log.log({"step": step, "reward/mean": step / 10, "staleness/histogram": [0, 6, 2], "loss/loss": math.nan})
    with MetricsLog(tmp_path, resume_step=3) as log:
        log.log({"step": 4, "reward/mean": 7.0, "note": "text is left out"})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    scalars = [(event.step, round(event.value, 4)) for event in events.Scalars("reward/mean")]
    assert scalars == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 7.0)]
    histogram = events.Histograms("staleness/histogram")[0].histogram_value
    assert (histogram.num, histogram.sum, histogram.min, histogram.max) == (8, 10, 1, 2)
    assert "loss/loss" not in events.Tags()["scalars"]


def test_tensorboard_missing_says_what_to_do(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def without_tensorboard(name, *args, **kwargs):
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError("No module named 'tensorboard'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tensorboard)
    with pytest.raises(ImportError, match="pip install tensorboard, or pass tensorboard=False"):
        MetricsLog(tmp_path)
    MetricsLog(tmp_path, tensorboard=False).close()


SAMPLE = {
    "group": 0,
    "prompt": "1+1=",
    "tokens": ["2", "<eos>"],
    "versions": [3, 4],
    "logprobs": [-0.1, -0.2],
    "reward": 1.0,
    "advantage": 0.5,
    "finish_reason": "stop",
}


def test_samples_of_removed_steps_go_with_them(tmp_path):
    log = SampleLog(tmp_path)
    for step in (1, 2, 3):
        log.log(step=step, **SAMPLE)
    log.close()
    log = SampleLog(tmp_path, resume_step=2)
    log.log(step=3, **(SAMPLE | {"reward": 0.0}))
    log.close()
    rows, broken = read_json_lines(tmp_path / "samples.jsonl")
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 1.0), (2, 1.0), (3, 0.0)]
    assert not broken


def test_sample_arrays_must_match(tmp_path):
    log = SampleLog(tmp_path)
    with pytest.raises(ValueError, match="each of 2 tokens, got 1 and 2"):
        log.log(step=1, **(SAMPLE | {"versions": [3]}))
    log.close()


def test_events_survive_a_resume(tmp_path):
    for kind in ("interrupted", "resume"):
        log = EventLog(tmp_path)
        log.log(kind, "text", step=3, time_s=1.5)
        log.close()
    rows, _ = read_json_lines(tmp_path / "events.jsonl")
    assert [row["kind"] for row in rows] == ["interrupted", "resume"]
    assert rows[0] == {"time_s": 1.5, "step": 3, "kind": "interrupted", "text": "text"}


def test_an_event_is_not_glued_to_a_torn_one(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b'{"kind": "checkpoint"}\n{"kind": "inter')
    log = EventLog(tmp_path)
    log.log("resume", "text", step=3, time_s=1.5)
    log.close()
    rows, broken = read_json_lines(tmp_path / "events.jsonl")
    assert [row["kind"] for row in rows] == ["checkpoint", "resume"]
    assert not broken


def test_importing_telemetry_does_not_load_torch():
    code = "import sys, areal_core.telemetry; sys.exit(any(name in sys.modules for name in ('torch', 'tensorboard')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_replace_file_leaves_no_temporary_file(tmp_path):
    replace_file(tmp_path / "a", b"1")
    replace_file(tmp_path / "a", b"2")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"2")]
