"""linear_ppo_loss: what ppo_loss of linear_logprob gives, gradient included, from forward alone."""

from typing import Any, NamedTuple

import pytest
import torch
from linear_cases import Problem, as_on_a_gpu, assert_gradients_near, make_problem
from linear_cases import oracle as logprob_oracle
from op_checks import assert_near, assert_same_bits
from torch import Tensor

from areal_core import ops
from areal_core.ops import lm_head
from areal_core.reference.loss import ppo_loss as loss_oracle

CONFIGS = {
    "default": ops.PPOLossConfig(),
    "everything": ops.PPOLossConfig(
        clip_high=0.3, dual_clip=2.0, behavior_cap=1.2, kl_coef=0.1, entropy_coef=0.05, kl_estimator="k2"
    ),
    "cispo": ops.PPOLossConfig.preset("cispo"),
    "reinforce": ops.PPOLossConfig.preset("reinforce"),
    "gspo": ops.PPOLossConfig.preset("gspo"),
    "distill": ops.PPOLossConfig.preset("distill", m2po_threshold=0.04),
    "mask": ops.PPOLossConfig(behavior_mode="mask", behavior_cap=1.1, behavior_low=0.9),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Inputs(NamedTuple):
    """Per-row inputs of the loss, near the log-probabilities of the problem."""

    proximal_logprobs: Tensor
    advantages: Tensor
    behavior_logprobs: Tensor
    ref_logprobs: Tensor


def make_inputs(problem: Problem) -> Inputs:
    truth = logprob_oracle(
        problem.hidden, problem.weight, problem.labels, bias=problem.bias, loss_mask=problem.loss_mask
    )[0]
    dtype = torch.float64 if problem.hidden.dtype == torch.float64 else torch.float32
    proximal = truth + 0.2 * torch.randn_like(truth)
    values = (proximal, torch.randn_like(truth), proximal + 0.1 * torch.randn_like(truth), truth - 0.1)
    return Inputs(*(x.to(dtype) for x in values))


def composed(hidden: Tensor, weight: Tensor, labels: Tensor, *args: Tensor, **options: Any) -> Any:
    """The same of two ops, one after the other."""
    proximal, advantages, mask = args
    linear = {k: options.pop(k) for k in ("bias", "temperature", "chunk_tokens", "main_grad") if k in options}
    out = ops.linear_logprob(hidden, weight, labels, loss_mask=mask, **linear)
    live = mask & (labels != -100)
    loss = ops.ppo_loss(out.logprobs, proximal, advantages, live, entropy=out.entropy, **options)
    return ops.FusedPPOLossOutput(*loss, out.logprobs, out.entropy)


def run(function: Any, problem: Problem, inputs: Inputs, upstream: float = 1.0, **options: Any) -> tuple[Any, Any]:
    """The output, and the gradients of upstream * loss."""
    leaves = [x.detach().clone().requires_grad_() for x in problem[:3]]
    named = inputs._asdict()
    out = function(
        leaves[0],
        leaves[1],
        problem.labels,
        named.pop("proximal_logprobs"),
        named.pop("advantages"),
        problem.loss_mask,
        bias=leaves[2],
        **named,
        **options,
    )
    return out, torch.autograd.grad(upstream * out.loss, leaves)


def used_op(function: Any) -> list[str]:
    """The native names of the fused head's ops that a call ran."""
    with torch.profiler.profile() as profile:
        function()
    return [e.name.split("::")[1] for e in profile.events() if e.name.startswith("areal_core::linear")]


# -- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("normalizer", [None, 37.0])
def test_equals_the_two_ops(dtype: torch.dtype, config: ops.PPOLossConfig, normalizer: float | None) -> None:
    """All per-row results and statistics to the last bit, gradients to rounding."""
    problem = make_problem(dtype=dtype)
    inputs = make_inputs(problem)
    options = {"config": config, "normalizer": normalizer, "temperature": 0.7, "chunk_tokens": 9}
    options |= {"teacher_logprobs": inputs.ref_logprobs + 0.1, "keep_mask": torch.rand(40) < 0.8}
    options["cu_seqlens"] = torch.tensor([0, 13, 13, 40])
    out, gradients = run(ops.linear_ppo_loss, problem, inputs, 3.0, **options)
    expected, expected_gradients = run(composed, problem, inputs, 3.0, **options)
    for value, other in zip((*out[0::2], *out.stats), (*expected[0::2], *expected.stats), strict=False):
        assert_same_bits(value, other)
    assert_same_bits(out.entropy, expected.entropy)
    assert_same_bits(out.stats.raw, expected.stats.raw)
    for value, other in zip(gradients, expected_gradients, strict=True):
        assert_near(value, other, absolute=1e-7, relative=2.0**-7 if value.element_size() == 2 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_the_oracle(dtype: torch.dtype) -> None:
    problem = make_problem(dtype=dtype)
    inputs, config = make_inputs(problem), CONFIGS["everything"]
    out, gradients = run(ops.linear_ppo_loss, problem, inputs, config=config, chunk_tokens=9)
    leaves = [x.double().requires_grad_() for x in problem[:3]]
    truths = logprob_oracle(*leaves[:2], problem.labels, bias=leaves[2], loss_mask=problem.loss_mask)
    live = problem.loss_mask & (problem.labels != -100)
    loss, stats = loss_oracle(
        truths[0],
        inputs[0],
        inputs[1],
        live,
        **dict(list(inputs._asdict().items())[2:]),
        entropy=truths[1],
        config=config,
    )
    error = 1e-12 if dtype == torch.float64 else 1e-5
    assert_near(out.loss, loss, absolute=error, relative=error)
    for name, value in out.stats.finalize()._asdict().items():
        if name in stats:
            assert_near(value, stats[name], absolute=error, relative=error)
    assert_gradients_near(list(gradients), list(torch.autograd.grad(loss, leaves)), dtype)


def test_upstream_gradient_scales() -> None:
    problem = make_problem(dtype=torch.float64)
    inputs = make_inputs(problem)
    once = run(ops.linear_ppo_loss, problem, inputs)[1]
    for factor in (1.0, -2.5, 0.0):
        for value, other in zip(run(ops.linear_ppo_loss, problem, inputs, factor)[1], once, strict=True):
            assert_near(value, factor * other, absolute=1e-15, relative=1e-13)


def test_microbatches_add_up() -> None:
    """With the normalizer of the batch, the gradient does not depend on the split."""
    problem = make_problem(tokens=60, dtype=torch.float64)
    inputs = make_inputs(problem)
    live = (problem.loss_mask & (problem.labels != -100)).sum()
    whole, gradients = run(ops.linear_ppo_loss, problem, inputs, normalizer=live)
    parts = []
    for rows in (slice(0, 7), slice(7, 60)):
        part = Problem(problem.hidden[rows], *problem[1:3], problem.labels[rows], problem.loss_mask[rows])
        parts.append(run(ops.linear_ppo_loss, part, Inputs(*(x[rows] for x in inputs)), normalizer=live))
    assert_near(sum(out.loss for out, _ in parts), whole.loss, absolute=1e-14, relative=1e-13)
    assert_near(parts[0][1][1] + parts[1][1][1], gradients[1], absolute=1e-14, relative=1e-13)


# -- masking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_masked_rows_reach_nothing(value: float, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not counted:
        as_on_a_gpu(monkeypatch)
    problem = make_problem()
    inputs, options = make_inputs(problem), {"config": CONFIGS["everything"], "chunk_tokens": 7}
    clean, clean_gradients = run(ops.linear_ppo_loss, problem, inputs, **options)
    masked = ~problem.loss_mask | (problem.labels == -100)
    nasty = Inputs(*(torch.where(masked, value, x) for x in inputs))
    hidden = torch.where(masked[:, None], value, problem.hidden)
    labels = torch.where(problem.loss_mask, problem.labels, 10**9)
    out, gradients = run(ops.linear_ppo_loss, problem._replace(hidden=hidden, labels=labels), nasty, **options)
    for a, b in zip(
        (out.loss, out.stats.raw, *gradients), (clean.loss, clean.stats.raw, *clean_gradients), strict=True
    ):
        assert_same_bits(a, b)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("tokens", [0, 30])
def test_no_live_row(tokens: int, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not counted:
        as_on_a_gpu(monkeypatch)
    problem = make_problem(tokens=tokens, live=0.0)
    out, gradients = run(ops.linear_ppo_loss, problem, make_inputs(problem), config=CONFIGS["everything"])
    assert out.loss == 0
    assert out.stats.raw.isfinite().all()
    assert [g.shape for g in gradients] == [x.shape for x in problem[:3]]
    assert not any(g.any() for g in gradients)


def test_rows_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(dtype=torch.float64)
    inputs, options = make_inputs(problem), {"config": CONFIGS["everything"], "chunk_tokens": 7}
    expected, expected_gradients = run(ops.linear_ppo_loss, problem, inputs, **options)
    as_on_a_gpu(monkeypatch)
    for live_tokens in (None, 30, 1000):
        out, gradients = run(ops.linear_ppo_loss, problem, inputs, live_tokens=live_tokens, **options)
        assert_same_bits(out.loss, expected.loss)
        for value, other in zip(gradients, expected_gradients, strict=True):
            assert_near(value, other, absolute=1e-14, relative=1e-12)
    out, _ = run(ops.linear_ppo_loss, problem, inputs, live_tokens=3, **options)
    assert out.loss.isnan()


@pytest.mark.parametrize("config", ["default", "gspo"])
def test_staleness_is_that_of_ppo_loss(config: str) -> None:
    """Whichever way it runs; masked rows do not count."""
    problem = make_problem()
    inputs, versions = make_inputs(problem), torch.arange(40, dtype=torch.int32) % 5
    options = {"config": CONFIGS[config], "cu_seqlens": torch.tensor([0, 13, 40]), "versions": versions}
    out = run(ops.linear_ppo_loss, problem, inputs, current_version=6, **options)[0]
    live = problem.loss_mask & (problem.labels != -100)
    ages = 6 - versions[live]
    assert out.stats.finalize().staleness_max == ages.max()
    assert_near(out.stats.finalize().staleness_mean, ages.double().mean(), absolute=1e-6, relative=0)
    with pytest.raises(ValueError, match="expected versions and current_version together"):
        run(ops.linear_ppo_loss, problem, inputs, **options)
    with pytest.raises(TypeError, match="expected versions of an integer dtype"):
        run(ops.linear_ppo_loss, problem, inputs, current_version=6, **{**options, "versions": versions.float()})


# -- which way it runs ------------------------------------------------------------------------------------------------


def test_token_level_losses_need_no_second_pass() -> None:
    problem = make_problem()
    inputs = make_inputs(problem)
    assert used_op(lambda: run(ops.linear_ppo_loss, problem, inputs)) == ["linear_ppo_forward_backward"]


def test_float16_gradients_see_the_loss_scale() -> None:
    """A gradient rounded to float16 before a loss scale of 2^16 would have lost most of its entries."""
    problem = make_problem(dtype=torch.float16)
    inputs = make_inputs(problem)
    assert used_op(lambda: run(ops.linear_ppo_loss, problem, inputs)) == ["linear_logprob", "linear_logprob_backward"]
    gradients = run(ops.linear_ppo_loss, problem, inputs, 2.0**16, normalizer=1e6)[1]
    truths = run(ops.linear_ppo_loss, problem._replace(**wide(problem)), inputs, 2.0**16, normalizer=1e6)[1]
    for value, truth in zip(gradients, truths, strict=True):
        assert_near(value, truth, absolute=1e-5, relative=2.0**-10)


def wide(problem: Problem) -> dict[str, Tensor]:
    return {name: getattr(problem, name).float() for name in ("hidden", "weight", "bias")}


def test_other_losses_run_in_two_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "_is_token_level", lambda config: False)
    problem = make_problem(dtype=torch.float64)
    inputs = make_inputs(problem)
    assert used_op(lambda: run(ops.linear_ppo_loss, problem, inputs)) == ["linear_logprob", "linear_logprob_backward"]
    out, gradients = run(ops.linear_ppo_loss, problem, inputs, config=CONFIGS["everything"])
    expected, expected_gradients = run(composed, problem, inputs, config=CONFIGS["everything"])
    assert not out.logprobs.requires_grad
    for value, other in zip((out.loss, *gradients), (expected.loss, *expected_gradients), strict=True):
        assert_same_bits(value, other)


def test_nothing_is_multiplied_for_gradients_nobody_wants() -> None:
    problem = make_problem()
    inputs = make_inputs(problem)
    arguments = (problem.labels, inputs.proximal_logprobs, inputs.advantages, problem.loss_mask)
    with torch.profiler.profile() as profile:
        out = ops.linear_ppo_loss(*problem[:2], *arguments)
    assert not out.loss.requires_grad
    assert sum(e.name == "aten::mm" for e in profile.events()) == 1
    for wanted in (0, 1):
        leaves = [x.clone().requires_grad_(i == wanted) for i, x in enumerate(problem[:2])]
        ops.linear_ppo_loss(*leaves, *arguments).loss.backward()
        assert [x.grad is not None for x in leaves] == [i == wanted for i in range(2)]


# -- main_grad and autograd -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("token_level", [True, False])
def test_main_grad(dtype: torch.dtype, token_level: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not token_level:
        monkeypatch.setattr(lm_head, "_is_token_level", lambda config: False)
    problem = make_problem(dtype=dtype)
    inputs = make_inputs(problem)
    truth = run(ops.linear_ppo_loss, problem._replace(bias=torch.zeros_like(problem.bias)), inputs)[1][1]
    hidden, weight = (x.clone().requires_grad_() for x in problem[:2])
    main_grad = torch.ones(101, 16, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    arguments = (problem.labels, inputs.proximal_logprobs, inputs.advantages, problem.loss_mask)
    named = {"behavior_logprobs": inputs.behavior_logprobs, "ref_logprobs": inputs.ref_logprobs}
    losses = [ops.linear_ppo_loss(hidden, weight, *arguments, main_grad=main_grad, **named).loss for _ in range(2)]
    (losses[0] + 2 * losses[1]).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    error = 1e-13 if dtype == torch.float64 else 1e-6
    assert_near(
        main_grad - 1, 3 * truth.double(), absolute=error, relative=2.0**-8 if dtype == torch.bfloat16 else error
    )


@pytest.mark.parametrize("upstream", [1.0, 2.0])
def test_a_second_backward_raises(upstream: float) -> None:
    problem = make_problem()
    inputs = make_inputs(problem)
    weight = problem.weight.requires_grad_()
    out = ops.linear_ppo_loss(problem.hidden, weight, problem.labels, *inputs[:2], problem.loss_mask)
    loss = upstream * out.loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_differentiating_the_gradient_raises() -> None:
    problem = make_problem()
    inputs = make_inputs(problem)
    weight = problem.weight.requires_grad_()
    out = ops.linear_ppo_loss(problem.hidden, weight, problem.labels, *inputs[:2], problem.loss_mask)
    (gradient,) = torch.autograd.grad(out.loss, weight, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^linear_ppo_loss: expected one backward pass"):
        gradient.sum().backward()


@pytest.mark.parametrize("name", Inputs._fields)
def test_broken_row_inputs_raise(name: str) -> None:
    problem = make_problem()
    inputs = make_inputs(problem)
    wrong = {name: getattr(inputs, name)[:-1]}
    with pytest.raises(ValueError, match=rf"^linear_ppo_loss: expected {name} of shape \[40\], got \[39\]"):
        run(ops.linear_ppo_loss, problem, inputs._replace(**wrong))
    wrong = {name: getattr(inputs, name).half()}
    with pytest.raises(TypeError, match=rf"^linear_ppo_loss: expected {name} dtype = torch.float32, got torch.float16"):
        run(ops.linear_ppo_loss, problem, inputs._replace(**wrong))


def test_an_option_without_its_input_raises() -> None:
    problem = make_problem()
    inputs = make_inputs(problem)
    arguments = (*problem[:2], problem.labels, *inputs[:2], problem.loss_mask)
    for config, missing in ((CONFIGS["mask"], "behavior_logprobs"), (ops.PPOLossConfig(kl_coef=0.1), "ref_logprobs")):
        with pytest.raises(ValueError, match=f"expected {missing} with"):
            ops.linear_ppo_loss(*arguments, config=config)
    with pytest.raises(ValueError, match="expected normalizer > 0"):
        ops.linear_ppo_loss(*arguments, normalizer=0.0)


@pytest.mark.parametrize("accumulates", [False, True])
def test_compiles_into_one_graph(accumulates: bool) -> None:
    problem = make_problem()
    inputs, config = make_inputs(problem), CONFIGS["everything"]

    def step(hidden: Tensor, weight: Tensor, main_grad: Tensor | None) -> Tensor:
        named = inputs._asdict()
        del named["proximal_logprobs"], named["advantages"]
        options: dict[str, Any] = {"config": config, "chunk_tokens": 7, "main_grad": main_grad, **named}
        out = ops.linear_ppo_loss(hidden * 1, weight, problem.labels, *inputs[:2], problem.loss_mask, **options)
        return 2 * out.loss

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        main_grad = torch.zeros(101, 16) if accumulates else None
        hidden, weight = (x.clone().requires_grad_() for x in problem[:2])
        function(hidden, weight, main_grad).backward()
        results.append((hidden.grad, main_grad if accumulates else weight.grad))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_opcheck() -> None:
    problem = make_problem(tokens=6, width=3, vocab=5, dtype=torch.float64)
    inputs = make_inputs(problem)
    native, leaves = torch.ops.areal_core, problem[:3]
    rows = (problem.labels, None, 0.7, problem.loss_mask, -100)
    options = [float(x) for x in CONFIGS["everything"]._native()]
    last = (torch.tensor([4.0], dtype=torch.float64), options, None, None, None, [True, True, True], False)
    arguments = (*leaves, torch.float64, *rows, 2, None, *inputs, None, None, *last)
    torch.library.opcheck(native.linear_ppo_forward_backward.default, arguments)
