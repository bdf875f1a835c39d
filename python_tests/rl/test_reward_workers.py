"""Runs of the real loop whose rewards come from worker processes."""

from areal_core.cli import main
from areal_core.telemetry import read_metrics

SMALL = [
    "rollout.batch_groups=8",
    "rollout.group_size=4",
    "train.minibatches=2",
    "train.steps=2",
    "evaluate.every=0",
    "telemetry.progress=none",
    "telemetry.tensorboard=false",
    "telemetry.report=false",
]


def run(path, *settings):
    assert main(["train", *SMALL, f"run_dir={path}", *settings]) == 0
    return [row for row in read_metrics(path) if row["step"] > 0]


def test_rewards_are_those_of_the_generator_itself(tmp_path):
    keys = ("reward/mean", "loss/loss", "optim/grad_norm", "tokens/trained")
    runs = [
        run(tmp_path / workers, "rollout.eta=0", "rollout.truncated=penalise", f"rollout.reward_workers={workers}")
        for workers in ("0", "2")
    ]
    assert [[row[key] for key in keys] for row in runs[0]] == [[row[key] for key in keys] for row in runs[1]]
    assert all(row["time/verify_s"] >= 0 for row in runs[1])
    assert sum(row["time/verify_s"] for row in runs[1]) > 0


def test_an_asynchronous_run_loses_no_sample(tmp_path):
    for row in run(tmp_path / "run", "rollout.reward_workers=1", "generate.generators=2"):
        assert row["count/groups"] == 8
        assert row["count/failed_samples"] == 0
        assert row["staleness/max"] <= 4
