"""Policy loss of packed sequences: decoupled PPO and its variants, with gradient and statistics in one pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_core.ops._dispatch import OnceDifferentiable, as_int64, call, register_fake
from areal_core.ops.loss_config import PPOLossConfig
from areal_core.ops.loss_stats import STAT_COUNT, PPOLossStats


class PPOLossOutput(NamedTuple):
    """The loss, a differentiable 0-d tensor, and the statistics of the call."""

    loss: Tensor
    stats: PPOLossStats


_DEFAULT_CONFIG = PPOLossConfig()


def ppo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    behavior_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    teacher_logprobs: Tensor | None = None,
    keep_mask: Tensor | None = None,
    versions: Tensor | None = None,
    current_version: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    config: PPOLossConfig = _DEFAULT_CONFIG,
) -> PPOLossOutput:
    """Policy loss over packed tokens, with its gradient and its statistics from a single pass.

    With u = exp(logprobs - proximal), w = exp(proximal - behavior) held constant and A the advantage, decoupled PPO is
    term = -w min(u A, clip(u, 1 - clip_low, 1 + clip_high) A) + kl_coef kl - entropy_coef entropy, and
    loss = sum of terms over live tokens / normalizer. Without behavior_logprobs w = 1: PPO against proximal_logprobs.
    `config` states the other objectives, levels and aggregations.

    Args:
        logprobs: float32 or float64 [T], nats, of the current policy; differentiable.
        proximal_logprobs: same dtype [T], of the policy before this update; no gradient, nor in any input below.
        advantages: same dtype [T].
        loss_mask: bool or number [T], nonzero = live.
        behavior_logprobs: same dtype [T], of the policy that produced the tokens.
        ref_logprobs: same dtype [T], of the reference policy: for kl_coef, and for statistics when that is 0.
        entropy: same dtype [T], nats, of the current policy; differentiable when entropy_coef is not 0.
        teacher_logprobs: same dtype [T], of a teacher: for distill_coef, and for statistics when that is 0.
        keep_mask: bool or number [T]; the policy term of a live token is left out where it is 0, but the token still
            counts in the normalizer, the KL and the entropy. What `m2po_mask` gives.
        versions: int64 [T], policy version that produced the token (< 0: unknown, counted as fresh); statistics only.
        current_version: number or one-element tensor, with versions.
        cu_seqlens: int32 or int64 [S+1], for what goes by sequence, and for the statistic live_sequences. Checked on
            the CPU only.
        normalizer: > 0; number or one-element tensor (not read back). None: the live tokens or sequences of this call,
            see PPOLossConfig.aggregation. Give that of the global batch, so that micro-batch losses add up to the loss
            of the batch. A micro-batch must hold whole sequences where the loss goes by sequence.
        config: the variant.

    Returns:
        PPOLossOutput(loss, stats); see PPOLossStats.

    Masked tokens are never looked at: NaN or inf there changes no bit of loss, gradient or statistics, and their
    gradient is 0. With no live token loss and gradient are exactly 0. Log-ratios are clamped to [-20, 20] before exp,
    with gradient 0 beyond: a behavior logprob of -inf under a finite proximal one gives weight e^20 before capping or
    masking. Two logprobs of -inf have log-ratio 0, without gradient. NaN at a live token makes the loss NaN, and the
    gradient of the token (with a ratio per sequence: of the sequence). At a clip edge the gradient is the unclipped
    one. The gradient is that of the loss as stated; with a ratio per sequence and advantages that differ within it,
    every token of the sequence gets the same share. Bitwise the same from run to run and for any number of threads;
    only once differentiable.

    Raises:
        ValueError: wrong shape or device, normalizer not > 0, or an option whose input is missing.
        TypeError: wrong dtype.

    Source: PPO, arXiv 1707.06347, eq. 7; decoupled objective, arXiv 2110.00641; dual clip, arXiv 1912.09729; the
    variants: see PPOLossConfig.
    """
    given = {
        "behavior_logprobs": behavior_logprobs,
        "ref_logprobs": ref_logprobs,
        "entropy": entropy,
        "teacher_logprobs": teacher_logprobs,
        "keep_mask": keep_mask,
        "cu_seqlens": cu_seqlens,
        "normalizer": normalizer,
    }
    check_inputs(given, config)
    # In a trace the op itself, which stays in the graph; elsewhere what takes a quarter of its time on small inputs.
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    function: Any = torch.ops.areal_core.ppo_loss.default if traced else _RecordedPPOLoss.apply
    loss, stats, *_ = call(
        function,
        logprobs.contiguous(),
        proximal_logprobs.detach().contiguous(),
        advantages.detach().contiguous(),
        loss_mask.to(torch.bool).contiguous(),
        *map(_constant, (behavior_logprobs, ref_logprobs)),
        None if entropy is None else entropy.contiguous(),
        _constant(teacher_logprobs),
        None if keep_mask is None else keep_mask.to(torch.bool).contiguous(),
        *version_arguments("ppo_loss", logprobs, versions, current_version),
        None if cu_seqlens is None else as_int64(cu_seqlens, "ppo_loss", "cu_seqlens"),
        normalizer_tensor(normalizer, logprobs, "ppo_loss"),
        *config._native(),
    )
    return PPOLossOutput(loss, PPOLossStats(stats.detach()))


def _constant(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().contiguous()


def check_inputs(given: dict[str, Any], config: PPOLossConfig) -> None:
    """Raise ValueError for an option of the config whose input was not given."""
    if not isinstance(config, PPOLossConfig):
        raise TypeError(f"ppo_loss: expected config a PPOLossConfig, got {config!r}")
    bounded = config.behavior_cap is not None or config.behavior_low is not None
    needs = (
        ("behavior_logprobs", "behavior_cap or behavior_low", bounded),
        ("behavior_logprobs", "behavior_level", config.behavior_level != "token"),
        ("ref_logprobs", "kl_coef", config.kl_coef != 0),
        ("entropy", "entropy_coef", config.entropy_coef != 0),
        ("teacher_logprobs", "distill_coef", config.distill_coef != 0),
        ("keep_mask", "m2po_threshold", config.m2po_threshold is not None),
        ("cu_seqlens", "a ratio, behavior weight or aggregation by sequence", config.needs_sequences),
        ("normalizer", "aggregation = 'constant'", config.aggregation == "constant"),
    )
    for name, option, wanted in needs:
        if wanted and given.get(name) is None:
            raise ValueError(f"ppo_loss: expected {name} with {option} set, got None")


def normalizer_tensor(normalizer: float | Tensor | None, like: Tensor, op: str) -> Tensor | None:
    """Give the normalizer as the native ops take it: float64 [1] on the device, not read back."""
    if normalizer is None:
        return None
    if isinstance(normalizer, Tensor):
        if normalizer.numel() != 1:
            raise ValueError(f"{op}: expected normalizer with 1 element, got {normalizer.numel()}")
        return normalizer.detach().to(device=like.device, dtype=torch.float64).reshape(1)
    if not normalizer > 0:
        raise ValueError(f"{op}: expected normalizer > 0, got {normalizer}")
    return torch.full((1,), float(normalizer), dtype=torch.float64, device=like.device)


def version_arguments(
    op: str, like: Tensor, versions: Tensor | None, current_version: int | Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Give both as the native ops take them: int64 [T] and [1]."""
    return None if versions is None else as_int64(versions, op, "versions"), _version_tensor(current_version, like)


