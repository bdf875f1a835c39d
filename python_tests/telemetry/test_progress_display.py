import io
import itertools
import math

import pytest
import torch
from rich.console import Console

from areal_core.telemetry import Progress
from areal_core.telemetry.format import compact, duration, finite, percent, sparkline
from areal_core.telemetry.progress import AGE_STYLES, sample_text

METRICS = {
    "step": 10,
    "version": 10,
    "reward/mean": 0.31,
    "reward/accuracy": 0.412,
    "response/tokens_mean": 14.23,
    "staleness/mean": 0.9,
    "staleness/max": 2,
    "rate/generated_tokens_per_s": 12_345.0,
    "rate/trained_tokens_per_s": 950.0,
    "idle/generator": 0.05,
    "idle/trainer": 0.091,
    "loss/entropy": 0.5,
    "eval/accuracy_greedy": 0.5,
}
SAMPLE = {"prompt": "1+1=", "tokens": ["2", "\n", "\x1b[2J"], "versions": [9, 10, 10], "reward": 1.0}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_screen(progress):
    console = Console(file=io.StringIO(), width=120)
    console.print(progress._render())
    return console.file.getvalue()


def test_plain_prints_every_n_steps_and_the_last(capsys):
    with Progress(25, "run", plain=True, every=10) as progress:
        for step in range(1, 26):
            progress.update(METRICS | {"step": step})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["10/25", "20/25", "25/25"]


def test_plain_line_holds_the_numbers():
    clock = itertools.count(0, 3.0)
    progress = Progress(40, "run", plain=True, every=100, clock=lambda: next(clock))
    progress.update(METRICS | {"step": 9})
    progress.update(METRICS)
    assert progress.line() == (
        "step 10/40  acc 41.2%  eval 50.0%  reward 0.31  len 14.2  stale 0.9/2  gen 12.3k tok/s  train 950 tok/s  "
        "idle gen 5.0%  idle train 9.1%  left 1:27 min"
    )


def test_no_terminal_means_plain(capsys):
    with Progress(1, "run", every=1) as progress:
        progress.update(METRICS)
    assert capsys.readouterr().out.startswith("step 10/1  acc 41.2%")


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("missing", [*METRICS, "all"])
def test_missing_keys_are_left_out(plain, missing):
    kept = {} if missing == "all" else {key: value for key, value in METRICS.items() if key != missing}
    with Progress(None, "run", plain=plain, every=1, file=io.StringIO()) as progress:
        progress.update(kept)
        progress.update(kept, sample={})
        assert progress.line()
        assert on_screen(progress)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "text", [1, 2], torch.tensor([1.0, 2.0]), object()])
def test_values_that_are_no_numbers_are_left_out(value):
    with Progress(10, "run", plain=True, file=io.StringIO()) as progress:
        progress.update(dict.fromkeys(METRICS, value))
        assert progress.line().startswith("step 0/10")
        assert on_screen(progress)


def test_live_display_shows_everything():
    progress = Progress(40, "chain arithmetic", plain=False, file=Terminal())
    for step in range(1, 11):
        progress.update(METRICS | {"step": step, "reward/accuracy": step / 10}, sample=SAMPLE)
    screen = on_screen(progress)
    for text in (
        "chain arithmetic", "step 10 of 40", "100%", "greedy 50.0%", "0.31", "14.2 tokens", "0.9 mean / 2 max",
        "12.3k tokens/s", "950 tokens/s", "5.0%", "9.1%", "▁▂▃▃▄▅▆▆▇█", "10.0% → 100%", "1+1=", "reward 1", "v9", "v10",
    ):  # fmt: skip
        assert text in screen


def test_sample_is_coloured_by_version_age():
    text = sample_text(SAMPLE, version=11)
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styles["2"] == AGE_STYLES[2]
    assert styles["⏎"] == AGE_STYLES[1]
    assert "\x1b" not in text.plain
    assert "\n" not in text.plain


def test_ages_count_from_the_version_that_trained():
    progress = Progress(40, "run", plain=False, file=Terminal())
    progress.update(METRICS | {"version": 11}, sample={"tokens": ["a", "b"], "versions": [9, 10]})
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard")
    console.print(progress._render())
    assert "\x1b[36ma\x1b[0m\x1b[32mb\x1b[0m" in console.file.getvalue()  # cyan: age 1; green: age 0


def test_an_exception_gives_the_terminal_back():
    terminal = Terminal()

    def fail():
        with Progress(5, "run", plain=False, file=terminal) as progress:
            progress.update(METRICS)
            assert "\x1b[?25l" in terminal.getvalue()  # the cursor is hidden
            raise RuntimeError("from inside")

    with pytest.raises(RuntimeError, match="from inside"):
        fail()
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")


@pytest.mark.parametrize("plain", [True, False])
def test_messages_stay(plain):
    terminal = Terminal()
    with Progress(5, "run", plain=plain, file=terminal) as progress:
        progress.message("generator 0 was restarted [1 of 8]")
    assert "generator 0 was restarted [1 of 8]" in terminal.getvalue()


def test_every_must_be_positive():
    with pytest.raises(ValueError, match="every >= 1, got 0"):
        Progress(5, "run", every=0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12, "12"), (999, "999"), (0.01234, "0.0123"), (999.6, "1k"), (1000, "1k"), (12_345, "12.3k"),
     (-4.5e6, "-4.5M"), (2e9, "2G"), (math.nan, None), (None, None)],
)  # fmt: skip
def test_compact(value, text):
    assert compact(value) == text


def test_percent_and_duration():
    assert [percent(value) for value in (0, 0.123, 1.0, None)] == ["0.0%", "12.3%", "100%", None]
    assert [duration(s) for s in (0, 9.96, 59.4, 59.6, 3_723, None)] == [
        "0.0 s", "10 s", "59 s", "1:00 min", "1:02:03 h", None,
    ]  # fmt: skip


def test_finite_takes_tensors_and_refuses_the_rest():
    assert finite(torch.tensor(2.5)) == 2.5
    assert [finite(value) for value in (math.inf, "1", [1], object())] == [None] * 4


def test_sparkline():
    assert sparkline([], 10) == ""
    assert sparkline([3.0], 10) == "▁"
    assert sparkline([0, 1], 10) == "▁█"
    assert sparkline([0, 0, 1, 1, 2, 2], 3) == "▁▅█"
    assert len(sparkline(list(range(1000)), 48)) == 48
