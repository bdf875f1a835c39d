"""Our kernels inside slime: log-probabilities and entropy, scans, micro-batches; and a policy loss for its hooks.

slime is installed from its repository. `apply()` in every training process, for example through
`--custom-megatron-init-path areal_core.integrations.slime.megatron_init`.

`strict=True` keeps slime's own bins, and its NaN entropy beside a logit of -inf.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from areal_core import ops
from areal_core.integrations._adapters import cannot_score, no_kernel_for, score
from areal_core.integrations._patch import Original, Patches, Seam, apply_seams

__all__ = ["SEAMS", "apply", "megatron_init"]


# -- log-probabilities -------------------------------------------------------------------------------------------------


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
    *,
    original: Original,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [T, 1] and entropy [T] of logits that ranks may share; chunks are needless."""
    group, ranks = _ranks(tp_group)
    if log_prob_keep_mask is not None:
        reason: str | None = "a mask over the vocabulary"
    elif logits.shape[0] == 0:
        reason = "no tokens"
    elif ranks > 1 and not isinstance(group, torch.distributed.ProcessGroup):
        reason = "a process group of another kind"
    else:
        reason = cannot_score(logits, tokens)
    if reason is None and original.strict and bool(logits.detach().isneginf().any()):
        reason = "strict: logits of -inf"
    if reason is not None:
        options = (with_entropy, chunk_size, log_prob_keep_mask, with_entropy_grad)
        return original.fall_through(reason, logits, tokens, tp_group, *options)
    if ranks == 1:
        out = score(logits, tokens)
    else:
        sizes = [logits.shape[1]] * ranks
        out = ops.logprob_from_logits(logits, tokens, group=group, vocab_sizes=sizes)
    entropy = out.entropy.float() if with_entropy else None
    if entropy is not None and not with_entropy_grad:
        entropy = entropy.detach()
    return out.logprobs.float().unsqueeze(-1), entropy


def _ranks(group: Any) -> tuple[Any, int]:
    """The group that shares the vocabulary, and its size; None is that of all ranks, as in slime."""
    if group is not None and hasattr(group, "size"):
        return group, group.size()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return group or torch.distributed.group.WORLD, torch.distributed.get_world_size(group)
    return None, 1


# -- scans over padded responses, in which every token counts ----------------------------------------------------------


def chunked_discounted_returns(
    rewards: Tensor, discount: float, chunk_size: int = 128, *, original: Original
) -> Tensor:
    """Sum of the discounted rewards from each token on."""
    if reason := _cannot_scan((rewards,), discount):
        return original.fall_through(reason, rewards, discount, chunk_size)
    return ops.discounted_returns(rewards, gamma=float(discount))


def vanilla_gae(
    rewards: Tensor, values: Tensor, gamma: float, lambd: float, *, original: Original
) -> tuple[Tensor, Tensor]:
    """GAE of rows that end at the last column."""
    if reason := _cannot_scan((rewards, values), gamma, lambd):
        return original.fall_through(reason, rewards, values, gamma, lambd)
    advantages, returns = ops.gae(rewards, values, gamma=float(gamma), lam=float(lambd))
    return advantages, returns


def chunked_gae(
    rewards: Tensor, values: Tensor, gamma: float, lambd: float, chunk_size: int = 128, *, original: Original
) -> tuple[Tensor, Tensor]:
    """The same."""
    if reason := _cannot_scan((rewards, values), gamma, lambd):
        return original.fall_through(reason, rewards, values, gamma, lambd, chunk_size)
    advantages, returns = ops.gae(rewards, values, gamma=float(gamma), lam=float(lambd))
    return advantages, returns


def _cannot_scan(tensors: tuple[Tensor, ...], *factors: float) -> str | None:
    first = tensors[0]
    if not all(0 <= factor <= 1 for factor in factors):
        return "a discount out of [0, 1]"
    if any(x.dim() != 2 or x.shape != first.shape or x.dtype != first.dtype for x in tensors):
        return "tensors that are not [B, T] of one dtype"
    if first.dtype not in (torch.float32, torch.float64):
        return f"rewards of dtype {first.dtype}"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "gradients to rewards or values"
    return no_kernel_for(first.device, torch.float32)


