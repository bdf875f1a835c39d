"""Our kernels inside AReaL: `with areal.apply(): ...`, or `areal.apply()` at the start of every training process.

`strict=True` keeps AReaL's conventions where ours differ on purpose: NaN entropy beside a logit of -inf, unbounded
ratios, advantages carried over masked tokens, NaN for a value loss without live tokens, M2PO's last token,
Karmarkar-Karp and first fit in AReaL's own order.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from areal_core import ops
from areal_core.integrations import _areal_losses as losses
from areal_core.integrations._adapters import cannot_score, carried_back, no_kernel_for, score
from areal_core.integrations._patch import Original, Patches, Seam, apply_seams

_ACTOR = "areal.trainer.ppo.actor"
_REFUSED = "what AReaL refuses, or values that are no lengths"


# --- log-probabilities ------------------------------------------------------------------------------------------------


def gather_logprobs(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    tp_group: Any = None,
    chunk_size: int = 1024,
    *,
    original: Original,
) -> Tensor:
    """Log-probability of the labels; chunks are needless, because nothing of the size of the logits is made."""
    reason = _cannot_score(logits, labels, temperature, original.strict)
    if reason is not None:
        return original.fall_through(reason, logits, labels, temperature, tp_group, chunk_size)
    return _score(logits, labels, temperature, tp_group)[0]


def gather_logprobs_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    tp_group: Any = None,
    chunk_size: int = 1024,
    *,
    original: Original,
) -> tuple[Tensor, Tensor]:
    """Log-probability of the labels and entropy of their rows, in one read of the logits."""
    reason = _cannot_score(logits, labels, temperature, original.strict)
    if reason is not None:
        return original.fall_through(reason, logits, labels, temperature, tp_group, chunk_size)
    return _score(logits, labels, temperature, tp_group)


def _cannot_score(logits: Tensor, labels: Tensor, temperature: Any, strict: bool) -> str | None:
    if isinstance(temperature, Tensor) or not 0 < temperature < math.inf:
        return "a temperature that is no positive number"
    if strict and labels.numel() == 0:
        return "strict: no tokens"
    if reason := cannot_score(logits, labels):
        return reason
    if strict and bool(logits.detach().amin(-1).isneginf().any()):
        return "strict: logits of -inf"
    return None


def _score(logits: Tensor, labels: Tensor, temperature: float, tp_group: Any) -> tuple[Tensor, Tensor]:
    """In float32, as AReaL's are for logits of any dtype."""
    ranks = 1 if tp_group is None else torch.distributed.get_world_size(tp_group)
    if ranks == 1:
        out = score(logits, labels, temperature=temperature)
    else:
        columns = logits.shape[-1]
        rows = logits.reshape(-1, columns)
        sizes = [columns] * ranks
        out = ops.logprob_from_logits(
            rows, labels.reshape(-1), temperature=temperature, group=tp_group, vocab_sizes=sizes
        )
    return out.logprobs.view(labels.shape).float(), out.entropy.view(labels.shape).float()


# --- advantages -------------------------------------------------------------------------------------------------------


def compute_advantages(self: Any, data: dict[str, Any], *, original: Original) -> dict[str, Any]:
    """Rewards with their KL penalty, GAE over the live tokens, normalisation. Column t belongs to token t + 1."""
    reason = _cannot_scan(self, data)
    if reason is not None:
        return original.fall_through(reason, self, data)
    rewards, full = _shape_rewards(self, data, original.strict)
    live = data["loss_mask"].bool()
    live[:, -1] = False  # the last column predicts nothing
    values = data["values"].float() if "values" in data else None
    scan = ops.gae(
        rewards.float(),
        torch.zeros_like(rewards, dtype=torch.float32) if values is None else values,
        gamma=float(self.discount),
        lam=float(self.gae_lambda),
        loss_mask=live,
        # A response that was cut off goes on with the value of its last column.
        terminal_rewards=None if values is None else self.discount * torch.where(full, values[:, -1], 0.0),
    )
    advantages, returns = scan
    if original.strict:
        advantages = carried_back(advantages, live)
        returns = advantages + (0.0 if values is None else values)
    elif values is not None:
        returns[:, -1] = values[:, -1]
    data["returns"] = returns
    data["advantages"] = _normalize(self.adv_norm, advantages, data["loss_mask"])
    return data


def _cannot_scan(actor: Any, data: dict[str, Any]) -> str | None:
    if not (0 <= actor.discount <= 1 and 0 <= actor.gae_lambda <= 1):
        return "discount or gae_lambda out of [0, 1]"
    mask = data["loss_mask"]
    if mask.dtype.is_floating_point and not bool(((mask == 0) | (mask == 1)).all()):
        return "a loss mask that weights tokens"
    return "no tokens" if mask.numel() == 0 else no_kernel_for(mask.device, torch.float32)


