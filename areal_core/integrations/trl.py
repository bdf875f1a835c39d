"""TRL: log-probabilities, entropy, the fused LM head and the GRPO loss.

`apply()` replaces them in TRL 1.16, for trainers made before or after it. The LM head serves GRPO, RLOO, KTO and the
asynchronous GRPO trainer, the log-probabilities the experimental trainers that compute logits.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from areal_core import ops
from areal_core.integrations._adapters import cannot_multiply, cannot_score, score
from areal_core.integrations._patch import Original, Patches, Seam, apply_seams
from areal_core.integrations._trl_loss import grpo_loss

__all__ = ["SEAMS", "apply"]


# -- log-probabilities and entropy from logits ------------------------------------------------------------------------


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    original: Original,
) -> Tensor:
    """Log-probabilities in float32; on the CPU TRL's have the dtype of the logits."""
    if reason := _not_ours(logits, index, row_mask, original.strict):
        return original.fall_through(reason, logits, index, temperature, row_mask)
    return _score(logits, index, temperature, row_mask, original.strict)[0]


def entropy_from_logits(logits: Tensor, chunk_size: int = 128, *, original: Original) -> Tensor:
    """Entropy in float32; logits of -inf are impossible tokens, and make it NaN in strict mode."""
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    if reason := _not_ours(logits, labels, None, original.strict):
        return original.fall_through(reason, logits, chunk_size)
    return _score(logits, labels, 1.0, None, original.strict)[1]


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    original: Original,
) -> tuple[Tensor, Tensor]:
    """Both of the above from one read of the logits."""
    if reason := _not_ours(logits, index, row_mask, original.strict):
        return original.fall_through(reason, logits, index, entropy_requires_grad, temperature, row_mask)
    logprobs, entropy = _score(logits, index, temperature, row_mask, original.strict)
    return logprobs, entropy if entropy_requires_grad else entropy.detach()


def _not_ours(logits: Tensor, index: Tensor, row_mask: Tensor | None, strict: bool) -> str | None:
    if strict and logits.device.type == "cpu" and logits.dtype in (torch.bfloat16, torch.float16):
        return "strict: half precision on the CPU"  # where TRL rounds on the way
    return cannot_score(logits, index, row_mask)


def _score(
    logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None, strict: bool
) -> tuple[Tensor, Tensor]:
    out = score(logits, index, temperature=temperature, loss_mask=row_mask)
    if not strict:
        return out.logprobs, out.entropy
    # TRL multiplies p = 0 by ln p = -inf where a logit is -inf, and subtracts infinities where all are.
    live = torch.ones_like(index, dtype=torch.bool) if row_mask is None else row_mask != 0
    none_possible = out.lse.detach() == -torch.inf  # 0 where masked
    some_impossible = live & (logits.detach() == -torch.inf).any(-1)
    return (
        out.logprobs * torch.where(none_possible, torch.nan, 1.0),
        out.entropy * torch.where(some_impossible, torch.nan, 1.0),
    )


# -- the LM head of the trainers --------------------------------------------------------------------------------------


def lm_head(
    cls: type,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    *,
    original: Original,
) -> tuple[Tensor | None, ...]:
    """Log-probabilities, entropy and mean logits of hidden @ weight.T + bias, by `ops.linear_logprob`."""
    reason = _head_is_not_ours(hidden, weight, bias, final_logit_softcapping, logit_scale, outputs, original.strict)
    if reason is not None:
        options = (temperature, chunk_size, final_logit_softcapping, logit_scale, outputs)
        return original.fall_through(reason, cls, hidden, weight, bias, targets, *options)
    temperature = temperature / logit_scale
    out = ops.linear_logprob(hidden, weight, targets, bias=bias, temperature=temperature, live_tokens=len(hidden))
    mean_logits = _mean_logits(hidden, weight, bias) / temperature if "mean_logits" in outputs else None
    return out.logprobs, out.entropy if "entropy" in outputs else None, None, mean_logits, None


def _head_is_not_ours(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    outputs: tuple[str, ...],
    strict: bool,
) -> str | None:
    if extra := sorted({"log_sum_sq_probs", "is_top1"}.intersection(outputs)):
        return f"outputs {', '.join(extra)}"
    if softcap is not None:
        return "final_logit_softcapping"
    if not logit_scale > 0:
        return "logit_scale <= 0"
    if reason := cannot_multiply(hidden, weight, bias):
        return reason
    if strict and (hidden.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(hidden.device.type)):
        return "strict: logits rounded to half precision"
    if strict and bias is not None:
        return "strict: a bias may be -inf"
    return None


@torch.no_grad()
def _mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The mean over the vocabulary is linear: hidden times the mean row of the weight."""
    mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
    return mean if bias is None else mean + bias.mean(dtype=torch.float32)


def score_live_rows(device: torch.device, *, original: Original) -> bool:
    """Leave out the rows that are masked on the CPU too, as TRL does where Triton runs."""
    return device.type == "cpu" or bool(original(device))


# -- the table --------------------------------------------------------------------------------------------------------

_UTILS, _HEAD = "trl.trainer.utils", "trl.kernels.chunked_logprob"
SEAMS = (
    Seam(
        "selective_log_softmax",
        _UTILS,
        "selective_log_softmax",
        "logits, index, temperature=1.0, row_mask=None",
        selective_log_softmax,
    ),
    Seam("entropy_from_logits", _UTILS, "entropy_from_logits", "logits, chunk_size=128", entropy_from_logits),
    Seam(
        "selective_log_softmax_and_entropy",
        _UTILS,
        "selective_log_softmax_and_entropy",
        "logits, index, entropy_requires_grad=True, temperature=1.0, row_mask=None",
        selective_log_softmax_and_entropy,
    ),
    Seam(
        "lm_head",
        _HEAD,
        "ChunkedLogProbFunction.apply",
        "ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0, "
        "outputs=('entropy', 'log_sum_sq_probs', 'mean_logits', 'is_top1')",
        lm_head,
        signature_of="ChunkedLogProbFunction.forward",
    ),
    Seam(
        "live_rows",
        _UTILS,
        "_use_triton",
        "model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=('log_probs',)",
        score_live_rows,
        sources=("422d009f04b66659",),
        signature_of="add_fused_lm_head",  # which asks it only this
        everywhere=False,
    ),
    Seam(
        "grpo_loss",
        "trl.trainer.grpo_trainer",
        "GRPOTrainer._compute_loss",
        "self, model, inputs",
        grpo_loss,
        sources=("80295546bbdbf6f7",),
    ),
)


def apply(*, only: Collection[str] | None = None, strict: bool = False) -> Patches:
    """Replace TRL's functions by those of `areal_core.ops`; all or none.

    Args:
        only: of selective_log_softmax, entropy_from_logits, selective_log_softmax_and_entropy, lm_head, live_rows and
            grpo_loss; None: all.
        strict: TRL's own conventions where ours differ on purpose: NaN from logits of -inf. The GRPO loss, and what
            is in half precision, are then left to TRL.

    Returns:
        Patches, a context manager; `undo` restores TRL, `fallbacks` counts the calls that TRL's functions answered.

    Raises:
        ValueError: an unknown name in `only`.
        MissingPackageError: TRL is not installed.
        UnsupportedVersionError: a function of this TRL is not the one known here; nothing was replaced.
        PatchError: it is applied already.
    """
    return apply_seams("trl", "1.16", SEAMS, only, strict)
