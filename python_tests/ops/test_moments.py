"""masked_moments and whiten: exact sums, whoever adds them up."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from batch_ranks import run_rank
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_near, assert_same_bits
from torch import Tensor

from areal_core import ops

EXTREMES = [[1e300, -1e300, 1e290], [1e-310, 3e-310, 2e-310], [0.0, 0.0, -0.0], [2.0**60, 1.0, -1.0]]


def make_numbers(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(count, dtype=torch.float64).to(dtype), torch.rand(count) < 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [2, 31, 129, 1000, 70001])
def test_moments_match_torch(dtype: torch.dtype, count: int) -> None:
    numbers, mask = make_numbers(count, dtype)
    mask[:2] = True
    live = numbers[mask].double()
    moments = ops.masked_moments(numbers, loss_mask=mask)
    assert moments.live == mask.sum()
    assert moments.min == live.min()
    assert moments.max == live.max()
    assert_near(moments.mean, live.mean(), absolute=1e-15, relative=1e-14)
    assert_near(moments.squares, (live - live.mean()).square().sum(), absolute=0, relative=1e-14)
    for ddof in (0, 1):
        assert_near(moments.std(ddof=ddof), live.std(correction=ddof), absolute=0, relative=1e-14)


def test_moments_of_numbers_far_from_zero() -> None:
    """The input of float32 one-pass variance that comes out negative."""
    numbers = 1000 + 0.1 * torch.randn(100_000)
    moments = ops.masked_moments(numbers)
    assert_near(moments.std(), numbers.double().std(), absolute=0, relative=1e-12)
    whitened = ops.whiten(numbers)
    assert abs(float(whitened.double().mean())) < 1e-6
    assert float(whitened.double().std()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("numbers", EXTREMES)
def test_moments_of_extreme_numbers(numbers: list[float]) -> None:
    x = torch.tensor(numbers, dtype=torch.float64)
    mean = math.fsum(numbers) / 3
    assert float(ops.masked_moments(x).mean) == pytest.approx(mean, rel=1e-15, abs=0)


@given(order=st.permutations(range(40)), cuts=st.lists(st.integers(0, 40), max_size=4), seed=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_no_bit_depends_on_the_order(order: list[int], cuts: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    numbers, mask = make_numbers(40, torch.float64)
    numbers *= 10.0 ** torch.randint(-9, 9, (40,))
    moments = ops.masked_moments(numbers, loss_mask=mask)
    permuted = ops.masked_moments(numbers[order], loss_mask=mask[order])
    for a, b in zip(moments, permuted, strict=True):
        assert_same_bits(a, b)
    whitened = ops.whiten(numbers, loss_mask=mask)
    assert_same_bits(ops.whiten(numbers[order], loss_mask=mask[order]), whitened[order])


def test_no_bit_depends_on_the_number_of_threads() -> None:
    numbers, mask = make_numbers(100_003)
    results = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        results.append(ops.whiten(numbers, loss_mask=mask))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
def test_no_bit_depends_on_the_split_over_ranks(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_rank, args=(3, str(tmp_path)), nprocs=3)


def test_whiten_is_the_formula_and_keeps_shape_and_dtype() -> None:
    numbers, mask = (x.reshape(4, 25) for x in make_numbers(100, torch.float64))
    live = numbers[mask]
    expected = torch.where(mask, (numbers - live.mean()) / (live.var() + 1e-8).sqrt(), 0.0)
    assert_near(ops.whiten(numbers, loss_mask=mask), expected, absolute=1e-14, relative=1e-13)
    expected = torch.where(mask, (numbers - live.mean()) / (live.std(correction=0) + 0.5), 0.0)
    out = ops.whiten(numbers, loss_mask=mask, ddof=0, eps=0.5, eps_in_root=False)
    assert_near(out, expected, absolute=1e-14, relative=1e-13)
    assert ops.whiten(numbers.float()).dtype == torch.float32


def test_equal_numbers_and_none_give_zeros() -> None:
    for numbers in (torch.full((5,), 0.1), torch.tensor([7.0]), torch.zeros(0)):
        assert not ops.whiten(numbers, eps=0.0).any()
    nothing = ops.masked_moments(torch.ones(3), loss_mask=torch.zeros(3))
    assert nothing.live == 0
    assert nothing.mean.isnan()
    assert nothing.squares == 0
    assert not ops.whiten(torch.ones(3), loss_mask=torch.zeros(3)).any()


def test_masked_numbers_are_never_read_and_live_junk_shows() -> None:
    numbers, mask = make_numbers(100)
    dirty = torch.where(mask, numbers, torch.tensor([math.nan, math.inf]).repeat(50))
    assert_same_bits(ops.whiten(dirty, loss_mask=mask), ops.whiten(numbers, loss_mask=mask))
    for junk in (math.nan, math.inf, -math.inf):
        numbers[mask.nonzero()[0]] = junk
        out = ops.whiten(numbers, loss_mask=mask)
        assert out[mask].isnan().all()
        assert not out[~mask].any()


def test_opcheck_and_compile() -> None:
    numbers, mask = make_numbers(50)
    native = torch.ops.areal_core
    torch.library.opcheck(native.moment_ranges.default, (numbers, mask))
    extent = torch.tensor([50.0, -4, 4]).double()
    torch.library.opcheck(native.moment_sums.default, (numbers, mask, extent, extent[:1].clone()))
    torch.library.opcheck(native.normalize.default, (numbers, mask, extent[:1].clone(), extent[2:].clone()))
    compiled = torch.compile(ops.whiten, fullgraph=True, backend="eager")(numbers, loss_mask=mask)
    assert_same_bits(compiled, ops.whiten(numbers, loss_mask=mask))


def test_bad_arguments_name_themselves() -> None:
    with pytest.raises(ValueError, match=r"loss_mask of shape \[3\], got \[2\]"):
        ops.whiten(torch.zeros(3), loss_mask=torch.ones(2))
    with pytest.raises(ValueError, match="ddof in"):
        ops.whiten(torch.zeros(3), ddof=2)
    with pytest.raises(ValueError, match="eps >= 0"):
        ops.whiten(torch.zeros(3), eps=math.nan)
    with pytest.raises(TypeError, match=r"numbers dtype in \{float32, float64\}, got BFloat16"):
        ops.whiten(torch.zeros(3).bfloat16())
    with pytest.raises(TypeError, match=r"^masked_moments: expected numbers dtype in \{float32, float64\}, got Long"):
        ops.whiten(torch.zeros(3).long())
