"""What every op test starts from and leaves behind, and the devices it runs on."""

from collections.abc import Iterator

import pytest
import torch

from areal_core import _C


def missing_for_cuda() -> str | None:
    """Why the tests marked `cuda` cannot run here; None where they can."""
    if not torch.cuda.is_available():
        return "no GPU, or a torch built without CUDA"
    return None if _C.cuda_compiled else "areal_core was built without the CUDA kernels"


@pytest.fixture(autouse=True)
def _clean_state(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skips what needs a GPU where there is none; seeds torch; restores the threads and the instruction set."""
    if request.node.get_closest_marker("cuda") and (reason := missing_for_cuda()):
        pytest.skip(reason)
    threads, isa = torch.get_num_threads(), _C.active_isa()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    _C.set_active_isa(isa)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, _clean_state: None) -> torch.device:
    """Runs the test once on the CPU and once on the GPU, for tests that say where each tensor goes."""
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device(request.param)


@pytest.fixture
def default_device(device: torch.device) -> Iterator[torch.device]:
    """The same for tests that do not say: `torch.zeros(3)` and the like make their tensors on the device."""
    if device.type == "cpu":
        yield device
    else:
        with device:
            yield device
