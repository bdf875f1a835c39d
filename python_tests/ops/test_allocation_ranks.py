"""Ranks of a process group agree on the number of micro-batches, and fail together."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from areal_core import ops

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")

CAP, WORLD = 10, 3
Outcome = list[list[int]] | str

EVEN = [[9, 8, 7, 6], [1, 2, 3, 4], [5, 5, 5, 5]]  # alone they need 4, 1 and 2
CASES: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "most wins": (EVEN, {}),
    "multiple": ([[9, 8, 7, 6], [1, 2, 3, 4], [5] * 6], {"multiple_of": 2, "method": "mffd"}),
    "multiple, empty": (EVEN, {"multiple_of": 3, "too_few": "empty"}),
    "levelled": (EVEN, {"method": "kk"}),
    "few": ([[9, 8, 7, 6], [1, 2], [5] * 4], {}),
    "few, empty": ([[9, 8, 7, 6], [1, 2], [5] * 4], {"too_few": "empty"}),
    "none, empty": ([[9, 9], [], [3]], {"too_few": "empty"}),
    "none anywhere": ([[], [], []], {}),
    "oversized": ([[9], [11], [3]], {}),
    "oversized alone": ([[9, 1, 1], [11, 5, 6], [3, 3, 3]], {"oversized": "alone"}),
}
COUNTS = {
    "most wins": 4,
    "multiple": 4,
    "multiple, empty": 6,
    "levelled": 4,
    "few, empty": 4,
    "none, empty": 2,
    "none anywhere": 0,
    "oversized alone": 3,
}


def allocate_all(rank: int, group: Any) -> dict[str, Outcome]:
    """Every case in turn; an error becomes its text."""
    outcomes: dict[str, Outcome] = {}
    for case, (lengths, options) in CASES.items():
        try:
            outcomes[case] = ops.allocate_microbatches(lengths[rank], CAP, group=group, **options)
        except ValueError as error:
            outcomes[case] = str(error)
    return outcomes


def join(rank: int, world: int, store: Path) -> None:
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)


def run_rank(rank: int, store: Path, results: Any) -> None:
    join(rank, WORLD, store)
    results.put((rank, allocate_all(rank, dist.group.WORLD)))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """What each rank of a group of three got."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    store = tmp_path_factory.mktemp("group") / "store"
    processes = [context.Process(target=run_rank, args=(rank, store, results)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    found = dict(results.get() for _ in range(WORLD))
    return [found[rank] for rank in range(WORLD)]


@pytest.mark.parametrize("case", COUNTS)
def test_ranks_agree(case: str, by_rank: list[dict[str, Outcome]]) -> None:
    lengths = CASES[case][0]
    for mine, outcomes in zip(lengths, by_rank, strict=True):
        bins = outcomes[case]
        assert isinstance(bins, list), bins
        assert len(bins) == COUNTS[case]
        assert sorted(i for b in bins for i in b) == list(range(len(mine)))
        assert all(sum(mine[i] for i in b) <= CAP or len(b) == 1 for b in bins)
        assert all(bins) or len(mine) < len(bins), "empty micro-batches only where sequences are too few"


def test_ranks_fail_together(by_rank: list[dict[str, Outcome]]) -> None:
    for outcomes in by_rank:
        assert "at least 4 sequences on every rank (what one of them needs), got 2 on rank 1" in str(outcomes["few"])
    texts = [outcomes["oversized"] for outcomes in by_rank]
    assert "lengths <= max_tokens = 10, got lengths[0] = 11" in str(texts[1])
    assert texts[0] == texts[2] == "allocate_microbatches: expected success on every rank, got an error on rank 1"


def test_a_group_of_one_changes_nothing(tmp_path: Path) -> None:
    join(0, 1, tmp_path / "store")
    try:
        with_group, alone = allocate_all(0, dist.group.WORLD), allocate_all(0, None)
    finally:
        dist.destroy_process_group()
    assert with_group == alone
