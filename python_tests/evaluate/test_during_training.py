"""Evaluation on the way: metrics of pass@k, maj@k and intervals where the configuration asks for them."""

import numpy as np
import pytest

from areal_core.cli import main
from areal_core.errors import ConfigError
from areal_core.evaluate import is_right, majority_at_k, pass_at_k
from areal_core.rl import evaluator
from areal_core.rl.config_file import load_config, save_config
from areal_core.rl.evaluator import evaluate_model
from areal_core.telemetry import read_metrics

SETTINGS = ["evaluate.problems=16", "evaluate.samples=4"]


def test_without_k_nothing_is_added(monkeypatch):
    monkeypatch.setattr(evaluator, "bootstrap", None)  # not even called
    assert set(evaluate_model(load_config(None, SETTINGS))) == {
        "eval/version",
        "eval/accuracy_greedy",
        "eval/accuracy_sampled",
        "eval/accuracy_sampled_standard_error",
        "eval/response_tokens_mean",
    }


def test_with_k_the_same_samples_say_more(monkeypatch):
    results = []
    run = evaluator.evaluate_policy
    monkeypatch.setattr(evaluator, "evaluate_policy", lambda *a, **b: results.append(run(*a, **b)) or results[-1])
    before = evaluate_model(load_config(None, SETTINGS))
    metrics = evaluate_model(load_config(None, [*SETTINGS, "evaluate.k=[1, 2, 4]"]))
    assert {key: metrics[key] for key in before} == before
    right = is_right(results[-1].rewards)
    assert metrics["eval/pass_at_1"] == pytest.approx(before["eval/accuracy_sampled"])
    for k in (2, 4):
        assert metrics[f"eval/pass_at_{k}"] == pytest.approx(pass_at_k(right.sum(axis=1), 4, k).mean())
    assert metrics["eval/pass_at_1"] <= metrics["eval/pass_at_2"] <= metrics["eval/pass_at_4"]
    assert metrics["eval/accuracy_sampled_low"] < before["eval/accuracy_sampled"]
    assert metrics["eval/accuracy_sampled_high"] > before["eval/accuracy_sampled"]
    assert metrics["eval/maj_at_1"] == pytest.approx(before["eval/accuracy_sampled"]), (
        "every response of a chain answers"
    )
    assert metrics["eval/maj_at_4"] != metrics["eval/pass_at_4"]


def test_votes_are_counted_by_answer(monkeypatch):
    votes = []

    def record(answers, rewards, k):
        votes.append((answers, rewards))
        return majority_at_k(answers, rewards, k)

    monkeypatch.setattr(evaluator, "majority_at_k", record)
    metrics = evaluate_model(load_config(None, [*SETTINGS, "evaluate.k=[4]"]))
    assert len(votes) == 16
    for answers, rewards in votes:
        assert len({answer for answer, reward in zip(answers, rewards, strict=True) if reward}) <= 1
    assert metrics["eval/maj_at_4"] == pytest.approx(np.mean([majority_at_k(a, r, 4) for a, r in votes]))


def test_a_run_records_them(tmp_path):
    run = [f"run_dir={tmp_path}", "train.steps=1", "rollout.batch_groups=4", "rollout.group_size=2"]
    quiet = ["telemetry.progress=none", "telemetry.report=false", "telemetry.tensorboard=false"]
    assert main(["train", *run, *quiet, *SETTINGS, "evaluate.k=[4]"]) == 0
    rows = [row for row in read_metrics(tmp_path) if "eval/pass_at_4" in row]
    assert [row["step"] for row in rows] == [0, 1]
    assert all(
        row["eval/accuracy_sampled_low"] <= row["eval/accuracy_sampled"] <= row["eval/pass_at_4"] for row in rows
    )


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("evaluate.k=[5]", "evaluate.k: expected numbers from 1 to evaluate.samples = 4, got [5]"),
        ("evaluate.k=[0]", "evaluate.k: expected numbers from 1 to evaluate.samples = 4, got [0]"),
        ("evaluate.k=2", "evaluate.k: expected a list, got 2"),
        ("evaluate.k=[a]", "evaluate.k[0]: expected a whole number, got 'a'"),
    ],
)
def test_a_k_out_of_range_is_refused(override, text):
    with pytest.raises(ConfigError, match="evaluate") as caught:
        load_config(None, [*SETTINGS, override])
    assert str(caught.value) == text


def test_the_list_of_k_survives_a_file(tmp_path):
    config = load_config(None, [*SETTINGS, "evaluate.k=[2, 4]"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml", []) == config
