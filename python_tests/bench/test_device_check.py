"""bench/device_check.sh where there is no GPU, and with a stand-in for the interpreter that pretends there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "bench" / "device_check.sh"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="tests run without the repository's bench folder")

PRETENDER = """#!/bin/sh
case "$1" in
  -c) echo "90 Pretended GPU" ;;
  -m) echo "a test failed"; exit 3 ;;
  bench/bench_loss.py) sleep 60 ;;
  *) echo "ran $*" ;;
esac
"""


def check(out: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OUT": str(out), "PYTHON": sys.executable, **environment}
    return subprocess.run([str(SCRIPT), *options], env=env, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture
def pretender(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(PRETENDER)
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=str)
def test_without_a_gpu_it_says_so(tmp_path: Path, options: list[str]) -> None:
    done = check(tmp_path / "out", *options)
    assert done.returncode == 2
    assert "no GPU" in done.stderr
    assert "nothing was measured on a GPU" in done.stderr
    stages = ("build", "tests", "memcheck", "racecheck", "synccheck", "initcheck", "bench_logprob", "bench_peers")
    for stage in stages if options else ():
        assert f"  {stage} " in done.stdout


def test_a_failing_stage_does_not_stop_the_next(tmp_path: Path, pretender: str) -> None:
    done = check(tmp_path / "out", "--no-build", PYTHON=pretender, TOKENS="7", SLOWEST_S="1")
    assert done.returncode == 1
    summary = (tmp_path / "out" / "summary.txt").read_text()
    verdicts = {line.split()[0]: line for line in summary.splitlines()[1:]}
    assert "Pretended GPU" in summary.splitlines()[0]
    assert "failed with code 3" in verdicts["tests"]
    assert "out of time after 1 s" in verdicts["bench_loss"]
    assert " passed " in verdicts["samples"]
    assert " passed " in verdicts["bench_peers"]
    assert "ran bench/floors.py" in summary
    assert "--tokens 7" in (tmp_path / "out" / "bench_logprob.log").read_text()


def test_what_the_budget_does_not_cover_is_named(tmp_path: Path, pretender: str) -> None:
    done = check(tmp_path / "out", "--no-build", PYTHON=pretender, BUDGET_S="0")
    assert done.returncode == 1
    assert done.stdout.count("skipped: the budget of 0 s is spent") >= 6


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    done = check(tmp_path / "out", "--quick")
    assert done.returncode == 1
    assert "unknown option --quick" in done.stderr
