"""The command line as it is typed."""

import pytest

from areal_core.cli import main


def test_overrides_may_stand_on_both_sides_of_an_option(tmp_path, capsys):
    """A bad value at the end is reached, so all before it was read."""
    arguments = ["train", "seed=1", f"run_dir={tmp_path / 'run'}", "--fresh", "train.steps=2", "rollout.eta=-1"]
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("areal-core train: rollout.eta: expected a whole number >= 0, or inf")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--frsh"],
        ["train", "--frsh=1"],
        ["train", "seed=1", "--fresh", "examples/chain.yaml"],
        ["report", "run", "seed=1"],
        ["info", "more"],
    ],
)
def test_what_nobody_understands_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert f"unrecognized arguments: {arguments[-1]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("model.path=nowhere", "model.path: expected a model directory or one of chain_policy, got 'nowhere'"),
        (
            "task.name=chess",
            "get_task: expected a task among chain_arithmetic, jsonl, parquet, reasoning_gym, got 'chess'",
        ),
        ("task.name=jsonl", "get_task: expected option path of jsonl, got None"),
        ("task={name: jsonl, options: {path: x.jsonl}}", "task.options.path: expected an existing file, got 'x.jsonl'"),
        ("task.options.depth=3", "get_task: expected options of chain_arithmetic among min_terms, "),
    ],
)
def test_a_wrong_setting_ends_in_one_line(override, text, tmp_path, capsys):
    assert main(["train", f"run_dir={tmp_path / 'run'}", override]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"areal-core train: {text}")
    assert error.count("\n") == 1
