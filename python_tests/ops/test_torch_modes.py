"""The ops under torch.func, forward-mode differentiation, autocast and CUDA graphs work, or say that they do not."""

from typing import Any

import pytest
import torch
from op_checks import assert_near, assert_same_bits
from op_samples import DIFFERENTIABLE, TRACEABLE, Sample, on_device, scalar, tensors_of, with_leaves
from torch import Tensor
from torch.autograd import forward_ad

FIRST = {sample.name: sample for sample in reversed(DIFFERENTIABLE)}.values()


def as_function_of_one(sample: Sample, device: torch.device) -> tuple[Any, Tensor]:
    """The floating-point results as a function of the first differentiable argument, and that argument."""
    arguments = on_device(sample.make(2), device)
    name = sample.gradients[0]

    def function(x: Tensor) -> tuple[Tensor, ...]:
        result = sample.function(**{**arguments, name: x})
        return tuple(y for y in tensors_of(result) if y.is_floating_point())

    return function, arguments[name]


# -- torch.func -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [s for s in DIFFERENTIABLE if "zigzag" not in s.name], ids=str)
def test_vmap_runs_one_after_the_other(sample: Sample, device: torch.device) -> None:
    function, x = as_function_of_one(sample, device)
    batch = torch.stack([x, 0.5 * x, -x])
    results = torch.func.vmap(function)(batch)
    for i, result in enumerate(results):
        for b in range(len(batch)):
            assert_same_bits(result[b], function(batch[b])[i])


def test_vmap_over_a_list_of_tensors_is_refused(device: torch.device) -> None:
    function, x = as_function_of_one(next(s for s in DIFFERENTIABLE if s.name == "zigzag_split"), device)
    with pytest.raises(NotImplementedError, match=r"copy_segments: expected a loop, got torch\.func\.vmap"):
        torch.func.vmap(function)(torch.stack([x, x]))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
@pytest.mark.parametrize("sample", FIRST, ids=str)
def test_func_grad_is_refused(sample: Sample, transform: Any, device: torch.device) -> None:
    function, x = as_function_of_one(sample, device)
    with pytest.raises(NotImplementedError, match=r"expected torch\.autograd\.grad, got torch\.func\.grad"):
        transform(lambda x: sum(y.sum() for y in function(x)))(x)


@pytest.mark.parametrize("sample", FIRST, ids=str)
def test_forward_mode_is_refused(sample: Sample, device: torch.device) -> None:
    """Left to torch, the tangents of a custom op would silently be zero."""
    function, x = as_function_of_one(sample, device)
    with pytest.raises(NotImplementedError, match="expected reverse-mode differentiation, got forward mode"):
        torch.func.jvp(function, (x,), (torch.ones_like(x),))
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="expected reverse-mode differentiation, got forward mode"),
    ):
        function(forward_ad.make_dual(x, torch.ones_like(x)))
    with forward_ad.dual_level():
        function(x)  # no tangent: allowed


def test_refusals_name_the_public_function(device: torch.device) -> None:
    sample = next(s for s in DIFFERENTIABLE if s.name == "logprob_from_logits")
    function, x = as_function_of_one(sample, device)
    with pytest.raises(NotImplementedError, match=r"^logprob_from_logits: expected reverse-mode"):
        torch.func.jvp(function, (x,), (torch.ones_like(x),))
    with pytest.raises(NotImplementedError, match=r"^logprob_from_logits: expected torch\.autograd\.grad"):
        torch.func.grad(lambda x: sum(y.sum() for y in function(x)))(x)


# -- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", TRACEABLE, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(sample: Sample, dtype: torch.dtype, device: torch.device) -> None:
    outcomes = []
    for enabled in (False, True):
        arguments, leaves = with_leaves(sample, on_device(sample.make(2), device))
        with torch.autocast(device.type, dtype, enabled=enabled):
            result = sample.function(**arguments)
        outcomes.append([*tensors_of(result), *(torch.autograd.grad(scalar(result), leaves) if leaves else ())])
    for a, b in zip(*outcomes, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_mixed_precision_step(dtype: torch.dtype, device: torch.device) -> None:
    """A head that autocast runs in half precision: everything per token is float32, the gradient comes back."""
    head = torch.nn.Linear(16, 37).to(device)
    hidden = torch.randn(9, 16, device=device)
    samples = {sample.name: on_device(sample.make(1), device) for sample in reversed(DIFFERENTIABLE)}
    labels = samples["logprob_from_logits"]["labels"][:9]
    logprob, ppo = (next(s.function for s in FIRST if s.name == n) for n in ("logprob_from_logits", "ppo_loss"))
    with torch.autocast(device.type, dtype):
        logits = head(hidden)
        out = logprob(logits, labels)
        fixed = {
            k: v[:9] for k, v in samples["ppo_loss"].items() if k != "logprobs" and isinstance(v, Tensor) and v.dim()
        }
        loss = ppo(out.logprobs, **{k: fixed[k] for k in ("proximal_logprobs", "advantages", "loss_mask")}).loss
    assert logits.dtype == dtype
    assert [x.dtype for x in (*out, loss)] == [torch.float32] * 4
    loss.backward()
    assert head.weight.grad.dtype == torch.float32
    exact = torch.log_softmax(logits.detach().double(), -1).gather(1, labels[:, None])[:, 0]
    assert_near(out.logprobs, exact, absolute=1e-6, relative=1e-6)


# -- CUDA graphs ------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("sample", TRACEABLE, ids=str)
def test_a_cuda_graph_replays_on_new_values(sample: Sample) -> None:
    device = torch.device("cuda", 0)

    def step(arguments: Any, leaves: list[Tensor]) -> list[Tensor]:
        result = sample.function(**arguments)
        return [*tensors_of(result), *(torch.autograd.grad(scalar(result), leaves) if leaves else ())]

    arguments, leaves = with_leaves(sample, on_device(sample.make(2), device))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(arguments, leaves)  # warms allocator and autograd up, as captures want
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(arguments, leaves)
    for scale in (0.5, -1.0):
        with torch.no_grad():
            for x in tensors_of(arguments):
                if x.is_floating_point() and x.dim() > 0 and bool((x <= 0).any()):  # leaves temperatures alone
                    x.mul_(scale)
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(captured, step(arguments, leaves), strict=True):
            assert_same_bits(got, want)
