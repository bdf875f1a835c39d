"""The kernels inside verl: log-probabilities and entropy, losses, advantages, balancing and padding.

    from areal_core.integrations import verl
    verl.apply()  # in every process, before workers are built
    verl.register()  # or: new names for verl's configuration, such as policy_loss.loss_mode=areal_core_vanilla

verl starts its workers as processes of their own. With VERL_USE_EXTERNAL_MODULES=areal_core.integrations.verl_plugin in
their environment each of them does both when it imports verl.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from areal_core.errors import PatchError
from areal_core.integrations import _verl_advantages as advantages
from areal_core.integrations import _verl_losses as losses
from areal_core.integrations import _verl_policy_losses as policy_losses
from areal_core.integrations._adapters import any_true, cannot_score, has_kernels, karmarkar_karp, score
from areal_core.integrations._patch import Original, Patches, Seam, apply_seams
from areal_core.ops._segments import copy_segments

__all__ = ["apply", "register"]

_FUNCTIONAL = "verl.utils.torch_functional"
_ALGOS = "verl.trainer.ppo.core_algos"


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True, *, original: Original) -> Any:
    """Log-probabilities, float32 also for 16-bit logits; in place where verl's own would be."""
    reason = _why_not(logits, labels)
    if reason is not None:
        return original.fall_through(reason, logits, labels, inplace_backward)
    flash = _uses_flash_cross_entropy()
    out = score(logits, labels, inplace_backward=inplace_backward and flash).logprobs
    return out.to(logits.dtype) if original.strict and not flash else out


def entropy_from_logits(logits: Tensor, *, original: Original) -> Any:
    """Entropy, float32 also for 16-bit logits; a logit of -inf adds nothing."""
    reason = _why_not(logits)
    if reason is None and original.strict and any_true((logits == -torch.inf).any()):
        reason = "strict: a logit of -inf"
    if reason is not None:
        return original.fall_through(reason, logits)
    entropy = _entropy(logits)
    return entropy.to(logits.dtype) if original.strict else entropy


def entropy_in_chunks(logits: Tensor, chunk_size: int = 2048, *, original: Original) -> Any:
    """The same: chunks only save memory, of which ours takes none."""
    reason = _why_not(logits)
    if reason is None and (logits.dim() != 2 or logits.dtype == torch.float64 or chunk_size < 1):
        reason = "logits that are not [T, V], or float64"
    if reason is None and original.strict and any_true((logits == -torch.inf).any()):
        reason = "strict: a logit of -inf"
    return original.fall_through(reason, logits, chunk_size) if reason else _entropy(logits)


def _entropy(logits: Tensor) -> Tensor:
    return score(logits, logits.new_zeros(logits.shape[:-1], dtype=torch.int64)).entropy


def _why_not(logits: Tensor, labels: Tensor | None = None) -> str | None:
    if logits.is_nested or logits.dim() < 2:
        return "logits that are nested, or of one row"
    return cannot_score(logits, logits.new_zeros(logits.shape[:-1], dtype=torch.int64) if labels is None else labels)


def _uses_flash_cross_entropy() -> bool:
    """Whether verl's function would take its kernel, which overwrites the logits backward."""
    available: bool = sys.modules[_FUNCTIONAL].FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE
    return available and os.environ.get("VERL_DISABLE_FLASH_ATTN_CE", "0") != "1"


def no_padding_2_padding(tensor: Tensor, data: Any, *, original: Original) -> Any:
    """The rows that predict a response, shifted by one and padded, in one copy and one backward."""
    prompts, responses = data["prompts"], data["responses"]
    values = tensor.values() if tensor.is_nested else tensor
    if prompts.is_nested:
        lengths = [x.offsets().diff() for x in (prompts, responses)]
    else:
        mask, split = data["attention_mask"], prompts.shape[1]
        lengths = [mask[:, :split].sum(1), mask[:, split:].sum(1)]
    prompt, response = torch.stack(lengths).cpu()
    width = _padded_width(data, responses, response)
    ends = (prompt + response).cumsum(0)
    fits = len(ends) > 0 and int(ends[-1]) == len(values) and width >= int(response.max()) and bool((prompt > 0).all())
    if not fits or not has_kernels(values):
        return original.fall_through("lengths that do not fit, or another device", tensor, data)
    targets = width * torch.arange(len(ends))
    index = (ends - response - 1, targets, targets + response)
    padded = copy_segments({"x": values}, index, width * len(ends), [0.0])["x"]
    return padded.view(len(ends), width, *values.shape[1:])


