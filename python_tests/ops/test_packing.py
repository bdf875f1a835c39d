"""Pack, unpack and choosing sequences, against plain loops and by round trips."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_cases import MASK, Layout, layouts, make_mask
from torch import Tensor

from areal_core import ops
from areal_core.reference import packing as reference

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor: equality of any dtype, NaN included."""
    return x.contiguous().view(torch.uint8) if x.numel() else x.new_empty(x.shape, dtype=torch.uint8)


def random_tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randint(0, 100, shape) % (2 if dtype == torch.bool else 100)).to(dtype)


def test_by_hand() -> None:
    ids = torch.arange(15).reshape(3, 5)
    packed = ops.pack({"input_ids": ids, "rewards": torch.arange(3.0)}, MASK, multiple_of=4, fill={"input_ids": -7})
    assert packed["input_ids"].tolist() == [0, 1, 2, 12, 13, 14, -7, -7]
    assert packed["rewards"].tolist() == [0.0, 1.0, 2.0]
    assert packed.cu_seqlens.tolist() == [0, 3, 3, 6, 8]
    assert packed.lengths.tolist() == [3, 0, 3]
    assert (packed.max_seqlen, packed.total_tokens, packed.num_tokens, packed.num_sequences) == (3, 8, 6, 3)
    restored = ops.unpack(packed, "left", fill=-1)
    assert restored["input_ids"].tolist() == [[-1, -1, 0, 1, 2], [-1] * 5, [-1, -1, 12, 13, 14]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=30)
@given(layout=layouts(), trailing=st.sampled_from([(), (1,), (3,), (2, 2), (0,)]), multiple=st.integers(1, 5))
def test_round_trip(
    dtype: torch.dtype,
    layout: Layout,
    trailing: tuple[int, ...],
    multiple: int,
) -> None:
    lengths, width, padding = layout
    mask = make_mask(lengths, width, padding)
    x = random_tensor(len(lengths), width, *trailing, dtype=dtype)
    by_mask = ops.pack({"x": x}, mask, multiple_of=multiple)
    by_lengths = ops.pack({"x": x}, lengths=lengths, padding=padding, multiple_of=multiple)
    want = x.reshape(mask.numel(), *trailing)[mask.reshape(-1).nonzero()[:, 0]]
    for packed in (by_mask, by_lengths):
        assert packed["x"].dtype == dtype
        assert packed.total_tokens % multiple == 0
        assert packed.total_tokens - packed.num_tokens < multiple
        assert packed["x"].shape == (packed.total_tokens, *trailing)
        assert torch.equal(bits(packed["x"][: sum(lengths)]), bits(want))
        assert not bits(packed["x"][sum(lengths) :]).any(), "the dummy segment holds 0"
    restored = ops.unpack(by_mask, padding)["x"]
    assert restored.shape == x.shape
    live = mask.reshape(*mask.shape, *[1] * len(trailing)).expand_as(x)
    assert torch.equal(bits(restored), bits(torch.where(live, x, x.new_zeros(()))))


@settings(deadline=None, max_examples=50)
@given(layout=layouts())
def test_matches_the_loop(layout: Layout) -> None:
    lengths, width, padding = layout
    mask = make_mask(lengths, width, padding)
    batch = {"a": torch.randn(len(lengths), width), "b": random_tensor(len(lengths), width, 2, dtype=torch.int16)}
    packed = ops.pack(batch, mask.to(torch.int64))
    want = reference.pack(batch, mask)
    assert all(torch.equal(packed[k], want[k]) for k in batch)
    want = reference.unpack(packed.data, mask, fill=5)
    got = ops.unpack(packed, padding, fill=5)
    assert all(torch.equal(got[k], want[k]) for k in batch)


