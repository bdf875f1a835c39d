"""Shifts inside sequences and position ids."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal_core import ops
from areal_core.reference import packing as reference

# Empty sequences first, last and in a row; sequences of one token.
CU = torch.tensor([0, 0, 3, 3, 3, 4, 6, 6])
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def test_by_hand() -> None:
    cu = torch.tensor([0, 3, 3, 6])
    ids = torch.tensor([10, 11, 12, 20, 21, 22])
    assert ops.next_token_labels(ids, cu).tolist() == [11, 12, -100, 21, 22, -100]
    assert ops.next_token_labels(ids, cu, ignore_index=-1).tolist() == [11, 12, -1, 21, 22, -1]
    assert ops.to_token_aligned(ids.double(), cu).tolist() == [0, 10, 11, 0, 20, 21]
    assert ops.to_prediction_aligned(ids.double(), cu).tolist() == [11, 12, 0, 21, 22, 0]
    assert ops.position_ids(cu).tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("trailing", [(), (3,), (2, 2)], ids=str)
def test_matches_the_loop(dtype: torch.dtype, index_dtype: torch.dtype, trailing: tuple[int, ...]) -> None:
    x = torch.randint(0, 2, (6, *trailing)).to(dtype)
    cu = CU.to(index_dtype)
    for fill in (0.0, 1.0):
        assert torch.equal(ops.to_token_aligned(x, cu, fill), reference.shift(x, CU.tolist(), 1, fill))
        assert torch.equal(ops.to_prediction_aligned(x, cu, fill), reference.shift(x, CU.tolist(), -1, fill))


@settings(deadline=None, max_examples=100)
@given(lengths=st.lists(st.integers(0, 6), max_size=12))
def test_never_crosses_a_boundary(lengths: list[int]) -> None:
    cu = torch.tensor([0, *lengths]).cumsum(0)
    total = sum(lengths)
    ids = torch.arange(total)
    labels = ops.next_token_labels(ids, cu)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    last = torch.cat([owner[1:] != owner[:-1], torch.ones(min(total, 1), dtype=torch.bool)])
    assert torch.equal(labels, torch.where(last, -100, ids + 1))
    assert torch.equal(ops.position_ids(cu), ids - cu[owner])
    # Back to the tokens: every token but the first of its sequence is where it was.
    first = ops.position_ids(cu) == 0
    assert torch.equal(ops.to_token_aligned(labels, cu, -7), torch.where(first, -7, ids))


def test_special_values_move_unchanged() -> None:
    x = torch.tensor([float("nan"), float("inf"), -0.0, 5e-324, -float("inf"), 1.0], dtype=torch.float64)
    moved = ops.to_token_aligned(x, CU, float("nan"))
    want = reference.shift(x, CU.tolist(), 1, float("nan"))
    assert torch.equal(moved.view(torch.int64)[1:3], x.view(torch.int64)[:2])
    assert torch.equal(moved.isnan(), want.isnan())
    low = torch.tensor([0.1, 0.2], dtype=torch.bfloat16)
    assert ops.to_token_aligned(low, torch.tensor([0, 2]), 0.3).tolist() == torch.tensor([0.3, 0.1]).bfloat16().tolist()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens(lengths: list[int]) -> None:
    cu = torch.tensor([0, *lengths]).cumsum(0)
    assert ops.next_token_labels(torch.empty(0, dtype=torch.int64), cu).shape == (0,)
    assert ops.to_token_aligned(torch.empty(0, 4), cu).shape == (0, 4)
    assert ops.position_ids(cu).shape == (0,)


def test_many_tokens_do_not_depend_on_threads() -> None:
    torch.manual_seed(0)
    lengths = torch.randint(0, 3000, (200,))
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, 1 << 40, (int(cu[-1]),))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append((ops.next_token_labels(ids, cu), ops.to_token_aligned(ids, cu), ops.position_ids(cu)))
    finally:
        torch.set_num_threads(before)
    last = cu[1:][lengths > 0] - 1
    want = ids.roll(-1)
    want[last] = -100
    for labels, moved, positions in results:
        assert torch.equal(labels, want)
        assert torch.equal(moved[1:], torch.where(positions[1:] > 0, ids[:-1], 0))
        assert torch.equal(positions, torch.cat([torch.arange(int(n)) for n in lengths]))


def test_gradients() -> None:
    torch.manual_seed(0)
    for trailing in ((), (2,)):
        x = torch.randn(6, *trailing, dtype=torch.float64, requires_grad=True)
        for op in (ops.to_token_aligned, ops.to_prediction_aligned):
            assert torch.autograd.gradcheck(lambda x, op=op: op(x, CU, 0.5), (x,))
            assert torch.autograd.gradgradcheck(lambda x, op=op: op(x, CU, 0.5), (x,))
    x = torch.ones(6, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(ops.to_token_aligned(x, CU).sum(), x)
    assert grad.tolist() == [1, 1, 0, 0, 1, 0]


def test_opcheck() -> None:
    for dtype in (torch.float32, torch.int64):
        x = torch.arange(6).to(dtype).requires_grad_(dtype.is_floating_point)
        torch.library.opcheck(torch.ops.areal_core.shift_tokens.default, (x, CU, 1, 0.0))
    torch.library.opcheck(torch.ops.areal_core.position_ids.default, (CU, 6))


def test_compile_without_a_graph_break() -> None:
    def step(ids: torch.Tensor, logprobs: torch.Tensor, cu: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positions = ops.position_ids(cu, total_tokens=ids.shape[0])
        return ops.next_token_labels(ids, cu), ops.to_token_aligned(logprobs * 2, cu, -1.0), positions

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 0, 4], [1, 9]):
        cu = torch.tensor([0, *lengths]).cumsum(0)
        ids = torch.arange(sum(lengths))
        eager_in = torch.randn(sum(lengths), requires_grad=True)
        compiled_in = eager_in.detach().clone().requires_grad_()
        want, got = step(ids, eager_in, cu), compiled(ids, compiled_in, cu)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        (want_grad,) = torch.autograd.grad(want[1].pow(2).sum(), eager_in)
        (got_grad,) = torch.autograd.grad(got[1].pow(2).sum(), compiled_in)
        assert torch.equal(want_grad, got_grad)


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([0, 3, 2, 6], r"non-decreasing cu_seqlens, got cu_seqlens\[1\] = 3 > cu_seqlens\[2\] = 2"),
        ([1, 6], r"cu_seqlens\[0\] = 0, got 1"),
        ([0, 5], r"cu_seqlens\[-1\] = 6 .* got 5"),
        ([0, 7], r"cu_seqlens\[-1\] = 6 .* got 7"),
        ([], "at least 1 element"),
    ],
)
def test_broken_cu_seqlens(cu: list[int], message: str) -> None:
    index = torch.tensor(cu, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        ops.next_token_labels(torch.arange(6), index)
    with pytest.raises(ValueError, match=message):
        ops.to_token_aligned(torch.zeros(6), index)
    with pytest.raises(ValueError, match="cu_seqlens"):
        ops.position_ids(index, total_tokens=6)


def test_broken_values() -> None:
    with pytest.raises(TypeError, match=r"input_ids of an integer dtype, got torch\.float32"):
        ops.next_token_labels(torch.zeros(6), CU)
    with pytest.raises(ValueError, match="integer fill"):
        ops.to_token_aligned(torch.zeros(6, dtype=torch.int64), CU, 0.5)
    with pytest.raises(ValueError, match="at least 1 dimension"):
        ops.to_token_aligned(torch.zeros(()), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="cu_seqlens"):
        ops.to_token_aligned(torch.zeros(6), CU[None])


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("next_token_labels", lambda cu: ops.next_token_labels(torch.arange(4), cu)),
        ("to_token_aligned", lambda cu: ops.to_token_aligned(torch.ones(4), cu)),
        ("to_prediction_aligned", lambda cu: ops.to_prediction_aligned(torch.ones(4), cu)),
        ("position_ids", ops.position_ids),
        ("zigzag_split", lambda cu: ops.zigzag_split(torch.ones(4), cu, 1, 0)),
        ("zigzag_merge", lambda cu: ops.zigzag_merge([torch.ones(4)], cu)),
    ],
)
def test_cu_seqlens_may_have_strides_but_no_fractions(op: str, function: Callable[[Tensor], Tensor]) -> None:
    strided = torch.tensor([0, 9, 2, 9, 4, 9])[::2]
    assert torch.equal(function(strided), function(torch.tensor([0, 2, 4], dtype=torch.int32)))
    with pytest.raises(TypeError, match=f"{op}: expected cu_seqlens of an integer dtype"):
        function(torch.tensor([0.0, 2.5, 4.0]))


def test_a_dict_is_shifted_together() -> None:
    batch = {
        "labels": torch.arange(6) + 10,
        "loss_mask": torch.tensor([0, 1, 1, 0, 1, 1], dtype=torch.bool),
        "logprobs": torch.randn(6),
        "versions": torch.tensor([7, 7, 8, 3, 3, 4], dtype=torch.int32),
        "hidden": torch.randn(6, 3).bfloat16(),
    }
    fill = {"labels": -100, "versions": -1}
    for op in (ops.to_prediction_aligned, ops.to_token_aligned):
        moved = op(batch, CU, fill)
        assert list(moved) == list(batch)
        for key, x in batch.items():
            assert torch.equal(moved[key], op(x, CU, fill.get(key, 0.0))), key
    rows = ops.to_prediction_aligned(batch, CU, fill)
    assert torch.equal(rows["labels"], ops.next_token_labels(batch["labels"], CU))
    # A label and its version, mask and logprob stay together.
    live = rows["labels"] != -100
    back = rows["labels"][live] - 10
    assert torch.equal(rows["versions"][live], batch["versions"][back])
    assert torch.equal(rows["loss_mask"][live], batch["loss_mask"][back])
    assert torch.equal(rows["logprobs"][live], batch["logprobs"][back])
    assert ops.to_token_aligned({}, CU) == {}


def test_gradients_of_a_dict() -> None:
    x, h = (torch.randn(6, *shape, dtype=torch.float64, requires_grad=True) for shape in ((), (2,)))

    def moved(x: torch.Tensor, h: torch.Tensor) -> list[torch.Tensor]:
        out = ops.to_prediction_aligned({"x": x, "ids": torch.arange(6), "h": h}, CU, {"x": 0.5})
        return [out["x"], out["h"]]

    assert torch.autograd.gradcheck(moved, (x, h))
    assert torch.autograd.gradgradcheck(moved, (x, h))
    tensors = [x.detach().requires_grad_(), torch.arange(6), h.detach().bfloat16()]
    torch.library.opcheck(torch.ops.areal_core.shift_segments.default, (tensors, CU, -1, [0.0, -7.0, 2.0]))


def test_dict_refusals() -> None:
    x = torch.zeros(6)
    with pytest.raises(ValueError, match=r"fill for per-token keys \['x'\], got \['y'\]"):
        ops.to_token_aligned({"x": x}, CU, {"y": 1.0})
    with pytest.raises(ValueError, match="one fill for one tensor"):
        ops.to_token_aligned(x, CU, {"x": 1.0})  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"every tensor as \[6, ...\]"):
        ops.to_token_aligned({"x": x, "y": x[:5]}, CU)
