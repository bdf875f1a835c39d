"""Cases of test_logprob_parallel.py: each runs on every rank of a group, in processes that the test starts.

A case is a function of the group. When it fails on one rank, all processes are ended.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from op_checks import EPSILON, assert_near, assert_same_bits
from torch import Tensor

from areal_core import ops
from areal_core.ops import _vocab_parallel
from areal_core.reference.logprob import logprob_from_logits as oracle

CASES: dict[str, Callable[[dist.ProcessGroup], None]] = {}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-6, torch.float16: 3e-6}


def case(function: Callable[[dist.ProcessGroup], None]) -> Callable[[dist.ProcessGroup], None]:
    CASES[function.__name__] = function
    return function


def run_rank(rank: int, ranks: int, folder: str) -> None:
    """What one process does: every case on all ranks, then on the first two. The first failure ends it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(minutes=2)
    )
    everyone, pair = dist.group.WORLD, dist.new_group([0, 1])
    for size, group in ((ranks, everyone), (2, pair)):
        for name, function in CASES.items():
            if rank >= size:
                continue
            torch.manual_seed(0)
            try:
                function(group)
            except BaseException as error:
                raise AssertionError(f"{name}, rank {rank} of {size}") from error
            dist.barrier(group)  # so that a failure is that of the case it is reported for
    dist.barrier(everyone)  # the first to leave would take the store with it
    dist.destroy_process_group()


# -- helpers ----------------------------------------------------------------------------------------------------------


def bounds(sizes: list[int], group: dist.ProcessGroup) -> tuple[int, int]:
    rank = dist.get_rank(group)
    return sum(sizes[:rank]), sum(sizes[: rank + 1])


def cut(sizes: list[int], group: dist.ProcessGroup) -> list[int]:
    """A list of three lengths, for the number of ranks there are."""
    return sizes if dist.get_world_size(group) == 3 else [sizes[0], sizes[1] + sizes[2]]


