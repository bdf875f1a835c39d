"""logprob_from_logits: errors, in-place backward, autograd and torch.compile."""

import pytest
import torch
from op_checks import assert_same_bits
from torch import Tensor

from areal_core import ops


def make_problem(rows: int = 4, vocab: int = 37, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return (3 * torch.randn(rows, vocab)).to(dtype), torch.randint(0, vocab, (rows,))


def loss_of(logits: Tensor, labels: Tensor, **options) -> Tensor:
    out = ops.logprob_from_logits(logits, labels, **options)
    return (out.logprobs - 0.1 * out.entropy + 0.01 * out.lse**2).sum()


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [-1, 37, 2**40, -(2**40)])
def test_label_out_of_range_raises(label: int) -> None:
    logits, labels = make_problem()
    labels[2] = label
    with pytest.raises(ValueError, match=rf"expected labels\[2\] in \[0, 37\) .*, got {label}$"):
        ops.logprob_from_logits(logits, labels)
    mask = torch.tensor([True, True, False, True])
    ops.logprob_from_logits(logits, labels, loss_mask=mask)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf"), 1e-45])
def test_temperature_out_of_range_raises(temperature: float) -> None:
    logits, labels = make_problem()
    with pytest.raises(ValueError, match="expected temperature > 0"):
        ops.logprob_from_logits(logits, labels, temperature=temperature)
    rows = torch.tensor([1.0, temperature, 1.0, 1.0])
    with pytest.raises(ValueError, match="expected temperature of row 1 > 0"):
        ops.logprob_from_logits(logits, labels, temperature=rows)
    ops.logprob_from_logits(logits, labels, temperature=rows, loss_mask=torch.tensor([True, False, True, True]))


@pytest.mark.parametrize(
    ("logits", "labels", "options", "error", "text"),
    [
        (torch.zeros(3), torch.zeros(3).long(), {}, ValueError, r"logits of shape \[T, V\], got 1-D"),
        (torch.zeros(2, 3, 4), torch.zeros(2).long(), {}, ValueError, r"logits of shape \[T, V\], got 3-D"),
        (torch.zeros(4, 3).t(), torch.zeros(3).long(), {}, ValueError, r"logits.stride\(-1\) = 1, got 3"),
        (torch.zeros(3, 4), torch.zeros(2).long(), {}, ValueError, r"labels of shape \[3\], got 1-D with 2"),
        (torch.zeros(3, 4), torch.zeros(3, 1).long(), {}, ValueError, r"labels of shape \[3\], got 2-D with 3"),
        (torch.zeros(3, 4), torch.zeros(3), {}, TypeError, "labels of an integer dtype, got torch.float32"),
        (torch.zeros(3, 4).long(), torch.zeros(3).long(), {}, TypeError, "expected logits dtype in .*, got Long"),
        (
            torch.zeros(3, 4),
            torch.zeros(3).long(),
            {"loss_mask": torch.ones(4)},
            ValueError,
            r"loss_mask of shape \[3\]",
        ),
        (torch.zeros(3, 4), torch.zeros(3).long(), {"temperature": torch.ones(2)}, ValueError, r"of shape \[3\]"),
        (torch.zeros(3, 4), torch.zeros(3).long(), {"group": object()}, TypeError, "ProcessGroup, got object"),
        (torch.zeros(3, 4), torch.zeros(3).long(), {"vocab_sizes": [4]}, ValueError, "vocab_sizes with a group only"),
        (
            torch.zeros(3, 4),
            torch.zeros(3).long(),
            {"temperature": torch.ones(3, requires_grad=True)},
            ValueError,
            "temperature without requires_grad",
        ),
    ],
)
def test_broken_contracts_raise(logits, labels, options, error, text) -> None:
    with pytest.raises(error, match=f"^logprob_from_logits: expected .*{text.removeprefix('expected ')}"):
        ops.logprob_from_logits(logits, labels, **options)


# -- in-place backward ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_inplace_backward_overwrites_the_logits_with_the_gradient(dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    data, labels = make_problem(3, 9001, dtype)
    labels[1] = -100
    plain = data.clone().requires_grad_()
    loss_of(plain, labels).backward()
    leaf = data.clone().requires_grad_()
    logits = leaf * 1  # as a model's head gives it: not a leaf
    loss_of(logits, labels, inplace_backward=True).backward()
    assert_same_bits(leaf.grad, plain.grad)
    assert_same_bits(logits, plain.grad)


