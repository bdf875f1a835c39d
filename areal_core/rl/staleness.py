"""The staleness gate: when a new group may be sampled, and when the finished ones make a batch.

Notation of the AReaL paper: B groups train one version, i is the current version, eta the bound. Group number
N_r (counted from 1) may be submitted only if ``floor((N_r - 1) / B) <= i + eta``.

Admission alone does not bound the age of what is trained on: a straggler can be overtaken by younger groups and come
back too old. A group admitted at version a has the deadline a + eta, the last version that may consume it. So a batch
at version i also has to leave a feasible rest: for every deadline d, at most ``B (d - i)`` unconsumed groups due by d
may remain. The gate makes the batch wait until enough of the due groups have finished.

Why that is always possible: at admission the unconsumed groups number at most ``B (i + eta + 1) - B i``, all due
by i + eta, so ``unconsumed(due by d) <= B (d - i + 1)`` holds for every d; a batch taken by the rule keeps it true at
i + 1. Hence no token is older than eta when it is consumed, and nothing is discarded. `tokens_within` is the check at
the point of use, which only a resumed run with other settings can fail.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

__all__ = ["StalenessGate", "tokens_within"]


class StalenessGate:
    """Counts submitted groups and answers the two questions above. Not thread-safe; its owner holds a lock.

    Args:
        batch_groups: groups in one training batch (B).
        eta: bound on the version age at consumption; math.inf for none.
        batches_ahead: batches that may be sampled ahead of the one in training, at most eta; paces sampling so
            that the typical age is what the user asked for and eta only the bound.
    """

    def __init__(self, batch_groups: int, eta: float, batches_ahead: float) -> None:
        if batch_groups < 1:
            raise ValueError(f"StalenessGate: expected batch_groups >= 1, got {batch_groups}")
        if not 0 <= batches_ahead <= eta:
            raise ValueError(f"StalenessGate: expected 0 <= batches_ahead <= eta = {eta}, got {batches_ahead}")
        self.batch_groups = batch_groups
        self.eta = eta
        self.batches_ahead = batches_ahead
        self.submitted = 0

    def can_submit(self, version: int) -> bool:
        """Whether one more group may be submitted while `version` is the one published to the generators."""
        return self.submitted // self.batch_groups <= version + self.batches_ahead

    def submit(self) -> None:
        """Count a submitted group."""
        self.submitted += 1

    def withdraw(self) -> None:
        """Uncount a group that will never be trained on (all its samples failed), so that another replaces it."""
        self.submitted -= 1

    def makes_batch(self, ready: Collection[int], in_flight: Collection[int], version: int) -> bool:
        """Whether `ready` holds a batch that keeps every deadline, if its oldest B groups are taken.

        Args:
            ready: for each finished group, the version at its admission.
            in_flight: the same for the groups still being sampled.
            version: the version about to be trained.
        """
        return self.counts_make_batch(Counter(ready), Counter(in_flight), version)

    def counts_make_batch(self, ready: Mapping[int, int], in_flight: Mapping[int, int], version: int) -> bool:
        """`makes_batch` of counts: version at admission -> number of groups, which may be 0."""
        if sum(ready.values()) < self.batch_groups:
            return False
        if self.eta == math.inf:
            return True
        for admitted in {*ready, *in_flight}:
            due = sum(count for a, count in ready.items() if a <= admitted)
            late = sum(count for a, count in in_flight.items() if a <= admitted)
            allowed_to_remain = self.batch_groups * (admitted + self.eta - version)
            if late > 0 and min(due, self.batch_groups) < due + late - allowed_to_remain:
                return False
        return True


def tokens_within(versions: npt.NDArray[np.int64], version: int, eta: float) -> npt.NDArray[np.bool_]:
    """Which tokens may train at `version`: those at most eta versions old.

    Args:
        versions: int64 [T], version that produced each token.
        version: version being trained.
        eta: the bound; math.inf admits all.

    Returns:
        bool [T].
    """
    if eta == math.inf:
        return np.ones(versions.shape, dtype=np.bool_)
    return np.asarray(version - versions <= eta)
