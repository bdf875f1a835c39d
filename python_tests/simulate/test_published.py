"""The published numbers: the errors that docs/simulator.md states."""

import pytest

from areal_core.reshard.models import load_model
from areal_core.simulate.costs import active_parameters, kv_bytes_per_token
from areal_core.simulate.published import Comparison, compare_published


@pytest.fixture(scope="module")
def rows() -> list[Comparison]:
    return compare_published()


def test_all_hours_are_within_fifteen_per_cent(rows: list[Comparison]) -> None:
    hours = [row for row in rows if row.unit == "h"]
    assert len(hours) == 8
    assert sum(row.kind == "predicted" for row in hours) == 4
    for row in hours:
        limit = 0.02 if row.kind == "calibrated" else 0.15
        assert abs(row.error) <= limit, row


def test_throughput_by_eta_is_within_fifteen_per_cent(rows: list[Comparison]) -> None:
    found = [row for row in rows if "eta" in row.what]
    assert len(found) == 4
    assert all(abs(row.error) <= 0.15 for row in found), found


def test_interruption_and_dynamic_micro_batches_gain(rows: list[Comparison]) -> None:
    """Sign and order of size only: docs/simulator.md says by how much they miss."""
    interruption = [row for row in rows if "interruptible" in row.what]
    fixed = [row for row in rows if "fixed" in row.what]
    assert (len(interruption), len(fixed)) == (2, 3)
    assert all(1.05 <= row.simulated <= 1.45 for row in interruption), interruption
    assert all(abs(row.error) <= 0.3 for row in fixed), fixed
    dynamic = {"1.5B": 427, "7B": 455, "32B": 388}
    assert all(row.simulated < 0.95 * dynamic[row.what.split(",")[0]] for row in fixed)


@pytest.mark.parametrize(
    ("name", "billions", "kv_kib"),
    [("qwen2.5-1.5b", 1.54, 28), ("qwen2.5-7b", 7.07, 56), ("qwen2.5-32b", 31.98, 256), ("qwen3-235b", 21.6, 188)],
)
def test_parameters_and_cache_of_public_models(name: str, billions: float, kv_kib: float) -> None:
    """Embeddings without the output layer are not multiplied with, so they do not count."""
    model = load_model(name)
    assert active_parameters(model) / 1e9 == pytest.approx(billions, rel=0.02)
    assert kv_bytes_per_token(model) == kv_kib * 1024
