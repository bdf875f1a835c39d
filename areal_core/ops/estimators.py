"""Advantage estimators by name: a table of declared parts, and the one function that composes them."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from areal_core.ops._estimator import Estimator
from areal_core.ops._packed import as_mask, packed_tokens
from areal_core.ops._scores import Batch, normalized_tokens, sequence_scores, token_advantages, without_offset

_ESTIMATORS = {
    "dapo": Estimator(mean_level="group", std_level="group", length_norm="group"),
    "dr_grpo": Estimator(mean_level="group"),
    "gdpo": Estimator(mean_level="group", std_level="group", per_reward=True),
    "gpg": Estimator(mean_level="group", rescale_by_signal=True),
    "grpo_original": Estimator(mean_level="group", std_level="group", length_norm="sequence", kl="token"),
    "grpo_r1": Estimator(mean_level="group", std_level="group", kl="token"),
    "maxrl": Estimator(mean_level="group", divide_by_mean=True),
    "opo": Estimator(mean_level="group", length_weighted=True),
    "orz": Estimator(critic=True),
    "pass_at_k": Estimator(mean_level="group", std_level="group", k=4, eps=0.0),
    "ppo": Estimator(critic=True, kl="to_go", discounted=True),
    "reinforce": Estimator(kl="sequence"),
    "reinforce_kl": Estimator(kl="to_go", discounted=True),
    "reinforce_pp": Estimator(kl="to_go", discounted=True, whiten=True, eps=1e-8, eps_in_root=True),
    "reinforce_pp_baseline": Estimator(
        mean_level="group", kl="to_go", discounted=True, whiten=True, eps=1e-8, eps_in_root=True
    ),
    "remax": Estimator(greedy_baseline=True, kl="to_go", discounted=True),
    "rloo": Estimator(mean_level="group", leave_one_out=True, kl="sequence"),
}


def estimators() -> list[str]:
    """Names that compute_advantages knows, sorted."""
    return sorted(_ESTIMATORS)


def get_estimator(name: str, **options: Any) -> Estimator:
    """The declaration of a name, with parts of it replaced by the options that `compute_advantages` takes.

    Raises:
        ValueError: an unknown name or option (the text lists the known ones), an option that would be ignored.
    """
    return _resolve(name, options, "get_estimator")


def register_estimator(name: str, estimator: Estimator) -> None:
    """Give an estimator a name for compute_advantages, in this process.

    Raises:
        ValueError: the name is taken, or empty.
        TypeError: anything but a str and an Estimator.
    """
    if not isinstance(name, str) or not isinstance(estimator, Estimator):
        raise TypeError(f"register_estimator: expected a str and an Estimator, got {name!r} and {estimator!r}")
    if not name or name in _ESTIMATORS:
        raise ValueError(f"register_estimator: expected a new name, got {name!r}, one of {estimators()}")
    _ESTIMATORS[name] = estimator


def compute_advantages(
    name: str | Estimator,
    *,
    rewards: Tensor,
    cu_seqlens: Tensor | None = None,
    group_ids: Tensor | None = None,
    loss_mask: Tensor | None = None,
    token_rewards: Tensor | None = None,
    logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    values: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
    beta: float = 0.0,
    gamma: float = 1.0,
    lam: float = 1.0,
    group: Any = None,
    **options: Any,
) -> Tensor:
    """Token advantages of a named estimator.

    With r the reward of the sequence, T its live tokens, kl_t = log pi/pi_ref, mean and std those of its group:

    ===================== =======================================================================================
    reinforce             r - beta sum over all t' of kl_t'
    reinforce_kl          r - beta sum over t' >= t of kl_t'
    reinforce_pp          reinforce_kl, then over the live tokens of the batch (A - mean) / sqrt(var + eps)
    reinforce_pp_baseline r - mean - beta sum over t' >= t of kl_t', normalised like reinforce_pp
    rloo                  R - mean of the others' R, with R = r - beta sum over all t' of kl_t'
    remax                 r - greedy reward - beta sum over t' >= t of kl_t'
    ppo                   GAE of the rewards 1{last t} r - beta kl_t against values
    orz                   r - V_t: GAE with gamma = lam = 1 and beta = 0
    grpo_original         ((r - mean) / (std + eps) + beta (pi_ref/pi - 1)) / T
    grpo_r1               (r - mean) / (std + eps) + beta (pi_ref/pi - 1)
    dapo                  (r - mean) / (std + eps) / mean of T over the group
    dr_grpo               r - mean
    opo                   r - sum of T r / sum of T over the group
    gpg                   (r - mean) times sequences / sequences in groups whose rewards differ
    gdpo                  sum over the R rewards of (r - mean) / (std + eps); the paper then has whiten=True
    maxrl                 (r - mean) / (mean + eps)
    pass_at_k             (E[best of k with this one] - E[best of k]) / std[best of k], over k-subsets of the group
    ===================== =======================================================================================

    With gamma < 1 (reinforce_kl, reinforce_pp, reinforce_pp_baseline, remax, ppo) rewards to come are discounted by
    gamma per live token, r being the reward of the last one.

    Args:
        name: one of the above, or an Estimator.
        rewards: [S], or [S, R] for gdpo; float32 or float64, other dtypes are converted to float32.
        cu_seqlens: int32 or int64 [S+1]; read on the CPU only, so on a GPU it must be valid. None: the per-token
            tensors, of which there must be one, are padded [S, L].
        group_ids: integer [S], equal within a group; groups of any size, in any order. Needed by estimators that
            compare within groups.
        loss_mask: bool or number [T], nonzero = live. None: every token is live (and on a GPU, without another
            per-token tensor, T is read back from cu_seqlens: one synchronisation).
        token_rewards: float32 [T] (float64 with float64 rewards), added to the reward of each token by the estimators
            that sum rewards to come, to the sequence's reward by the others.
        logprobs: same dtype [T], nats, needed when beta is not 0 (else only its length counts); no gradient.
        ref_logprobs: same, of the reference policy; must be None when beta is 0.
        values: same [T], of the critic: ppo and orz.
        greedy_rewards: [S], of the greedy response to each prompt: remax.
        beta: weight of the KL to the reference policy.
        gamma: discount per live token, in [0, 1].
        lam: of GAE, in [0, 1].
        group: torch.distributed process group whose ranks hold the parts of the batch; each must call. Covers what is
            taken over the batch: whitening, "batch" levels, gpg. A group's sequences must be on one rank.
        options: replace a part of the estimator: mean_level, std_level, leave_one_out, leave_one_out_std, length_norm,
            k, kl_estimator, whiten, ddof, eps, eps_in_root, singleton (see Estimator).

    Returns:
        Tensor [T] (or [S, L]), float32, or float64 for float64 rewards.

    Masked tokens get 0 and are never read. A NaN reward is a failed sample: left out of all statistics, its advantages
    0 (so is a sequence whose KL is NaN where the KL is part of the reward). A group of equal rewards gives exactly 0; a
    group of one gives 0, or its reward with singleton="raw"; pass_at_k, whose k is 4 unless given, gives 0 to smaller
    groups. An infinite reward makes its group infinite. Statistics are float64; bitwise the same for any order of the
    sequences, any number of threads and any split over ranks.

    Raises:
        ValueError: unknown name or option, an option or input that the estimator would ignore, a missing input, wrong
            shape.
        TypeError: wrong dtype.

    Source: REINFORCE++, arXiv 2501.03262; RLOO, 2402.14740; ReMax, 2310.10505; GAE, 1506.02438; Open-Reasoner-Zero,
    2503.24290; GRPO, 2402.03300 and 2501.12948; DAPO, 2503.14476; Dr.GRPO, 2503.20783; OPO, 2505.23585; GPG,
    2504.02546; GDPO, 2601.05242; pass@k, 2508.10751.
    """
    estimator = _resolve(name, options)
    label = name if isinstance(name, str) else "this estimator"
    _check_inputs(
        label,
        estimator,
        {"beta": (beta, 0.0), "gamma": (gamma, 1.0), "lam": (lam, 1.0)},
        {
            "group_ids": group_ids,
            "values": values,
            "greedy_rewards": greedy_rewards,
            "logprobs": logprobs,
            "ref_logprobs": ref_logprobs,
        },
    )
    tokens = {
        "loss_mask": as_mask(loss_mask),
        "token_rewards": token_rewards,
        "logprobs": logprobs,
        "ref_logprobs": ref_logprobs,
        "values": values,
    }
    offsets, flat, shape = packed_tokens("compute_advantages", cu_seqlens, tokens)
    if shape is None:
        shape = torch.Size([int(offsets[-1]) if offsets.numel() else 0])
    batch = Batch(
        rewards=rewards.detach() if rewards.dtype == torch.float64 else rewards.detach().to(torch.float32),
        cu_seqlens=offsets,
        group_ids=group_ids,
        greedy_rewards=greedy_rewards,
        num_tokens=shape.numel(),
        beta=beta,
        gamma=gamma,
        lam=lam,
        process_group=group,
        **flat,
    )
    _check_sizes(batch)
    scores = without_offset(estimator, batch, sequence_scores(estimator, batch))
    advantages = token_advantages(estimator, batch, scores)
    if estimator.whiten:
        advantages = normalized_tokens(estimator, batch, scores, advantages)
    return advantages.reshape(shape)


def _check_sizes(batch: Batch) -> None:
    """Check what the native ops would report under names of their own."""
    if batch.rewards.dim() == 0:
        raise ValueError("compute_advantages: expected rewards of shape [S], got []")
    sequences = batch.rewards.shape[0]
    per_token = (batch.num_tokens,)
    shapes = {
        "cu_seqlens": (sequences + 1,),
        "group_ids": (sequences,),
        "greedy_rewards": (sequences,),
        "loss_mask": per_token,
        "token_rewards": per_token,
        "logprobs": per_token,
        "ref_logprobs": per_token,
        "values": per_token,
    }
    for name, shape in shapes.items():
        tensor = getattr(batch, name)
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"compute_advantages: expected {name} of shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.device != batch.rewards.device:
            raise ValueError(f"compute_advantages: expected {name} on {batch.rewards.device}, got {tensor.device}")
    if not -math.inf < batch.beta < math.inf:
        raise ValueError(f"compute_advantages: expected beta finite, got {batch.beta}")
    for name, number in (("gamma", batch.gamma), ("lam", batch.lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"compute_advantages: expected {name} in [0, 1], got {number}")


_OPTIONS = (
    "ddof",
    "eps",
    "eps_in_root",
    "k",
    "kl_estimator",
    "leave_one_out",
    "leave_one_out_std",
    "length_norm",
    "mean_level",
    "singleton",
    "std_level",
    "whiten",
)


def _resolve(name: str | Estimator, options: dict[str, Any], user: str = "compute_advantages") -> Estimator:
    if not isinstance(name, (str, Estimator)):
        raise TypeError(f"{user}: expected a name or an Estimator, got {name!r}")
    if isinstance(name, str) and name not in _ESTIMATORS:
        raise ValueError(f"{user}: expected name in {estimators()}, got {name!r}")
    for option in options:
        if option not in _OPTIONS:
            raise ValueError(f"{user}: expected options among {list(_OPTIONS)}, got {option!r}")
    declared = _ESTIMATORS[name] if isinstance(name, str) else name
    parts = {**asdict(declared), **options}
    has_mean, has_std = parts["mean_level"] != "none", parts["std_level"] != "none"
    has_eps = has_std or parts["whiten"]
    uses = {
        "ddof": (has_std and not parts["k"]) or parts["whiten"],
        "eps_in_root": has_eps,
        "eps": has_eps or declared.divide_by_mean,
        "k": declared.k > 0,
        "leave_one_out": has_mean,
        "leave_one_out_std": has_std,
        "singleton": has_mean or has_std,
        "kl_estimator": declared.kl in ("sequence", "to_go"),
    }
    for option, value in options.items():
        if not uses.get(option, True):
            raise ValueError(f"{user}: expected no {option} with {name}, which does not use it, got {value}")
    return replace(declared, **options)


def _check_inputs(
    label: str, estimator: Estimator, numbers: dict[str, tuple[float, float]], tensors: dict[str, Tensor | None]
) -> None:
    """Refuse what the estimator would ignore, and name what it misses."""
    beta = numbers["beta"][0]
    uses = {
        "beta": estimator.kl != "none",
        "gamma": estimator.discounted,
        "lam": estimator.discounted and estimator.critic,
    }
    for name, (value, neutral) in numbers.items():
        if value != neutral and not uses[name]:
            raise ValueError(
                f"compute_advantages: expected {name} = {neutral:g} with {label}, which does not use it, got {value}"
            )
    needed = {"group_ids"} if estimator.needs_groups else set()
    if estimator.critic:
        needed.add("values")
    if estimator.greedy_baseline:
        needed.add("greedy_rewards")
    if beta != 0:
        needed |= {"logprobs", "ref_logprobs"}
    harmless = ("group_ids", "logprobs")  # what a batch carries anyway
    for name, tensor in tensors.items():
        if (tensor is not None) == (name in needed) or (tensor is not None and name in harmless):
            continue
        user = f"beta = {beta}" if name in ("logprobs", "ref_logprobs") else label
        if name in needed:
            raise ValueError(f"compute_advantages: expected {name} with {user}, got None")
        raise ValueError(f"compute_advantages: expected {name} = None with {user}, which does not use it, got a tensor")