def _padded_width(data: Any, responses: Tensor, lengths: Tensor) -> int:
    from verl.utils import tensordict_utils

    if not responses.is_nested:
        return responses.shape[1]
    given: int = tensordict_utils.get_non_tensor_data(data=data, key="max_response_len", default=-1)
    return int(lengths.max()) if given < 0 else given


_LOSS = "old_log_prob, log_prob, advantages, response_mask, loss_agg_mode='{}', config=None, rollout_is_weights=None"
_TOKENS, _ROWS = _LOSS.format("token-mean"), _LOSS.format("seq-mean-token-mean")
_TOTALS = "dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None"
_REWARDS = "token_level_rewards, response_mask"
_PLAIN = f"{_REWARDS}, index, epsilon=1e-06, config=None, **kwargs"
_GRPO = f"{_REWARDS}, index, epsilon=1e-06, norm_adv_by_std_in_grpo=True, config=None"

# Of every loss and estimator the source has to be the one that was looked at: their options mean what it makes of them.
_POLICY_LOSSES = (
    ("vanilla", policy_losses.vanilla, _TOKENS, "1a0214517a6dbfc8"),
    ("gspo", policy_losses.gspo, _ROWS, "fd4ceb495b6b2c75"),
    ("sapo", policy_losses.sapo, _ROWS, "9e9994716c612cbb"),
    ("cispo", policy_losses.cispo, _TOKENS, "ed3e38ae6bcfd1fa"),
    ("gpg", policy_losses.gpg, _TOKENS, "e0a572563fc170d2"),
    ("geo_mean", policy_losses.geo_mean, _TOKENS, "d11a96d3848fb01e"),
    ("dppo_tv", policy_losses.dppo_tv, _TOKENS, "42043ddc9449afb4"),
    ("dppo_kl", policy_losses.dppo_kl, _TOKENS, "baf0dea8554f3573"),
    (
        "reinforce",
        policy_losses.reinforce,
        _LOSS.format("seq-mean-token-sum").replace("old_log_prob", "rollout_log_prob"),
        "31577535b4284d29",
    ),
)
_ADVANTAGES = (
    ("grpo", advantages.grpo, _GRPO, "1ae54c999b7df21e"),
    ("grpo_vectorized", advantages.grpo, _GRPO, "128ff4f68e2d2d7f"),
    ("rloo", advantages.rloo, _PLAIN, "a7377d83e25007a5"),
    ("rloo_vectorized", advantages.rloo_vectorized, _PLAIN, "496d24a692417299"),
    ("opo", advantages.opo, _PLAIN, "334dc14adba29d69"),
    (
        "gpg",
        advantages.gpg,
        f"{_REWARDS}, index, epsilon=1e-06, f_norm=1.0, alpha=1.0, config=None, **kwargs",
        "a9594f34e970335d",
    ),
    ("gdpo", advantages.gdpo, f"{_GRPO}, non_tensor_batch=None, batch=None, **kwargs", "2a394e39442e0e2a"),
    ("reinforce_plus_plus", advantages.reinforce_plus_plus, f"{_REWARDS}, config=None, **kwargs", "f5cf999027e8c1b6"),
    ("reinforce_plus_plus_baseline", advantages.reinforce_plus_plus_baseline, _PLAIN, "67d2569cc9f7c9f3"),
    (
        "remax",
        advantages.remax,
        "token_level_rewards, reward_baselines, response_mask, config=None, **kwargs",
        "4731e8a39c58288b",
    ),
)
SEAMS = (
    Seam(
        "logprobs", _FUNCTIONAL, "logprobs_from_logits", "logits, labels, inplace_backward=True", logprobs_from_logits
    ),
    Seam("entropy", _FUNCTIONAL, "entropy_from_logits", "logits", entropy_from_logits),
    Seam(
        "entropy_in_chunks",
        _FUNCTIONAL,
        "entropy_from_logits_with_chunking",
        "logits, chunk_size=2048",
        entropy_in_chunks,
    ),
    *(
        Seam(f"policy_loss.{name}", _ALGOS, f"compute_policy_loss_{name}", parameters, adapter, (source,))
        for name, adapter, parameters, source in _POLICY_LOSSES
    ),
    Seam(
        "advantage.gae",
        _ALGOS,
        "compute_gae_advantage_return",
        "token_level_rewards, values, response_mask, gamma, lam",
        advantages.gae,
        ("fabcb104a5e4c1ee",),
    ),
    *(
        Seam(f"advantage.{name}", _ALGOS, f"compute_{name}_outcome_advantage", parameters, adapter, (source,))
        for name, adapter, parameters, source in _ADVANTAGES
    ),
    Seam(
        "value_loss",
        _ALGOS,
        "compute_value_loss",
        f"vpreds, returns, values, response_mask, cliprange_value, loss_agg_mode='token-mean', {_TOTALS}",
        losses.value_loss,
        ("8e4bdebbeb6a425a",),
    ),
    Seam(
        "agg_loss",
        _ALGOS,
        "agg_loss",
        f"loss_mat, loss_mask, loss_agg_mode, {_TOTALS}",
        losses.agg_loss,
        ("fd052ff7eb539f78",),
    ),
    Seam(
        "kl_penalty",
        _ALGOS,
        "kl_penalty",
        "logprob, ref_logprob, kl_penalty",
        losses.kl_penalty,
        ("a2d1ace64346e336",),
    ),
    Seam(
        "karmarkar_karp",
        "verl.utils.seqlen_balancing",
        "karmarkar_karp",
        "seqlen_list, k_partitions, equal_size",
        karmarkar_karp,
    ),
    Seam(
        "no_padding_2_padding",
        "verl.workers.utils.padding",
        "no_padding_2_padding",
        "tensor, data",
        no_padding_2_padding,
        ("0868d5c4731b66ac",),
    ),
)
# verl's trainer gives what these need to its own names alone; "reinforce" has no name in its registry.
_UNNAMED = {"advantage.gae", "advantage.gdpo", "advantage.remax", "policy_loss.reinforce"}


