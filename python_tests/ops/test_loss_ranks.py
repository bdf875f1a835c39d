"""The losses and their statistics do not depend on how a batch is split over ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from loss_ranks import run_rank


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
def test_ranks_together_are_the_whole_batch(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_rank, args=(3, str(tmp_path)), nprocs=3)
