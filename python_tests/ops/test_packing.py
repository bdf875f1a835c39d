"""Packing, shifts and micro-batch allocation."""

import pytest
import torch

from areal_core import ops

MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]])


def test_pack_and_unpack_by_hand() -> None:
    ids = torch.arange(15).reshape(3, 5)
    packed = ops.pack({"input_ids": ids, "rewards": torch.arange(3.0)}, MASK, multiple_of=4, fill={"input_ids": -7})
    assert packed["input_ids"].tolist() == [0, 1, 2, 12, 13, 14, -7, -7]
    assert packed.cu_seqlens.tolist() == [0, 3, 3, 6, 8]
    assert packed["rewards"].tolist() == [0.0, 1.0, 2.0]
    restored = ops.unpack(packed, "left", fill=-1)
    assert restored["input_ids"].tolist() == [[-1, -1, 0, 1, 2], [-1] * 5, [-1, -1, 12, 13, 14]]


def test_shifts_by_hand() -> None:
    cu = torch.tensor([0, 3, 3, 6])
    ids = torch.tensor([10, 11, 12, 20, 21, 22])
    assert ops.next_token_labels(ids, cu).tolist() == [11, 12, -100, 21, 22, -100]
    assert ops.to_token_aligned(ids.double(), cu).tolist() == [0, 10, 11, 0, 20, 21]
    assert ops.to_prediction_aligned(ids.double(), cu).tolist() == [11, 12, 0, 21, 22, 0]
    assert ops.position_ids(cu).tolist() == [0, 1, 2, 0, 1, 2]


def test_allocation_by_hand() -> None:
    assert ops.allocate_microbatches([3, 5, 4, 4], 8) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match=r"lengths\[1\] = 9"):
        ops.allocate_microbatches([3, 9], 8)
