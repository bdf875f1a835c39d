import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.rl.staleness import StalenessGate, tokens_within


def papers_rule(n_r: int, batch: int, version: int, eta: float) -> bool:
    return math.floor((n_r - 1) / batch) <= version + eta


@given(st.integers(1, 7), st.integers(0, 5), st.integers(0, 6), st.integers(0, 60))
def test_admission_is_the_papers_formula(batch, eta, version, submitted):
    gate = StalenessGate(batch, eta, eta)
    gate.submitted = submitted
    assert gate.can_submit(version) == papers_rule(submitted + 1, batch, version, eta)


@settings(max_examples=200)
@given(st.data(), st.integers(1, 5), st.sampled_from([0, 1, 2, 4, math.inf]), st.sampled_from([0, 1, 3, math.inf]))
def test_age_at_consumption_never_exceeds_eta(data, batch, eta, depth):
    """Random finishing order, tokens as old as their admission, oldest groups taken first."""
    gate = StalenessGate(batch, eta, min(eta, depth))
    in_flight: dict[int, int] = {}  # group -> version at admission
    ready: dict[int, int] = {}
    consumed: list[int] = []
    version = 0
    while version < 6:
        while gate.can_submit(version) and len(in_flight) + len(ready) < 40:
            in_flight[gate.submitted] = version
            gate.submit()
        while not gate.makes_batch(ready.values(), in_flight.values(), version):
            assert in_flight, "deadlock: the batch waits and nothing is in flight"
            group = data.draw(st.sampled_from(sorted(in_flight)))
            ready[group] = in_flight.pop(group)
        taken = sorted(ready)[:batch]
        assert all(version - ready[group] <= eta for group in taken)
        consumed += taken
        for group in taken:
            del ready[group]
        version += 1
    assert len(consumed) == len(set(consumed)) == 6 * batch


def test_synchronous_runs_admit_one_batch_per_version():
    gate = StalenessGate(4, 0, 0)
    for version in range(3):
        admitted = 0
        while gate.can_submit(version):
            gate.submit()
            admitted += 1
        assert admitted == 4


def test_withdrawn_groups_are_replaced():
    gate = StalenessGate(2, 0, 0)
    gate.submit()
    gate.submit()
    assert not gate.can_submit(0)
    gate.withdraw()
    assert gate.can_submit(0)


def test_tokens_within():
    versions = np.array([0, 3, 4, 5])
    assert tokens_within(versions, 5, 1).tolist() == [False, False, True, True]
    assert tokens_within(versions, 5, math.inf).all()


def test_contracts():
    with pytest.raises(ValueError, match="batch_groups >= 1, got 0"):
        StalenessGate(0, 1, 1)
    with pytest.raises(ValueError, match="batches_ahead <= eta = 1, got 2"):
        StalenessGate(1, 1, 2)
