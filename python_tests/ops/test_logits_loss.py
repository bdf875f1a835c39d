"""ppo_loss_from_logits: what ppo_loss of logprob_from_logits gives, the gradient in the logits' place."""

from typing import Any, NamedTuple

import pytest
import torch
from op_checks import ISAS, assert_near, assert_same_bits
from torch import Tensor

from areal_core import _C, ops

CONFIGS = {
    "default": ops.PPOLossConfig(),
    "everything": ops.PPOLossConfig(
        clip_high=0.3, dual_clip=2.0, behavior_cap=1.2, kl_coef=0.1, entropy_coef=0.05, distill_coef=0.1
    ),
    "cispo": ops.PPOLossConfig.preset("cispo"),
    "reinforce": ops.PPOLossConfig.preset("reinforce"),
    "gspo": ops.PPOLossConfig.preset("gspo"),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Problem(NamedTuple):
    logits: Tensor
    labels: Tensor
    proximal: Tensor
    advantages: Tensor
    mask: Tensor
    named: dict[str, Tensor]


def make_problem(tokens: int = 20, vocab: int = 101, dtype: torch.dtype = torch.float32) -> Problem:
    logits, labels = (3 * torch.randn(tokens, vocab)).to(dtype), torch.randint(0, vocab, (tokens,))
    mask = torch.rand(tokens) < 0.7
    if tokens > 3:
        labels[3], mask[3] = -100, True
    row_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    proximal = logits.to(row_dtype).log_softmax(1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    proximal = proximal + 0.2 * torch.randn(tokens)
    names = ("behavior_logprobs", "ref_logprobs", "teacher_logprobs")
    named = {name: proximal + 0.1 * torch.randn(tokens, dtype=row_dtype) for name in names}
    named["keep_mask"] = torch.rand(tokens) < 0.9
    named["cu_seqlens"] = torch.tensor([0, tokens // 2, tokens])
    named["versions"], named["current_version"] = torch.arange(tokens) % 5, torch.tensor(6)
    return Problem(logits, labels, proximal, torch.randn(tokens, dtype=row_dtype), mask, named)


def composed(logits: Tensor, labels: Tensor, *args: Tensor, **options: Any) -> Any:
    """The same of two ops, one after the other."""
    proximal, advantages, mask = args
    temperature = options.pop("temperature", 1.0)
    out = ops.logprob_from_logits(logits, labels, loss_mask=mask, temperature=temperature)
    live = mask & (labels != -100)
    loss = ops.ppo_loss(out.logprobs, proximal, advantages, live, entropy=out.entropy, **options)
    return ops.FusedPPOLossOutput(*loss, out.logprobs.detach(), out.entropy.detach())


def run(function: Any, p: Problem, upstream: float = 1.0, **options: Any) -> tuple[Any, Tensor, Tensor]:
    """The output, the gradient of upstream * loss, and the logits as they are afterwards."""
    leaf = p.logits.detach().clone().requires_grad_()
    logits = leaf * 1
    out = function(logits, p.labels, p.proximal, p.advantages, p.mask, **p.named, **options)
    (gradient,) = torch.autograd.grad(upstream * out.loss, leaf)
    return out, gradient, logits


def check(p: Problem, **options: Any) -> None:
    out, gradient, logits = run(ops.ppo_loss_from_logits, p, 3.0, **options)
    expected, expected_gradient, _ = run(composed, p, 3.0, **options)
    for value, other in ((out.loss, expected.loss), (out.stats.raw, expected.stats.raw)):
        assert_same_bits(value, other)
    assert_same_bits(out.logprobs, expected.logprobs)
    assert_same_bits(out.entropy, expected.entropy)
    assert gradient.dtype == p.logits.dtype
    rounding = {torch.float64: 1e-13, torch.float32: 1e-6}.get(p.logits.dtype, 2.0**-7)
    assert_near(gradient, expected_gradient, absolute=1e-7, relative=rounding)
    assert_same_bits(logits.detach(), gradient)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("normalizer", [None, 37.0])
def test_equals_the_two_ops(dtype: torch.dtype, config: ops.PPOLossConfig, normalizer: float | None) -> None:
    """All per-row results and statistics to the last bit, gradients to rounding, by whatever way it runs."""
    check(make_problem(dtype=dtype), config=config, normalizer=normalizer, temperature=0.7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [1, 33, 4097, 151936])
def test_groups_of_rows(isa: str, vocab: int) -> None:
    """One row at a time, several, and all at once, on any instruction set."""
    try:
        _C.set_active_isa(isa)
    except _C.Error:
        pytest.skip(f"no {isa} here")
    check(make_problem(tokens=5, vocab=vocab), config=CONFIGS["everything"], temperature=torch.linspace(0.5, 2, 5))


def test_the_same_bits_for_any_number_of_threads() -> None:
    p, results = make_problem(tokens=300, vocab=3000), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(run(ops.ppo_loss_from_logits, p, config=CONFIGS["everything"]))
    assert_same_bits(results[0][0].loss, results[1][0].loss)
    assert_same_bits(results[0][1], results[1][1])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_masked_rows_reach_nothing(config: ops.PPOLossConfig) -> None:
    p = make_problem()
    clean, gradient, _ = run(ops.ppo_loss_from_logits, p, config=config)
    masked = ~p.mask | (p.labels == -100)
    named = {k: torch.where(masked, torch.nan, v) if v.is_floating_point() else v for k, v in p.named.items()}
    nasty = p._replace(
        logits=torch.where(masked[:, None], torch.nan, p.logits),
        labels=torch.where(p.mask, p.labels, 10**9),
        advantages=torch.where(masked, torch.inf, p.advantages),
        named=named,
    )
    out, nasty_gradient, _ = run(ops.ppo_loss_from_logits, nasty, config=config)
    assert_same_bits(out.loss, clean.loss)
    assert_same_bits(out.stats.raw, clean.stats.raw)
    assert_same_bits(nasty_gradient, gradient)
    assert not gradient[masked].any()


@pytest.mark.parametrize("tokens", [0, 6])
def test_no_live_row(tokens: int) -> None:
    p = make_problem(tokens)._replace(mask=torch.zeros(tokens, dtype=torch.bool))
    out, gradient, _ = run(ops.ppo_loss_from_logits, p, config=CONFIGS["everything"])
    assert out.loss == 0
    assert gradient.shape == (tokens, 101)
    assert not gradient.any()


def test_only_its_rows_are_written() -> None:
    p, base = make_problem(), torch.full((20, 130), 7.0)
    base[:, 5:106] = p.logits
    logits = base[:, 5:106].detach().requires_grad_()
    out = ops.ppo_loss_from_logits(logits, p.labels, p.proximal, p.advantages, p.mask, **p.named)
    out.loss.backward()
    assert_same_bits(base[:, 5:106].contiguous(), run(ops.ppo_loss_from_logits, p)[1])
    assert bool((base[:, :5] == 7).all() and (base[:, 106:] == 7).all())


def test_logits_without_gradient_are_left_alone() -> None:
    p = make_problem()
    before = p.logits.clone()
    arguments = (p.labels, p.proximal, p.advantages, p.mask)
    assert not ops.ppo_loss_from_logits(p.logits, *arguments, **p.named).loss.requires_grad
    with torch.no_grad():
        ops.ppo_loss_from_logits(p.logits.requires_grad_(), *arguments, **p.named)
    assert_same_bits(p.logits.detach(), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_scaling_in_place(dtype: torch.dtype, threads: int) -> None:
    """Rounded once; a factor of exactly 1 reads and writes nothing."""
    torch.set_num_threads(threads)
    factor_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    for shape in ((0,), (7,), (1003,), (0, 5), (3, 1), (5, 33), (700, 311)):
        values = torch.randn(shape).to(dtype)
        for factor in (1.0, -0.3, 0.0):
            base = torch.full((*shape[:-1], shape[-1] + 3), 7.0, dtype=dtype)
            view = base[..., 1 : shape[-1] + 1]
            view.copy_(values)
            torch.ops.areal_core.scale_(view, torch.tensor([factor], dtype=factor_dtype))
            assert_same_bits(view.contiguous(), (values.to(factor_dtype) * factor).to(dtype))
            assert bool((base[..., 0] == 7).all() and (base[..., shape[-1] + 1 :] == 7).all())


@pytest.mark.parametrize("upstream", [1.0, 2.0])
@pytest.mark.parametrize("config", ["default", "gspo"])
def test_a_second_backward_raises(upstream: float, config: str) -> None:
    p = make_problem()
    logits = p.logits.requires_grad_() * 1
    version = logits._version
    arguments = (p.labels, p.proximal, p.advantages, p.mask)
    loss = upstream * ops.ppo_loss_from_logits(logits, *arguments, **p.named, config=CONFIGS[config]).loss
    loss.backward(retain_graph=True)
    assert logits._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_others_who_saved_the_logits_notice() -> None:
    p = make_problem()
    logits = p.logits.requires_grad_() * 1
    other = (logits * logits).sum()
    ops.ppo_loss_from_logits(logits, p.labels, p.proximal, p.advantages, p.mask)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_differentiating_the_gradient_raises() -> None:
    p = make_problem()
    leaf = p.logits.requires_grad_()
    out = ops.ppo_loss_from_logits(leaf * 1, p.labels, p.proximal, p.advantages, p.mask)
    (gradient,) = torch.autograd.grad(out.loss, leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^ppo_loss_from_logits: expected one backward pass"):
        gradient.sum().backward()


def test_broken_contracts_raise_before_anything_is_written() -> None:
    p = make_problem()
    logits = p.logits.requires_grad_()
    before = logits.detach().clone()
    call = ops.ppo_loss_from_logits
    live = int((p.mask & (p.labels != -100)).nonzero()[-1])
    labels, rows = p.labels.clone(), torch.ones(20)
    labels[live], rows[live] = 101, 0.0
    with pytest.raises(ValueError, match=rf"^ppo_loss_from_logits: expected labels\[{live}\] in \[0, 101\)"):
        call(logits, labels, p.proximal, p.advantages, p.mask)
    with pytest.raises(ValueError, match=rf"^ppo_loss_from_logits: expected temperature of row {live} > 0"):
        call(logits, p.labels, p.proximal, p.advantages, p.mask, temperature=rows)
    with pytest.raises(ValueError, match=r"^ppo_loss_from_logits: expected logits of shape \[T, V\], got 3-D"):
        call(logits[None], p.labels, p.proximal, p.advantages, p.mask)
    with pytest.raises(ValueError, match=r"^ppo_loss_from_logits: expected advantages of shape \[20\], got \[3\]"):
        call(logits, p.labels, p.proximal, p.advantages[:3], p.mask)
    with pytest.raises(TypeError, match=r"^ppo_loss_from_logits: expected proximal_logprobs dtype = torch.float32"):
        call(logits, p.labels, p.proximal.double(), p.advantages, p.mask)
    with pytest.raises(ValueError, match="expected ref_logprobs with kl_coef set"):
        call(logits, p.labels, p.proximal, p.advantages, p.mask, config=ops.PPOLossConfig(kl_coef=0.1))
    overlapping = torch.randn(1, 101).expand(20, 101).requires_grad_()
    with pytest.raises(ValueError, match="rows do not overlap"):
        call(overlapping, p.labels, p.proximal, p.advantages, p.mask)
    assert_same_bits(logits.detach(), before)


@pytest.mark.parametrize(("label", "ignore_index"), [(-1, -100), (-100, -1), (-5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("wants_gradient", [True, False])
def test_only_the_callers_ignore_index_masks(
    label: int, ignore_index: int, dtype: torch.dtype, wants_gradient: bool
) -> None:
    p = make_problem(dtype=dtype)
    labels = torch.where(p.labels < 0, ignore_index, p.labels)
    labels[5], mask = label, torch.ones(20, dtype=torch.bool)
    logits = p.logits.requires_grad_(wants_gradient) * 1
    with pytest.raises(ValueError, match=rf"expected labels\[5\] in \[0, 101\).*= {ignore_index}, got {label}"):
        ops.ppo_loss_from_logits(logits, labels, p.proximal, p.advantages, mask, ignore_index=ignore_index)
    labels[5] = ignore_index
    out = ops.ppo_loss_from_logits(logits, labels, p.proximal, p.advantages, mask, ignore_index=ignore_index)
    assert int(out.stats.finalize().live_tokens) == int((labels != ignore_index).sum())


def test_compiles_into_one_graph() -> None:
    p, config = make_problem(), CONFIGS["everything"]

    def step(leaf: Tensor) -> Tensor:
        arguments = (p.labels, p.proximal, p.advantages, p.mask)
        return 2 * ops.ppo_loss_from_logits(leaf * 1, *arguments, **p.named, config=config).loss

    gradients = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaf = p.logits.clone().requires_grad_()
        function(leaf).backward()
        gradients.append(leaf.grad)
    assert_near(*gradients, absolute=1e-8, relative=1e-5)