@settings(deadline=None, max_examples=50)
@given(layout=layouts(), data=st.data())
def test_select_sequences(layout: Layout, data: st.DataObject) -> None:
    lengths, width, padding = layout
    sequences = len(lengths)
    batch = {"x": torch.randn(sequences, width, 2), "reward": torch.randn(sequences)}
    packed = ops.pack(batch, make_mask(lengths, width, padding), per_sequence=["reward"], multiple_of=3)
    chosen = data.draw(st.permutations(range(sequences)))[: data.draw(st.integers(0, sequences))]
    part = ops.select_sequences(packed, chosen, multiple_of=2)
    want = ops.pack({k: v[chosen] for k, v in batch.items()}, make_mask(lengths, width, padding)[chosen], multiple_of=2)
    assert torch.equal(part["x"], want["x"])
    assert torch.equal(part["reward"], want["reward"])
    assert torch.equal(part.cu_seqlens, want.cu_seqlens)
    inverse = [chosen.index(i) for i in range(sequences)] if len(chosen) == sequences else None
    if inverse is not None:  # order restored exactly
        assert torch.equal(ops.select_sequences(part, inverse, multiple_of=3)["x"], packed["x"])


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12), multiple=st.integers(1, 3))
def test_microbatches_merge_back_in_order(lengths: list[int], multiple: int) -> None:
    batch = {
        "x": torch.randn(len(lengths), 9),
        "h": torch.randn(len(lengths), 9, 2),
        "reward": torch.randn(len(lengths)),
    }
    packed = ops.pack(batch, lengths, multiple_of=multiple)
    bins = ops.allocate_microbatches(lengths, 11)
    parts = [ops.select_sequences(packed, b, multiple_of=4) for b in bins]
    merged = ops.merge_microbatches(parts, bins, multiple_of=multiple)
    assert all(torch.equal(merged[k], packed[k]) for k in batch)
    assert torch.equal(merged.cu_seqlens, packed.cu_seqlens)
    assert torch.equal(merged.lengths, packed.lengths)
    assert merged.padded_length == packed.padded_length


@pytest.mark.parametrize("threads", [1, 2])
def test_large_batches_do_not_depend_on_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    lengths = torch.randint(0, 600, (200,))
    mask = make_mask(lengths.tolist(), 600, "left")
    batch = {"ids": torch.randint(0, 1 << 40, (200, 600)), "h": torch.randn(200, 600, 3).bfloat16()}
    try:
        torch.set_num_threads(threads)
        packed = ops.pack(batch, mask)
        restored = ops.unpack(packed, "left", fill=1)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(packed["ids"], batch["ids"][mask])
    assert torch.equal(packed["h"], batch["h"][mask])
    assert torch.equal(restored["ids"], torch.where(mask, batch["ids"], 1))


def test_shape_decides_and_names_override() -> None:
    lengths = [2, 1]
    batch = {"square": torch.randn(2, 3), "tokens": torch.randn(2, 3), "scores": torch.randn(2, 7)}
    packed = ops.pack(batch, make_mask(lengths, 3, "right"), per_sequence=["square"])
    assert packed.per_sequence == {"square", "scores"}
    assert packed["square"] is batch["square"]
    assert packed["tokens"].shape == (3,)
    assert list(packed.data) == list(batch)
    packed = ops.pack(batch, lengths, per_sequence=["square", "scores"])
    assert packed["tokens"].shape == (3,)
    with pytest.raises(ValueError, match="'tokens': 3, 'scores': 7"):
        ops.pack(batch, lengths, per_sequence=["square"])


def test_left_and_right_padding_in_one_mask() -> None:
    x = torch.arange(15).reshape(3, 5)
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]])
    assert ops.pack({"x": x}, mask)["x"].tolist() == [1, 2, 3, 5, 14]


def test_keys_may_be_added_before_unpacking() -> None:
    packed = ops.pack({"x": torch.arange(15).reshape(3, 5)}, MASK)
    more = dataclasses.replace(packed, data={"advantages": torch.ones(6)})
    assert ops.unpack(more, fill=float("nan"), length=3)["advantages"].isnan().sum() == 3
    with pytest.raises(ValueError, match=r"'advantages' as \[T = 6"):
        ops.unpack(dataclasses.replace(packed, data={"advantages": torch.ones(5)}))
    with pytest.raises(ValueError, match="length >= 3"):
        ops.unpack(packed, length=2)


def test_non_contiguous_input() -> None:
    x = torch.randn(5, 3, 2).transpose(0, 1)
    wide = torch.randn(3, 9)[:, 2:7]
    packed = ops.pack({"x": x, "wide": wide}, MASK)
    assert torch.equal(packed["x"], x[MASK.bool()])
    assert torch.equal(packed["wide"], wide[MASK.bool()])


def test_padding_is_never_read() -> None:
    x = torch.where(MASK.bool(), torch.randn(3, 5), float("nan")).requires_grad_()
    packed = ops.pack({"x": x}, MASK, multiple_of=8)
    assert not packed["x"].isnan().any()
    (grad,) = torch.autograd.grad(packed["x"].sum(), x)
    assert torch.equal(grad, MASK.float())


@pytest.mark.parametrize("sequences", [0, 1, 3])
@pytest.mark.parametrize("width", [0, 4])
def test_nothing_to_pack(sequences: int, width: int) -> None:
    batch = {"x": torch.randn(sequences, width), "h": torch.randn(sequences, width, 0), "r": torch.randn(sequences)}
    for packed in (
        ops.pack(batch, torch.zeros(sequences, width, dtype=torch.bool), per_sequence=["r"]),
        ops.pack(batch, lengths=[0] * sequences, per_sequence=["r"]),
    ):
        assert packed.total_tokens == packed.max_seqlen == 0
        assert packed.cu_seqlens.tolist() == [0] * (sequences + 1)
        assert ops.unpack(packed)["x"].shape == (sequences, width)
        assert ops.unpack(packed)["r"] is batch["r"]
    assert ops.pack({}, MASK).cu_seqlens.tolist() == [0, 3, 3, 6]


