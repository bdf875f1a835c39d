"""logprob_from_logits: values and gradients against the fp64 oracle, masking, strides, in-place backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import EPSILON, ISAS, assert_near, assert_same_bits, reference_data
from torch import Tensor

from areal_core import _C, ops
from areal_core.reference.logprob import logprob_from_logits as oracle

STREAM_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = [torch.float64, *STREAM_DTYPES]
FORWARD = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-6, torch.float16: 3e-6}


def make_problem(
    rows: int, vocab: int, dtype: torch.dtype = torch.float32, scale: float = 3.0
) -> tuple[Tensor, Tensor]:
    logits = (scale * torch.randn(rows, vocab, dtype=torch.float64)).to(dtype)
    return logits, torch.randint(0, max(vocab, 1), (rows,))


def run(function, logits: Tensor, labels: Tensor, weights: Tensor, **options):
    """Outputs and the gradient of sum(weights * outputs), weights [3, T]."""
    leaf = logits.detach().clone().requires_grad_()
    outputs = function(leaf, labels, **options)
    used = weights.to(outputs[0].dtype)
    (gradient,) = torch.autograd.grad(sum((w * o).sum() for w, o in zip(used, outputs, strict=True)), leaf)
    return [o.detach() for o in outputs], gradient


def check(logits: Tensor, labels: Tensor, **options) -> None:
    weights = torch.randn(3, len(labels), dtype=torch.float64)
    outputs, gradient = run(ops.logprob_from_logits, logits, labels, weights, **options)
    options.pop("inplace_backward", None)
    truths, true_gradient = run(oracle, logits.double(), labels, weights, **options)
    row_dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    for output, truth in zip(outputs, truths, strict=True):
        assert output.dtype == row_dtype
        assert_near(output, truth, absolute=FORWARD[logits.dtype], relative=3e-7)
    assert gradient.dtype == logits.dtype
    assert_near(gradient, true_gradient, absolute=FORWARD[logits.dtype], relative=8 * EPSILON[logits.dtype])


# -- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 31, 33, 1025, 4096, 4097, 12289])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "rows"])
def test_values_and_gradients(dtype: torch.dtype, vocab: int, temperature: float | str) -> None:
    logits, labels = make_problem(5, vocab, dtype)
    check(logits, labels, temperature=torch.linspace(0.5, 2.0, 5) if temperature == "rows" else temperature)


@pytest.mark.parametrize("dtype", STREAM_DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [50257, 151936])
def test_real_vocabularies(dtype: torch.dtype, vocab: int) -> None:
    logits, labels = make_problem(3, vocab, dtype)
    labels[1] = vocab - 1
    check(logits, labels)


@pytest.mark.parametrize("dtype", STREAM_DTYPES, ids=str)
def test_every_tail(dtype: torch.dtype) -> None:
    for vocab in range(1, 68):
        check(*make_problem(2, vocab, dtype))


@pytest.mark.parametrize("dtype", STREAM_DTYPES, ids=str)
def test_instruction_sets_agree(dtype: torch.dtype) -> None:
    for isa in ISAS[: ISAS.index(_C.best_isa()) + 1]:
        _C.set_active_isa(isa)
        check(*make_problem(3, 5003, dtype))


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_results_do_not_depend_on_the_number_of_threads(rows: int) -> None:
    logits, labels = make_problem(rows, 20011)
    weights = torch.randn(3, rows)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(run(ops.logprob_from_logits, logits, labels, weights))
    for outputs, gradient in results[1:]:
        for output, first in zip(outputs, results[0][0], strict=True):
            assert_same_bits(output, first)
        assert_same_bits(gradient, results[0][1])


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 4),
    vocab=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    temperature=st.sampled_from([0.01, 1.0, 100.0]),
    blocked=st.floats(0, 1),
    data=st.data(),
)
def test_any_small_problem(rows, vocab, dtype, scale, temperature, blocked, data) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    logits, labels = make_problem(rows, vocab, dtype, scale)
    logits[torch.rand(rows, vocab) < blocked] = -torch.inf
    labels[torch.rand(rows) < 0.2] = -100
    mask = torch.rand(rows) < 0.8
    weights = torch.randn(3, rows, dtype=torch.float64)
    outputs, gradient = run(ops.logprob_from_logits, logits, labels, weights, temperature=temperature, loss_mask=mask)
    truths, true_gradient = run(oracle, logits.double(), labels, weights, temperature=temperature, loss_mask=mask)
    steps = scale / temperature  # z itself is rounded in float32
    for output, truth in zip(outputs, truths, strict=True):
        assert_near(output, truth, absolute=3e-6 + 1e-7 * steps, relative=1e-6)
    assert_near(
        gradient,
        true_gradient,
        absolute=(1e-5 + 1e-6 * steps) / temperature,
        relative=8 * EPSILON[dtype] + 1e-6 * steps,
    )


def test_float64_gradients_by_finite_differences() -> None:
    logits, labels = make_problem(4, 9, torch.float64)
    labels[2] = -100
    mask = torch.tensor([True, True, True, False])
    temperature = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64)
    leaf = logits.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: ops.logprob_from_logits(x, labels, temperature=temperature, loss_mask=mask), (leaf,)
    )


def test_agrees_with_reference_data() -> None:
    cases = reference_data("logprob")
    dtypes = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}
    compared = 0
    for (kind, case, dtype_name), arrays in cases.items():
        truth = cases.get(("truth", case, dtype_name), {})
        if kind != "in" or "entropy" not in truth:
            continue
        dtype = dtypes[dtype_name]
        logits, labels, weights = (torch.from_numpy(arrays[name]) for name in ("logits", "labels", "w"))
        possible = ~(logits == -torch.inf).all(-1)  # log-softmax itself is NaN there
        for output, grad, row in (("logprob", "grad", 0), ("entropy", "entropy_grad", 1)):
            chosen = torch.zeros(3, len(labels), dtype=torch.float64)
            chosen[row] = weights
            outputs, gradient = run(ops.logprob_from_logits, logits.to(dtype), labels, chosen)
            true_output, true_grad = (torch.from_numpy(truth[name]) for name in (output, grad))
            assert_near(outputs[row][possible], true_output[possible], absolute=3e-6, relative=3e-7)
            assert_near(gradient[possible], true_grad[possible], absolute=3e-6, relative=8 * max(EPSILON[dtype], 1e-7))
            compared += 1
    assert compared >= 20


# -- inputs that have broken others -----------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [33, 1025, 16385])
@pytest.mark.parametrize("value", [-20.0, -200.0, -1e4, 1e4])
def test_uniform_rows_far_from_zero(vocab: int, value: float) -> None:
    logits = torch.full((2, vocab), value)
    out = ops.logprob_from_logits(logits, torch.tensor([0, vocab - 1]))
    entropy = torch.log(torch.tensor(float(vocab), dtype=torch.float64)).expand(2)
    assert_near(out.logprobs, -entropy, absolute=2e-6, relative=0)
    assert_near(out.entropy, entropy, absolute=2e-6, relative=0)
    assert_near(out.lse, value + entropy, absolute=2e-6, relative=1e-7)


@pytest.mark.parametrize("vocab", [1, 9, 1025, 16385])
@pytest.mark.parametrize("dtype", STREAM_DTYPES, ids=str)
def test_only_the_last_token_possible(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.full((2, vocab), -torch.inf, dtype=dtype)
    logits[:, -1] = 3.0
    outputs, gradient = run(ops.logprob_from_logits, logits, torch.tensor([vocab - 1, 0]), torch.ones(3, 2))
    assert outputs[0][0] == 0
    assert outputs[0][1] == (0 if vocab == 1 else -torch.inf)
    assert outputs[1].tolist() == [0, 0]
    assert outputs[2].tolist() == [3, 3]
    assert not gradient.isnan().any()


@pytest.mark.parametrize(("dtype", "margin", "relative"), [(torch.bfloat16, 6.9, 2**-8), (torch.float32, 14.0, 1e-5)])
def test_gradient_of_a_sure_label(dtype: torch.dtype, margin: float, relative: float) -> None:
    """1 - p survives, be it 1e-3 or 1e-6: it is never computed as a difference, nor rounded twice."""
    logits, weights = torch.tensor([[margin, 0.0]]).to(dtype), torch.tensor([[1.0], [0.0], [0.0]])
    for isa in ISAS[: ISAS.index(_C.best_isa()) + 1]:
        _C.set_active_isa(isa)
        outputs, gradient = run(ops.logprob_from_logits, logits, torch.tensor([0]), weights)
        truths, true_gradient = run(oracle, logits.double(), torch.tensor([0]), weights)
        assert_near(outputs[0], truths[0], absolute=0, relative=1e-5)
        assert_near(gradient, true_gradient, absolute=0, relative=relative)


def test_large_offset_keeps_the_difference() -> None:
    for isa in ISAS[: ISAS.index(_C.best_isa()) + 1]:
        _C.set_active_isa(isa)
        out = ops.logprob_from_logits(torch.tensor([[16384.0, 16383.0]]), torch.tensor([0]))
        assert_near(out.logprobs, torch.tensor([-0.3132616875]), absolute=1e-7, relative=0)


def test_upstream_gradients_differ_by_row() -> None:
    logits, labels = make_problem(2, 7)
    one = run(ops.logprob_from_logits, logits, labels, torch.ones(3, 2))[1]
    scaled = run(ops.logprob_from_logits, logits, labels, torch.ones(3, 2) * torch.tensor([1.0, 2.0]))[1]
    assert_near(scaled, one * torch.tensor([[1.0], [2.0]]), absolute=1e-7, relative=1e-6)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38], [1e-40, 0.0, -1e-40]])
    outputs, gradient = run(ops.logprob_from_logits, logits, torch.tensor([0, 1, 2]), torch.ones(3, 3))
    uniform = torch.tensor(3.0).log()
    assert_near(outputs[0], torch.stack([0 * uniform, -uniform, -uniform]), absolute=1e-6, relative=0)
    assert_near(outputs[1], torch.stack([0 * uniform, uniform, uniform]), absolute=1e-6, relative=0)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("temperature", [1e-37, 1e-34, 1e-31, 1e31, 1e35, 3e37])
def test_extreme_temperatures(temperature: float) -> None:
    """Neither the scaled nor the unscaled differences may leave float32's range."""
    for isa in ISAS[: ISAS.index(_C.best_isa()) + 1]:
        _C.set_active_isa(isa)
        logits, labels = make_problem(3, 5000)
        logits = (logits.double() * min(temperature, 1e37)).float()
        logits[1, ::2] = -torch.inf
        labels[1] = 1
        weights = temperature * torch.randn(3, 3, dtype=torch.float64) if temperature < 1 else torch.randn(3, 3)
        outputs, gradient = run(ops.logprob_from_logits, logits, labels, weights, temperature=temperature)
        truths, true_gradient = run(oracle, logits.double(), labels, weights, temperature=temperature)
        for output, truth in zip(outputs, truths, strict=True):
            assert_near(output, truth, absolute=1e-5, relative=1e-6)
        size = true_gradient.abs().max().item()
        assert_near(gradient, true_gradient, absolute=max(1e-6 * size, 1e-44), relative=2e-5)