# -- micro-batches -----------------------------------------------------------------------------------------------------


def first_fit_pack(total_lengths: Sequence[int], max_tokens_per_bin: int, *, original: Original) -> list[list[int]]:
    """First fit decreasing: seldom more bins than first fit, usually fewer. A sample beyond the cap is alone."""
    if original.strict:
        return original.fall_through("strict", total_lengths, max_tokens_per_bin)
    lengths = _whole(total_lengths)
    if lengths is None or max_tokens_per_bin < 1:
        return original.fall_through("lengths that are no whole numbers", total_lengths, max_tokens_per_bin)
    return ops.allocate_microbatches(lengths, int(max_tokens_per_bin), oversized="alone") if lengths else []


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool, *, original: Original
) -> list[list[int]]:
    """k partitions with level sums, none of them empty."""
    lengths = _whole(seqlen_list)
    reason = None
    if original.strict:
        reason = "strict"
    elif lengths is None:
        reason = "lengths that are no whole numbers"
    elif not 0 < k_partitions <= len(lengths) or (equal_size and len(lengths) % k_partitions):
        reason = "fewer samples than partitions, or partitions that can't be equal"
    if reason is not None or lengths is None:
        return original.fall_through(str(reason), seqlen_list, k_partitions, equal_size)
    return ops.partition_balanced(lengths, k_partitions, equal_size=equal_size)


def _whole(values: Sequence[Any]) -> list[int] | None:
    """The values as whole numbers >= 0 that the native allocation takes; None where they are not."""
    try:
        numbers = [int(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        return None
    fits = all(a == b and 0 <= a < 2**53 for a, b in zip(numbers, values, strict=True))
    return numbers if fits and sum(numbers) < 2**62 else None


# -- the table ---------------------------------------------------------------------------------------------------------

_UTILS, _BALANCING = "slime.utils.ppo_utils", "slime.utils.seqlen_balancing"
_LOGPROB = (
    "logits, tokens, tp_group, with_entropy=False, chunk_size=-1, log_prob_keep_mask=None, with_entropy_grad=True"
)

SEAMS = (
    Seam(
        "calculate_log_probs_and_entropy",
        _UTILS,
        "calculate_log_probs_and_entropy",
        _LOGPROB,
        calculate_log_probs_and_entropy,
    ),
    Seam(
        "chunked_discounted_returns",
        _UTILS,
        "chunked_discounted_returns",
        "rewards, discount, chunk_size=128",
        chunked_discounted_returns,
    ),
    Seam("chunked_gae", _UTILS, "chunked_gae", "rewards, values, gamma, lambd, chunk_size=128", chunked_gae),
    Seam("vanilla_gae", _UTILS, "vanilla_gae", "rewards, values, gamma, lambd", vanilla_gae),
    Seam("first_fit_pack", _BALANCING, "first_fit_pack", "total_lengths, max_tokens_per_bin", first_fit_pack),
    Seam(
        "get_seqlen_balanced_partitions",
        _BALANCING,
        "get_seqlen_balanced_partitions",
        "seqlen_list, k_partitions, equal_size",
        get_seqlen_balanced_partitions,
    ),
)


def apply(*, only: Collection[str] | None = None, strict: bool = False) -> Patches:
    """Replace slime's functions, or those that `only` names; see `areal_core.integrations`.

    Raises:
        ValueError, MissingPackageError, UnsupportedVersionError, PatchError: as `_patch.apply_seams`.
    """
    return apply_seams("slime", "0.3.1", SEAMS, only, strict, source="https://github.com/THUDM/slime")


def megatron_init(args: Any) -> None:
    """Apply everything: a function for slime's --custom-megatron-init-path."""
    apply()
