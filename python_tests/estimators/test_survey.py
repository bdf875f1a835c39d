"""The command: its numbers, its table, its page in a browser, its picture, and what it says without matplotlib."""

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from areal_core.cli import main
from areal_core.estimators.survey import CASES, Survey, angle_deg, reward_weight, success_weight, take_survey

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
UNBIASED = {"REINFORCE", "RLOO", "ReMax", "PPO (exact critic)", "ORZ (exact critic)", "ORZ (untrained)"}


@pytest.fixture(scope="module")
def survey() -> Survey:
    return take_survey(4)


def test_rows(survey):
    rows = {row.label: row for row in survey.rows}
    assert len(rows) == len(CASES)
    assert {label for label, row in rows.items() if row.bias < 1e-10} == UNBIASED
    assert rows["Dr.GRPO"].length == pytest.approx(3 / 4, abs=1e-10)
    assert rows["Dr.GRPO"].angle_deg < 1e-6
    for label in UNBIASED:
        assert rows[label].prompt_weights == pytest.approx((1, 1, 1), abs=1e-10)
        assert rows[label].length == pytest.approx(1, abs=1e-10)
    for label in set(rows) - UNBIASED - {"Dr.GRPO"}:
        assert rows[label].angle_deg > 0.1, label
    assert all(row.noise == pytest.approx(math.sqrt(row.variance) / row.length / scale(rows)) for row in survey.rows)


def scale(rows):
    """|grad J|, from a row with length 1."""
    row = rows["RLOO"]
    return math.sqrt(row.variance) / row.noise


def test_curves_are_the_ops(survey):
    curves = {curve.label: dict(zip(curve.x, curve.y, strict=True)) for curve in survey.by_success}
    assert list(curves["RLOO"].values()) == pytest.approx([1] * len(curves["RLOO"]))
    assert list(curves["Dr.GRPO"].values()) == pytest.approx([3 / 4] * len(curves["Dr.GRPO"]))
    assert min(curves["GRPO"], key=curves["GRPO"].get) == pytest.approx(0.5)
    (original, r1), (dapo, _) = survey.by_response_length, survey.by_prompt_length
    assert original.y == pytest.approx([32 / tokens for tokens in original.x])
    assert dapo.y == pytest.approx([32 / tokens for tokens in dapo.x])
    assert r1.y == pytest.approx([1] * len(r1.x))
    untrained, blind, exact = survey.by_lambda
    assert untrained.x[-1] == pytest.approx(1)
    for curve in (untrained, blind):
        assert curve.y[-1] < 1e-12, "at lambda = 1 the critic is a mere baseline"
        assert all(a > b for a, b in zip(curve.y, curve.y[1:], strict=False))
        assert curve.y[0] > 0.1
    assert max(exact.y) < 1e-12
    for lam, curve in zip((1, 0.99, 0.95, 0.9), survey.reward_share, strict=True):
        assert curve.y == pytest.approx([lam ** (tokens - 1) for tokens in curve.x])


@pytest.mark.parametrize("group_size", [2, 8])
def test_the_weight_of_maxrl_in_closed_form(group_size):
    for p in (0.05, 0.5, 0.9):
        expected = (1 - (1 - p) ** group_size) / p - (1 - p) ** (group_size - 1)
        assert success_weight("maxrl", p, group_size, eps=0.0) == pytest.approx(expected, rel=1e-10)


def test_small_angles_are_accurate():
    import torch

    a, b = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([1.0, 1e-9], dtype=torch.float64)
    assert angle_deg(a, b) == pytest.approx(math.degrees(1e-9), rel=1e-6)
    assert angle_deg(a, -3 * a) == pytest.approx(180)


def test_the_reward_share_is_that_of_the_formula():
    assert reward_weight(0.9, 4) == pytest.approx([1, 0.9, 0.81, 0.729])


@pytest.mark.parametrize("group_size", [1, 9])
def test_group_sizes_out_of_range(group_size, capsys):
    assert main(["estimators", "--group-size", str(group_size)]) == 2
    assert "group size in [2, 8]" in capsys.readouterr().err


def test_the_command(tmp_path, capsys):
    assert main(["estimators", "--output", str(tmp_path / "out"), "--group-size", "2"]) == 0
    printed = capsys.readouterr().out
    for case in CASES:
        assert re.search(rf"^{re.escape(case.label)} +\d", printed, re.MULTILINE), case.label
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 80
    assert (tmp_path / "out" / "estimators.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "estimators.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 7
    assert "slot:" not in page
    assert not re.search(r'(src|href)="(?!#)', page), "the page needs nothing but itself"
    assert not re.search("nan|inf(?!o)", re.sub(r"<style.*?</style>", "", page, flags=re.DOTALL), re.IGNORECASE)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for reference in re.findall(r"(?:url\(|href=\")#([^)\"]+)", page):
        assert reference in ids
    assert not re.search("#1d1d1f(?!;)", page.split("</style>")[1]), "every colour follows the theme"


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
def test_the_page_in_a_browser(tmp_path, survey):
    from areal_core.estimators.page import render_page

    path = tmp_path / "page.html"
    path.write_text(render_page(survey), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--no-first-run"]
    flags += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    result = subprocess.run([BROWSER, *flags, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert 'data-ready="true"' in result.stdout
    assert not [line for line in result.stderr.splitlines() if "CONSOLE" in line]


def test_without_matplotlib_the_table_is_printed_and_the_error_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["estimators", "--output", str(tmp_path / "out"), "--group-size", "2"]) == 2
    captured = capsys.readouterr()
    assert "RLOO" in captured.out
    assert "pip install matplotlib" in captured.err
    assert not (tmp_path / "out").exists()


def test_the_guide_runs(capsys):
    guide = (Path(__file__).parents[2] / "docs" / "estimators.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/estimators.md", "exec"), {})
    assert "variance" in capsys.readouterr().out
