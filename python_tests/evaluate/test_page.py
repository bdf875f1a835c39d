"""The page of an evaluation, as text and in a browser."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from areal_core.cli import main
from areal_core.evaluate.page import _response
from areal_core.evaluate.results import Response

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
VOID = {"meta", "rect", "line", "path", "circle", "br"}


class Structure(HTMLParser):
    """Open elements, which must close in order, and the visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]):
            self.text += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two models, one of them greedy in name only, on a data set whose texts are hostile."""
    path = tmp_path_factory.mktemp("data") / "a&b.jsonl"
    lines = [{"prompt": f"{i}+{i}=", "answer": "<script>alert(1)</script><!--slot:title-->"} for i in range(5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = tmp_path_factory.mktemp("out")
    arguments = ["chain_policy", "<b>=chain_policy", "--data", "chain_arithmetic", str(path), "--problems", "9"]
    assert main(["eval", *arguments, "--samples", "4", "--k", "2", "4", "--output", str(folder)]) == 0
    return folder


def test_the_page_holds_what_the_table_says(folder):
    page = Structure()
    page.feed((folder / "evaluation.html").read_text())
    assert not page.open
    assert len(set(page.ids)) == len(page.ids)
    assert page.tags.count("svg") == 3 * 2, "intervals, curves and problems of two data sets"
    assert "alert(1)" in page.text, "as text"
    assert page.tags.count("script") == 1
    assert "<!--slot:title-->" in page.text
    for line in (folder / "table.txt").read_text().splitlines():
        for value, interval in re.findall(r"(\S+) (\[[^\]]+\])", line):
            assert f"{value}{interval}" in page.text
    assert "https://" not in (folder / "evaluation.html").read_text().replace("http://www.w3.org", "")


def test_responses_are_shown_as_text():
    hostile = Response("<img src=x onerror=alert(1)>" + "x" * 5000, 0.0, 7, "length", None)
    shown = _response("<m>", 0.25, [hostile] * 4)
    assert "<img" not in shown
    assert "&lt;img" in shown
    assert "<m>" not in shown
    assert "25.0% of 4 right; the first, cut after 7 tokens" in shown
    assert len(shown) < 2500


def test_one_sample_has_no_curves(tmp_path):
    arguments = ["chain_policy", "--data", "chain_arithmetic", "--problems", "1", "--temperature", "0"]
    assert main(["eval", *arguments, "--output", str(tmp_path)]) == 0
    assert len(json.loads((tmp_path / "results.jsonl").read_text())["responses"]) == 1, "greedy ones are all alike"
    page = (tmp_path / "evaluation.html").read_text()
    assert "nan" not in page.lower()
    assert "One sample for each problem" in page
    assert "decoded greedily" in page


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_shows_the_page_without_complaint(folder, tmp_path):
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    result = subprocess.run(
        [*command, f"--user-data-dir={tmp_path}", (folder / "evaluation.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert 'data-ready="true"' in result.stdout
    assert "CONSOLE" not in result.stderr, result.stderr