def _version_tensor(version: int | Tensor | None, like: Tensor) -> Tensor | None:
    if version is None:
        return None
    if isinstance(version, Tensor):
        return version.detach().to(device=like.device, dtype=torch.int64).reshape(-1)
    return torch.full((1,), version, dtype=torch.int64, device=like.device)


def _fake(logprobs: Tensor, *args: Any) -> tuple[Tensor, ...]:
    entropy, entropy_coef = args[5], args[-3]
    grad_entropy = logprobs.new_empty(logprobs.shape if entropy is not None and entropy_coef != 0 else (0,))
    stats = logprobs.new_empty(STAT_COUNT, dtype=torch.float64)
    return logprobs.new_empty(()), stats, torch.empty_like(logprobs), grad_entropy, logprobs.new_empty(())


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.input_count = len(inputs)
    ctx.save_for_backward(inputs[0], inputs[6], *output[2:])


def _backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    logprobs, entropy, grad_logprobs, grad_entropy, scale = ctx.saved_tensors
    sources = [x for x in (grad_loss, logprobs, entropy) if x is not None]
    grads: list[Tensor | None] = [None] * ctx.input_count
    with torch.no_grad():
        factor = grad_loss * scale
        if ctx.needs_input_grad[0]:
            grads[0] = grad_logprobs * factor
        if ctx.needs_input_grad[6]:
            grads[6] = grad_entropy * factor if grad_entropy.numel() else torch.zeros_like(entropy)
    once: Any = OnceDifferentiable.apply
    return tuple(None if grad is None else once("ppo_loss", grad, *sources) for grad in grads)


class _RecordedPPOLoss(torch.autograd.Function):
    """The op with its formula; torch walks over a schema of 30 arguments to go from the one to the other."""

    op_name = "ppo_loss"

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """Inputs and outputs are those of the op."""
        output: tuple[Tensor, ...] = torch.ops.areal_core.ppo_loss.default(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Of the op."""
        return _backward(ctx, *grads)


register_fake("ppo_loss", _fake)
torch.library.register_autograd("areal_core::ppo_loss", _backward, setup_context=_setup_context)