def problem(sizes: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits of the whole vocabulary, and a row for each column on either side of a border, besides others."""
    total = sum(sizes)
    borders = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    labels = [b - 1 for b in borders[1:]] + borders[:-1] + torch.randint(0, total, (3,)).tolist()
    logits = 3 * torch.randn(len(labels), total, dtype=torch.float64)
    return logits.to(dtype), torch.tensor(labels)


def run(function, logits: Tensor, labels: Tensor, weights: Tensor, **options) -> tuple[list[Tensor], Tensor]:
    """Outputs, and the gradient of sum(weights * outputs)."""
    leaf = logits.detach().clone().requires_grad_()
    outputs = function(leaf, labels, **options)
    used = weights.to(outputs[0].dtype)
    (gradient,) = torch.autograd.grad(sum((w * o).sum() for w, o in zip(used, outputs, strict=True)), leaf)
    return [o.detach() for o in outputs], gradient


def assert_same_on_all_ranks(values: Tensor, group: dist.ProcessGroup) -> None:
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, values, group=group)
    for other in everyone:
        assert_same_bits(other, values)


def check(logits: Tensor, labels: Tensor, sizes: list[int], group: dist.ProcessGroup, **options) -> None:
    """Against the fp64 oracle and the op on the whole vocabulary; the same bits on all ranks."""
    weights = torch.randn(3, len(labels), dtype=torch.float64)
    begin, end = bounds(sizes, group)
    shard = logits[:, begin:end]
    outputs, gradient = run(ops.logprob_from_logits, shard, labels, weights, group=group, vocab_sizes=sizes, **options)
    assert_same_on_all_ranks(torch.stack(outputs), group)
    whole, whole_gradient = run(ops.logprob_from_logits, logits, labels, weights, **options)
    options.pop("inplace_backward", None)
    truths, true_gradient = run(oracle, logits.double(), labels, weights, **options)
    tolerance = TOLERANCE[logits.dtype]
    for output, one, truth in zip(outputs, whole, truths, strict=True):
        assert output.dtype == one.dtype
        assert_near(output, truth, absolute=tolerance, relative=3e-7)
        assert_near(output, one, absolute=tolerance, relative=3e-7)
    relative = 8 * EPSILON[logits.dtype]
    assert gradient.dtype == logits.dtype
    assert_near(gradient, true_gradient[:, begin:end], absolute=tolerance, relative=relative)
    assert_near(gradient, whole_gradient[:, begin:end], absolute=tolerance, relative=relative)


# -- cases ------------------------------------------------------------------------------------------------------------


@case
def values_and_gradients(group: dist.ProcessGroup) -> None:
    for sizes in ([5, 1, 31], [1, 1, 1], [16, 16, 16], [1000, 4095, 4097]):
        sizes = cut(sizes, group)
        for dtype in DTYPES:
            logits, labels = problem(sizes, dtype)
            labels[1] = -100
            mask = torch.arange(len(labels)) != 2
            check(logits, labels, sizes, group, loss_mask=mask, temperature=0.7)
            check(logits, labels, sizes, group, temperature=torch.linspace(0.5, 2, len(labels)))


@case
def real_vocabulary(group: dist.ProcessGroup) -> None:
    sizes = cut([50304, 50304, 51328], group)
    check(*problem(sizes, torch.bfloat16), sizes, group)


@case
def label_of_another_shard_is_not_taken_for_a_padded_column(group: dist.ProcessGroup) -> None:
    for size in (127, 1023, 4095, 4096):  # one less than a tile, and a tile
        sizes = cut([size, size, size], group)
        logits, labels = problem(sizes)
        logits[:, 3] = 50.0  # a wrong pick would show
        check(logits, labels, sizes, group)


@case
def padded_columns_stay_out(group: dist.ProcessGroup) -> None:
    sizes = cut([40, 40, 40], group)
    logits, labels = problem(sizes)
    for real in (100, 81, 41, 1):  # of 120 columns; with 41, a shard may hold padding only
        padded, clipped = logits.clone(), labels.clamp(max=real - 1)
        padded[:, real:] = -torch.inf
        check(padded, clipped, sizes, group)
        begin, end = bounds(sizes, group)
        gradient = run(
            ops.logprob_from_logits,
            padded[:, begin:end],
            clipped,
            torch.ones(3, len(labels)),
            group=group,
            vocab_sizes=sizes,
        )[1]
        assert not gradient[:, max(0, real - begin) :].any()


@case
def inplace_backward_gives_the_same_bits(group: dist.ProcessGroup) -> None:
    sizes = cut([33, 1, 64], group)
    for dtype in DTYPES:
        logits, labels = problem(sizes, dtype)
        begin, end = bounds(sizes, group)
        weights = torch.randn(3, len(labels))
        options = {"group": group, "vocab_sizes": sizes}
        plain = run(ops.logprob_from_logits, logits[:, begin:end], labels, weights, **options)[1]
        leaf = logits[:, begin:end].clone().requires_grad_()
        used = leaf * 1
        out = ops.logprob_from_logits(used, labels, inplace_backward=True, **options)
        version = used._version
        sum((w * o).sum() for w, o in zip(weights, out, strict=True)).backward()
        assert used._version > version
        assert_same_bits(used, plain)
        assert_same_bits(leaf.grad, plain)


@case
def digits_survive_the_exchange(group: dist.ProcessGroup) -> None:
    """The difference of large logits, and 1 - p of a sure label, though label and rest lie on different ranks."""
    sizes = cut([1, 1, 1], group)
    begin, end = bounds(sizes, group)
    options = {"group": group, "vocab_sizes": sizes}
    logits = torch.tensor([[16384.0, 16383.0, -torch.inf], [20.0, 6.0, -torch.inf]])
    upstream = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    outputs, gradient = run(ops.logprob_from_logits, logits[:, begin:end], torch.tensor([0, 0]), upstream, **options)
    truths, true_gradient = run(oracle, logits, torch.tensor([0, 0]), upstream)
    assert_near(outputs[0], truths[0], absolute=0, relative=1e-6)
    assert_near(gradient, true_gradient[:, begin:end], absolute=0, relative=1e-5)


@case
def masked_and_impossible_and_poisoned_rows(group: dist.ProcessGroup) -> None:
    sizes = cut([9, 30, 2], group)
    begin, end = bounds(sizes, group)
    logits, labels = problem(sizes)
    mask = torch.ones(len(labels), dtype=torch.bool)
    weights = torch.ones(3, len(labels))
    options = {"group": group, "vocab_sizes": sizes}
    clean = run(ops.logprob_from_logits, logits[:, begin:end], labels, weights, loss_mask=mask, **options)
    nasty = logits.clone()
    mask[0], labels[0], nasty[0], weights[:, 0] = False, 10**9, torch.nan, torch.nan
    labels[1], nasty[1] = -100, torch.inf
    nasty[2] = -torch.inf
    nasty[3, 0] = torch.nan  # the first rank's
    nasty[4, -1] = torch.inf  # the last rank's
    outputs, gradient = run(ops.logprob_from_logits, nasty[:, begin:end], labels, weights, loss_mask=mask, **options)
    assert_same_on_all_ranks(torch.stack(outputs), group)
    for row in (0, 1):
        assert [o[row].item() for o in outputs] == [0, 0, 0]
        assert not gradient[row].any()
    assert [o[2].item() for o in outputs] == [-torch.inf, 0, -torch.inf]
    assert not gradient[2].any()
    for row in (3, 4):
        assert torch.stack([o[row] for o in outputs]).isnan().all()
        assert gradient[row].isnan().all()
    for output, same in zip(outputs, clean[0], strict=True):
        assert_same_bits(output[5:], same[5:])
    assert_same_bits(gradient[5:], clean[1][5:])


@case
def no_rows(group: dist.ProcessGroup) -> None:
    sizes = cut([4, 4, 4], group)
    begin, end = bounds(sizes, group)
    logits = torch.empty(0, end - begin, requires_grad=True)
    out = ops.logprob_from_logits(logits, torch.empty(0, dtype=torch.int64), group=group, vocab_sizes=sizes)
    assert [o.shape for o in out] == [(0,)] * 3
    out.entropy.sum().backward()
    assert logits.grad.shape == logits.shape


@case
def one_collective_forward_and_none_backward(group: dist.ProcessGroup) -> None:
    sizes = cut([40, 1, 2], group)
    begin, end = bounds(sizes, group)
    logits, labels = problem(sizes)
    leaf = logits[:, begin:end].requires_grad_()
    real = _vocab_parallel._all_gather
    with mock.patch.object(_vocab_parallel, "_all_gather", side_effect=real) as gather:
        out = ops.logprob_from_logits(leaf, labels, group=group, vocab_sizes=sizes)
    assert gather.call_count == 1
    if dist.get_rank(group) == 0:  # alone: would wait for ever on a collective
        (out.logprobs + out.entropy + out.lse).sum().backward()
        assert leaf.grad.any()


@case
def sizes_are_asked_for_once(group: dist.ProcessGroup) -> None:
    sizes = cut([3, 17, 20], group)
    begin, end = bounds(sizes, group)
    logits, labels = problem(sizes)
    expected = ops.logprob_from_logits(logits[:, begin:end], labels, group=group, vocab_sizes=sizes).logprobs
    real = _vocab_parallel._all_gather
    with mock.patch.object(_vocab_parallel, "_all_gather", side_effect=real) as gather:
        for _ in range(3):
            out = ops.logprob_from_logits(logits[:, begin:end], labels, group=group)
            assert_same_bits(out.logprobs, expected)
    assert gather.call_count == 4
    with pytest.raises(ValueError, match="first call; give vocab_sizes where they change"):
        ops.logprob_from_logits(torch.randn(2, 99), torch.zeros(2, dtype=torch.int64), group=group)


@case
def broken_contracts_raise_on_every_rank(group: dist.ProcessGroup) -> None:
    sizes = cut([4, 5, 6], group)
    begin, end = bounds(sizes, group)
    logits, labels = problem(sizes)
    shard = logits[:, begin:end]
    for wrong in ([4, 5, 6, 7], [15], [s + 1 for s in sizes]):
        with pytest.raises(ValueError, match=r"expected vocab_sizes with \d entries and \d+ = V of this rank"):
            ops.logprob_from_logits(shard, labels, group=group, vocab_sizes=wrong)
    for label in (-1, 15, 2**40):
        labels[2] = label
        with pytest.raises(ValueError, match=rf"expected labels\[2\] in \[0, 15\) .*, got {label}$"):
            ops.logprob_from_logits(shard, labels, group=group, vocab_sizes=sizes)
    with pytest.raises(ValueError, match="expected temperature > 0"):
        ops.logprob_from_logits(shard, labels, group=group, vocab_sizes=sizes, temperature=0.0)


@case
def float64_gradients_by_finite_differences(group: dist.ProcessGroup) -> None:
    """Of the merge alone: what this rank's logits do to the outputs goes through its own part."""
    sizes = cut([3, 4, 5], group)
    begin, end = bounds(sizes, group)
    logits, labels = problem(sizes, torch.float64)
    weights = torch.randn(3, len(labels), dtype=torch.float64)
    options = {"group": group, "vocab_sizes": sizes}
    gradient = run(ops.logprob_from_logits, logits[:, begin:end], labels, weights, **options)[1]
    step = 1e-6
    for column in (0, sizes[0] - 1, sizes[0], sum(sizes) - 1):
        ends = []
        for sign in (1, -1):
            moved = logits.clone()
            moved[0, column] += sign * step
            out = ops.logprob_from_logits(moved[:, begin:end], labels, **options)
            ends.append(sum((w * o).sum() for w, o in zip(weights, out, strict=True)))
        if begin <= column < end:
            assert_near(gradient[0, column - begin], (ends[0] - ends[1]) / (2 * step), absolute=1e-7, relative=1e-7)


@case
def compiles_into_one_graph(group: dist.ProcessGroup) -> None:
    sizes = cut([8, 9, 10], group)
    begin, end = bounds(sizes, group)
    logits, labels = problem(sizes)

    def step(x: Tensor) -> Tensor:
        out = ops.logprob_from_logits(x * 1, labels, group=group, vocab_sizes=sizes)
        return (out.logprobs - 0.1 * out.entropy).sum()

    gradients = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaf = logits[:, begin:end].clone().requires_grad_()
        function(leaf).backward()
        gradients.append(leaf.grad)
    assert_same_bits(*gradients)
