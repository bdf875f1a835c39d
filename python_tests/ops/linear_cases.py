"""Problems of the fused LM head, their outputs and gradients, and how near the fp64 oracle these must be."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from op_checks import EPSILON, assert_near
from torch import Tensor

from areal_core import ops
from areal_core.ops import _linear_chunks
from areal_core.reference.lm_head import linear_logprob as oracle

STREAM_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = [torch.float64, *STREAM_DTYPES]
ROW_ERROR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-5, torch.float16: 2e-5}


class Problem(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    labels: Tensor
    loss_mask: Tensor


def make_problem(
    tokens: int = 40, width: int = 16, vocab: int = 101, dtype: torch.dtype = torch.float32, live: float = 0.6
) -> Problem:
    """About `live` of the rows count; among the others are both kinds of masking."""
    labels = torch.randint(0, vocab, (tokens,))
    mask = torch.rand(tokens) < live
    if tokens > 3 and live < 1:
        labels[3], mask[3] = -100, True
    hidden, weight, bias = (torch.randn(s, dtype=torch.float64) for s in ((tokens, width), (vocab, width), (vocab,)))
    return Problem(hidden.to(dtype), weight.to(dtype), bias.to(dtype), labels, mask)


def as_on_a_gpu(monkeypatch: Any) -> None:
    """The path of a GPU, on CPU tensors: live rows are not counted, products take the operands as they are."""

    def multiply_wide(a: Tensor, b: Tensor, out: Tensor) -> None:
        out.copy_(a.to(out.dtype) @ b.to(out.dtype))

    monkeypatch.setattr(_linear_chunks, "counts_rows", lambda device: False)
    monkeypatch.setattr(_linear_chunks, "widens_operands", lambda device: False)
    monkeypatch.setattr(_linear_chunks, "_multiply_wide", multiply_wide)
    monkeypatch.setattr(_linear_chunks, "_PRODUCT_ROWS", 30)


def run(
    function: Callable[..., Any], problem: Problem, weights: Tensor, dtype: torch.dtype | None = None, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of sum(weights * outputs) for hidden, weight and bias; weights [3, T]."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in problem[:3]]
    options.setdefault("loss_mask", problem.loss_mask)
    outputs = function(leaves[0], leaves[1], problem.labels, bias=leaves[2], **options)
    total = sum((w * o).sum() for w, o in zip(weights.to(outputs[0].dtype), outputs, strict=True))
    return [o.detach() for o in outputs], list(torch.autograd.grad(total, leaves))


def assert_gradients_near(
    gradients: list[Tensor], truths: list[Tensor], dtype: torch.dtype, *, rounded_operands: bool = False
) -> None:
    """Within float32 rounding of sums, of the size of the largest entry, and one rounding to the dtype.

    Where the gradient of the logits is an operand in the dtype, the sums carry its rounding too.
    """
    for gradient, truth in zip(gradients, truths, strict=True):
        assert gradient.dtype == dtype
        largest = float(truth.abs().max()) if truth.numel() else 0.0
        absolute = (1e-13 if dtype == torch.float64 else 4e-6) * (1 + largest)
        absolute += EPSILON[dtype] * (1 + largest) if rounded_operands else 0
        assert_near(gradient, truth, absolute=absolute, relative=EPSILON[dtype])


def check(problem: Problem, *, rounded_operands: bool = False, **options: Any) -> None:
    """Outputs and gradients against the oracle."""
    dtype = problem.hidden.dtype
    weights = torch.randn(3, len(problem.labels), dtype=torch.float64)
    outputs, gradients = run(ops.linear_logprob, problem, weights, **options)
    for name in ("chunk_tokens", "live_tokens"):
        options.pop(name, None)
    truths, true_gradients = run(oracle, problem, weights, torch.float64, **options)
    for output, truth in zip(outputs, truths, strict=True):
        assert output.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_near(output, truth, absolute=ROW_ERROR[dtype], relative=1e-6)
    assert_gradients_near(gradients, true_gradients, dtype, rounded_operands=rounded_operands)
