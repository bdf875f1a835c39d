"""The zigzag layout of context parallelism."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core import ops


def test_by_hand() -> None:
    cu = torch.tensor([0, 8, 8, 12], dtype=torch.int32)
    x = torch.arange(12)
    assert ops.zigzag_split(x, cu, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert ops.zigzag_split(x, cu, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


@settings(deadline=None, max_examples=50)
@given(
    chunks=st.lists(st.integers(0, 3), max_size=6),
    cp_size=st.integers(1, 4),
    trailing=st.sampled_from([(), (2,), (0,)]),
)
def test_merge_undoes_split(chunks: list[int], cp_size: int, trailing: tuple[int, ...]) -> None:
    cu = torch.tensor([0, *chunks]).cumsum(0) * 2 * cp_size
    x = torch.randn(int(cu[-1]), *trailing).to(torch.bfloat16)
    parts = [ops.zigzag_split(x, cu, cp_size, r) for r in range(cp_size)]
    assert torch.equal(ops.zigzag_merge(parts, cu), x)
    assert torch.equal(ops.zigzag_merge(torch.stack(parts), cu), x)
    positions = ops.position_ids(cu)
    for r in range(cp_size):  # rank r owns chunks r and 2 cp_size - 1 - r of each sequence, in this order
        mine = ops.zigzag_split(positions, cu, cp_size, r)
        want = [[k * c + i for k in (r, 2 * cp_size - 1 - r) for i in range(c)] for c in chunks]
        assert mine.tolist() == [p for sequence in want for p in sequence]


def test_gradients() -> None:
    cu = torch.tensor([0, 4, 4, 12])
    x = torch.randn(12, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.zigzag_split(x, cu, 2, 1), (x,))
    assert torch.autograd.gradcheck(lambda x: ops.zigzag_merge(list(x.chunk(2)), cu), (x,))


def test_refusals() -> None:
    x, cu = torch.zeros(12), torch.tensor([0, 4, 12])
    refusals: list[tuple[Callable[[], torch.Tensor], str]] = [
        (lambda: ops.zigzag_split(x, cu, 2, 2), r"cp_rank in \[0, cp_size = 2\), got 2"),
        (lambda: ops.zigzag_split(x, torch.tensor([0, 6, 12]), 2, 0), "got 6 tokens in sequence 0"),
        (lambda: ops.zigzag_split(x, torch.tensor([0, 4, 8]), 2, 0), r"cu_seqlens from 0 to 12 .*got \[0, 4, 8\]"),
        (lambda: ops.zigzag_split(x, torch.tensor([4, 12]), 2, 0), r"cu_seqlens from 0 to 12 .*got \[4, 12\]"),
        (lambda: ops.zigzag_split(x, torch.tensor([0, 16, 12]), 2, 0), "expected non-decreasing cu_seqlens"),
        (lambda: ops.zigzag_split(x, cu[None], 2, 0), r"cu_seqlens \[S\+1\]"),
        (lambda: ops.zigzag_merge([], cu), "at least one part"),
        (lambda: ops.zigzag_merge([x[:6], x[:5]], cu), "cu_seqlens from 0 to 11"),
        (lambda: ops.zigzag_merge([x[:6], x[:6]], cu[1:]), "cu_seqlens from 0 to 12"),
    ]
    for call, message in refusals:
        with pytest.raises(ValueError, match=message):
            call()