def _shape_rewards(actor: Any, data: dict[str, Any], strict: bool) -> tuple[Tensor, Tensor]:
    """Do what comes before the scan, in AReaL's order and with its changes of `data`; rewards [S, L], cut off [S]."""
    config = actor.config
    if config.overlong_reward_penalty:
        penalize = importlib.import_module(_ACTOR).reward_overlong_penalty
        limits = (config.overlong_tokens, config.overlong_penalty_factor, config.max_new_tokens)
        data = penalize(data, *limits)
    score = (data["rewards"] + actor.reward_bias) * actor.reward_scaling
    score = score.clip(min=-actor.reward_clip, max=actor.reward_clip)
    if actor.reward_norm:
        score = actor.reward_norm(score)
    loss_mask = data["loss_mask"].float().roll(-1, -1)
    if not config.use_decoupled_loss and config.recompute_logprob:
        if data["prox_logp"] is None:
            raise ValueError("prox_logp is None but recompute_logprob=True: compute_logp() was skipped")
        old = data["prox_logp"]
    else:
        old = data["logprobs"].roll(-1, -1)
        if not config.use_decoupled_loss:
            data["prox_logp"] = old
    reference = data.get("ref_logp")
    if reference is None:
        reference = torch.zeros_like(old)
    for logprobs in (old, reference):  # in place: other keys hold the same tensors
        logprobs *= loss_mask
        if not strict:
            logprobs.masked_fill_(loss_mask == 0, 0.0)  # NaN under the mask
    lengths = data["attention_mask"].sum(-1).long()
    full = lengths == data["attention_mask"].shape[1]
    rewards = -actor.kl_ctl * actor.kl_estimator(old, reference)
    data["kl_rewards"] = rewards.clone()
    rows = torch.arange(len(lengths), device=lengths.device)
    rewards[rows, lengths - 1] = 0
    rewards[rows, (lengths - 2).clip(min=0)] += torch.where(full, 0, score) if actor.mask_no_eos_with_zero else score
    data |= {"tot_rewards": rewards, "loss_mask": loss_mask, "logprobs": old}
    return rewards, full