# -- masking and non-finite logits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("how", ["loss_mask", "ignore_index"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_rows_are_zero_whatever_they_hold(poison: float, how: str, dtype: torch.dtype) -> None:
    logits, labels = make_problem(6, 40, dtype)
    mask = torch.tensor([1, 0, 1, 0, 0, 1], dtype=torch.bool)
    options = {}
    if how == "loss_mask":
        labels[~mask] = 12345  # out of range, and never looked at
        options["loss_mask"] = mask
    else:
        labels[~mask] = -1
        options["ignore_index"] = -1
    weights = torch.randn(3, 6)
    clean = run(ops.logprob_from_logits, logits, labels, weights, **options)
    poisoned = logits.clone()
    poisoned[~mask] = poison
    weights[:, ~mask] = torch.nan
    outputs, gradient = run(ops.logprob_from_logits, poisoned, labels, weights, **options)
    for output, same in zip(outputs, clean[0], strict=True):
        assert_same_bits(output, same)
        assert not output[~mask].any()
    assert_same_bits(gradient, clean[1])
    assert not gradient[~mask].any()


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16])
def test_loss_mask_of_any_dtype(mask_dtype: torch.dtype) -> None:
    logits, labels = make_problem(4, 11)
    mask = torch.tensor([1, 0, 0, 1]).to(mask_dtype)
    check(logits, labels, loss_mask=mask)


