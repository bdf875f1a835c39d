"""Cases of test_linear_parallel.py: each runs on every rank of a group, in processes that the test starts."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import vocab_parallel_cases
from linear_cases import DTYPES, ROW_ERROR, Problem, assert_gradients_near, make_problem, oracle
from linear_cases import run as run_whole
from op_checks import assert_near, assert_same_bits
from torch import Tensor
from vocab_parallel_cases import assert_same_on_all_ranks, bounds, cut

from areal_core import ops
from areal_core.ops import _vocab_parallel

CASES: dict[str, Callable[[dist.ProcessGroup], None]] = {}


def case(function: Callable[[dist.ProcessGroup], None]) -> Callable[[dist.ProcessGroup], None]:
    CASES[function.__name__] = function
    return function


def run_rank(rank: int, ranks: int, folder: str) -> None:
    """What one process does."""
    with mock.patch.dict(vocab_parallel_cases.CASES, CASES, clear=True):
        vocab_parallel_cases.run_rank(rank, ranks, folder)


def shard(problem: Problem, sizes: list[int], group: dist.ProcessGroup) -> Problem:
    begin, end = bounds(sizes, group)
    return problem._replace(weight=problem.weight[begin:end], bias=problem.bias[begin:end])


def assert_shares_near(
    gradients: list[Tensor], truths: list[Tensor], sizes: list[int], group: dist.ProcessGroup, dtype: torch.dtype
) -> None:
    """Hidden's gradient is the sum of the ranks' shares, each rounded; weight's and bias' are this rank's rows."""
    begin, end = bounds(sizes, group)
    assert_gradients_near(gradients[1:], [x[begin:end] for x in truths[1:]], dtype)
    spread = 1 + (float(truths[0].abs().max()) if truths[0].numel() else 0)
    error = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[dtype]
    assert_near(gradients[0], truths[0], absolute=error * spread, relative=0)
    assert_same_on_all_ranks(gradients[0], group)


def check(problem: Problem, sizes: list[int], group: dist.ProcessGroup, **options: Any) -> None:
    """Against the oracle on the whole vocabulary; outputs are the same bits on all ranks."""
    dtype, weights = problem.hidden.dtype, torch.randn(3, len(problem.labels), dtype=torch.float64)
    parallel = {"group": group, "vocab_sizes": sizes, "chunk_tokens": 9}
    outputs, gradients = run_whole(ops.linear_logprob, shard(problem, sizes, group), weights, **parallel, **options)
    assert_same_on_all_ranks(torch.stack(outputs), group)
    truths, true_gradients = run_whole(oracle, problem, weights, torch.float64, **options)
    for output, truth in zip(outputs, truths, strict=True):
        assert_near(output, truth, absolute=ROW_ERROR[dtype], relative=1e-6)
    assert_shares_near(gradients, true_gradients, sizes, group, dtype)


# -- cases ------------------------------------------------------------------------------------------------------------


@case
def values_and_gradients(group: dist.ProcessGroup) -> None:
    for sizes in (cut([60, 1, 40], group), cut([5, 90, 6], group)):
        for dtype in DTYPES:
            problem = make_problem(dtype=dtype)
            check(problem, sizes, group, temperature=0.7)
            check(problem, sizes, group, temperature=torch.linspace(0.5, 2, 40))


@case
def masked_and_empty(group: dist.ProcessGroup) -> None:
    sizes = cut([60, 1, 40], group)
    check(make_problem(live=0.0), sizes, group)
    check(make_problem(tokens=0), sizes, group)
    problem, weights = make_problem(), torch.randn(3, 40)
    hidden = torch.where(problem.loss_mask[:, None], problem.hidden, torch.nan)
    options = {"group": group, "vocab_sizes": sizes}
    clean = run_whole(ops.linear_logprob, shard(problem, sizes, group), weights, **options)
    nasty = run_whole(ops.linear_logprob, shard(problem._replace(hidden=hidden), sizes, group), weights, **options)
    for a, b in zip(clean[0] + clean[1], nasty[0] + nasty[1], strict=True):
        assert_same_bits(a, b)


@case
def padded_vocabulary(group: dist.ProcessGroup) -> None:
    """A bias of -inf takes rows of the weight out."""
    sizes, problem = cut([60, 1, 40], group), make_problem(dtype=torch.float64)
    problem.bias[80:] = -torch.inf
    problem.labels.clamp_(max=79)
    outputs, gradients = run_whole(
        ops.linear_logprob, shard(problem, sizes, group), torch.ones(3, 40), group=group, vocab_sizes=sizes
    )
    small = problem._replace(weight=problem.weight[:80], bias=problem.bias[:80])
    truths, _ = run_whole(oracle, small, torch.ones(3, 40))
    for output, truth in zip(outputs, truths, strict=True):
        assert_near(output, truth, absolute=1e-12, relative=1e-12)
    begin, end = bounds(sizes, group)
    assert not gradients[1][max(80, begin) - begin : end - begin].any()
    assert gradients[1].isfinite().all()


