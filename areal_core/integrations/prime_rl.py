"""Our kernels inside prime-rl's trainer: log-probabilities, entropy, and the losses of its components.

prime-rl is installed from its repository. `strict=True` sends what it rounds or lets overflow to its own functions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from areal_core import ops
from areal_core.integrations._adapters import cannot_score, computed_dtype, no_kernel_for, score
from areal_core.integrations._patch import Original, Patches, Seam, apply_seams

__all__ = ["SEAMS", "apply"]

_LOSS = "prime_rl.trainer.rl.loss"
_CLAMP = 20.0  # of log-ratios, in ops.ppo_loss
_REF_KL_TRUST, _REF_KL_TAU = 0.2, 1e-3  # constants of ref_kl_loss_fn


# -- log-probabilities and entropy -------------------------------------------------------------------------------------


def selective_log_softmax(logits: Tensor, index: Tensor, *, original: Original) -> Tensor:
    """Log-probabilities in float32; prime-rl's have the dtype of the logits."""
    reason = cannot_score(logits, index)
    if original.strict and logits.dtype != torch.float32:
        reason = "strict: logits that are not float32"
    if reason is not None:
        return original.fall_through(reason, logits, index)
    return score(logits, index).logprobs


def compute_entropy(shifted_logits: Tensor, *, original: Original) -> Tensor:
    """Entropy without gradient."""
    labels = torch.zeros(shifted_logits.shape[:-1], dtype=torch.int64, device=shifted_logits.device)
    reason = cannot_score(shifted_logits, labels)
    with torch.no_grad():
        if original.strict and (shifted_logits.dtype != torch.float32 or bool(shifted_logits.isneginf().any())):
            reason = "strict: logits of -inf, or not float32"
        if reason is not None:
            return original.fall_through(reason, shifted_logits)
        return score(shifted_logits, labels).entropy


# -- losses of one sample ----------------------------------------------------------------------------------------------


def default_loss_fn(inputs: Any, loss_config: Any, *, original: Original) -> Any:
    """Policy gradient within a trust region by the sign of the advantage, and a squared log-ratio."""
    if reason := _not_covered(inputs, original.strict):
        return original.fall_through(reason, inputs, loss_config)
    moved = _moved(inputs)
    up, down = inputs.advantages > 0, inputs.advantages < 0
    high, low = moved > loss_config.dppo_mask_high, moved < -loss_config.dppo_mask_low
    dropped = torch.where(up, high, low)
    live, mean = inputs.loss_mask, _module()._safe_mean
    metrics = _trust_metrics(inputs, dropped) | {
        "is_masked_low": mean(down & low, live),
        "is_masked_high": mean(up & high, live),
        "masked_advantage_positive": mean(up, live & dropped),
        "masked_advantage_negative": mean(down, live & dropped),
    }
    return _output(inputs, loss_config.adv_tau * inputs.advantages, dropped, loss_config.kl_tau, metrics)


def ipo_loss_fn(inputs: Any, loss_config: Any, *, original: Original) -> Any:
    """The same with a trust region on both sides."""
    if reason := _not_covered(inputs, original.strict):
        return original.fall_through(reason, inputs, loss_config)
    dropped = _moved(inputs).abs() > loss_config.ipo_threshold
    metrics = _trust_metrics(inputs, dropped)
    return _output(inputs, loss_config.adv_tau * inputs.advantages, dropped, loss_config.kl_tau, metrics)


def ref_kl_loss_fn(inputs: Any, *, original: Original) -> Any:
    """Distillation: the reverse KL to the reference is the advantage."""
    if inputs.ref_logprobs is None or inputs.ref_logprobs.requires_grad:
        return original.fall_through("no constant ref_logprobs", inputs)
    if reason := _not_covered(inputs, original.strict):
        return original.fall_through(reason, inputs)
    advantages = inputs.ref_logprobs - inputs.trainer_logprobs.detach()
    dropped = _moved(inputs) < -_REF_KL_TRUST
    metrics = {f"ref_kl/{name}": value for name, value in _trust_metrics(inputs, dropped).items()}
    metrics["ref_kl"] = _module()._safe_mean(advantages, inputs.loss_mask)
    return _output(inputs, advantages, dropped, _REF_KL_TAU, metrics)


