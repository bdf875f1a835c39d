"""`areal-core eval` as it is typed: tables, files, reruns, and what it refuses."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from areal_core.assets import resolve_model
from areal_core.cli import main
from areal_core.errors import ConfigError
from areal_core.evaluate import majority_at_k, sampling
from areal_core.evaluate.data import load_data_sets
from areal_core.evaluate.results import Results
from areal_core.model import load_model, load_tokenizer, save_model

CHAIN = ["chain_policy", "--data", "chain_arithmetic"]
ARGUMENTS = ["--problems", "12", "--samples", "4", "--k", "2", "4"]


def evaluate(folder: Path, *more: str, models: tuple[str, ...] = ("chain_policy",)) -> int:
    data = [] if "--data" in more else ["--data", "chain_arithmetic"]
    return main(["eval", *models, *data, *ARGUMENTS, "--output", str(folder), *more])


def rows(folder: Path) -> dict[tuple[str, str, int], dict]:
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    found = {(row["model"], row["data"], row["index"]): row for row in lines}
    assert len(found) == len(lines), "no problem is there twice"
    return found


@pytest.fixture
def other_policy(tmp_path: Path) -> Path:
    """The bundled policy with another head."""
    source, directory = resolve_model("chain_policy"), tmp_path / "other"
    model = load_model(source)
    model.named_weights()["lm_head.weight"].mul_(0.5)
    save_model(model, directory)
    load_tokenizer(source).save(directory)
    return directory


def test_two_models_on_two_data_sets(tmp_path, other_policy, capsys):
    path = tmp_path / "sums.jsonl"
    path.write_text('{"prompt": "1+2=", "answer": "3"}\n{"prompt": "2*3-1=", "answer": "nothing"}\n')
    data = ["--data", "chain_arithmetic", f"{path}:verifier=exact"]
    folder = tmp_path / "out"
    assert evaluate(folder, *data, models=("chain_policy", f"flat={other_policy}")) == 0
    out = capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["models"] == ["chain_policy", "flat"]
    assert summary["data"] == ["chain_arithmetic", "sums"]
    found = rows(folder)
    assert len(found) == 2 * (12 + 2)
    for cell in summary["cells"]:
        shares = [
            np.mean([response["reward"] for response in row["responses"]])
            for key, row in sorted(found.items())
            if key[:2] == (cell["model"], cell["data"])
        ]
        assert cell["pass_at"]["1"]["value"] == pytest.approx(np.mean(shares))
        assert cell["pass_at"]["4"]["value"] == pytest.approx(np.mean(np.array(shares) > 0))
        assert cell["shares"] == pytest.approx(shares)
        assert cell["problems"] == len(shares)
        assert f"{100 * np.mean(shares):.1f} [" in out
        majorities = [
            majority_at_k([r["answer"] for r in row["responses"]], [r["reward"] for r in row["responses"]], 4)
            for key, row in sorted(found.items())
            if key[:2] == (cell["model"], cell["data"])
        ]
        assert cell["maj_at"]["4"]["value"] == pytest.approx(np.mean(majorities))
    first, second = summary["cells"][0], summary["cells"][1]
    assert first["gain"] is None
    assert second["gain"]["value"] == pytest.approx(second["pass_at"]["1"]["value"] - first["pass_at"]["1"]["value"])
    for name in ("table.txt", "table.md"):
        text = (folder / name).read_text()
        assert "averaged over 4 samples for each problem, at temperature 0.6" in text
        assert text.count("flat") == 3


def test_responses_are_recorded_as_they_were_sampled(tmp_path):
    assert evaluate(tmp_path, "--max-new-tokens", "3") == 0
    task = load_data_sets(["chain_arithmetic"], 12)[0].task
    for row in rows(tmp_path).values():
        problem = next(p for p in load_data_sets(["chain_arithmetic"], 12)[0].problems if p.prompt == row["prompt"])
        assert len(row["responses"]) == 4
        for response in row["responses"]:
            assert response["tokens"] == len(response["text"]) + (response["finish"] == "stop")
            assert response["tokens"] == 3 or response["finish"] == "stop"
            assert response["reward"] == task.verify(problem, response["text"])
            assert response["answer"] == (response["text"].rpartition(")")[2] or None)


LONG = ["--data", "chain_arithmetic:min_terms=6,max_terms=8"]


def responses(folder: Path) -> list[dict]:
    return [response for _, row in sorted(rows(folder).items()) for response in row["responses"]]


def test_sampling_settings_reach_the_engine(tmp_path):
    runs = {
        "plain": [],
        "one slot": ["--slots", "1"],
        "short": ["--max-new-tokens", "2"],
        "seed": ["--seed", "1"],
        "hot": ["--temperature", "5"],
        "top-k": ["--temperature", "5", "--top-k", "1"],
        "top-p": ["--temperature", "5", "--top-p", "0.001"],
    }
    found = {}
    for name, options in runs.items():
        assert evaluate(tmp_path / name, *LONG, *options) == 0
        found[name] = responses(tmp_path / name)
    texts = {name: [response["text"] for response in listed] for name, listed in found.items()}
    assert len({len(text) for text in texts["plain"]}) > 3, "responses end at different times"
    assert found["one slot"] == found["plain"], "in the order of their numbers, not of their ends"
    assert all(text[:2] == short for text, short in zip(texts["plain"], texts["short"], strict=True))
    assert texts["seed"] != texts["plain"] != texts["hot"]
    assert len(set(texts["top-k"])) <= 12, "greedy: one response to a problem"
    assert texts["top-k"] == texts["top-p"]


def test_what_was_cut_is_counted(tmp_path):
    assert evaluate(tmp_path, *LONG, "--max-new-tokens", "2") == 0
    cut = [response["finish"] == "length" for response in responses(tmp_path)]
    (cell,) = json.loads((tmp_path / "summary.json").read_text())["cells"]
    assert 0 < cell["truncated"]["value"] < 1
    assert cell["truncated"]["value"] == pytest.approx(np.mean(cut))
    assert cell["truncated"]["value"] != 0.5
    assert cell["tokens"]["value"] == pytest.approx(np.mean([r["tokens"] for r in responses(tmp_path)]))


def test_the_template_is_put_around_the_prompt(tmp_path, capsys):
    assert evaluate(tmp_path, "--template", "A: {prompt}") == 2
    assert "cannot encode 'A: " in capsys.readouterr().err


def test_an_interrupted_evaluation_continues_to_the_same_results(tmp_path, monkeypatch, capsys):
    assert evaluate(tmp_path / "whole") == 0
    add, calls = Results.add, []

    def interrupted(self, *row):
        add(self, *row)
        calls.append(row)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Results, "add", interrupted)
        assert evaluate(tmp_path / "cut") == 130
    assert "areal-core eval: interrupted" in capsys.readouterr().err
    assert len(rows(tmp_path / "cut")) == 5
    with (tmp_path / "cut" / "results.jsonl").open("a") as file:
        file.write('{"model": "chain_policy", "da')  # a crash amid a line
    assert evaluate(tmp_path / "cut", "--slots", "3", "--threads", "2") == 0
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    summaries = [(tmp_path / name / "summary.json").read_bytes() for name in ("cut", "whole")]
    assert summaries[0] == summaries[1]


def test_what_is_there_is_not_sampled_again(tmp_path, other_policy, monkeypatch, capsys):
    assert evaluate(tmp_path / "out") == 0
    before = rows(tmp_path / "out")
    asked = []
    monkeypatch.setattr(sampling, "load_model", lambda directory: asked.append(directory) or load_model(directory))
    assert evaluate(tmp_path / "out", "--k", "3") == 0
    assert not asked, "another k needs no model"
    assert "pass@3" in capsys.readouterr().out
    assert evaluate(tmp_path / "out", models=("chain_policy", f"other={other_policy}")) == 0
    assert asked == [other_policy]
    assert {key: row for key, row in rows(tmp_path / "out").items() if key[0] == "chain_policy"} == before
    assert evaluate(tmp_path / "out", "--problems", "15") == 0
    assert len(rows(tmp_path / "out")) == 12 * 2 + 3


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--temperature", "1"], "holds an evaluation with temperature 0.6, got 1.0"),
        (["--samples", "5"], "holds an evaluation with samples 4, got 5"),
        (["--max-new-tokens", "5"], "holds an evaluation with max_new_tokens None, got 5"),
        (["--seed", "1"], "holds an evaluation with seed 0, got 1"),
        (["--top-p", "0.9"], "holds an evaluation with top_p 1.0, got 0.9"),
        (["--template", "0+{prompt}"], "holds an evaluation with template '{prompt}', got '0+{prompt}'"),
        (
            ["--data", "chain_arithmetic=chain_arithmetic:modulus=7"],
            "options of chain_arithmetic {}, got {'modulus': 7}",
        ),
    ],
)
def test_a_rerun_with_other_settings_is_refused(more, text, tmp_path, capsys):
    assert evaluate(tmp_path) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert evaluate(tmp_path, *more) == 2
    assert text in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_other_weights_and_other_problems_are_refused(tmp_path, other_policy, capsys):
    path, folder = tmp_path / "sums.jsonl", tmp_path / "out"
    path.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    assert evaluate(folder, "--data", str(path)) == 0
    assert evaluate(folder, "--data", str(path), models=(f"chain_policy={other_policy}",)) == 2
    assert "other files of model chain_policy" in capsys.readouterr().err
    assert evaluate(folder, "--data", str(path), models=(f"other={other_policy}",)) == 0
    assert evaluate(folder, "--data", str(path)) == 0
    assert evaluate(folder, "--data", str(path), models=("other=chain_policy",)) == 2
    assert "other files of model other" in capsys.readouterr().err, "a call without it does not forget it"
    path.write_text('{"prompt": "1+3=", "answer": "4"}\n')
    assert evaluate(folder, "--data", str(path)) == 2
    assert "expected prompt '1+2=' of problem 0 of sums, got '1+3='" in capsys.readouterr().err


def test_a_verifier_that_fails_counts_as_wrong_and_is_named(tmp_path, monkeypatch, capsys):
    from areal_core.tasks import ChainArithmetic

    verify = ChainArithmetic.verify

    def failing(self, problem, text):
        if problem.answer in "01234":
            raise RuntimeError("no")
        return verify(self, problem, text)

    monkeypatch.setattr(ChainArithmetic, "verify", failing)
    assert evaluate(tmp_path) == 0
    failed = [r for row in rows(tmp_path).values() for r in row["responses"] if r["reward"] is None]
    assert failed
    (cell,) = json.loads((tmp_path / "summary.json").read_text())["cells"]
    assert cell["failed"] == len(failed)
    assert cell["pass_at"]["1"]["value"] == cell["reward"]["value"] < 1
    assert "verifier failed" in capsys.readouterr().out
    assert evaluate(tmp_path) == 0, "and is read back"


def test_json_is_all_that_is_printed(tmp_path, capsys):
    assert evaluate(tmp_path, "--json", "--temperature", "0", "--samples", "1", "--k", "1") == 2, "k of 2 and 4 too"
    assert "--k: expected numbers from 1 to --samples = 1, got 2" in capsys.readouterr().err
    assert evaluate(tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "summary.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["chain_policy", "--samples", "4"], "--samples: expected --data beside it"),
        (["chain_policy", "other"], "expected one model and key=value overrides without --data, got 'other'"),
        (["nowhere", "--data", "chain_arithmetic"], "MODEL nowhere: expected a model directory or one of chain_policy"),
        (["chain_policy", "chain_policy", "--data", "chain_arithmetic"], "expected different labels"),
        (["chain_policy", "--data", "chess"], "expected a task among"),
        (["chain_policy", "--data", "chain_arithmetic:modulus"], "expected a task among"),
        (["chain_policy", "--data", "chain_arithmetic:modulus=7,x"], "expected key=value after the colon"),
        (["chain_policy", "--data", "chain_arithmetic:depth=7"], "expected options of chain_arithmetic among"),
        (["chain_policy", "--data", "a=chain_arithmetic", "a=chain_arithmetic"], "got 'a' twice"),
        (["chain_policy", "--data", "gone.jsonl"], "gone.jsonl"),
        ([*CHAIN, "--samples", "0"], "--samples: expected >= 1, got 0"),
        (
            [*CHAIN, "--temperature", "0", "--samples", "2"],
            "expected 1 at temper",
        ),
        ([*CHAIN, "--problems", "0"], "--problems: expected >= 1, got 0"),
        (
            [*CHAIN, "--template", "x"],
            "--template: expected a text with {prompt}",
        ),
        ([*CHAIN, "--top-p", "2"], "expected top_p in (0, 1], got 2"),
        ([*CHAIN, "--max-new-tokens", "128"], "expected a prompt of at most 0"),
        (
            [*CHAIN, "--max-new-tokens", "0"],
            "expected max_new_tokens >= 1, got 0",
        ),
    ],
)
def test_mistakes_end_in_one_line(arguments, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_a_folder_without_results_takes_any_settings(tmp_path, capsys):
    assert evaluate(tmp_path, "--max-new-tokens", "127") == 2
    assert "chain_arithmetic: problem chain10:" in capsys.readouterr().err
    assert evaluate(tmp_path, "--max-new-tokens", "100") == 0


def test_made_up_problems_are_different_ones():
    (data,) = load_data_sets(["tiny=chain_arithmetic:min_terms=2,max_terms=2"], 256)
    assert data.label == "tiny"
    assert 5 < len(data.problems) < 40, "there are no 256"
    assert len({problem.prompt for problem in data.problems}) == len(data.problems)


def test_files_are_taken_in_their_order(tmp_path):
    path = tmp_path / "my:file.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}", "answer": "{i}"}}\n' for i in range(5)))
    for spec, label in ((str(path), "my:file"), (f"five={path}", "five"), (f"{path}:verifier=numeric", "my:file")):
        (data,) = load_data_sets([spec])
        assert data.label == label
        assert [problem.prompt for problem in data.problems] == list("01234")
    with pytest.raises(ConfigError, match="expected key=value"):
        load_data_sets([f"{path}:eval_path=x"])
