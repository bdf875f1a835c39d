"""Helpers shared by the op tests: closeness that fails on NaN, and reference data of other libraries."""

import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

EPSILON = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
ISAS = ("baseline", "avx2", "avx512")


def assert_near(value: Tensor, truth: Tensor, *, absolute: float, relative: float) -> None:
    """|value - truth| <= absolute + relative |truth| everywhere; infinities must be equal; NaN fails."""
    value, truth = value.detach().double(), truth.detach().double()
    assert value.shape == truth.shape
    error = torch.where(value == truth, 0.0, (value - truth).abs())
    bound = absolute + relative * truth.abs()
    worst = (error / bound).argmax() if error.numel() else None
    assert bool((error <= bound).all()), (
        f"{int((~(error <= bound)).sum())} of {error.numel()} values differ; at {int(worst)}: "
        f"expected {truth.flatten()[worst].item()}, got {value.flatten()[worst].item()}"
    )


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    """Equal bit for bit: NaN equals itself, 0 does not equal -0."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert torch.equal(a.detach().contiguous().view(words), b.detach().contiguous().view(words))


def reference_data(name: str) -> dict[tuple[str, str, str], dict[str, np.ndarray]]:
    """Arrays of <name>.npz by (in | out | truth, case, dtype); skips the test where there is none.

    A key without dtype, truth/<case>/<array>, becomes (truth, <case>, <array>) with the single array "".

    The folder is $AREAL_REFS, or ../shared/refs beside the repository.
    """
    folder = os.environ.get("AREAL_REFS", Path(__file__).parents[2] / ".." / "shared" / "refs")
    path = Path(folder) / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"no reference data at {path}")
    cases: dict[tuple[str, str, str], dict[str, np.ndarray]] = defaultdict(dict)
    with np.load(path) as arrays:
        for key in arrays.files:
            kind, case, dtype, array = (*key.split("/", 3), "")[:4]
            cases[kind, case, dtype][array] = arrays[key]
    return dict(cases)
