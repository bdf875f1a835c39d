"""docs/evaluation.md: its code runs, and it names every option and file."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from areal_core.cli import main
from areal_core.evaluate import command, results

GUIDE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()


def test_the_code_prints_what_it_should(capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    exec(compile(block, "evaluation.md", "exec"), {})
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("[0.         0.5        1.         0.83333333] Estimate(value=0.58")
    # Of four threes: 6 6 5 and 6 6 - (right), 6 5 - twice (a coin).
    assert float(out[1]) == pytest.approx(0.75)


def test_every_option_and_file_is_explained():
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        main(["eval", "--help"])
    options = set(re.findall(r"(?m)^  (--[\w-]+)", shown.getvalue()))
    assert len(options) > 10
    assert not {option for option in options if f"`{option}`" not in GUIDE}
    files = (command.PAGE_FILE, command.TEXT_FILE, command.MARKDOWN_FILE, command.JSON_FILE)
    for name in (*files, results.RESULTS_FILE, results.SETTINGS_FILE):
        assert f"`{name}`" in GUIDE
