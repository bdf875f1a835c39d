"""linear_logprob: values and gradients against the fp64 oracle, chunks, masking, precision, main_grad."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import DTYPES, STREAM_DTYPES, Problem, as_on_a_gpu, check, make_problem, oracle, run
from op_checks import assert_near, assert_same_bits
from torch import Tensor

from areal_core import ops

# -- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 33, 101, 1025])
@pytest.mark.parametrize("temperature", [0.7, "rows"])
def test_values_and_gradients(dtype: torch.dtype, vocab: int, temperature: float | str) -> None:
    problem = make_problem(vocab=vocab, dtype=dtype)
    check(problem, temperature=torch.linspace(0.5, 2.0, 40) if temperature == "rows" else temperature, chunk_tokens=9)


@pytest.mark.parametrize("dtype", STREAM_DTYPES, ids=str)
def test_real_vocabulary(dtype: torch.dtype) -> None:
    """Several blocks of a weight that is widened, the last one short."""
    check(make_problem(tokens=6, width=24, vocab=50257, dtype=dtype, live=0.7), chunk_tokens=3)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 40),
    chunk=st.integers(1, 50),
    width=st.integers(1, 9),
    vocab=st.integers(1, 40),
    live=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape(tokens: int, chunk: int, width: int, vocab: int, live: float, dtype: torch.dtype) -> None:
    check(make_problem(tokens, width, vocab, dtype, live), chunk_tokens=chunk)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_counted(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    problem = make_problem(dtype=dtype)
    live = int((problem.loss_mask & (problem.labels != -100)).sum())
    for live_tokens in (None, live, live + 3, 1000):
        check(problem, chunk_tokens=7, live_tokens=live_tokens, rounded_operands=True)
    check(make_problem(dtype=dtype, live=0.0), chunk_tokens=7)
    check(make_problem(tokens=0, dtype=dtype))


def test_no_bias_and_only_what_needs_a_gradient() -> None:
    problem = make_problem(dtype=torch.float64)
    truths = run(oracle, problem._replace(bias=torch.zeros(101)), torch.ones(3, 40), torch.float64)[1]
    for wanted in ((True, False), (False, True), (True, True)):
        hidden, weight = (x.clone().requires_grad_(w) for x, w in zip(problem[:2], wanted, strict=True))
        out = ops.linear_logprob(hidden, weight, problem.labels, loss_mask=problem.loss_mask)
        (out.logprobs + out.entropy + out.lse).sum().backward()
        for leaf, truth, want in zip((hidden, weight), truths, wanted, strict=False):
            assert (leaf.grad is not None) == want
            if want:
                assert_near(leaf.grad, truth, absolute=1e-12, relative=1e-12)


def test_float64_gradients_by_finite_differences() -> None:
    problem = make_problem(tokens=5, width=3, vocab=7, dtype=torch.float64, live=0.8)
    leaves = [x.requires_grad_() for x in problem[:3]]

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        mask = problem.loss_mask
        return ops.linear_logprob(hidden, weight, problem.labels, bias=bias, loss_mask=mask, chunk_tokens=2)

    assert torch.autograd.gradcheck(function, leaves)


def test_each_row_has_its_own_upstream_gradient() -> None:
    """The gradient of the weight is a sum over rows: it cannot be scaled afterwards."""
    problem = make_problem(tokens=2, dtype=torch.float64, live=1.0)
    hidden, weight = problem.hidden.requires_grad_(), problem.weight.requires_grad_()
    out = ops.linear_logprob(hidden, weight, problem.labels, chunk_tokens=1)
    rows = [torch.autograd.grad(out.logprobs[t], weight, retain_graph=True)[0] for t in range(2)]
    (both,) = torch.autograd.grad(out.logprobs, weight, torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert_near(both, rows[0] + 2 * rows[1], absolute=1e-14, relative=1e-13)


# -- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_chunks_change_the_last_bits_at_most(dtype: torch.dtype) -> None:
    problem, weights = make_problem(tokens=64, width=32, dtype=dtype), torch.randn(3, 64)
    whole = run(ops.linear_logprob, problem, weights, chunk_tokens=64)
    error = 1e-13 if dtype == torch.float64 else 1e-5
    for chunk in (1, 5, 63, None):
        parts = run(ops.linear_logprob, problem, weights, chunk_tokens=chunk)
        for a, b in zip(parts[0], whole[0], strict=True):
            assert_near(a, b, absolute=error, relative=error)
        for a, b in zip(parts[1], whole[1], strict=True):
            assert_near(a, b, absolute=4 * error, relative=2.0**-7 if dtype == torch.bfloat16 else error)


def test_the_same_call_gives_the_same_bits() -> None:
    problem, weights = make_problem(), torch.randn(3, 40)
    first, second = (run(ops.linear_logprob, problem, weights, chunk_tokens=11) for _ in range(2))
    for a, b in zip(first[0] + first[1], second[0] + second[1], strict=True):
        assert_same_bits(a, b)


# -- masking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("counted", [True, False])
def test_masked_rows_reach_nothing(value: float, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not counted:
        as_on_a_gpu(monkeypatch)
    problem, weights = make_problem(), torch.randn(3, 40)
    clean = run(ops.linear_logprob, problem, weights, chunk_tokens=7)
    masked = ~problem.loss_mask | (problem.labels == -100)
    hidden, labels = problem.hidden.clone(), problem.labels.clone()
    hidden[masked] = value
    labels[~problem.loss_mask] = 10**9
    weights[:, masked] = torch.nan
    nasty = run(ops.linear_logprob, problem._replace(hidden=hidden, labels=labels), weights, chunk_tokens=7)
    for a, b in zip(nasty[0] + nasty[1], clean[0] + clean[1], strict=True):
        assert_same_bits(a, b)
    assert not nasty[1][0][masked].any()


def test_all_masked_and_empty() -> None:
    for problem in (make_problem(live=0.0), make_problem(tokens=0)):
        tokens = len(problem.labels)
        outputs, gradients = run(ops.linear_logprob, problem, torch.ones(3, tokens))
        assert [o.shape for o in outputs] == [(tokens,)] * 3
        assert not torch.stack(outputs).any()
        assert [g.shape for g in gradients] == [x.shape for x in problem[:3]]
        assert not any(g.any() for g in gradients)


def test_a_poisoned_row_stays_alone() -> None:
    problem = make_problem(live=1.0)
    problem.hidden[5] = torch.nan
    outputs, gradients = run(ops.linear_logprob, problem, torch.ones(3, 40), loss_mask=None)
    for output in outputs:
        assert output[5].isnan()
        assert output.isnan().sum() == 1
    assert gradients[0].isnan().any(1).nonzero().tolist() == [[5]]


def test_rows_beyond_live_tokens_are_not_dropped_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(live=1.0)
    with pytest.raises(ValueError, match=r"^linear_logprob: expected live_tokens >= 40 .*, got 39$"):
        ops.linear_logprob(problem.hidden, problem.weight, problem.labels, live_tokens=39)
    as_on_a_gpu(monkeypatch)
    out = ops.linear_logprob(problem.hidden, problem.weight, problem.labels, live_tokens=39)
    assert out.logprobs.isnan().nonzero().tolist() == [[39]]


# -- layout and precision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(dtype: torch.dtype) -> None:
    problem, weights = make_problem(dtype=dtype), torch.randn(3, 40)
    expected = run(ops.linear_logprob, problem, weights)
    spaced = torch.empty(40, 32, dtype=dtype)[:, ::2].copy_(problem.hidden)
    for hidden in (problem.hidden.t().contiguous().t(), spaced):
        for weight in (problem.weight, problem.weight.t().contiguous().t()):
            other = run(ops.linear_logprob, problem._replace(hidden=hidden, weight=weight), weights)
            for a, b in zip(other[0] + other[1], expected[0] + expected[1], strict=True):
                assert_near(a, b, absolute=1e-5, relative=2.0**-7)


def test_bfloat16_is_nearer_the_truth_than_bfloat16_logits() -> None:
    """Rounding the inputs is all that is lost: the logits in between are float32."""
    problem, weights = make_problem(width=256, dtype=torch.bfloat16, live=1.0), torch.randn(3, 40)

    def plain(hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor, **options) -> tuple[Tensor, ...]:
        return ops.logprob_from_logits(hidden @ weight.t() + bias, labels, **options)

    truths, true_gradients = run(oracle, problem, weights, torch.float64)
    ours, baseline = run(ops.linear_logprob, problem, weights), run(plain, problem, weights)
    for mine, other, truth in zip(ours[0], baseline[0], truths, strict=True):
        assert (mine - truth).abs().max() * 100 < (other - truth).abs().max()
    for mine, other, truth in zip(ours[1], baseline[1], true_gradients, strict=True):
        assert (mine - truth).abs().max() <= (other - truth).abs().max()


def test_gradient_of_a_bfloat16_weight_adds_up_in_float32() -> None:
    """Many small chunks: a bfloat16 sum would lose what is below 2^-8 of it."""
    problem = make_problem(tokens=600, width=4, vocab=5, dtype=torch.bfloat16, live=1.0)
    check(problem, chunk_tokens=1)


# -- main_grad --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_main_grad_receives_the_gradient_of_the_weight(dtype: torch.dtype) -> None:
    problem = make_problem(dtype=dtype)
    truth = run(oracle, problem._replace(bias=torch.zeros(101)), torch.ones(3, 40), torch.float64)[1]
    main_grad = torch.ones(101, 16, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    hidden, weight = problem.hidden.clone().requires_grad_(), problem.weight.clone().requires_grad_()
    version = main_grad._version
    # Two graphs alive at once, as with gradient accumulation.
    outs = [
        ops.linear_logprob(
            hidden, weight, problem.labels, loss_mask=problem.loss_mask, chunk_tokens=9, main_grad=main_grad
        )
        for _ in range(2)
    ]
    for out in outs:
        (out.logprobs + out.entropy + out.lse).sum().backward()
    assert weight.grad is None
    assert main_grad._version > version
    assert_near(main_grad - 1, 2 * truth[1], absolute=1e-12 if dtype == torch.float64 else 3e-5, relative=1e-6)
    hidden_error = 1e-12 if dtype == torch.float64 else 1e-4
    assert_near(hidden.grad, 2 * truth[0], absolute=hidden_error, relative=2.0**-7)


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most memory that tensors made by the call hold at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events, allocations = list(profile.profiler.kineto_results.experimental_event_tree()), []
    while events:
        event = events.pop()
        events += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            allocations.append((event.start_time_ns, event.extra_fields.alloc_size))
    used = peak = 0
    for _, size in sorted(allocations, key=lambda allocation: allocation[0]):
        used += size
        peak = max(peak, used)
    return peak


def test_memory_is_a_chunk_of_logits_and_the_gradients() -> None:
    tokens, width, vocab, chunk = 256, 4, 4000, 32
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    labels, rows = torch.randint(0, vocab, (tokens,)), torch.ones(tokens)
    chunk_bytes, gradient_bytes = 4 * chunk * vocab, 4 * (tokens + vocab) * width

    def logprobs() -> None:
        out = ops.linear_logprob(hidden, weight, labels, chunk_tokens=chunk)
        torch.autograd.grad(out.logprobs.sum(), (hidden, weight))

    def loss() -> None:
        out = ops.linear_ppo_loss(hidden, weight, labels, -rows, rows, rows, chunk_tokens=chunk)
        torch.autograd.grad(out.loss, (hidden, weight))

    def unfused() -> None:
        out = ops.logprob_from_logits(hidden @ weight.t(), labels)
        torch.autograd.grad(out.logprobs.sum(), (hidden, weight))

    per_row = 4 * tokens * 40  # outputs, statistics, indices
    for function in (logprobs, loss):
        assert chunk_bytes <= peak_bytes(function) <= chunk_bytes + gradient_bytes + per_row
    assert peak_bytes(unfused) > 2 * 4 * tokens * vocab


def test_default_chunks_are_bounded() -> None:
    from areal_core.ops._linear_chunks import split

    def longest(tokens: int, vocab: int) -> int:
        return max(len(x) for x in split(torch.arange(tokens), vocab, None))

    assert longest(100_000, 151_936) <= 441  # 256 MB of float32
    assert longest(100_000, 10_000_000) <= 128
    assert longest(100_000, 7) <= 4096
    lengths = [len(x) for x in split(torch.arange(1000), 151_936, None)]
    assert lengths == [334, 334, 332]


def test_problem_has_both_kinds_of_masking() -> None:
    problem: Problem = make_problem()
    assert problem.loss_mask.any()
    assert not problem.loss_mask.all()
    assert problem.labels[3] == -100
