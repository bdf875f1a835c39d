"""What packing refuses, its gradients, and the checks of its native operators."""

import dataclasses
from typing import Any

import pytest
import torch
from packing_cases import MASK
from torch import Tensor

from areal_core import ops


def test_merge_refuses() -> None:
    packed = ops.pack({"x": torch.ones(3, 5)}, MASK)
    parts = [ops.select_sequences(packed, b) for b in ([0, 2], [1])]
    for wrong in ([[0, 2]], [[0], [1, 2]], [[0, 1], [1]], [[0, 1], [3]]):
        with pytest.raises(ValueError, match="every index once in bins of sizes"):
            ops.merge_microbatches(parts, wrong)
    with pytest.raises(ValueError, match="every index once"):
        ops.merge_microbatches([], [])
    other = dataclasses.replace(parts[1], data={"y": parts[1]["x"]})
    with pytest.raises(ValueError, match="the same keys"):
        ops.merge_microbatches([parts[0], other], [[0, 2], [1]])


@pytest.mark.parametrize(
    ("batch", "layout", "options", "message"),
    [
        ({"x": torch.ones(3, 5)}, torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [1] * 5]), {}, "holes, .* in row 1"),
        ({"x": torch.ones(4, 5)}, MASK, {}, r"'x' as \[3, ...\] .* got \[4, 5\]"),
        ({"x": torch.ones(())}, MASK, {}, r"'x' as \[3, ...\]"),
        ({"x": torch.ones(3, 5)}, torch.ones(3, 5, 1), {}, r"attention_mask \[S, L\]"),
        ({"x": torch.ones(3, 5)}, [1, 6, 2], {}, r"lengths in \[0, 5\], got lengths\[1\] = 6"),
        ({"x": torch.ones(3, 5)}, [1, -1, 2], {}, r"got lengths\[1\] = -1"),
        ({"x": torch.ones(3, 5)}, [1, 2], {}, r"'x' as \[2, ...\]"),
        ({"x": torch.ones(3, 5)}, [1, 2, 3], {"padding": "up"}, "padding in"),
        ({"x": torch.ones(3, 5)}, None, {}, "attention_mask or lengths, got none"),
        ({"x": torch.ones(3, 5)}, MASK, {"lengths": [1, 2, 3]}, "got both"),
        ({"x": torch.ones(3, 5)}, MASK, {"multiple_of": 0}, "multiple_of >= 1"),
        ({"x": torch.ones(3, 5)}, MASK, {"per_sequence": ["y"]}, "per_sequence among .* got"),
        ({"x": torch.ones(3, 5)}, MASK, {"fill": {"y": 1}}, "fill for per-token keys .* got"),
        ({"x": torch.ones(3, 5, dtype=torch.int8)}, MASK, {"fill": 200}, "integer fill"),
        ({"x": torch.ones(3, 5, dtype=torch.int64)}, MASK, {"fill": float("nan")}, "integer fill"),
        ({"x": torch.ones(3, 5, dtype=torch.int64)}, MASK, {"fill": 0.5}, "integer fill"),
        ({"x": torch.ones(3, 5, dtype=torch.float8_e5m2)}, MASK, {"fill": 1}, "fill = 0"),
    ],
)
def test_broken_contracts(batch: dict[str, Tensor], layout: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.pack(batch, layout, **options)


@pytest.mark.parametrize("chosen", [[3], [-1], [0, 0]])
def test_select_refuses(chosen: list[int]) -> None:
    packed = ops.pack({"x": torch.ones(3, 5)}, MASK)
    with pytest.raises(ValueError, match=r"distinct indices in \[0, 3\)"):
        ops.select_sequences(packed, chosen)


def test_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    h = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    ids = torch.arange(15).reshape(3, 5)  # an integer key rides along

    def through(x: Tensor, h: Tensor) -> list[Tensor]:
        packed = ops.pack({"x": x, "ids": ids, "h": h}, MASK, multiple_of=4)
        part = ops.select_sequences(packed, [2, 1, 0])
        padded = ops.unpack(part, "left", fill=2)
        merged = ops.merge_microbatches([part, ops.select_sequences(part, [0])], [[3, 1, 0], [2]])
        return [packed["x"], part["h"], padded["x"], padded["h"], merged["x"]]

    assert torch.autograd.gradcheck(through, (x, h))
    assert torch.autograd.gradgradcheck(through, (x, h))


def test_opcheck() -> None:
    index = [torch.tensor(v) for v in ([6, 0, 3], [1, 4, 4], [3, 4, 6])]
    tensors = [torch.randn(9, 2, requires_grad=True), torch.arange(9), torch.randn(9).bfloat16()]
    torch.library.opcheck(torch.ops.areal_core.copy_segments.default, (tensors, *index, 7, [0.5, -1.0, 2.0]))
    torch.library.opcheck(torch.ops.areal_core.mask_extents.default, (MASK.bool(),))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (([0, 0], [0, 1], [2, 3]), "ordered segments"),
        (([0, 0], [0, 3], [2, 9]), "ordered segments"),
        (([8, 0], [0, 3], [2, 4]), "source rows within"),
        (([-1, 0], [0, 3], [2, 4]), "source rows within"),
        (([0], [0, 3], [2, 4]), "target_begin of shape"),
    ],
)
def test_native_checks(index: tuple[list[int], ...], message: str) -> None:
    begins = [torch.tensor(v) for v in index]
    with pytest.raises(Exception, match=message):
        torch.ops.areal_core.copy_segments([torch.ones(9)], *begins, 7, [0.0])


