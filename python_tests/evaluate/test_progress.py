"""The progress of an evaluation where there is no terminal, and in one."""

import io

import pytest
from rich.console import Console

from areal_core.assets import resolve_model
from areal_core.evaluate import progress
from areal_core.evaluate.data import load_data_sets
from areal_core.evaluate.progress import Progress
from areal_core.evaluate.results import ModelSource, Response, Results, SamplingSettings


@pytest.fixture
def results(tmp_path):
    data = load_data_sets(["chain_arithmetic"], 3)
    model = ModelSource.open("m", resolve_model("chain_policy"))
    with Results(tmp_path, SamplingSettings(samples=2), [model], data) as results:
        results.add("m", "chain_arithmetic", 1, RESPONSES)
        yield data, results


RESPONSES = [Response("1", 1.0, 2, "stop", "1"), Response("2", None, 3, "stop", "2")]


def test_a_line_when_the_last_problem_is_done(results):
    data, recorded = results
    ticks = iter([10.0, 52.0])
    file = io.StringIO()
    with Progress(["m"], data, recorded, file=file, clock=lambda: next(ticks)) as shown:
        shown.of("m")(data[0], RESPONSES)
        assert file.getvalue() == ""
        shown.of("m")(data[0], RESPONSES)
    assert file.getvalue() == "m on chain_arithmetic: 3 problems, 10 tokens, 42 s\n"


def test_a_terminal_shows_bars(results, monkeypatch):
    data, recorded = results
    monkeypatch.setattr(
        progress, "Console", lambda **options: Console(**{**options, "force_terminal": True, "width": 120})
    )
    file = io.StringIO()
    with Progress(["m"], data, recorded, file=file) as shown:
        shown.of("m")(data[0], RESPONSES)
    last = file.getvalue()
    assert "m on chain_arithmetic" in last
    assert "2/3" in last
    assert "pass@1 50.0%" in last