def test_inplace_backward_bumps_the_version_and_refuses_a_second_run() -> None:
    data, labels = make_problem()
    logits = data.requires_grad_() * 1
    version = logits._version
    loss = loss_of(logits, labels, inplace_backward=True)
    assert logits._version == version
    loss.backward(retain_graph=True)
    assert logits._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_backward_is_seen_by_others_who_saved_the_logits() -> None:
    data, labels = make_problem()
    leaf = data.requires_grad_()
    logits = leaf * 1
    other = logits.exp().sum() + (logits * logits).sum()  # the product saves the logits themselves
    loss_of(logits, labels, inplace_backward=True).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_plain_backward_may_run_again_and_leaves_the_logits_alone() -> None:
    data, labels = make_problem()
    leaf = data.clone().requires_grad_()
    loss = loss_of(leaf, labels)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf)
    assert_same_bits(first, second)
    assert_same_bits(leaf, data)


def test_inplace_backward_writes_strided_rows_only() -> None:
    base = torch.full((4, 50), 7.0)
    data, labels = make_problem(4, 37)
    base[:, 5:42] = data
    logits = base[:, 5:42].detach().requires_grad_()
    loss_of(logits, labels, inplace_backward=True).backward()
    plain = data.clone().requires_grad_()
    loss_of(plain, labels).backward()
    assert_same_bits(base[:, 5:42], plain.grad)
    assert bool((base[:, :5] == 7).all() and (base[:, 42:] == 7).all())


def test_inplace_backward_refuses_rows_that_overlap() -> None:
    logits = torch.randn(1, 9).expand(3, 9).requires_grad_()
    loss = loss_of(logits, torch.zeros(3, dtype=torch.int64), inplace_backward=True)
    with pytest.raises((RuntimeError, ValueError), match="rows do not overlap"):
        loss.backward()


# -- autograd and torch.compile ---------------------------------------------------------------------------------------


def test_each_output_alone_has_its_gradient() -> None:
    data, labels = make_problem(dtype=torch.float64)
    for name in ("logprobs", "entropy", "lse"):
        leaf = data.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, name=name: getattr(ops.logprob_from_logits(x, labels), name), (leaf,))


def test_no_graph_where_none_is_asked_for() -> None:
    data, labels = make_problem()
    assert not ops.logprob_from_logits(data, labels).logprobs.requires_grad
    with torch.no_grad():
        assert not ops.logprob_from_logits(data.requires_grad_(), labels).logprobs.requires_grad


def test_differentiating_the_gradient_raises() -> None:
    data, labels = make_problem()
    leaf = data.requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(leaf, labels), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_into_one_graph(dynamic: bool, inplace: bool) -> None:
    def step(logits: Tensor, labels: Tensor, mask: Tensor, temperature: Tensor) -> Tensor:
        return loss_of(
            logits * 1, labels, loss_mask=mask, temperature=temperature, ignore_index=-1, inplace_backward=inplace
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (4, 6):
        data, labels = make_problem(rows)
        labels[1] = -1
        options = (labels, torch.rand(rows) < 0.8, torch.rand(rows) + 0.5)
        eager, leaf = data.clone().requires_grad_(), data.clone().requires_grad_()
        step(eager, *options).backward()
        compiled(leaf, *options).backward()
        assert_same_bits(leaf.grad, eager.grad)


def test_meta_tensors_give_shapes() -> None:
    logits = torch.empty(5, 70, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = ops.logprob_from_logits(logits, torch.empty(5, dtype=torch.int64, device="meta"))
    assert [(o.shape, o.dtype) for o in out] == [((5,), torch.float32)] * 3
    out.entropy.sum().backward()
    assert logits.grad.shape == (5, 70)
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("temperatures", [None, torch.rand(4, dtype=torch.float64) + 0.5])
@pytest.mark.parametrize("mask", [None, torch.tensor([True, False, True, True])])
def test_opcheck(temperatures: Tensor | None, mask: Tensor | None) -> None:
    data, labels = make_problem(dtype=torch.float64)
    native = torch.ops.areal_core
    common = (labels, temperatures, 0.7, mask, -100)
    torch.library.opcheck(native.logprob_forward.default, (data.clone().requires_grad_(), *common, False))
    logprobs, entropy, _lse, row_max, log_sum = native.logprob_forward.default(data, *common, False)
    upstream = (torch.randn(4, dtype=torch.float64), None, torch.randn(4, dtype=torch.float64))
    saved = (logprobs, entropy, row_max, log_sum)
    torch.library.opcheck(native.logprob_backward.default, (*upstream, data, *common, *saved))
    torch.library.opcheck(native.logprob_backward_.default, (*upstream, data.clone(), *common, *saved))
