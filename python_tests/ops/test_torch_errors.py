"""One error contract for all ops: an argument of the wrong dtype, shape, device or size is either taken for what the
docstring says, or raises ValueError or TypeError that reads "<op>: expected <what>, got <value>" and names an argument.
"""

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from op_checks import assert_same_bits
from op_samples import SAMPLES, Sample, tensors_of
from torch import Tensor

# Wrong values that the documentation of an argument allows: "dtype" (any, or another float), "shape", "number".
ANY_DTYPE = {"dtype"}
TAKEN = {
    **dict.fromkeys(("loss_mask", "keep_mask", "attention_mask", "x", "parts", "temperature", "normalizer"), ANY_DTYPE),
    "logits": ANY_DTYPE,  # any float
    "numbers": ANY_DTYPE,  # float64
    ("compute_advantages", "rewards"): ANY_DTYPE,
    ("compute_advantages", "greedy_rewards"): ANY_DTYPE,
    ("discounted_returns", "rewards"): ANY_DTYPE,  # float64
    ("scale_rewards", "rewards"): {"dtype", "shape", "device"},  # the only tensor, of any shape
    ("scale_rewards", "scaling"): {"number"},
    ("scale_rewards", "bias"): {"number"},
    ("soft_overlong_penalty", "lengths"): {"dtype", "shape", "device"},
    ("shape_rewards", "rewards"): ANY_DTYPE,
    ("filter_groups", "rewards"): ANY_DTYPE,
    "current_version": {"dtype", "shape"},  # a number or a tensor of one element
    "weight": {"shape"},  # another vocabulary
    ("position_ids", "cu_seqlens"): {"device"},  # the only tensor
    ("ppo_loss", "cu_seqlens"): {"device"},  # not read by losses of tokens
    "beta": {"number"},
    "fill": {"number"},
    "ignore_index": {"number"},
}
ANY_TRAILING = {"x", "parts", "normalizer", "input_ids"}  # [T, ...], or one element in any shape


def wrong_tensors(name: str, x: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, what was done, tensor)"""
    floating = x.dtype.is_floating_point
    dtypes = (torch.int64, torch.complex64, torch.float64, torch.bool) if floating else (torch.float32, torch.complex64)
    yield from (("dtype", str(dtype), x.to(dtype)) for dtype in dtypes if dtype != x.dtype)
    if x.dim() > 0:
        yield "shape", "one row less", x[:-1]
        if not name.startswith("cu_"):  # there it is an empty sequence more
            yield "shape", "one row more", torch.cat([x, x[-1:]])
        yield "shape", "no rows", x[:0]
        if name not in ("temperature", "normalizer"):
            yield "shape", "0-D", x.flatten()[0]
    if name not in ANY_TRAILING:
        yield "shape", "one dimension more", x[..., None]
    yield "device", "meta", x.to("meta")


def wrong_numbers(x: float) -> Iterator[tuple[str, str, Any]]:
    yield "number", "negative", -1 if isinstance(x, int) else -1.0
    if isinstance(x, float):
        yield "number", "NaN", math.nan
    yield "type", "text", "text"


def wrong_calls() -> Iterator[Any]:
    for sample in SAMPLES:
        for name, value in sample.make(1).items():
            if isinstance(value, Tensor):
                changes = wrong_tensors(name, value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                changes = wrong_numbers(value)
            else:
                continue
            taken = TAKEN.get(name, set()) | TAKEN.get((sample.name, name), set())
            for kind, what, wrong in changes:
                yield pytest.param(sample, name, wrong, kind in taken, id=f"{sample}-{name}-{kind}-{what}")


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize(("sample", "name", "wrong", "taken"), wrong_calls())
def test_a_wrong_argument_is_named(sample: Sample, name: str, wrong: Any, taken: bool) -> None:
    error = error_of(sample, {name: wrong})
    if error is None:
        assert taken, f"expected an error, got none for {name} = {wrong}"
    elif isinstance(error, NotImplementedError):
        assert "meta tensor" in str(error), "torch: there is nothing to copy"
    elif not isinstance(wrong, str):  # for text a TypeError of Python's own may do
        text = str(error).split("\n", 1)[0]
        assert re.match(r"\w+: expected .+, got .+", text), text
        parameters = {*inspect.signature(sample.function).parameters, *_keys(sample)}
        assert parameters & set(re.findall(r"\w+", text)), text


def error_of(sample: Sample, change: dict[str, Any]) -> Exception | None:
    """What the call raises with the change; only errors of the contract are caught."""
    try:
        sample.function(**{**sample.make(1), **change})
    except (ValueError, TypeError, NotImplementedError) as error:
        return error
    return None


def _keys(sample: Sample) -> set[str]:
    """Tensors of a dict argument count as arguments."""
    return {key for value in sample.make(1).values() if isinstance(value, dict) for key in value}


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_strides_do_not_matter(sample: Sample) -> None:
    """A tensor with gaps gives the same bits, or is refused by name."""
    arguments = sample.make(1)
    expected = tensors_of(sample.function(**arguments))
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        gaps = value.repeat_interleave(2, -1)[..., ::2]
        if error := error_of(sample, {name: gaps}):
            assert re.match(rf"\w+: expected .*{name}\.stride\(-1\) = 1, got 2", str(error))
            continue
        results = tensors_of(sample.function(**{**arguments, name: gaps}))
        for got, want in zip(results, expected, strict=True):
            assert_same_bits(got, want)