@case
def share_of_the_hidden_gradient(group: dist.ProcessGroup) -> None:
    sizes, problem = cut([60, 1, 40], group), make_problem(dtype=torch.float64)
    options = {"group": group, "vocab_sizes": sizes}
    total = run_whole(ops.linear_logprob, shard(problem, sizes, group), torch.ones(3, 40), **options)[1][0]
    options["reduce_hidden_grad"] = False
    share = run_whole(ops.linear_logprob, shard(problem, sizes, group), torch.ones(3, 40), **options)[1][0].clone()
    assert not torch.equal(share, total)
    dist.all_reduce(share, group=group)
    assert_near(share, total, absolute=1e-14, relative=1e-13)


@case
def one_collective_forward_and_one_backward(group: dist.ProcessGroup) -> None:
    sizes, problem = cut([60, 1, 40], group), make_problem()
    part = shard(problem, sizes, group)
    leaves = [x.clone().requires_grad_() for x in part[:2]]
    with (
        mock.patch.object(_vocab_parallel, "_all_gather", side_effect=_vocab_parallel._all_gather) as gather,
        mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduce,
    ):
        out = ops.linear_logprob(*leaves, part.labels, group=group, vocab_sizes=sizes, chunk_tokens=3)
        assert (gather.call_count, reduce.call_count) == (1, 0)
        (out.logprobs + out.entropy).sum().backward()
        assert (gather.call_count, reduce.call_count) == (1, 1)


@case
def main_grad_of_a_shard(group: dist.ProcessGroup) -> None:
    sizes, problem = cut([60, 1, 40], group), make_problem(dtype=torch.bfloat16)
    problem = problem._replace(bias=torch.zeros_like(problem.bias))
    part, (begin, end) = shard(problem, sizes, group), bounds(sizes, group)
    truth = run_whole(oracle, problem, torch.ones(3, 40), torch.float64)[1][1][begin:end]
    main_grad, weight = torch.zeros(end - begin, 16), part.weight.clone().requires_grad_()
    options = {"group": group, "vocab_sizes": sizes, "loss_mask": problem.loss_mask}
    out = ops.linear_logprob(part.hidden, weight, problem.labels, main_grad=main_grad, **options)
    (out.logprobs + out.entropy + out.lse).sum().backward()
    assert weight.grad is None
    assert_near(main_grad, truth, absolute=1e-4, relative=1e-5)


@case
def policy_loss(group: dist.ProcessGroup) -> None:
    sizes, problem = cut([60, 1, 40], group), make_problem(dtype=torch.float64)
    proximal, advantages = (torch.randn(40, dtype=torch.float64) for _ in range(2))
    proximal -= 5
    config = ops.PPOLossConfig(entropy_coef=0.1)
    results = []
    for part, options in ((shard(problem, sizes, group), {"group": group, "vocab_sizes": sizes}), (problem, {})):
        leaves = [x.clone().requires_grad_() for x in part[:2]]
        arguments = (problem.labels, proximal, advantages, problem.loss_mask)
        out = ops.linear_ppo_loss(*leaves, *arguments, bias=part.bias, config=config, **options)
        out.loss.backward()
        results.append((out.loss, out.stats.raw, *(x.grad for x in leaves)))
    begin, end = bounds(sizes, group)
    truths = (*results[1][:3], results[1][3][begin:end])
    for value, truth in zip(results[0], truths, strict=True):
        assert_near(value, truth, absolute=1e-13, relative=1e-11)


@case
def broken_contracts_raise_on_every_rank(group: dist.ProcessGroup) -> None:
    sizes, problem = cut([60, 1, 40], group), make_problem(live=1.0)
    part = shard(problem, sizes, group)
    with pytest.raises(ValueError, match=r"^linear_logprob: expected vocab_sizes with \d entries"):
        ops.linear_logprob(*part[:2], problem.labels, group=group, vocab_sizes=[101])
    with pytest.raises(ValueError, match=r"^linear_logprob: expected vocab_sizes with a group only"):
        ops.linear_logprob(*part[:2], problem.labels, vocab_sizes=sizes)
    problem.labels[5] = 101
    with pytest.raises(ValueError, match=r"^linear_logprob: expected labels\[5\] in \[0, 101\)"):
        ops.linear_logprob(*part[:2], problem.labels, group=group, vocab_sizes=sizes)


@case
def compiles_into_one_graph(group: dist.ProcessGroup) -> None:
    sizes, problem = cut([60, 1, 40], group), make_problem()
    part = shard(problem, sizes, group)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        options: dict[str, Any] = {"group": group, "vocab_sizes": sizes, "chunk_tokens": 9}
        out = ops.linear_logprob(hidden * 1, weight, problem.labels, loss_mask=problem.loss_mask, **options)
        return (out.logprobs - 0.1 * out.entropy).sum()

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in part[:2]]
        function(*leaves).backward()
        results.append([x.grad for x in leaves])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
