"""Trainer and generator ranks killed in the middle of updates: what readers then see, and whether the retry succeeds.

The processes are those of the crash tests. A victim dies by SIGKILL at the instruction that touches a chunk, spread
over its part of the update, and at moments of no pattern, wherever the protocol then is.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.errors import ArealError

sys.path.append(str(Path(__file__).parents[1] / "python_tests" / "reshard"))

from crash_cast import Cast, chunks_of

if TYPE_CHECKING:
    from harness import Bench

VICTIMS = {("sender", "shm"): 1, ("receiver", "tcp"): 3, ("coordinator", "tcp"): 0}
COUNTS = ("kills", "old_served", "new_served", "retried")


class Tally:
    """Kills of one victim, and what came of them."""

    def __init__(self, cast: Cast, victim: int) -> None:
        self.cast, self.victim, self.version = cast, victim, 0
        self.kills = self.old_served = self.new_served = self.retried = 0
        self.retry_s = 0.0
        cast.update(0)

    def at_chunk(self, chunk: int) -> None:
        """Kill at a chunk: every reader still has the version before."""
        self.cast.begin(self.version + 1, (self.victim, chunk))
        self.cast.ends(self.version + 1)
        self._aftermath(self.version)

    def at_moment(self, spins: int) -> None:
        """Kill whatever is under way: every reader has the version before, or the whole new one."""
        self.cast.begin(self.version + 1)
        for _ in range(spins):
            pass
        self.cast.processes[self.victim].kill()
        self.cast.processes[self.victim].join()
        self._aftermath(self.version, self.version + 1)

    def _aftermath(self, *allowed: int) -> None:
        self.kills += 1
        try:
            if self.cast.expect(*allowed) == self.version:
                self.old_served += 1
            else:  # killed when the update was through, at least on one rank
                self.new_served += 1
        except (AssertionError, ArealError) as error:
            print(f"  kill {self.kills}: {error}")
        self.cast.bury(self.victim, -signal.SIGKILL)
        start = time.perf_counter()
        self.version += 2
        self.cast.update(self.version)
        self.cast.expect(self.version)
        self.retried += 1
        self.retry_s = max(self.retry_s, time.perf_counter() - start)


def bench_crashes(bench: Bench, points: int) -> None:
    """A row for each victim: that many kills at chunks, and as many at moments of no pattern."""
    tallies: list[Tally] = []
    for (who, transport), victim in VICTIMS.items() if points else ():
        with tempfile.TemporaryDirectory() as folder:
            cast = Cast(f"unix:{folder}/control", transport, signal.SIGKILL)
            try:
                tallies.append(tally := Tally(cast, victim))
                chunks = chunks_of(victim)
                for point in range(points):
                    tally.at_chunk(point * chunks // points)
                for point in range(points):
                    tally.at_moment(100_000 * point)
            except (AssertionError, ArealError) as error:  # no retry, so no later kill of this victim either
                print(f"  after kill {tally.kills}: {error}")
            finally:
                cast.close()
        row = {key: getattr(tally, key) for key in COUNTS} | {"retry_worst_s": tally.retry_s}
        bench.rows.append({"case": "crashes", "provider": f"{who}, {transport}"} | row)
    if tallies:
        kills, old, new, retried = (sum(getattr(tally, key) for tally in tallies) for key in COUNTS)
        print(
            f"\n{kills} kill points ({', '.join(who for who, _ in VICTIMS)}): old version served {old}, whole new one "
            f"{new}, retry succeeded {retried}, the slowest in {max(t.retry_s for t in tallies):.2f} s"
        )