def apply(*, only: Collection[str] | None = None, strict: bool = False) -> Patches:
    """Replace verl's functions at these seams in this process, also in verl's registries; docs/integrations.md says
    what each honours.

    Args:
        only: names of seams; None: all.
        strict: verl's own convention where ours differs on purpose.

    Raises:
        ValueError, MissingPackageError, UnsupportedVersionError, PatchError: see `apply_seams`.
    """
    return apply_seams("verl", "0.9.1", SEAMS, only, strict)


def register(*, strict: bool = False) -> tuple[str, ...]:
    """Register our policy losses and estimators beside verl's own, for its configuration to choose.

    Before `apply`, which replaces what is registered already. verl's name after "areal_core_", and "areal_core_ppo" for
    the vanilla loss; "areal_core_grpo" reads norm_adv_by_std_in_grpo from the configuration.

    Returns:
        The names.

    Raises:
        PatchError: they are registered, or verl's functions replaced, already.
        MissingPackageError, UnsupportedVersionError: see `apply`.
    """
    seams = [x for x in SEAMS if x.name.startswith(("policy_loss.", "advantage.")) and x.name not in _UNNAMED]
    with apply_seams("verl", "0.9.1", seams, None, strict):
        algos = sys.modules[_ALGOS]
        functions = {seam.name: getattr(algos, seam.attribute) for seam in seams}
    names = []
    for seam_name, function in functions.items():
        kind, name = seam_name.split(".")
        name = "areal_core_" + ("ppo" if name == "vanilla" else name)
        taken = algos.POLICY_LOSS_REGISTRY if kind == "policy_loss" else algos.ADV_ESTIMATOR_REGISTRY
        if name in taken:
            raise PatchError(f"verl: expected no {kind} {name}, got one: register() was called before")
        if kind == "policy_loss":
            algos.register_policy_loss(name)(function)
        else:
            algos.register_adv_est(name)(_configured(function) if "grpo" in name else function)
        names.append(name)
    return tuple(names)


def _configured(grpo: Callable[..., Any]) -> Callable[..., Any]:
    """GRPO with the option that verl's trainer passes by hand to the estimator named grpo alone."""

    def estimate(
        token_level_rewards: Tensor, response_mask: Tensor, index: Any, config: Any = None, **more: Any
    ) -> Any:
        if config is not None:
            more.setdefault("norm_adv_by_std_in_grpo", config.get("norm_adv_by_std_in_grpo", True))
        return grpo(token_level_rewards, response_mask, index, config=config, **more)

    return estimate