def test_all_rows_masked() -> None:
    logits, labels = make_problem(3, 11)
    outputs, gradient = run(
        ops.logprob_from_logits, logits, labels, torch.ones(3, 3), loss_mask=torch.zeros(3, dtype=torch.bool)
    )
    assert not torch.stack(outputs).any()
    assert not gradient.any()


@pytest.mark.parametrize("vocab", [5, 40, 9000])
def test_row_without_a_possible_token(vocab: int) -> None:
    logits, labels = make_problem(3, vocab)
    logits[1] = -torch.inf
    outputs, gradient = run(ops.logprob_from_logits, logits, labels, torch.ones(3, 3))
    assert [o[1].item() for o in outputs] == [-torch.inf, 0, -torch.inf]
    assert not gradient[1].any()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("position", [0, 17, 4096, 8999])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("rest", ["random", "-inf"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_poison_their_row_only(position: int, value: float, rest: str, dtype: torch.dtype) -> None:
    logits, labels = make_problem(3, 9000, dtype)
    clean = run(ops.logprob_from_logits, logits, labels, torch.ones(3, 3))
    if rest == "-inf":
        logits[1] = -torch.inf
    logits[1, position] = value
    outputs, gradient = run(ops.logprob_from_logits, logits, labels, torch.ones(3, 3))
    for output, same in zip(outputs, clean[0], strict=True):
        assert output[1].isnan()
        assert_same_bits(output[[0, 2]], same[[0, 2]])
    assert gradient[1].isnan().all()
    assert_same_bits(gradient[[0, 2]], clean[1][[0, 2]])


def test_nan_with_any_payload_poisons() -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1, -0x003FFFFF], dtype=torch.int32)
    logits = torch.zeros(4, 20)
    logits[:, 3] = bits.view(torch.float32)
    assert ops.logprob_from_logits(logits, torch.zeros(4, dtype=torch.int64)).logprobs.isnan().all()


