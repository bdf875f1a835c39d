"""gae against the definition in fp64, and the promises of its docstring."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import ISAS, assert_near, assert_same_bits
from torch import Tensor

from areal_core import _C, ops
from areal_core.reference import advantages as reference

RUNNABLE_ISAS = ISAS[: ISAS.index(_C.best_isa()) + 1]
# Around the widths of the vectors; empty sequences between.
LENGTHS = [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100, 1000, 0]
DISCOUNTS = [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0), (1.0, 0.5)]


def make_batch(lengths: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    rewards, values = torch.randn(2, int(cu_seqlens[-1]), dtype=torch.float64).to(dtype)
    return rewards, values, cu_seqlens


def make_mask(kind: str, tokens: int) -> Tensor | None:
    return {
        "none": None,
        "all": torch.ones(tokens),
        "empty": torch.zeros(tokens),
        "sparse": torch.rand(tokens) < 0.3,
        "dense": torch.rand(tokens) < 0.97,
        "runs": torch.arange(tokens) % 90 < 45,
    }[kind]


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
@pytest.mark.parametrize("mask", ["none", "all", "empty", "sparse", "dense", "runs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_matches_the_definition(gamma: float, lam: float, mask: str, dtype: torch.dtype) -> None:
    rewards, values, cu_seqlens = make_batch(LENGTHS, dtype)
    loss_mask = make_mask(mask, len(rewards))
    truth = reference.gae(rewards, values, cu_seqlens, gamma=gamma, lam=lam, loss_mask=loss_mask)
    for isa in RUNNABLE_ISAS:
        _C.set_active_isa(isa)
        out = ops.gae(rewards, values, cu_seqlens, gamma=gamma, lam=lam, loss_mask=loss_mask)
        bound = 2e-5 if dtype == torch.float32 else 1e-12  # sums of up to 1,000 numbers near 1
        for ours, true in zip(out, truth, strict=True):
            assert ours.dtype == dtype
            assert_near(ours, true, absolute=bound, relative=0)


def test_is_no_worse_than_the_eager_loop() -> None:
    rewards, values, cu_seqlens = make_batch([4096] * 4)
    truth, _ = reference.gae(rewards, values, cu_seqlens, gamma=1.0, lam=1.0)
    eager = torch.zeros(4, 4096)
    advantage = next_value = torch.zeros(4)
    for t in range(4095, -1, -1):
        value = values.view(4, -1)[:, t]
        advantage = rewards.view(4, -1)[:, t] + next_value - value + advantage
        next_value = value
        eager[:, t] = advantage
    for isa in RUNNABLE_ISAS:
        _C.set_active_isa(isa)
        ours = ops.gae(rewards, values, cu_seqlens).advantages
        assert float((ours - truth).abs().max()) <= float((eager.flatten() - truth).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_masked_tokens_are_never_looked_at(dtype: torch.dtype) -> None:
    rewards, values, cu_seqlens = make_batch(LENGTHS, dtype)
    mask = make_mask("runs", len(rewards)) & make_mask("dense", len(rewards))
    junk = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype).repeat(len(rewards))[: len(rewards)]
    for isa in RUNNABLE_ISAS:
        _C.set_active_isa(isa)
        clean = ops.gae(rewards, values, cu_seqlens, gamma=0.99, lam=0.95, loss_mask=mask)
        dirty = ops.gae(
            torch.where(mask, rewards, junk),
            torch.where(mask, values, junk.flip(0)),
            cu_seqlens,
            gamma=0.99,
            lam=0.95,
            loss_mask=mask,
        )
        for a, b in zip(clean, dirty, strict=True):
            assert_same_bits(a, b)
            assert not a[~mask].any()


def test_masked_tokens_carry_the_recurrence_unchanged() -> None:
    """Tool output inside a response: the same numbers as with the masked tokens cut out."""
    rewards, values, cu_seqlens = make_batch([40, 60], torch.float64)
    mask = make_mask("sparse", 100)
    kept = torch.stack([mask[:40].sum(), mask[40:].sum()]).cumsum(0)
    cut = ops.gae(rewards[mask], values[mask], torch.cat([torch.zeros(1).long(), kept]), gamma=0.9, lam=0.8)
    whole = ops.gae(rewards, values, cu_seqlens, gamma=0.9, lam=0.8, loss_mask=mask)
    for a, b in zip(whole, cut, strict=True):
        assert_same_bits(a[mask], b)


@given(lengths=st.lists(st.integers(0, 70), max_size=8), seed=st.integers(0, 99), masked=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_sequence_gives_the_same_bits_alone(lengths: list[int], seed: int, masked: bool) -> None:
    torch.manual_seed(seed)
    rewards, values, cu_seqlens = make_batch(lengths)
    mask = make_mask("runs" if masked else "none", len(rewards))
    packed = ops.gae(rewards, values, cu_seqlens, gamma=0.98, lam=0.9, loss_mask=mask)
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        part = slice(begin, end)
        alone = ops.gae(
            rewards[part],
            values[part],
            torch.tensor([0, end - begin]),
            gamma=0.98,
            lam=0.9,
            loss_mask=None if mask is None else mask[part],
        )
        assert_same_bits(alone.advantages, packed.advantages[part])
        assert_same_bits(alone.returns, packed.returns[part])


def test_no_bit_depends_on_the_number_of_threads() -> None:
    rewards, values, cu_seqlens = make_batch([5000, 17, 3000, 0, 12000, 1] * 4)
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        results.append(ops.gae(rewards, values, cu_seqlens, gamma=0.99, lam=0.95))
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            assert_same_bits(a, b)


def test_a_nan_reaches_the_earlier_tokens_of_its_sequence_only() -> None:
    rewards, values, cu_seqlens = make_batch([50, 50, 50])
    rewards[80] = math.nan
    for isa in RUNNABLE_ISAS:
        _C.set_active_isa(isa)
        out = ops.gae(rewards, values, cu_seqlens, gamma=0.99, lam=0.95)
        for tensor in out:
            assert tensor.isnan().nonzero().flatten().tolist() == list(range(50, 81))


def test_with_lam_one_returns_are_sums_of_rewards_whatever_the_values() -> None:
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    values = 1e6 * torch.randn(8)
    out = ops.gae(rewards, values, torch.tensor([0, 3, 8]))
    assert out.returns.tolist() == [1.0] * 8
    assert torch.equal(out.advantages, 1.0 - values)


def test_accepts_int32_offsets_strides_and_gradients() -> None:
    rewards, values, cu_seqlens = make_batch([5, 6])
    plain = ops.gae(rewards, values, cu_seqlens)
    strided = torch.stack([rewards, rewards], dim=1)[:, 0].requires_grad_()
    out = ops.gae(strided, values.requires_grad_(), cu_seqlens.int())
    assert_same_bits(out.advantages, plain.advantages)
    assert not out.advantages.requires_grad


def test_opcheck_and_compile() -> None:
    rewards, values, cu_seqlens = make_batch([5, 6])
    mask = torch.rand(11) < 0.5
    torch.library.opcheck(
        torch.ops.areal_core.gae.default, (rewards, values, torch.ones(2).double(), cu_seqlens, mask, 0.9, 0.8)
    )
    compiled = torch.compile(ops.gae, fullgraph=True)(rewards, values, cu_seqlens, gamma=0.9, lam=0.8, loss_mask=mask)
    eager = ops.gae(rewards, values, cu_seqlens, gamma=0.9, lam=0.8, loss_mask=mask)
    for a, b in zip(compiled, eager, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gamma": 1.5}, ValueError, r"gamma in \[0, 1\], got 1.5"),
        ({"lam": math.nan}, ValueError, r"lam in \[0, 1\], got nan"),
        ({"values": torch.zeros(4)}, ValueError, r"values of shape \[5\]"),
        ({"loss_mask": torch.zeros(6)}, ValueError, r"loss_mask of shape \[5\]"),
        ({"values": torch.zeros(5).double()}, TypeError, "values dtype = Float, got Double"),
        ({"rewards": torch.zeros(5).bfloat16()}, TypeError, r"rewards dtype in \{float32, float64\}, got BFloat16"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, "cu_seqlens of an integer dtype"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, r"cu_seqlens\[-1\] = 5"),
        ({"cu_seqlens": torch.tensor([1, 5])}, ValueError, r"cu_seqlens\[0\] = 0"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, 5])}, ValueError, "non-decreasing cu_seqlens"),
        ({"cu_seqlens": torch.zeros(0).long()}, ValueError, "cu_seqlens with at least 1 element"),
    ],
)
def test_bad_arguments_name_themselves(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"rewards": torch.zeros(5), "values": torch.zeros(5), "cu_seqlens": torch.tensor([0, 5]), **change}
    with pytest.raises(error, match="gae: expected " + message):
        ops.gae(**arguments)
