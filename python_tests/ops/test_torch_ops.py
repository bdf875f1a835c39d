"""What torch asks of custom ops, for all of them at once: every public function has a sample call (op_samples.py), the
native ops these reach, forward and backward, pass torch.library.opcheck, and nothing waits for the device.
"""

from typing import Any

import pytest
import torch
from op_checks import assert_near
from op_samples import (
    SAMPLES,
    NativeCalls,
    Sample,
    map_tensors,
    native_calls,
    on_device,
    scalar,
    tensors_of,
    with_leaves,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal_core import ops
from areal_core.model import DecoderConfig, PackedDecoder

NOT_OPS = {"estimators", "get_estimator", "register_estimator"}  # names of estimators, and what they stand for
PUBLIC = {name for name in ops.__all__ if name.islower()} - NOT_OPS


def layer_calls() -> list[tuple[str, Any, tuple[Any, ...]]]:
    """The native layers, which a decoder calls."""
    model = PackedDecoder(DecoderConfig("llama", 11, 8, 12, 1, num_heads=2, num_kv_heads=1, head_dim=4))
    with NativeCalls() as recorded:
        model(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 5])).sum().backward()
    return [("decoder", func, args) for func, args in recorded.calls]


def vocab_parallel_calls() -> list[tuple[str, Any, tuple[Any, ...]]]:
    """What the log-probabilities call where ranks share the vocabulary, which takes processes to sample."""
    logits = torch.randn(5, 9, requires_grad=True)
    hidden, weight = torch.randn(5, 4), torch.randn(9, 4)
    rows = (torch.tensor([0, 11, 3, -1, 8]), None, 0.7, None, -1)
    native = torch.ops.areal_core
    with NativeCalls() as recorded:
        with torch.no_grad():
            part = native.logprob_partial.default(logits, *rows, 3, 12)
        linear = (hidden, weight, None, torch.float32)
        linear_part = native.linear_logprob_partial.default(*linear, *rows, 2, None, 3, 12)
        linear = (hidden.requires_grad_(), weight.requires_grad_(), *linear[2:])
        native.logprob_merge.default(logits, part[None], *rows, 3, False)[0].sum().backward()
        native.linear_logprob.default(*linear, *rows, 2, None, linear_part[None], 3, None, 0)[0].sum().backward()
    return [("vocab_parallel", func, args) for func, args in recorded.calls]


CALLS = {
    f"{func.name().removeprefix('areal_core::')}-{sample}-{i}": (func, args)
    for i, (sample, func, args) in enumerate([*native_calls(SAMPLES), *vocab_parallel_calls(), *layer_calls()])
}


def test_every_public_function_has_a_sample() -> None:
    assert sorted(PUBLIC - {sample.name for sample in SAMPLES}) == []


def test_every_native_op_is_reached_by_a_sample() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("areal_core::")}
    assert len(registered) >= 18
    assert sorted(registered - {func.name() for func, _ in CALLS.values()}) == []


@pytest.mark.parametrize("call", CALLS)
def test_opcheck(call: str, device: torch.device) -> None:
    func, args = CALLS[call]
    if device.type == "cuda" and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA"):
        pytest.skip("an op of the CPU alone")
    differentiable = "backward" not in func.name() and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "Autograd"
    )

    def fresh(x: Tensor) -> Tensor:
        return x.detach().clone().to(device).requires_grad_(x.requires_grad and differentiable)

    torch.library.opcheck(func, map_tensors(args, fresh))


@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_devices_agree(sample: Sample, size: int, device: torch.device) -> None:
    """Results and gradients on the device are those of the CPU, but for the rounding of sums and of exp."""
    results = []
    for where in (torch.device("cpu"), device):
        arguments, leaves = with_leaves(sample, on_device(sample.make(size), where))
        result = sample.function(**arguments)
        gradients = torch.autograd.grad(scalar(result), leaves) if leaves else ()
        results.append([*tensors_of(result), *gradients])
    for want, got in zip(*results, strict=True):
        if want.is_floating_point():
            assert_near(got.cpu(), want, absolute=1e-5, relative=1e-5)
        else:
            assert torch.equal(got.cpu(), want)


# -- no synchronisation -----------------------------------------------------------------------------------------------

SYNCHRONISING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}


class DeviceWatch(TorchDispatchMode):
    """Notes what would wait for a device or copy host memory to it; tensors of "meta" stand for the device's."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = tensors_of([args, kwargs or {}])
        on_host = [x for x in inputs if x.device.type == "cpu" and x.dim() > 0]
        if func._schema.name.removeprefix("aten::") in SYNCHRONISING and len(on_host) < len(inputs):
            self.faults.append(f"{func} waits for the device")
        result = func(*args, **(kwargs or {}))
        if on_host and any(x.device.type != "cpu" for x in [*inputs, *tensors_of(result)]):
            self.faults.append(f"{func} mixes host and device")
        return result


def run_on_meta(sample: Sample) -> list[str]:
    arguments = on_device(sample.make(1), "meta")
    with DeviceWatch() as watch:
        result = sample.function(**arguments)
    assert all(x.device.type == "meta" for x in tensors_of(result))
    return watch.faults


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.traceable], ids=str)
def test_nothing_waits_for_the_device(sample: Sample) -> None:
    """On tensors without values any look at a value raises, so that sizes cannot depend on one either."""
    assert run_on_meta(sample) == []


@pytest.mark.parametrize(
    "sample",
    [
        Sample("pack", "mask", next(s.make for s in SAMPLES if str(s) == "pack-mask")),
        Sample("position_ids", "", lambda n: {"cu_seqlens": torch.tensor([0, 3])}),
        Sample(
            "compute_advantages",
            "",
            lambda n: {
                "name": "dr_grpo",
                "rewards": torch.zeros(1),
                "cu_seqlens": torch.tensor([0, 3]),
                "group_ids": torch.zeros(1).long(),
            },
        ),
    ],
    ids=str,
)
def test_a_synchronisation_is_noticed(sample: Sample) -> None:
    """The documented exceptions: these must know a size that is on the device."""
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        run_on_meta(sample)


def test_a_copy_from_the_host_is_noticed() -> None:
    with DeviceWatch() as watch:
        torch.arange(3).to("meta")
    assert watch.faults == ["aten._to_copy.default mixes host and device"]