def test_dummy_segment_longer_than_the_sequences() -> None:
    packed = ops.pack({"x": torch.ones(3, 5)}, MASK, multiple_of=64)
    assert (packed.max_seqlen, packed.total_tokens, packed.num_tokens) == (58, 64, 6)
    assert packed.cu_seqlens.tolist() == [0, 3, 3, 6, 64]
    assert packed["x"].sum() == 6
    assert ops.pack({"x": torch.ones(3, 5)}, MASK, multiple_of=3).cu_seqlens.tolist() == [0, 3, 3, 6, 6]


@settings(deadline=None, max_examples=50)
@given(layout=layouts(), multiple=st.integers(1, 4), whole=st.integers(1, 5), data=st.data())
def test_each_sequence_aligned(layout: Layout, multiple: int, whole: int, data: st.DataObject) -> None:
    lengths, width, padding = layout
    mask = make_mask(lengths, width, padding)
    batch = {"x": torch.randn(len(lengths), width), "live": torch.ones(len(lengths), width, dtype=torch.bool)}
    batch = {k: v * mask for k, v in batch.items()}
    aligned: dict[str, Any] = {"multiple_of": whole, "sequence_multiple_of": multiple}
    packed = ops.pack(batch, mask, **aligned, fill={"x": 9})
    segments = [-(-n // multiple) * multiple for n in lengths]
    cu = packed.cu_seqlens.tolist()
    assert [b - a for a, b in itertools.pairwise(cu)][: len(lengths)] == segments
    assert packed.total_tokens == -(-sum(segments) // whole) * whole == (cu[-1] if lengths else 0)
    assert packed.lengths.tolist() == lengths
    assert packed.num_tokens == sum(lengths)
    # What is no token is filled, and a mask that rides along is off there.
    assert packed["live"].sum() == sum(lengths)
    assert (packed["x"][~packed["live"]] == 9).all()
    assert torch.equal(packed["x"][packed["live"]], batch["x"][mask])
    for key, value in ops.unpack(packed, padding).items():
        assert torch.equal(value, batch[key])
    chosen = data.draw(st.permutations(range(len(lengths))))
    part = ops.select_sequences(packed, chosen, **aligned, fill={"x": 9})
    plain = ops.merge_microbatches([part], [chosen])
    assert torch.equal(plain["x"], batch["x"][mask])
    again = ops.merge_microbatches([part], [chosen], **aligned, fill={"x": 9})
    assert torch.equal(again["x"], packed["x"])
    assert torch.equal(again.cu_seqlens, packed.cu_seqlens)


def test_aligned_sequences_split_in_zigzag() -> None:
    cp_size = 2
    batch = {"x": torch.arange(1, 16).reshape(3, 5)}
    packed = ops.pack(batch, lengths=[5, 0, 3], sequence_multiple_of=2 * cp_size)
    parts = [ops.zigzag_split(packed["x"], packed.cu_seqlens, cp_size, r) for r in range(cp_size)]
    assert [p.tolist() for p in parts] == [[1, 2, 0, 0, 11, 0], [3, 4, 5, 0, 12, 13]]
    merged = ops.zigzag_merge(parts, packed.cu_seqlens)
    assert torch.equal(merged, packed["x"])


@settings(deadline=None, max_examples=30)
@given(layout=layouts(), trailing=st.sampled_from([(), (3,), (0,)]), fill=st.sampled_from([0.0, -7.0]))
def test_unpack_into_given_tensors(layout: Layout, trailing: tuple[int, ...], fill: float) -> None:
    lengths, width, padding = layout
    batch = {
        "x": torch.randn(len(lengths), width, *trailing),
        "ids": torch.randint(0, 9, (len(lengths), width)),
        "rewards": torch.randn(len(lengths)),
    }
    packed = ops.pack(batch, lengths=lengths, padding=padding, per_sequence=["rewards"])
    want = ops.unpack(packed, padding, fill)
    out = {k: torch.full_like(v, 5) for k, v in want.items() if k != "rewards"}
    versions = {k: v._version for k, v in out.items()}
    got = ops.unpack(packed, padding, fill, out=out)
    assert list(got) == list(want)
    assert got["rewards"] is batch["rewards"]
    for key in ("x", "ids"):
        assert got[key] is out[key]
        assert torch.equal(got[key], want[key])
        assert out[key]._version > versions[key], "autograd must see the write"
