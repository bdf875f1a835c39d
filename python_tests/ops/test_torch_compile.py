"""torch.compile takes every traceable op into one graph, forward and backward, with sizes that vary."""

from typing import Any

import pytest
import torch
from op_checks import assert_same_bits
from op_samples import TRACEABLE, Sample, on_device, scalar, tensors_of, with_leaves
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend


def run(function: Any, sample: Sample, size: int, device: torch.device) -> list[Tensor]:
    """The results and the gradients."""
    arguments, leaves = with_leaves(sample, on_device(sample.make(size), device))
    result = function(**arguments)
    gradients = torch.autograd.grad(scalar(result), leaves) if leaves else ()
    return [*tensors_of(result), *gradients]


def assert_same_results(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) > 0
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("sample", TRACEABLE, ids=str)
def test_one_graph_with_varying_sizes(sample: Sample, device: torch.device) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")  # tracing alone; opcheck runs the native ops through AOTAutograd
    compiled = torch.compile(sample.function, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for size in (2, 5):
        assert_same_results(run(compiled, sample, size, device), run(sample.function, sample, size, device))
        graphs.append(counter.frame_count)  # dynamo may count its first graph twice, when it starts over for a float
    assert graphs[0] == graphs[-1], "compiled again for another size"


@pytest.mark.parametrize("sample", [s for s in TRACEABLE if str(s) in ("logprob_from_logits", "ppo_loss")], ids=str)
def test_one_graph_of_fixed_size(sample: Sample, device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(sample.function, fullgraph=True, dynamic=False, backend="aot_eager")
    assert_same_results(run(compiled, sample, 2, device), run(sample.function, sample, 2, device))


def test_a_graph_break_is_noticed(device: torch.device) -> None:
    torch._dynamo.reset()
    sample = TRACEABLE[0]

    def breaks(**arguments: Any) -> Any:
        torch._dynamo.graph_break()
        return sample.function(**arguments)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        run(torch.compile(breaks, fullgraph=True, backend="aot_eager"), sample, 2, device)
