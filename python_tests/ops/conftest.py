"""What every op test starts from and leaves behind."""

from collections.abc import Iterator

import pytest
import torch

from areal_core import _C


@pytest.fixture(autouse=True)
def _clean_state() -> Iterator[None]:
    """Seeds torch; restores the number of threads and the instruction set afterwards."""
    threads, isa = torch.get_num_threads(), _C.active_isa()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    _C.set_active_isa(isa)
