"""The pool with real processes, and verifiers that do all that they should not."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_core.errors import ArealError
from areal_core.rl import reward_pool
from areal_core.rl.reward_pool import Reward, RewardPool
from areal_core.tasks import Problem

from . import verifiers_gone_wrong as wrong

PROBLEM = Problem("1+1=", "2", "7", {"rationale": "x" * 100})
LIMIT_S = 60.0


def judge(pool: RewardPool, texts: list[str]) -> dict[int, Reward]:
    """Submit all, poll until all are back; by ticket."""
    for ticket, text in enumerate(texts):
        pool.submit(ticket, PROBLEM, text)
    found: dict[int, Reward] = {}
    deadline = time.monotonic() + LIMIT_S
    while pool.outstanding:
        assert time.monotonic() < deadline, f"only {sorted(found)} of {len(texts)} came back"
        for reward in pool.poll(0.2):
            assert reward.ticket not in found
            found[reward.ticket] = reward
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.01)


def test_every_ticket_comes_back_with_its_own_reward() -> None:
    with RewardPool(wrong.wrong_task, workers=2, timeout_s=30) as pool:
        found = judge(pool, [f"value {k / 8}" for k in range(200)] + ["value 9 " + " " * 500_000])
        pids = {judge(pool, ["pid"])[0].value for _ in range(20)}
    assert {ticket: reward.value for ticket, reward in found.items()} == {k: k / 8 for k in range(200)} | {200: 9.0}
    assert pids
    assert pool.counters["verified"] == 221
    assert pool.counters["restarts"] == 0


FAILURES = {
    "raises no parser": ("raised", "the verifier raised RuntimeError: no parser"),
    "exits": ("raised", "the verifier raised SystemExit: 3"),
    "text": ("raised", "the verifier raised ValueError: "),
    "value inf": ("not_finite", "expected a finite reward from the verifier, got inf"),
    "nan": ("not_finite", "expected a finite reward from the verifier, got nan"),
    "crashes": ("crashed", "the verifier ended its process (exit code -11)"),
    "leaves": ("crashed", "the verifier ended its process (exit code 0)"),
    "waits": ("timed_out", "the verifier gave no result within 0.3 s (rollout.reward_timeout_s)"),
    "swallows": ("timed_out", "the verifier gave no result within 0.3 s (rollout.reward_timeout_s)"),
    "holds_the_interpreter": ("timed_out", "the verifier gave no result within 0.3 s"),
    "takes_the_timer": ("timed_out", "the verifier gave no result within 0.3 s"),
}


def test_what_goes_wrong_costs_its_own_sample_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_pool, "_GRACE_S", 0.3)
    texts = [text for failure in FAILURES for text in ("value 1", failure, "value 2")]
    with RewardPool(wrong.wrong_task, workers=2, timeout_s=0.3) as pool:
        found = judge(pool, texts)
        counters = pool.counters
    assert len(found) == len(texts)
    for ticket, text in enumerate(texts):
        if text.startswith("value ") and text != "value inf":
            assert found[ticket] == Reward(ticket, float(text[6:]))
        else:
            assert math.isnan(found[ticket].value)
            assert found[ticket].error.startswith(FAILURES[text][1])
    for kind in ("raised", "not_finite", "crashed", "timed_out"):
        assert counters[kind] == sum(failure == kind for failure, _ in FAILURES.values())
    assert counters["restarts"] == counters["crashed"] + counters["timed_out"]
    assert counters["verified"] == 2 * len(FAILURES)


def test_poll_does_not_wait_for_a_verifier() -> None:
    with RewardPool(wrong.wrong_task, workers=1, timeout_s=30) as pool:
        judge(pool, ["value 1"])
        pool.submit(0, PROBLEM, "waits")
        pool.submit(1, PROBLEM, "value 1 " + " " * 1_000_000)  # more than a pipe holds
        assert [pool.poll() for _ in range(100)] == [[]] * 100
        assert pool.outstanding == 2


def test_a_full_pool_refuses() -> None:
    with RewardPool(wrong.wrong_task, workers=1, timeout_s=30, capacity=2) as pool:
        pool.submit(0, PROBLEM, "value 1")
        assert not pool.full
        pool.submit(1, PROBLEM, "value 1")
        assert pool.full
        with pytest.raises(ValueError, match="at most 2 tickets outstanding"):
            pool.submit(2, PROBLEM, "value 1")
        while pool.full:
            pool.poll(0.2)
        pool.submit(2, PROBLEM, "value 1")


def test_a_worker_that_is_killed_is_replaced() -> None:
    with RewardPool(wrong.wrong_task, workers=1, timeout_s=30) as pool:
        judge(pool, ["value 1"])
        (before,) = pool.pids
        os.kill(before, signal.SIGKILL)
        wait_until_gone([before])
        judge(pool, ["value 1"])  # may be lost with it
        assert judge(pool, ["value 1"])[0].value == 1.0
        assert pool.pids != [before]


def test_a_task_that_cannot_start_is_named() -> None:
    with (
        RewardPool(wrong.task_that_cannot_start, workers=1, timeout_s=30) as pool,
        pytest.raises(ArealError, match="reward worker: RuntimeError: no such data"),
    ):
        judge(pool, ["value 1"])


def test_closing_ends_the_workers_at_once() -> None:
    pool = RewardPool(wrong.wrong_task, workers=2, timeout_s=1000)
    pids = pool.pids
    for ticket in range(4):
        pool.submit(ticket, PROBLEM, "waits")
    pool.poll(5)
    pool.close()
    pool.close()
    assert not any(map(is_alive, pids))
    assert pool.outstanding == 0


@pytest.mark.parametrize("verifier", ["holds_the_interpreter", "takes_the_timer"])
def test_no_worker_outlives_a_killed_generator(verifier: str) -> None:
    """One worker idle, the other in a verifier that never returns."""
    code = """
import sys, time
import rl.verifiers_gone_wrong as wrong
from areal_core.rl.reward_pool import RewardPool
from areal_core.tasks import Problem
pool = RewardPool(wrong.wrong_task, workers=2, timeout_s=1000)
while not all(worker.ready for worker in pool._workers):
    pool.submit(0, Problem("", "", ""), "value 1")
    while pool.outstanding:
        pool.poll(0.1)
pool.submit(1, Problem("", "", ""), sys.argv[1])
print(*pool.pids, flush=True)
time.sleep(1000)
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", code, verifier],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    with process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2
    wait_until_gone(pids)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"workers": 0}, "expected workers and capacity >= 1, got 0 and 4096"),
        ({"capacity": 0}, "got 1 and 0"),
        ({"timeout_s": math.inf}, "expected a finite timeout_s > 0, got inf"),
        ({"timeout_s": 0.0}, "got 0.0"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RewardPool(wrong.wrong_task, **{"workers": 1, "timeout_s": 1.0, **options})  # type: ignore[arg-type]
