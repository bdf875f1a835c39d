"""interpolate_proximal and m2po_mask."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core import ops
from areal_core.reference import value_loss as reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_loglinear_interpolation_by_version(dtype: torch.dtype) -> None:
    behavior = torch.full((7,), -4.0, dtype=dtype)
    current = torch.full((7,), -2.0, dtype=dtype, requires_grad=True)
    versions = torch.tensor([-1, 0, 2, 5, 8, 9, 12])
    out = ops.interpolate_proximal(behavior, current, versions, current_version=9)
    shares = [0, 8 / 9, 6 / 7, 3 / 4, 0, 0, 0]  # (8 - b) / (9 - b); the prompt, the proximal and the future keep theirs
    torch.testing.assert_close(out, torch.tensor([-4 + 2 * a for a in shares], dtype=dtype))
    assert not out.requires_grad
    at = ops.interpolate_proximal(behavior, current, versions, current_version=torch.tensor(9), proximal_version=9)
    assert at.tolist() == [-4, -2, -2, -2, -2, -4, -4]


def test_interpolation_of_float64_keeps_its_digits() -> None:
    """A quotient of integer tensors is float32."""
    ones = torch.ones(3, dtype=torch.float64)
    out = ops.interpolate_proximal(0 * ones, ones, torch.tensor([0, 1, 2]), current_version=7, proximal_version=5)
    torch.testing.assert_close(out, torch.tensor([5 / 7, 4 / 6, 3 / 5], dtype=torch.float64), rtol=1e-15, atol=0)


def test_linear_interpolation_averages_probabilities() -> None:
    behavior, current = torch.tensor([0.2, 0.2]).log(), torch.tensor([0.6, 0.6]).log()
    out = ops.interpolate_proximal(behavior, current, torch.tensor([1, 2]), current_version=3, method="linear")
    torch.testing.assert_close(out.exp(), torch.tensor([0.4, 0.2]))


@pytest.mark.parametrize("method", ["loglinear", "linear"])
def test_impossible_tokens(method: str) -> None:
    inf = math.inf
    behavior, current = torch.tensor([-inf, -inf, -1.0, -inf, math.nan]), torch.tensor([-1.0, -1.0, -inf, -inf, -1.0])
    versions = torch.tensor([0, 2, 0, 0, 0])
    out = ops.interpolate_proximal(behavior, current, versions, current_version=3, method=method)
    assert out[1] == -inf  # exactly the behavior logprob
    assert out[3] == -inf
    assert out[4].isnan()
    assert not out[:4].isnan().any()
    halfway = math.log(2 / 3 * math.exp(-1.0)), math.log(1 / 3 * math.exp(-1.0))
    expected = [-inf, -inf] if method == "loglinear" else list(halfway)
    assert out[[0, 2]].tolist() == pytest.approx(expected)


def test_bad_arguments_of_interpolation() -> None:
    x, v = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"method in \('loglinear', 'linear'\), got 'cubic'"):
        ops.interpolate_proximal(x, x, v, current_version=1, method="cubic")
    with pytest.raises(ValueError, match=r"interpolate_proximal: expected versions of shape \[3\], got \[2\]"):
        ops.interpolate_proximal(x, x, v[:2], current_version=1)
    with pytest.raises(TypeError, match="versions of an integer dtype"):
        ops.interpolate_proximal(x, x, x, current_version=1)


@given(tokens=st.integers(0, 400), scale=st.floats(0.01, 1.0), threshold=st.floats(1e-4, 1.0), ties=st.booleans())
@settings(max_examples=40, deadline=None)
def test_m2po_mask_matches_the_definition(tokens: int, scale: float, threshold: float, ties: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    proximal = torch.randn(tokens, generator=generator)
    difference = scale * torch.randn(tokens, generator=generator)
    behavior = proximal + (difference.mul(8).round() / 8 if ties else difference)
    mask = torch.rand(tokens, generator=generator) < 0.8
    keep = ops.m2po_mask(proximal, behavior, mask, threshold=threshold)
    assert torch.equal(keep, reference.m2po_mask(proximal, behavior, mask, threshold))


def test_m2po_drops_the_largest_until_the_rest_averages_below() -> None:
    log_ratio = torch.tensor([0.1, -0.3, 0.2, 5.0, 9.0])
    zero, mask = torch.zeros(5), torch.tensor([1, 1, 1, 1, 0])
    assert ops.m2po_mask(log_ratio, zero, mask, threshold=0.05).tolist() == [True, True, True, False, False]
    assert ops.m2po_mask(log_ratio, zero, mask, threshold=0.04).tolist() == [True, False, True, False, False]
    assert ops.m2po_mask(log_ratio, zero, mask, threshold=100.0).tolist() == [True, True, True, True, False]
    assert not ops.m2po_mask(log_ratio, zero, mask, threshold=1e-6).any()


def test_m2po_ignores_masked_tokens_and_drops_nan() -> None:
    proximal, behavior = torch.tensor([0.1, math.nan, -math.inf, -1.0]), torch.tensor([0.0, 0.0, -math.inf, -math.inf])
    assert ops.m2po_mask(proximal, behavior, torch.ones(4), threshold=0.5).tolist() == [True, False, True, False]
    assert not ops.m2po_mask(proximal, behavior, torch.zeros(4)).any()


def test_m2po_mask_cuts_the_policy_term_alone() -> None:
    proximal = torch.zeros(4)
    keep = ops.m2po_mask(proximal, torch.tensor([0.0, 0.1, -0.1, 3.0]), torch.ones(4), threshold=0.04)
    logprobs = torch.zeros(4, requires_grad=True)
    config = ops.PPOLossConfig.preset("m2po")
    out = ops.ppo_loss(logprobs, proximal, torch.ones(4), torch.ones(4), keep_mask=keep, config=config)
    out.loss.backward()
    assert logprobs.grad.tolist() == [-0.25, -0.25, -0.25, 0.0]
    assert out.stats.finalize().dropped_fraction == 0.25


def test_bad_arguments_of_m2po() -> None:
    with pytest.raises(ValueError, match="m2po_mask: expected threshold > 0, got 0"):
        ops.m2po_mask(torch.zeros(3), torch.zeros(3), torch.ones(3), threshold=0.0)
    with pytest.raises(ValueError, match=r"m2po_mask: expected loss_mask of shape \[3\], got \[2\]"):
        ops.m2po_mask(torch.zeros(3), torch.zeros(3), torch.ones(2))