def _normalize(norm: Any, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """AReaL's Normalization: over the batch of all ranks by ops.whiten, else by itself."""
    if norm is None:
        return advantages
    if (norm.mean_level, norm.std_level, norm.mean_leave1out) != ("batch", "batch", False):
        return norm(advantages, loss_mask)
    distributed = torch.distributed.is_initialized()
    return ops.whiten(
        advantages,
        loss_mask=loss_mask.bool(),
        ddof=int(norm.std_unbiased),
        eps=norm.eps,
        eps_in_root=False,
        group=torch.distributed.group.WORLD if distributed else None,
    )


# --- micro-batches ----------------------------------------------------------------------------------------------------


def ffd_allocate(
    values: Sequence[int], capacity: int, min_groups: int, n_groups_divisor: int = 1, *, original: Original
) -> list[list[int]]:
    """As few groups as first fit decreasing needs, with levelled loads where the capacity allows."""
    if original.strict:
        return original.fall_through("strict", values, capacity, min_groups, n_groups_divisor)
    try:
        return _fewest_groups(_integers(values), int(capacity), min_groups or 1, n_groups_divisor)
    except (ValueError, TypeError):
        return original.fall_through(_REFUSED, values, capacity, min_groups, n_groups_divisor)


def kk_allocate(
    values: Sequence[int],
    capacity: int,
    min_groups: int,
    n_groups_divisor: int = 1,
    equal_size: bool = False,
    *,
    original: Original,
) -> list[list[int]]:
    """As many groups as AReaL makes, or as first fit decreasing needs where these would not do."""
    arguments = (values, capacity, min_groups, n_groups_divisor, equal_size)
    if original.strict:
        return original.fall_through("strict", *arguments)
    try:
        lengths = _integers(values)
        least = max(min_groups or 1, n_groups_divisor)
        k = -(-max(least, -(-sum(lengths) // int(capacity))) // n_groups_divisor) * n_groups_divisor
        k = min(k, len(lengths))
        if len(lengths) < least or max(lengths) > capacity or (equal_size and len(lengths) % k):
            return original.fall_through(_REFUSED, *arguments)
        levelled = _levelled(lengths, k, int(capacity), equal_size)
        return levelled or _fewest_groups(lengths, int(capacity), min_groups or 1, n_groups_divisor)
    except (ValueError, TypeError):
        return original.fall_through(_REFUSED, *arguments)


def balanced_greedy_partition(nums: Sequence[int], K: int, *, original: Original) -> list[list[int]]:  # noqa: N803
    """K groups of equally many values, level in their sums."""
    if original.strict:
        return original.fall_through("strict", nums, K)
    try:
        if len(nums) % K == 0:
            return ops.partition_balanced(_integers(nums), K, equal_size=True)
    except (ValueError, TypeError, ZeroDivisionError):
        pass
    return original.fall_through(_REFUSED, nums, K)


def _fewest_groups(lengths: list[int], capacity: int, least: int, divisor: int) -> list[list[int]]:
    groups = ops.allocate_microbatches(lengths, capacity, min_bins=max(least, 1), multiple_of=divisor)
    return _levelled(lengths, len(groups), capacity, True) or groups


def _levelled(lengths: list[int], k: int, capacity: int, equal_size: bool) -> list[list[int]]:
    """k groups with level sums; none where that takes more than the capacity."""
    try:
        return ops.partition_balanced(lengths, k, equal_size=equal_size, max_tokens=capacity)
    except ValueError:
        return []


def _integers(values: Sequence[int]) -> list[int]:
    integers = [int(value) for value in values]
    if any(a != b for a, b in zip(integers, values, strict=True)):
        raise ValueError("values that are no integers")
    return integers


def pack_tensor_dict(data: dict[str, Any], *, original: Original) -> dict[str, Any]:
    """All padded tensors of a batch in one pass each, instead of one copy a sequence."""
    mask = data.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.numel() == 0:
        return original.fall_through("no attention mask [B, S] with tokens", data)
    padded = {
        key: value
        for key, value in data.items()
        if key != "attention_mask" and isinstance(value, Tensor) and value.shape[:2] == mask.shape
    }
    lengths = mask.sum(dim=1, dtype=torch.int32)
    host = lengths.tolist()
    if any(type(x) is not Tensor or x.device != mask.device for x in padded.values()):
        return original.fall_through("tensors of several devices or kinds", data)
    if not 0 <= min(host) <= max(host) <= mask.shape[1]:
        return original.fall_through("a mask of other numbers than 0 and 1", data)
    packed = ops.pack(padded, lengths=host).data
    result: dict[str, Any] = {}
    for key, value in data.items():
        if key == "attention_mask":
            result["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
            result["max_seqlen"] = max(host)
        else:
            result[key] = packed.get(key, value)
    return result


# --- the table --------------------------------------------------------------------------------------------------------

_SCORED = "logits, labels, temperature=1.0, tp_group=None, chunk_size=1024"
_POLICY = (
    "logprobs, proximal_logprobs, old_logprobs, advantages, eps_clip, loss_mask, eps_clip_higher=None, c_clip=None, "
    "rejection_sampling=None, importance_sampling_level='token', cu_seqlens=None"
)
_SAPO = (
    "logprobs, old_logprobs, advantages, tau_pos, tau_neg, loss_mask, importance_sampling_level='token', "
    "cu_seqlens=None"
)
_VALUE = "value, old_value, target_value, value_eps_clip, loss_mask=None, loss_fn_type='mse'"
_M2PO = "old_logp, prox_logp, loss_mask, m2_threshold"
_PROXIMAL = "old_logp, logprobs, versions, current_version, method=None"
_FFD = "values, capacity, min_groups, n_groups_divisor=1"
_KK = _FFD + ", equal_size=False"
_VOCAB, _FUNCTIONAL = "areal.utils.functional.vocab_parallel", "areal.utils.functional.functional"
_SEQPACK = "areal.utils.seqpack"


def _loss(name: str, parameters: str, adapter: Callable[..., Any], source: str) -> Seam:
    return Seam(name, _FUNCTIONAL, name, parameters, adapter, sources=(source,))


def _actor(attribute: str, parameters: str, adapter: Callable[..., Any], source: str) -> Seam:
    name = attribute.rpartition(".")[2].lstrip("_")
    return Seam(name, _ACTOR, attribute, parameters, adapter, sources=(source,))


SEAMS = (
    Seam("gather_logprobs", _VOCAB, "gather_logprobs", _SCORED, gather_logprobs),
    Seam("gather_logprobs_entropy", _VOCAB, "gather_logprobs_entropy", _SCORED, gather_logprobs_entropy),
    _loss("ppo_actor_loss_fn", _POLICY, losses.ppo_actor_loss_fn, "1f044d1dac960c98"),
    _loss("sapo_loss_fn", _SAPO, losses.sapo_loss_fn, "69e1601312b71ec1"),
    _loss("ppo_critic_loss_fn", _VALUE, losses.ppo_critic_loss_fn, "59bd5e18e0b1e0fe"),
    _actor("_apply_m2po_masking", _M2PO, losses.apply_m2po_masking, "9225e92ce07e2554"),
    _actor("compute_prox_logp_approximations", _PROXIMAL, losses.compute_prox_logp_approximations, "ccf7287249bcb89b"),
    _actor("PPOActor._compute_advantages", "self, data", compute_advantages, "82931883b0c2c431"),
    Seam("ffd_allocate", _SEQPACK, "ffd_allocate", _FFD, ffd_allocate),
    Seam("kk_allocate", _SEQPACK, "kk_allocate", _KK, kk_allocate),
    Seam("balanced_greedy_partition", _SEQPACK, "balanced_greedy_partition", "nums, K", balanced_greedy_partition),
    Seam("pack_tensor_dict", "areal.utils.data", "pack_tensor_dict", "data", pack_tensor_dict),
)


def apply(*, only: Collection[str] | None = None, strict: bool = False) -> Patches:
    """Replace AReaL's functions, or those that `only` names; see `areal_core.integrations`.

    Raises:
        ValueError, MissingPackageError, UnsupportedVersionError, PatchError: as `_patch.apply_seams`.
    """
    return apply_seams("areal", "1.0.4", SEAMS, only, strict)