def test_lengths_are_copied_and_must_be_integers() -> None:
    lengths = torch.tensor([2, 1])
    packed = ops.pack({"x": torch.zeros(2, 3)}, lengths)
    lengths[0] = 3
    assert packed.lengths.tolist() == [2, 1]
    for wrong in (torch.tensor([2.0, 1.5]), torch.tensor([True, True]), [2.5, 1]):
        with pytest.raises(TypeError, match="pack: expected lengths of an integer dtype"):
            ops.pack({"x": torch.zeros(2, 3)}, lengths=wrong)  # type: ignore[arg-type]


def test_unpack_refuses_what_it_cannot_write_into() -> None:
    packed = ops.pack({"x": torch.ones(3, 5), "ids": torch.ones(3, 5, dtype=torch.int64)}, MASK)
    good = ops.unpack(packed)
    wrong: list[tuple[dict[str, Tensor], type[Exception], str]] = [
        ({"x": good["x"]}, ValueError, r"out for the per-token keys \['ids', 'x'\], got \['x'\]"),
        ({**good, "x": torch.ones(3, 6)}, ValueError, r"out\['x'\] contiguous \[3, 5\], got \[3, 6\]"),
        ({**good, "x": torch.ones(5, 3).t()}, ValueError, r"out\['x'\] contiguous"),
        ({**good, "ids": torch.ones(3, 5)}, TypeError, r"out\['ids'\] dtype = torch.int64, got torch.float32"),
        ({**good, "x": torch.ones(3, 5, requires_grad=True)}, ValueError, "no gradients through out, got 'x'"),
    ]
    for out, error, message in wrong:
        with pytest.raises(error, match=message):
            ops.unpack(packed, out=out)
    leaf = torch.ones(3, 5, requires_grad=True)
    with pytest.raises(ValueError, match="no gradients through out"):
        ops.unpack(ops.pack({"x": leaf}, MASK), out={"x": torch.ones(3, 5)})


def test_native_checks_of_given_targets() -> None:
    begin, end = torch.tensor([0]), torch.tensor([2])
    x = torch.ones(2, 3)
    into = torch.ops.areal_core.copy_segments_into
    torch.library.opcheck(into.default, ([x], [torch.zeros(4, 3)], begin, begin, end, [0.0]))
    wrong = [torch.zeros(4, 2), torch.zeros(4), torch.zeros(4, 3).double(), torch.zeros(3, 4).t(), torch.zeros(1, 3)]
    for target in wrong:
        with pytest.raises(Exception, match="copy_segments_into: expected"):
            into([x], [target], begin, begin, end, [0.0])
    with pytest.raises(Exception, match="one target per tensor"):
        into([x, x], [torch.zeros(4, 3)], begin, begin, end, [0.0, 0.0])
