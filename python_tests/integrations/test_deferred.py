"""Logits that are computed when something reads them; and which heads of models the kernels take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from areal_core.integrations._adapters import cannot_multiply
from areal_core.integrations._deferred import DeferredLogits

from patched import close


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def deferred(*shape: int) -> tuple[DeferredLogits, Tensor, list[int]]:
    head, hidden, reads = torch.nn.Linear(5, 11), torch.randn(*shape, 5), []
    return DeferredLogits(hidden, head, lambda: reads.append(1)), head(hidden), reads


READERS = {
    "slice": lambda x: x[:, :-1],
    "view in three": lambda x: x.view(3, 2, 11),
    "view of columns": lambda x: x.view(-1, 22),
    "view of other rows": lambda x: x.view(6, 11)[:4],
    "method": lambda x: x.softmax(-1),
    "function": torch.tanh,
    "inside a list": lambda x: torch.stack([x, x]),
    "negative factor": lambda x: x * -2.0,
    "negative divisor": lambda x: (x / -2.0).view(-1, 11),
    "tensor factor": lambda x: torch.linspace(1, 2, 11) * x,
    "division by a tensor": lambda x: x / torch.linspace(1, 2, 11),
    "sum": lambda x: x + 1,
    "operators": lambda x: 1 + x + abs(x) + (1 - x) + 2 / (3 + abs(x)) + x % 2 + x // 2 + x**2 + 2**x - (-x),
    "products": lambda x: (x @ torch.ones(11, 2), torch.ones(4, 3) @ x),
    "rows": lambda x: (len(x), list(x)),
    "comparison": lambda x: x > 0,
    "after a scale": lambda x: (2 * x / 3).float().exp(),
    "old options": lambda x: functional.cross_entropy(x.view(-1, 11), torch.arange(6), reduce=False),
    "older options": lambda x: functional.cross_entropy(x.view(-1, 11), torch.arange(6), size_average=False),
    "weighted loss": lambda x: functional.cross_entropy(x.view(-1, 11), torch.arange(6), torch.linspace(1, 2, 11)),
    "smoothed loss": lambda x: functional.cross_entropy(x.view(-1, 11), torch.arange(6), label_smoothing=0.2),
    "soft labels": lambda x: functional.cross_entropy(x.view(-1, 11), torch.full((6, 11), 1 / 11)),
    "loss of batches": lambda x: functional.cross_entropy(x.transpose(1, 2), torch.arange(6).view(2, 3)),
    "numpy": lambda x: torch.as_tensor(x.detach().numpy()),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_whatever_reads_them_gets_logits(name: str) -> None:
    lazy, logits, reads = deferred(2, 3)
    close(READERS[name](lazy), READERS[name](logits))
    assert reads


def _assign(x: Any) -> None:
    x[..., 3] = -20.0


IN_PLACE = {
    "method": lambda x: x.div_(2.0),
    "item": _assign,
    "function": lambda x: functional.relu(x, inplace=True),
    "through data": lambda x: x.data.clamp_(max=0.1),
}


@pytest.mark.parametrize("name", IN_PLACE)
@torch.no_grad()
def test_what_is_done_in_place_stays_done(name: str) -> None:
    lazy, logits, reads = deferred(2, 3)
    for x in (lazy, logits):
        IN_PLACE[name](x)
    assert isinstance(lazy, DeferredLogits)
    for loss in (lambda x: functional.cross_entropy((x / 2).view(-1, 11), torch.arange(6)), lambda x: x.float()):
        close(loss(lazy), loss(logits))
    assert reads == [1], "computed once"


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_a_plain_cross_entropy_does_not(reduction: str, scale: float) -> None:
    lazy, logits, reads = deferred(2, 3)
    labels = torch.tensor([1, -7, 3, 10, 0, 2])

    def loss(x: Any) -> Tensor:
        x = (x / 2.0 * scale).float().contiguous().reshape((-1, 11))
        return functional.cross_entropy(x, labels, ignore_index=-7, reduction=reduction)

    close(loss(lazy), loss(logits))
    assert lazy.shape == logits.shape
    assert (lazy.size(-1), lazy.size(), lazy.device) == (11, logits.size(), logits.device)
    assert not reads


def test_a_shape_that_does_not_fit_is_refused_as_by_torch() -> None:
    for x in deferred(2, 3)[:2]:
        with pytest.raises(RuntimeError, match=r"shape '\[5, 11\]' is invalid"):
            x.view(5, 11)


@pytest.mark.parametrize(
    ("shape", "labels"),
    [((-1, 11), torch.arange(5)), ((-1, 11), torch.zeros(6)), ((2, 3, 11), torch.zeros(2, 3, dtype=torch.int64))],
    ids=["too few", "floating-point", "not flat"],
)
def test_labels_that_torch_refuses(shape: tuple[int, ...], labels: Tensor) -> None:
    lazy, logits, _ = deferred(2, 3)
    with pytest.raises((RuntimeError, ValueError)) as expected:
        functional.cross_entropy(logits.view(shape), labels)
    with pytest.raises((RuntimeError, ValueError, TypeError)) as refused:
        functional.cross_entropy(lazy if len(shape) == 3 else lazy.view(shape), labels)
    assert str(refused.value) == str(expected.value) or "labels of an integer dtype" in str(refused.value)


def test_which_heads_the_kernels_take() -> None:
    class Special(torch.nn.Parameter):
        pass

    hidden, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    half = hidden.bfloat16()
    another = "a head of another dtype than the hidden states"
    assert cannot_multiply(hidden, torch.nn.Parameter(weight), bias) is None
    assert cannot_multiply(half, weight, None) == another
    assert cannot_multiply(hidden, weight, bias.bfloat16()) == another
    with torch.autocast("cpu", torch.bfloat16):
        assert cannot_multiply(half, weight, bias) is None
        assert cannot_multiply(half, weight, bias.bfloat16()) == another
    assert cannot_multiply(hidden, Special(weight), None) == "a sharded or special parameter"
    assert cannot_multiply(hidden.int(), weight.int(), None) == "no kernel for torch.int32 on cpu"
    assert cannot_multiply(hidden.to("meta"), weight.to("meta"), None) == "no kernel for meta"
