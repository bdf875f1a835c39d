"""Trainer and generator ranks that die in the middle of an update, at every chunk of it.

They die at the instruction that touches a chunk (crash_cast.py) and, at moments of no pattern, by SIGKILL. Readers go
on with the version before, on every rank; the retry succeeds, and the survivors hold no more descriptors and mappings
than before.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from crash_cast import RECEIVERS, Cast, chunks_of


@pytest.mark.parametrize(
    ("transport", "victim"),
    [("shm", 1), ("tcp", 1), ("tcp", 3), ("shm", 0), ("tcp", 0)],
    ids=["sender, shm", "sender, tcp", "receiver, tcp", "coordinator, shm", "coordinator, tcp"],
)
def test_one_dies_at_every_chunk(tmp_path: Path, transport: str, victim: int) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    cast = Cast(f"unix:{tmp_path}/control", transport)
    survivor = 1 if victim == 0 else 0
    version, before = 0, {}
    cast.update(version)
    for chunk in range(chunks_of(victim)):
        cast.begin(version + 1, (victim, chunk))
        ends = cast.ends(version + 1)
        assert "done" not in {end for end, _ in ends.values()}, ends
        cast.expect(version)
        cast.bury(victim, -signal.SIGSEGV)
        ends = cast.update(version + 2)
        version = cast.expect(version + 2)
        after = {survivor: ends[survivor][1], **{r: cast.ask(r) for r in RECEIVERS if r != victim}}
        if chunk == 1:
            before = after  # the first round has loaded what is loaded once
        assert chunk < 2 or after == before, f"chunk {chunk}: descriptors and mappings {before} -> {after}"
    cast.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_is_killed_at_moments_of_no_pattern(tmp_path: Path, victim: int) -> None:
    cast = Cast(f"unix:{tmp_path}/control", "shm")
    cast.update(0)
    version = 0
    for round_ in range(5):
        cast.begin(version + 1)
        for _ in range(round_ * 50_000):
            pass
        cast.processes[victim].kill()
        cast.bury(victim, -signal.SIGKILL)
        cast.expect(version, version + 1)
        cast.update(version + 2)
        version = cast.expect(version + 2)
    cast.close()
