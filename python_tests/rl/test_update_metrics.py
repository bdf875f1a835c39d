"""What a step says of its weight update: publications matched with the loads that generators report, in any order."""

import pytest

from areal_core.reshard import PublishStats
from areal_core.rl.messages import VersionLoad
from areal_core.rl.update_metrics import UpdateMetrics


def stats(version, moved=300, bound=200):
    return PublishStats(
        version=version, bytes=moved, seconds=0.5, bytes_per_s=600.0, wait_seconds=0.125, bound_bytes=bound
    )


def test_a_step_has_its_publication_and_the_loads_reported_since_the_step_before():
    updates = UpdateMetrics()
    updates.loaded([VersionLoad(1, 12.0, 0.25)])  # a generator's report overtakes the trainer's own record
    updates.published(stats(1), 10.0)
    updates.loaded([VersionLoad(1, 11.0, 0.75)])
    assert updates.take() == {
        "publish/loads": 2.0,
        "publish/bytes": 300.0,
        "publish/bytes_over_bound": 1.5,
        "publish/wait_s": 0.125,
        "publish/pause_s": 0.5,
        "publish/pause_max_s": 0.75,
        "publish/visible_p50_s": pytest.approx(1.5),
        "publish/visible_p95_s": pytest.approx(1.95),
    }
    assert updates.take() == {"publish/loads": 0.0}


def test_a_late_load_counts_from_its_own_publication():
    updates = UpdateMetrics()
    for version in (1, 2):
        updates.published(stats(version), 10.0 * version)
        updates.take()
    updates.loaded([VersionLoad(1, 23.0, 0.0), VersionLoad(2, 23.0, 0.0)])
    metrics = updates.take()
    assert metrics["publish/visible_p50_s"] == pytest.approx((13.0 + 3.0) / 2)
    assert "publish/bytes" not in metrics


def test_a_load_of_a_version_that_nobody_recorded_has_a_pause_and_no_latency():
    updates = UpdateMetrics()
    updates.loaded([VersionLoad(7, 1.0, 0.5)])  # published before a resume
    assert updates.take() == {"publish/loads": 1.0, "publish/pause_s": 0.5, "publish/pause_max_s": 0.5}


def test_a_long_run_remembers_a_bounded_number_of_publications():
    updates = UpdateMetrics()
    for version in range(1000):
        updates.published(stats(version), float(version))
    updates.loaded([VersionLoad(0, 5.0, 0.5), VersionLoad(999, 1001.0, 0.5)])
    metrics = updates.take()
    assert metrics["publish/visible_p50_s"] == metrics["publish/visible_p95_s"] == 2.0
    assert metrics["publish/loads"] == 2.0


def test_a_publication_without_bytes_keeps_its_bound():
    updates = UpdateMetrics()
    updates.published(stats(1, 0, 0), 0.0)
    assert updates.take()["publish/bytes_over_bound"] == 0.0
