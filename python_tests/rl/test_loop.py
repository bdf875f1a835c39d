"""Whole runs of the real loop: real processes, real engine, real kernels, a few steps each."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_core.cli import main
from areal_core.rl.evaluator import Evaluator
from areal_core.telemetry import read_metrics

SMALL = [
    "rollout.batch_groups=8",
    "rollout.group_size=4",
    "train.minibatches=2",
    "evaluate.problems=16",
    "evaluate.every=3",
    "checkpoint.every=2",
    "telemetry.progress=none",
    "telemetry.tensorboard=false",
]


def settings(run_dir, *more):
    return [*SMALL, f"run_dir={run_dir}", *more]


def steps_of(run_dir):
    """The training steps; the metrics also hold the evaluation before the first one, as step 0."""
    return [row for row in read_metrics(run_dir) if row["step"] > 0]


def events(run_dir):
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


class Running:
    """`areal-core train` in a process that the test watches through its metrics file."""

    def __init__(self, run_dir, *arguments):
        self.run_dir = run_dir
        command = [sys.executable, "-m", "areal_core.cli", "train", *settings(run_dir, *arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def wait_for_step(self, step, seconds=120):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            rows = steps_of(self.run_dir)
            if rows and rows[-1]["step"] >= step:
                return
            if self.process.poll() is not None:
                pytest.fail(f"the run ended before step {step}: {self.process.stdout.read()}")
            time.sleep(0.02)
        self.process.kill()
        pytest.fail(f"no step {step} within {seconds} s")

    def generators(self):
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                command = (path / "cmdline").read_text()
            except OSError:
                continue
            if parent == self.process.pid and "spawn_main" in command:
                found.append(int(path.name))
        return found

    def finish(self, seconds=180):
        out, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, out


@pytest.mark.parametrize("eta", ["0", "1", "4", "inf"])
def test_a_run_leaves_a_complete_record(tmp_path, eta):
    run_dir = tmp_path / "run"
    assert main(["train", *settings(run_dir, f"rollout.eta={eta}", "train.steps=4")]) == 0
    before, *rows = read_metrics(run_dir)
    assert before["step"] == 0
    assert 0 <= before["eval/accuracy_sampled"] <= 1
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["count/groups"] == 8
        assert row["staleness/max"] <= float(eta)
        assert row["tokens/generated"] >= 0
        assert 0 <= row["idle/generator"] <= 1
        assert 0 <= row["idle/trainer"] <= 1
        assert math.isfinite(row["loss/loss"])
        assert math.isfinite(row["optim/grad_norm"])
        assert row["publish/bytes"] > 100_000
        assert row["publish/bytes_over_bound"] == 1
        if row["publish/loads"]:
            assert 0 < row["publish/pause_s"] <= row["publish/pause_max_s"] < row["publish/visible_p95_s"]
            assert row["publish/visible_p50_s"] <= row["publish/visible_p95_s"] < row["time_s"]
    assert sum(row["publish/loads"] for row in rows) > 0
    assert "Weight update" in (run_dir / "report.html").read_text()
    assert "eval/accuracy_sampled" in rows[2]
    assert "eval/accuracy_sampled" in rows[3]
    assert "eval/accuracy_sampled" not in rows[1]
    assert (run_dir / "report.html").stat().st_size > 10_000
    assert (run_dir / "checkpoints" / "step_000004" / "policy" / "model.safetensors").exists()
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 8
    assert all(len(s["tokens"]) == len(s["versions"]) == len(s["logprobs"]) > 0 for s in samples)
    trace = json.loads((run_dir / "trace.json").read_text())
    assert {"generate", "weight_update", "publish", "forward_backward"} <= {e["name"] for e in trace if e["ph"] == "X"}


def test_synchronous_runs_repeat_bit_for_bit(tmp_path):
    keys = ("reward/mean", "loss/loss", "optim/grad_norm", "tokens/trained", "response/tokens_mean")
    runs = []
    for name in ("a", "b"):
        assert main(["train", *settings(tmp_path / name, "rollout.eta=0", "train.steps=3", "seed=5")]) == 0
        runs.append([[row[key] for key in keys] for row in steps_of(tmp_path / name)])
    assert runs[0] == runs[1]


def test_the_seed_matters(tmp_path):
    for seed in (1, 2):
        assert main(["train", *settings(tmp_path / str(seed), "rollout.eta=0", "train.steps=1", f"seed={seed}")]) == 0
    assert steps_of(tmp_path / "1")[0]["tokens/trained"] != steps_of(tmp_path / "2")[0]["tokens/trained"]


def test_an_existing_run_is_neither_overwritten_nor_mixed_up(tmp_path, capsys):
    arguments = ["train", *settings(tmp_path / "run", "train.steps=1")]
    assert main(arguments) == 0
    assert main(arguments) == 2
    assert "--resume continues it, --fresh deletes it" in capsys.readouterr().err
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert main([*arguments, "--fresh"]) == 0
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert len(steps_of(tmp_path / "run")) == 1


def test_a_killed_generator_is_replaced_and_nothing_is_lost(tmp_path):
    run_dir = tmp_path / "run"
    running = Running(run_dir, "train.steps=12", "generate.generators=2")
    running.wait_for_step(2)
    os.kill(running.generators()[0], signal.SIGKILL)
    code, out = running.finish()
    assert code == 0, out
    rows = steps_of(run_dir)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[-1]["count/generator_restarts"] == 1
    assert all(row["count/groups"] == 8 and row["staleness/max"] <= 4 for row in rows)
    assert [e["kind"] for e in events(run_dir)].count("generator_restart") == 1


def test_a_killed_trainer_resumes_with_the_same_history(tmp_path):
    run_dir = tmp_path / "run"
    running = Running(run_dir, "train.steps=200")
    running.wait_for_step(5)
    running.process.kill()
    running.finish()
    before = {row["step"]: row for row in steps_of(run_dir)}
    assert main(["train", *settings(run_dir, "train.steps=8"), "--resume"]) == 0
    rows = steps_of(run_dir)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    (resumed,) = [e for e in events(run_dir) if e["kind"] == "resume"]
    kept = resumed["step"]
    assert kept >= 4
    assert [before[step] for step in range(1, kept + 1)] == rows[:kept]
    assert all(later["time_s"] > earlier["time_s"] for earlier, later in itertools.pairwise(rows))


def test_ctrl_c_checkpoints_and_leaves(tmp_path):
    run_dir = tmp_path / "run"
    running = Running(run_dir, "train.steps=500", "checkpoint.every=0")
    running.wait_for_step(2)
    running.process.send_signal(signal.SIGINT)
    code, out = running.finish()
    assert code == 130, out
    step = read_metrics(run_dir)[-1]["step"]
    assert f"interrupted after step {step}" in out
    assert (run_dir / "checkpoints" / f"step_{step:06d}" / "manifest.json").exists()
    assert main(["train", *settings(run_dir, f"train.steps={step + 1}"), "--resume"]) == 0
    assert read_metrics(run_dir)[-1]["step"] == step + 1


def test_a_corrupt_checkpoint_is_passed_over(tmp_path):
    run_dir = tmp_path / "run"
    assert main(["train", *settings(run_dir, "train.steps=4")]) == 0
    path = run_dir / "checkpoints" / "step_000004" / "policy" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(bytes(content))
    assert main(["train", *settings(run_dir, "train.steps=5"), "--resume"]) == 0
    kinds = {e["kind"]: e["text"] for e in events(run_dir)}
    assert "model.safetensors is corrupt" in kinds["warning"]
    assert "step 2" in kinds["resume"]
    assert [row["step"] for row in steps_of(run_dir)] == [1, 2, 3, 4, 5]


def test_a_run_interrupted_before_its_first_step_can_be_resumed(tmp_path, monkeypatch, capsys):
    evaluate = Evaluator.run

    def interrupted_evaluation(self):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self)

    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "run", interrupted_evaluation)
        assert main(["train", *settings(run_dir, "train.steps=2")]) == 130
    assert "interrupted after step 0" in capsys.readouterr().out
    assert main(["train", f"run_dir={run_dir}", "--resume"]) == 0
    assert [row["step"] for row in read_metrics(run_dir)] == [0, 1, 2]


def test_resume_without_a_file_keeps_the_settings_of_the_run(tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert main(["train", *settings(run_dir, "train.steps=1", "train.learning_rate=3e-5")]) == 0
    assert main(["train", f"run_dir={run_dir}", "train.steps=2", "--resume"]) == 0
    assert "learning_rate: 3.0e-05" in (run_dir / "config.yaml").read_text()
    assert steps_of(run_dir)[-1]["count/groups"] == 8
    assert main(["train", f"run_dir={run_dir}", "train.steps=3", "rollout.group_size=2", "--resume"]) == 2
    assert "rollout.group_size: a resumed run must keep its value 4, got 2" in capsys.readouterr().err


def test_nothing_to_resume_is_a_clear_error(tmp_path, capsys):
    assert main(["train", *settings(tmp_path / "run"), "--resume"]) == 2
    assert "no checkpoint to resume from" in capsys.readouterr().err


def test_bad_lines_of_a_dataset_are_counted_and_training_goes_on(tmp_path):
    data = tmp_path / "problems.jsonl"
    lines = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "", "answer": "1"}, {"prompt": "9*9" * 30, "answer": "1"}]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = f"task.options={{path: {data}, eval_path: {data}}}"
    run_dir = tmp_path / "run"
    arguments = settings(run_dir, "task.name=jsonl", options, "train.steps=2", "evaluate.every=0")
    assert main(["train", *arguments]) == 0
    rows = steps_of(run_dir)
    assert rows[-1]["count/bad_problems"] > 0
    assert rows[-1]["count/groups"] == 8


def test_mistakes_in_the_command_line_name_the_key(tmp_path, capsys):
    assert main(["train", f"run_dir={tmp_path}", "rollout.etta=1"]) == 2
    assert "rollout.etta: unknown key; did you mean rollout.eta?" in capsys.readouterr().err
    assert main(["train", f"run_dir={tmp_path}", "model.path=nowhere"]) == 2
    assert "expected a model directory or one of chain_policy, got 'nowhere'" in capsys.readouterr().err
    assert main(["train", f"run_dir={tmp_path}", "task.name=chess"]) == 2
    assert "'chess'" in capsys.readouterr().err


def test_evaluation_of_a_model_directory(capsys):
    assert main(["eval", "chain_policy", "evaluate.problems=64"]) == 0
    out = capsys.readouterr().out
    assert "accuracy_greedy" in out
    assert "response_tokens_mean" in out


def test_info_says_what_is_installed(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "instruction set" in out
    assert "torch" in out
