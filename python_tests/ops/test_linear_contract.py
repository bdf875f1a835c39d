"""linear_logprob: errors, autograd, autocast and torch.compile."""

from typing import Any

import pytest
import torch
from linear_cases import check, make_problem, oracle, run
from op_checks import assert_near, assert_same_bits
from torch import Tensor

from areal_core import ops


def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
    out = ops.linear_logprob(hidden, weight, labels, **options)
    return (out.logprobs - 0.1 * out.entropy + 0.01 * out.lse**2).sum()


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [-1, 101, 2**40])
def test_label_out_of_range_raises(label: int) -> None:
    problem = make_problem(live=1.0)
    problem.labels[7] = label
    with pytest.raises(ValueError, match=rf"^linear_logprob: expected labels\[7\] in \[0, 101\) .*, got {label}$"):
        ops.linear_logprob(problem.hidden, problem.weight, problem.labels)
    mask = torch.arange(40) != 7
    ops.linear_logprob(problem.hidden, problem.weight, problem.labels, loss_mask=mask)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf"), 1e-45])
def test_temperature_out_of_range_raises(temperature: float) -> None:
    problem = make_problem(live=1.0)
    with pytest.raises(ValueError, match=r"^linear_logprob: expected temperature > 0"):
        ops.linear_logprob(problem.hidden, problem.weight, problem.labels, temperature=temperature)
    rows = torch.ones(40)
    rows[9] = temperature
    with pytest.raises(ValueError, match=r"^linear_logprob: expected temperature of row 9 > 0"):
        ops.linear_logprob(problem.hidden, problem.weight, problem.labels, temperature=rows)
    mask = torch.arange(40) != 9
    ops.linear_logprob(problem.hidden, problem.weight, problem.labels, temperature=rows, loss_mask=mask)


HIDDEN, WEIGHT, LABELS = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((torch.zeros(4), WEIGHT, LABELS), {}, ValueError, r"hidden of shape \[T, H\], got \[4\]"),
        ((HIDDEN, torch.zeros(5, 4), LABELS), {}, ValueError, r"weight of shape \[V, 3\], got \[5, 4\]"),
        ((HIDDEN, torch.zeros(5), LABELS), {}, ValueError, r"weight of shape \[V, 3\], got \[5\]"),
        ((HIDDEN, WEIGHT, LABELS[:3]), {}, ValueError, r"labels of shape \[4\], got \[3\]"),
        ((HIDDEN, WEIGHT, LABELS.float()), {}, TypeError, "labels of an integer dtype, got torch.float32"),
        ((HIDDEN.long(), WEIGHT, LABELS), {}, TypeError, "hidden dtype in .*, got torch.int64"),
        ((HIDDEN, WEIGHT.bfloat16(), LABELS), {}, TypeError, "weight dtype = torch.float32, got torch.bfloat16"),
        ((HIDDEN, WEIGHT.to("meta"), LABELS), {}, ValueError, "weight on cpu, got meta"),
        ((HIDDEN, WEIGHT, LABELS), {"bias": torch.zeros(4)}, ValueError, r"bias of shape \[5\], got \[4\]"),
        ((HIDDEN, WEIGHT, LABELS), {"bias": torch.zeros(5).half()}, TypeError, "bias dtype = torch.float32"),
        ((HIDDEN, WEIGHT, LABELS), {"loss_mask": torch.ones(5)}, ValueError, r"loss_mask of shape \[4\]"),
        ((HIDDEN, WEIGHT, LABELS), {"temperature": torch.ones(2)}, ValueError, r"temperature of shape \[4\]"),
        (
            (HIDDEN, WEIGHT, LABELS),
            {"temperature": torch.ones(4, requires_grad=True)},
            ValueError,
            "temperature without requires_grad",
        ),
        ((HIDDEN, WEIGHT, LABELS), {"chunk_tokens": 0}, ValueError, "chunk_tokens >= 1, got 0"),
        ((HIDDEN, WEIGHT, LABELS), {"live_tokens": -1}, ValueError, "live_tokens >= 0, got -1"),
        ((HIDDEN, WEIGHT, LABELS), {"main_grad": torch.zeros(5, 4)}, ValueError, r"main_grad of shape \[5, 3\]"),
        (
            (HIDDEN, WEIGHT, LABELS),
            {"main_grad": torch.zeros(5, 3).half()},
            TypeError,
            "main_grad dtype = torch.float32",
        ),
        ((HIDDEN, WEIGHT, LABELS), {"main_grad": torch.zeros(5, 3)}, ValueError, "a weight that requires a gradient"),
    ],
)
def test_broken_contracts_raise(
    arguments: tuple[Tensor, ...], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"^linear_logprob: expected {text}"):
        ops.linear_logprob(*arguments, **options)


# -- autograd ---------------------------------------------------------------------------------------------------------


def test_each_output_alone_has_its_gradient() -> None:
    problem = make_problem(tokens=4, width=3, vocab=6, dtype=torch.float64)
    for name in ("logprobs", "entropy", "lse"):

        def function(hidden: Tensor, weight: Tensor, name: str = name) -> Tensor:
            value: Tensor = getattr(ops.linear_logprob(hidden, weight, problem.labels), name)
            return value

        assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in problem[:2]])