def test_zero_upstream_gradient_gives_zero_even_where_the_row_is_nan() -> None:
    logits, labels = make_problem(2, 30)
    logits[1, 4] = torch.nan
    weights = torch.tensor([[1.0, 0.0]]).expand(3, 2)
    leaf = logits.requires_grad_()
    out = ops.logprob_from_logits(leaf, labels)
    out.logprobs.backward(weights[0])
    assert not leaf.grad[1].any()
    assert leaf.grad[0].any()


# -- shapes, strides, sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [0, 1, 33])
def test_no_rows(vocab: int) -> None:
    logits = torch.empty(0, vocab, requires_grad=True)
    out = ops.logprob_from_logits(logits, torch.empty(0, dtype=torch.int64))
    assert [o.shape for o in out] == [(0,)] * 3
    out.logprobs.sum().backward()
    assert logits.grad.shape == (0, vocab)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [33, 129])
def test_strided_and_misaligned_rows(dtype: torch.dtype, vocab: int) -> None:
    base = (3 * torch.randn(8, vocab + 7, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, vocab, (8,))
    padded, shifted, every_other = base[:, :vocab], base[:, 3 : 3 + vocab], base[::2, 1 : 1 + vocab]
    expanded = base[:1, :vocab].expand(8, vocab)
    for view in (padded, shifted, every_other, expanded):
        assert_view_matches_copy(view, labels[: len(view)])


def assert_view_matches_copy(view: Tensor, labels: Tensor) -> None:
    leaf = view.detach().requires_grad_()
    assert leaf.stride() == view.stride()
    copy = view.detach().contiguous().requires_grad_()
    for tensor in (leaf, copy):
        ops.logprob_from_logits(tensor, labels).logprobs.sum().backward()
    assert_same_bits(leaf.grad.contiguous(), copy.grad)


def test_row_offsets_beyond_32_bits() -> None:
    """The second row lies 2^31 elements after the first; the pages between them are never touched."""
    vocab, far = 1000, 2**31
    storage = torch.empty(far + vocab, dtype=torch.bfloat16)
    logits = storage.as_strided((2, vocab), (far, 1))
    small, labels = make_problem(2, vocab, torch.bfloat16)
    logits.copy_(small)
    weights = torch.randn(3, 2)
    outputs, gradient = run(ops.logprob_from_logits, small, labels, weights)
    leaf = logits.detach().requires_grad_()
    out = ops.logprob_from_logits(leaf, labels, inplace_backward=True)
    for output, same in zip(out, outputs, strict=True):
        assert_same_bits(output, same)
    sum((w * o).sum() for w, o in zip(weights, out, strict=True)).backward()
    assert_same_bits(logits.contiguous(), gradient)


def test_labels_of_other_integer_dtypes_and_strides() -> None:
    logits, labels = make_problem(4, 50)
    expected = ops.logprob_from_logits(logits, labels).logprobs
    assert_same_bits(ops.logprob_from_logits(logits, labels.int()).logprobs, expected)
    assert_same_bits(ops.logprob_from_logits(logits, labels.repeat_interleave(2)[::2]).logprobs, expected)


def test_temperature_tensor_of_one_element_is_a_number() -> None:
    logits, labels = make_problem(4, 50)
    expected = ops.logprob_from_logits(logits, labels, temperature=0.5).logprobs
    for temperature in (torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64)):
        assert_same_bits(ops.logprob_from_logits(logits, labels, temperature=temperature).logprobs, expected)
