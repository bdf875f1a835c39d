"""areal-core simulate as it is typed."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from areal_core.cli import main
from areal_core.simulate import SimulateConfig

EXAMPLES = Path(__file__).parents[2] / "examples" / "simulate"
QUICK = ("steps=8", "skip_steps=2", "rollout.batch_groups=16", "cluster.gpus=16")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(path), "steps=4", "skip_steps=1"]) == 0
    assert "tokens trained" in capsys.readouterr().out


def test_json_holds_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *QUICK, "--json", "seed=1"]) == 0
    figures = json.loads(capsys.readouterr().out)
    groups = figures["groups"]
    assert groups["submitted"] == groups["trained"] + groups["finished"] + groups["in_flight"] + groups["dropped"]
    assert figures["tokens_per_s"] > 0


def test_a_sweep_writes_a_table_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shares, etas = ["--shares", "0.5,0.75,0.99"], ["--etas", "0,2"]
    arguments = ["simulate", *QUICK, "train.gpus_per_replica=4", *shares, *etas, "--output", str(tmp_path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "12 (75.0%)" in printed
    assert "99" not in printed, "this share leaves no replica"
    assert "Let " in printed
    for name in ("sweep.html", "sweep.svg"):
        text = (tmp_path / name).read_text()
        assert text.count('class="curve') == 2
    assert "<td>8 (50.0%)</td>" in (tmp_path / "sweep.html").read_text()
    if "matplotlib" in sys.modules:
        assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_advice_is_the_lowest_eta_that_is_as_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", *QUICK, "--shares", "0.5,0.75", "--etas", "0,1,8", "--json", "--output", str(tmp_path)]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    best = max(cell["tokens_per_s"] for cell in found["results"])
    good = [cell for cell in found["results"] if cell["tokens_per_s"] >= 0.98 * best]
    assert found["advice"]["eta"] == min(cell["eta"] for cell in good)
    assert len(found["results"]) == 6


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--run", "nowhere"], "read_run: expected the folder of a run, got nowhere"),
        (["--published", "steps=3"], "simulate: expected no CONFIG and no key=value"),
        (["model.name=qwen2.5-8b"], "model: expected a directory, a config.json or a public name"),
        (["cluster.gpu=3"], "cluster.gpu: unknown key; did you mean cluster.gpus?"),
        (["--sweep", "cluster.colocated=true", "rollout.eta=0"], "cluster.colocated: expected false in a sweep"),
        (["--shares", "1.5"], "cluster.generator_share: expected in (0, 1), got 1.5"),
        (["lengths.run=nowhere"], "lengths.run: expected a run with samples"),
    ],
)
def test_a_mistake_ends_in_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"areal-core simulate: {text}")


def write_run(folder: Path, *, eta: int, train_s: float, generate_s: float) -> None:
    """A run as the loop records it, of which everything is known: 16 responses of 10 tokens a step, one generator."""
    settings = {
        "rollout": {"group_size": 4, "batch_groups": 4, "eta": eta, "pipeline_depth": 1},
        "generate": {"generators": 1, "max_slots": 0, "max_new_tokens": 24, "on_update": "recompute"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    step_s = max(train_s, generate_s) if eta else train_s + generate_s
    metrics = [
        {
            "step": step,
            "time/forward_backward_s": train_s,
            "time/wait_s": step_s - train_s,
            "time/generate_s": generate_s,
            "time/verify_s": generate_s / 4,
            "tokens/generated": 160,
            "idle/generator": 1 - generate_s / step_s,
            "response/tokens_mean": 10.0,
            "staleness/histogram": [0, 160] if eta else [160],
        }
        for step in range(1, 21)
    ]
    samples = [{"step": step, "tokens": ["x"] * 10} for step in range(1, 21)]
    for name, rows in (("metrics.jsonl", metrics), ("samples.jsonl", samples)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("eta", [0, 1])
@pytest.mark.parametrize(("train_s", "generate_s"), [(0.5, 0.2), (0.2, 0.5)])
def test_a_run_of_known_times_is_simulated_as_it_was(
    eta: int, train_s: float, generate_s: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, eta=eta, train_s=train_s, generate_s=generate_s)
    assert main(["simulate", "--run", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for key in ("step_s", "generated_per_s", "trainer_idle", "generator_idle"):
        assert found["simulated"][key] == pytest.approx(found["measured"][key], rel=0.02, abs=0.01), key
    if train_s > generate_s or not eta:
        np.testing.assert_allclose(found["simulated"]["ages"], found["measured"]["ages"], atol=1e-6)
    assert main(["simulate", "--run", str(tmp_path)]) == 0
    assert "tokens of age 0" in capsys.readouterr().out


def test_lengths_of_a_run_are_drawn_from_its_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, eta=1, train_s=1.0, generate_s=1.0)
    assert main(["simulate", *QUICK, f"lengths.run={tmp_path}", "lengths.prompt=5", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["tokens_per_s"] * figures["step_s"] == pytest.approx(16 * 16 * 15)


def test_a_run_that_measured_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, eta=0, train_s=1.0, generate_s=0.0)
    assert main(["simulate", "--run", str(tmp_path)]) == 2
    assert "expected steps with times of the generators" in capsys.readouterr().err


def test_the_guide_names_every_setting() -> None:
    """Each in backticks: `section.key`, or `key` where the section stands before it."""
    guide = (EXAMPLES.parents[1] / "docs" / "simulator.md").read_text()
    written = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`", guide))))
    names = {field.name for field in dataclasses.fields(SimulateConfig)}
    for section in vars(SimulateConfig()).values():
        if dataclasses.is_dataclass(section):
            names |= {field.name for field in dataclasses.fields(section)}
    assert names <= written, f"not in docs/simulator.md: {sorted(names - written)}"
