"""The fused LM head on a vocab-parallel weight: three processes run all cases, as a group of three and one of two."""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing
from linear_parallel_cases import run_rank

RANKS = 3


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
def test_every_case_on_two_and_three_ranks(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_rank, args=(RANKS, str(tmp_path)), nprocs=RANKS)
