"""linear_logprob: the last chunk's logits, which backward finds where forward left them."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from linear_cases import DTYPES, Problem, as_on_a_gpu, make_problem, run
from op_checks import assert_near, assert_same_bits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal_core import ops
from areal_core.ops import lm_head


def products(function: Callable[[], Any]) -> int:
    """How many matrix products a call computes."""
    with torch.profiler.profile() as profile:
        function()
    return sum(event.name in ("aten::mm", "aten::addmm") for event in profile.events())


@pytest.mark.parametrize(("chunk", "count"), [(40, 3), (20, 4 * 2 - 1), (9, 4 * 5 - 1)])
def test_the_last_chunk_is_multiplied_once(chunk: int, count: int) -> None:
    problem = make_problem(live=1.0)
    hidden, weight = (x.requires_grad_() for x in problem[:2])
    options: dict[str, Any] = {"chunk_tokens": chunk}

    def logprobs(**more: Any) -> Tensor:
        return ops.linear_logprob(hidden, weight, problem.labels, **options, **more).logprobs.sum()

    assert products(lambda: torch.autograd.grad(logprobs(), (hidden, weight))) == count
    with torch.no_grad():
        assert products(logprobs) == -(-40 // chunk)
    loss = logprobs()
    assert products(lambda: torch.autograd.grad(loss, (hidden, weight), retain_graph=True)) == count - -(-40 // chunk)
    again = products(lambda: torch.autograd.grad(loss, (hidden, weight)))
    assert again == 3 * -(-40 // chunk)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counted", [True, False])
def test_found_and_computed_logits_give_the_same_bits(
    dtype: torch.dtype, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not counted:
        as_on_a_gpu(monkeypatch)
    problem, weights = make_problem(dtype=dtype), torch.randn(3, 40)
    found = run(ops.linear_logprob, problem, weights, chunk_tokens=9)
    monkeypatch.setattr(lm_head, "rows_to_keep", lambda *_: 0)
    computed = run(ops.linear_logprob, problem, weights, chunk_tokens=9)
    for a, b in zip(found[0] + found[1], computed[0] + computed[1], strict=True):
        assert_same_bits(a, b)


def test_graphs_alive_at_once_have_their_own_logits() -> None:
    problems, weights = [make_problem(dtype=torch.float64) for _ in range(3)], torch.randn(40, dtype=torch.float64)
    weight = problems[0].weight.requires_grad_()

    def loss(problem: Problem) -> Tensor:
        return (weights * ops.linear_logprob(problem.hidden, weight, problem.labels, chunk_tokens=15).logprobs).sum()

    problems = [problem._replace(labels=problem.labels.clamp(min=0)) for problem in problems]
    apart = [torch.autograd.grad(loss(problem), weight)[0] for problem in problems]
    losses = [loss(problem) for problem in problems]
    for i in (1, 0, 2):
        assert_same_bits(torch.autograd.grad(losses[i], weight)[0], apart[i])
    (together,) = torch.autograd.grad(sum(loss(problem) for problem in problems), weight)
    assert_near(together, sum(apart), absolute=1e-13, relative=1e-12)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    problem, results = make_problem(live=1.0), []

    def function(hidden: Tensor, weight: Tensor) -> Tensor:
        return ops.linear_logprob(hidden, weight, problem.labels, chunk_tokens=9).logprobs

    for checkpointed in (False, True):
        hidden, weight = (x.clone().requires_grad_() for x in problem[:2])
        options = {"use_reentrant": use_reentrant}
        out = checkpoint(function, hidden, weight, **options) if checkpointed else function(hidden, weight)
        out.sum().backward()
        results.append((out, hidden.grad, weight.grad))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_saved_tensors_may_move() -> None:
    """Hooks may pack the logits away: what backward unpacks is what it takes."""
    problem, weights = make_problem(), torch.randn(3, 40)
    plain = run(ops.linear_logprob, problem, weights, chunk_tokens=9)
    with torch.autograd.graph.save_on_cpu():
        moved = run(ops.linear_logprob, problem, weights, chunk_tokens=9)
    for a, b in zip(plain[0] + plain[1], moved[0] + moved[1], strict=True):
        assert_same_bits(a, b)


def test_one_chunk_is_held_from_forward_to_backward() -> None:
    problem = make_problem(live=1.0)
    saved: list[int] = []
    hidden, weight = (x.requires_grad_() for x in problem[:2])

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ops.linear_logprob(hidden, weight, problem.labels, chunk_tokens=15)
    others = (hidden.numel(), weight.numel(), 40)  # per row: labels and results
    assert [size for size in saved if size not in others] == [14 * 101]  # 40 rows in chunks of 14, 14 and 12


def test_a_graph_does_not_keep_itself_alive() -> None:
    problem = make_problem()
    out = ops.linear_logprob(problem.hidden.requires_grad_(), problem.weight, problem.labels.clamp(min=0))
    node = weakref.ref(out.logprobs.grad_fn)
    gc.disable()
    try:
        del out
        assert node() is None
    finally:
        gc.enable()