def test_backward_may_run_again() -> None:
    problem = make_problem()
    hidden, weight = (x.clone().requires_grad_() for x in problem[:2])
    loss = loss_of(hidden, weight, problem.labels)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b)


def test_a_weight_changed_before_backward_is_noticed() -> None:
    problem = make_problem()
    hidden, weight = problem.hidden.clone().requires_grad_(), problem.weight.clone().requires_grad_()
    loss = loss_of(hidden, weight, problem.labels)
    with torch.no_grad():
        weight.mul_(0.9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("index", [0, 1])
def test_differentiating_the_gradient_raises(index: int) -> None:
    problem = make_problem()
    leaves = [x.clone().requires_grad_() for x in problem[:2]]
    gradients = torch.autograd.grad(loss_of(*leaves, problem.labels), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^linear_logprob: expected one backward pass"):
        gradients[index].sum().backward()


def test_no_graph_where_none_is_asked_for() -> None:
    problem = make_problem()
    assert not ops.linear_logprob(*problem[:2], problem.labels).logprobs.requires_grad
    with torch.no_grad():
        out = ops.linear_logprob(problem.hidden, problem.weight.requires_grad_(), problem.labels)
    assert not out.logprobs.requires_grad


# -- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_on_a_cpu_keeps_float32(hidden_dtype: torch.dtype) -> None:
    """Hidden and weight may differ in dtype then; the gradient of each has its own."""
    problem, weights = make_problem(), torch.randn(3, 40)
    problem = problem._replace(hidden=problem.hidden.to(hidden_dtype))
    with torch.autocast("cpu", torch.bfloat16):
        outputs, gradients = run(ops.linear_logprob, problem, weights, chunk_tokens=9)
    truths, true_gradients = run(oracle, problem, weights, torch.float64)
    for output, truth in zip(outputs, truths, strict=True):
        assert_near(output, truth, absolute=2e-5, relative=1e-6)
    assert [g.dtype for g in gradients] == [hidden_dtype, torch.float32, torch.float32]
    assert_near(gradients[0], true_gradients[0], absolute=1e-4, relative=2.0**-8)
    assert_near(gradients[1], true_gradients[1], absolute=1e-4, relative=1e-5)


def test_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        check(make_problem(dtype=torch.float64))


# -- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("accumulates", [False, True])
def test_compiles_into_one_graph(dynamic: bool, accumulates: bool) -> None:
    weight_data = make_problem().weight

    def step(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, main_grad: Tensor | None) -> Tensor:
        options: dict[str, Any] = {"loss_mask": mask, "ignore_index": -1, "main_grad": main_grad}
        return loss_of(hidden * 1, weight, labels, temperature=0.7, chunk_tokens=7, **options)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (20, 31):
        problem = make_problem(tokens)
        labels = torch.where(problem.labels == -100, -1, problem.labels)
        results = []
        for function in (step, compiled):
            main_grad = torch.zeros(101, 16) if accumulates else None
            hidden, weight = problem.hidden.clone().requires_grad_(), weight_data.clone().requires_grad_()
            function(hidden, weight, labels, problem.loss_mask, main_grad).backward()
            assert (weight.grad is None) == accumulates
            results.append((hidden.grad, main_grad if accumulates else weight.grad))
        for a, b in zip(*results, strict=True):
            assert_same_bits(a, b)


def test_meta_tensors_give_shapes() -> None:
    hidden = torch.empty(5, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(70, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = ops.linear_logprob(hidden, weight, torch.empty(5, dtype=torch.int64, device="meta"))
    assert [(o.shape, o.dtype) for o in out] == [((5,), torch.float32)] * 3
    out.entropy.sum().backward()
    for leaf in (hidden, weight):
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, torch.bfloat16)


@pytest.mark.parametrize("temperatures", [None, torch.rand(6, dtype=torch.float64) + 0.5])
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_opcheck(temperatures: Tensor | None, main_grad: bool, keeps: bool) -> None:
    problem = make_problem(tokens=6, width=3, vocab=5, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in problem[:3]]
    buffer = torch.zeros(5, 3, dtype=torch.float64) if main_grad else None
    arguments = (*leaves, torch.float64, problem.labels, temperatures, 0.7, problem.loss_mask, -100, 2, None)
    live = int((problem.loss_mask & (problem.labels != -100)).sum())
    native, kept_rows = torch.ops.areal_core, min(2, live) if keeps else 0
    torch.library.opcheck(native.linear_logprob.default, (*arguments, None, 0, buffer, kept_rows))
    *saved, kept = [x.detach() for x in native.linear_logprob.default(*arguments, None, 0, buffer, kept_rows)]
    upstream = [torch.randn(6, dtype=torch.float64), None, torch.randn(6, dtype=torch.float64)]
    frozen = [x.detach() for x in leaves]
    backward = (upstream, saved, *frozen, *arguments[3:], 0, [True, True, True], buffer, kept if keeps else None)
    torch.library.opcheck(native.linear_logprob_backward.default, backward)