def _module() -> Any:
    return importlib.import_module(_LOSS)


def _not_covered(inputs: Any, strict: bool) -> str | None:
    tensors = (inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages)
    if inputs.loss_weights is not None:
        return "weights of tokens"
    if any(x.dtype not in (torch.float32, torch.float64) for x in tensors):
        return "half-precision logprobs or advantages"
    if tensors[1].requires_grad or tensors[2].requires_grad:
        return "gradients to what the loss holds constant"
    if strict and not bool(((tensors[0].detach() - tensors[1]).abs() <= _CLAMP).all()):
        return "strict: log-ratios beyond 20"
    return no_kernel_for(tensors[0].device, torch.float32)


def _moved(inputs: Any) -> Tensor:
    """By how much probability the trainer is above the sampler."""
    return inputs.trainer_logprobs.detach().exp() - inputs.inference_logprobs.exp()


def _trust_metrics(inputs: Any, dropped: Tensor) -> dict[str, Tensor]:
    log_ratio = (inputs.trainer_logprobs.detach() - inputs.inference_logprobs).clamp_(-_CLAMP, _CLAMP)
    mismatch = torch.expm1(log_ratio) - log_ratio
    live, mean = inputs.loss_mask, _module()._safe_mean
    return {
        "masked_mismatch_kl": mean(mismatch, live & dropped),
        "unmasked_mismatch_kl": mean(mismatch, live & ~dropped),
        "is_masked": mean(dropped, live),
    }


def _output(inputs: Any, advantages: Tensor, dropped: Tensor, kl_tau: float, metrics: dict[str, Tensor]) -> Any:
    """The sum over live tokens of -u A, where it is kept, and kl_tau log(u)^2, which is twice k2."""
    dtype = computed_dtype(inputs.trainer_logprobs, inputs.inference_logprobs, advantages)
    sampler = inputs.inference_logprobs.to(dtype)
    config = ops.PPOLossConfig(objective="reinforce", kl_coef=2 * kl_tau, kl_estimator="k2", aggregation="constant")
    out = ops.ppo_loss(
        inputs.trainer_logprobs.to(dtype),
        sampler,
        advantages.to(dtype),
        inputs.loss_mask,
        ref_logprobs=sampler,
        keep_mask=~dropped,
        normalizer=1.0,
        config=config,
    )
    return _module().LossOutputs(loss=out.loss, metrics=metrics)


# -- the table ---------------------------------------------------------------------------------------------------------


def _loss(name: str, parameters: str, adapter: Callable[..., Any], source: str) -> Seam:
    return Seam(name, _LOSS, name, parameters, adapter, sources=(source,))


SEAMS = (
    Seam("selective_log_softmax", _LOSS, "selective_log_softmax", "logits, index", selective_log_softmax),
    Seam("compute_entropy", _LOSS, "compute_entropy", "shifted_logits", compute_entropy),
    Seam(
        "default_loss_fn",
        _LOSS,
        "default_loss_fn",
        "inputs, loss_config",
        default_loss_fn,
        sources=("109a419e21422e9e",),
    ),
    _loss("ipo_loss_fn", "inputs, loss_config", ipo_loss_fn, "9b136b87d668c48b"),
    _loss("ref_kl_loss_fn", "inputs", ref_kl_loss_fn, "33c2462934fa889c"),
)


def apply(*, only: Collection[str] | None = None, strict: bool = False) -> Patches:
    """Replace prime-rl's functions, or those that `only` names; see `areal_core.integrations`.

    Raises:
        ValueError, MissingPackageError, UnsupportedVersionError, PatchError: as `_patch.apply_seams`.
    """
    return apply_seams("prime_rl", "0.8", SEAMS, only, strict, source="https://github.com/PrimeIntellect-ai/prime-rl")
