"""Our kernels inside NeMo-RL: log-probabilities over a tensor-parallel vocabulary, GAE, sequence packing.

NeMo-RL is installed from its repository; the package of that name on PyPI is a placeholder.

`strict=True` keeps NeMo-RL's own bins, and advantages and returns carried over masked tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from areal_core import ops
from areal_core.integrations._adapters import (
    any_true,
    cannot_score,
    carried_back,
    is_not_binary,
    no_kernel_for,
    score,
)
from areal_core.integrations._patch import Original, Patches, Seam, apply_seams

__all__ = ["SEAMS", "apply"]


# -- log-probabilities -------------------------------------------------------------------------------------------------


def distributed_logprob(
    cls: Any,
    logits: Tensor,
    target: Tensor,
    start: int,
    end: int,
    group: Any,
    inference_only: bool = False,
    *,
    original: Original,
) -> Tensor:
    """Log-probabilities of the targets, from this rank's columns of the logits."""
    if reason := _cannot_score(logits, target, start, end, group):
        return original.fall_through(reason, cls, logits, target, start, end, group, inference_only)
    return _score(logits, target, group, inference_only)


def chunked_distributed_logprob(
    cls: Any,
    logits: Tensor,
    target: Tensor,
    start: int,
    end: int,
    chunk_size: int,
    tp_group: Any,
    inference_only: bool = False,
    *,
    original: Original,
) -> Tensor:
    """The same; chunks are needless, because nothing of the size of the logits is made but their gradient."""
    if reason := _cannot_score(logits, target, start, end, tp_group):
        arguments = (logits, target, start, end, chunk_size, tp_group, inference_only)
        return original.fall_through(reason, cls, *arguments)
    return _score(logits, target, tp_group, inference_only)


def _cannot_score(logits: Tensor, target: Tensor, start: int, end: int, group: Any) -> str | None:
    rank, columns = torch.distributed.get_rank(group), logits.shape[-1]
    if (start, end) != (rank * columns, (rank + 1) * columns):
        return "shards of several sizes"
    return cannot_score(logits, target)


def _score(logits: Tensor, target: Tensor, group: Any, inference_only: bool) -> Tensor:
    ranks, columns = torch.distributed.get_world_size(group), logits.shape[-1]
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        if ranks == 1:
            return score(logits, target).logprobs.float()
        rows, sizes = logits.reshape(-1, columns), [columns] * ranks
        everyone = torch.distributed.group.WORLD if group is None else group
        out = ops.logprob_from_logits(rows, target.reshape(-1), group=everyone, vocab_sizes=sizes)
        return out.logprobs.view(target.shape).float()


# -- advantages --------------------------------------------------------------------------------------------------------


def compute_gae(
    self: Any,
    token_level_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gae_lambda: Any = None,
    *,
    original: Original,
) -> tuple[Tensor, Tensor]:
    """GAE that crosses masked tokens, whose advantages and returns are 0."""
    lam = self.gae_lambda if gae_lambda is None else gae_lambda
    reason = no_kernel_for(values.device, torch.float32)
    if isinstance(lam, Tensor):
        reason = "a lambda for each sample"
    elif not (0 <= lam <= 1 and 0 <= self.gae_gamma <= 1):
        reason = "gamma or lambda out of [0, 1]"
    elif any(x.dtype not in (torch.float32, torch.float64) for x in (values, token_level_rewards)):
        reason = "rewards or values in half precision"
    elif torch.is_grad_enabled() and (values.requires_grad or token_level_rewards.requires_grad):
        reason = "gradients to rewards or values"
    elif any_true(is_not_binary(mask)):
        reason = "a mask that weights tokens"
    if reason is not None:
        return original.fall_through(reason, self, token_level_rewards, values, mask, gae_lambda)
    live = mask != 0
    gamma = float(self.gae_gamma)
    advantages, returns = ops.gae(
        token_level_rewards.to(values.dtype), values, gamma=gamma, lam=float(lam), loss_mask=live
    )
    if original.strict:
        advantages = carried_back(advantages, live)
        returns = advantages + values
    return advantages, returns


# -- packing -----------------------------------------------------------------------------------------------------------


def first_fit_decreasing(self: Any, sequence_lengths: list[int], *, original: Original) -> list[list[int]]:
    """First fit decreasing."""
    return _pack(self, sequence_lengths, "ffd", original)


def modified_first_fit_decreasing(self: Any, sequence_lengths: list[int], *, original: Original) -> list[list[int]]:
    """Modified first fit decreasing."""
    return _pack(self, sequence_lengths, "mffd", original)


def _pack(packer: Any, lengths: list[int], method: Any, original: Original) -> list[list[int]]:
    if original.strict:
        return original.fall_through("strict", packer, lengths)
    try:
        numbers = [int(length) for length in lengths]
        if numbers and all(a == b for a, b in zip(numbers, lengths, strict=True)):
            return ops.allocate_microbatches(numbers, int(packer.bin_capacity), method=method)
    except (ValueError, TypeError):
        pass
    return original.fall_through("what NeMo-RL refuses, or no lengths", packer, lengths)


# -- the table ---------------------------------------------------------------------------------------------------------

_MODEL = "nemo_rl.distributed.model_utils"
_ESTIMATORS = "nemo_rl.algorithms.advantage_estimator"
_PACKING = "nemo_rl.data.packing.algorithms"
_SHARD = "ctx, vocab_parallel_logits, target, vocab_start_index, vocab_end_index"

SEAMS = (
    Seam(
        "DistributedLogprob",
        _MODEL,
        "DistributedLogprob.apply",
        f"{_SHARD}, group, inference_only=False",
        distributed_logprob,
        signature_of="DistributedLogprob.forward",
    ),
    Seam(
        "ChunkedDistributedLogprob",
        _MODEL,
        "ChunkedDistributedLogprob.apply",
        f"{_SHARD}, chunk_size, tp_group, inference_only=False",
        chunked_distributed_logprob,
        signature_of="ChunkedDistributedLogprob.forward",
    ),
    Seam(
        "GeneralizedAdvantageEstimator",
        _ESTIMATORS,
        "GeneralizedAdvantageEstimator._compute_gae",
        "self, token_level_rewards, values, mask, gae_lambda=None",
        compute_gae,
        sources=("677cd9eb05bcc0b2",),
    ),
    Seam(
        "FirstFitDecreasingPacker",
        _PACKING,
        "FirstFitDecreasingPacker._pack_implementation",
        "self, sequence_lengths",
        first_fit_decreasing,
    ),
    Seam(
        "ModifiedFirstFitDecreasingPacker",
        _PACKING,
        "ModifiedFirstFitDecreasingPacker._pack_implementation",
        "self, sequence_lengths",
        modified_first_fit_decreasing,
    ),
)


def apply(*, only: Collection[str] | None = None, strict: bool = False) -> Patches:
    """Replace NeMo-RL's functions, or those that `only` names; see `areal_core.integrations`.

    Raises:
        ValueError, MissingPackageError, UnsupportedVersionError, PatchError: as `_patch.apply_seams`.
    """
    return apply_seams("nemo_rl", "0.6.0", SEAMS, only, strict, source="https://github.com/NVIDIA-NeMo/RL")
