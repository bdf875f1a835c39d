"""Advantages of packed sequences: GAE, and estimators that score each sequence against its group."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_core.ops._dispatch import as_int64, call


class GAEOutput(NamedTuple):
    """Per-token results, [T], in the dtype of the rewards; 0 where masked."""

    advantages: Tensor
    returns: Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    loss_mask: Tensor | None = None,
) -> GAEOutput:
    """Generalised advantage estimation over packed sequences, scanned from the end of each.

    Over the live tokens of a sequence, with t+ the next live token and value 0 after the last:
    A_t = r_t + gamma V_t+ - V_t + gamma lam A_t+, and returns_t = A_t + V_t.

    Args:
        rewards: float32 or float64 [T].
        values: same dtype [T]; no gradient flows to either.
        cu_seqlens: int32 or int64 [S+1]; read on the CPU only, so on a GPU it must be valid.
        gamma: discount per live transition, in [0, 1].
        lam: in [0, 1].
        loss_mask: bool or number [T], nonzero = live. None: every token is live.

    Returns:
        GAEOutput(advantages, returns).

    A masked token has no reward and no value: it is never read, the recurrence crosses it unchanged (no discount), and
    its outputs are 0. A non-finite live input reaches the earlier tokens of its own sequence only. T = 0 gives empty
    tensors. A sequence gives the same bits alone or packed, from run to run and for any number of threads.

    Raises:
        ValueError: wrong shape, gamma or lam out of [0, 1], cu_seqlens that do not cover the T tokens.
        TypeError: wrong dtype.

    Source: arXiv 1506.02438, eq. 16.
    """
    outputs = call(
        torch.ops.areal_core.gae.default,
        rewards.detach().contiguous(),
        values.detach().contiguous(),
        as_int64(cu_seqlens, "gae", "cu_seqlens"),
        _mask(loss_mask),
        gamma,
        lam,
    )
    return GAEOutput(*outputs)


@dataclass(frozen=True)
class _Estimator:
    """One point of the space (reward - baseline) / scale; see csrc/ops/advantages/group.h."""

    mean_level: str = "none"
    std_level: str = "none"
    leave_one_out: bool = False
    divide_by_mean: bool = False
    divide_by_length: bool = False
    kl: str = "none"  # beta acts on nothing, on each token's advantage ("token"), or on the reward ("sequence")
    ddof: int = 1
    eps: float = 1e-6
    eps_in_root: bool = False
    singleton: str = "zero"


_ESTIMATORS = {
    "dr_grpo": _Estimator(mean_level="group"),
    "grpo_original": _Estimator(mean_level="group", std_level="group", divide_by_length=True, kl="token"),
    "grpo_r1": _Estimator(mean_level="group", std_level="group", kl="token"),
    "maxrl": _Estimator(mean_level="group", divide_by_mean=True),
    "reinforce": _Estimator(kl="sequence"),
    "rloo": _Estimator(mean_level="group", leave_one_out=True, kl="sequence"),
}
_LEVELS = ("none", "group", "batch")
_SINGLETONS = ("zero", "raw")
_OPTIONS = tuple(f.name for f in fields(_Estimator) if f.name not in ("divide_by_mean", "divide_by_length", "kl"))


def compute_advantages(
    name: str,
    *,
    rewards: Tensor,
    cu_seqlens: Tensor,
    group_ids: Tensor,
    loss_mask: Tensor | None = None,
    logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    values: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
    beta: float = 0.0,
    gamma: float = 1.0,
    lam: float = 1.0,
    **options: Any,
) -> Tensor:
    """Token advantages of a named estimator that compares each sequence's reward with its group's.

    With r the reward, T the live tokens of a sequence, kl = sum of log pi/pi_ref over them and the statistics of the
    sequence's group:

    ============== ===========================================================
    reinforce      r - beta kl
    rloo           R - mean of the others' R, with R = r - beta kl
    dr_grpo        r - mean
    grpo_r1        (r - mean) / (std + eps) + beta (pi_ref/pi - 1)
    grpo_original  grpo_r1 divided by T
    maxrl          (r - mean) / (mean + eps)
    ============== ===========================================================

    Args:
        name: one of the above.
        rewards: [S], float32 or float64; other dtypes are converted to float32.
        cu_seqlens: int32 or int64 [S+1]; read on the CPU only, so on a GPU it must be valid.
        group_ids: integer [S], equal within a group; groups of any size, in any order.
        loss_mask: bool or number [T], nonzero = live. None: every token is live (and on a GPU, without logprobs
            either, T is read back from cu_seqlens: one synchronisation).
        logprobs: float32 [T] (float64 with float64 rewards), nats, needed when beta is not 0 (else only its length
            counts); no gradient.
        ref_logprobs: same, of the reference policy; must be None when beta is 0.
        values: must be None: no estimator here has a critic (see gae).
        greedy_rewards: must be None: no estimator here has a greedy baseline.
        beta: weight of the KL to the reference policy.
        gamma: must be 1.
        lam: must be 1.
        options: replace a part of the estimator: mean_level and std_level ("none", "group", "batch"), leave_one_out
            (baseline without the sequence itself), ddof (0 or 1, default 1), eps (default 1e-6), eps_in_root
            (sqrt(var + eps) instead of std + eps), singleton ("zero" or "raw": what a group of one gives).

    Returns:
        Tensor [T], float32, or float64 for float64 rewards; every live token of a sequence gets its advantage.

    Masked tokens get 0 and are never read. A NaN reward is a failed sample: left out of all statistics, advantage 0
    (plus the token KL term). A group of equal rewards gives exactly 0; a group of one gives 0, or its reward with
    singleton="raw". An infinite reward makes its group non-finite. Statistics are fp64; bitwise the same from run to
    run and for any number of threads.

    Raises:
        ValueError: unknown name or option, an option or input that the estimator would ignore, wrong shape.
        TypeError: wrong dtype.

    Source: RLOO, arXiv 2402.14740; Dr.GRPO, arXiv 2503.20783; GRPO, arXiv 2402.03300 and 2501.12948.
    """
    estimator = _resolve(name, options)
    _check_used(name, estimator, beta, gamma, lam, ref_logprobs, values, greedy_rewards)
    float64 = rewards.dtype == torch.float64
    rewards = rewards.detach() if float64 else rewards.detach().to(torch.float32)
    tokens = _token_count(loss_mask, logprobs, ref_logprobs, cu_seqlens=cu_seqlens)
    cu_seqlens = as_int64(cu_seqlens, "compute_advantages", "cu_seqlens")
    mask = _mask(loss_mask)
    pair: tuple[Tensor | None, Tensor | None] = (None, None)
    if beta != 0:
        if logprobs is None or ref_logprobs is None:
            raise ValueError(f"compute_advantages: expected logprobs and ref_logprobs with beta = {beta}, got None")
        pair = (logprobs.detach().contiguous(), ref_logprobs.detach().contiguous())
    if beta != 0 and estimator.kl == "sequence":
        sums = call(torch.ops.areal_core.log_ratio_sums.default, *pair, cu_seqlens, mask)
        rewards = rewards.to(torch.float64) - beta * sums
    scores = _group_scores(rewards, group_ids, estimator)
    token_beta = beta if estimator.kl == "token" else 0.0
    advantages: Tensor = call(
        torch.ops.areal_core.spread_scores.default,
        scores,
        cu_seqlens,
        tokens,
        mask,
        *(pair if token_beta != 0 else (None, None)),
        token_beta,
        estimator.divide_by_length,
        float64,
    )
    return advantages


def _resolve(name: str, options: dict[str, Any]) -> _Estimator:
    if name not in _ESTIMATORS:
        raise ValueError(f"compute_advantages: expected name in {sorted(_ESTIMATORS)}, got {name!r}")
    for option in options:
        if option not in _OPTIONS:
            raise ValueError(f"compute_advantages: expected options among {sorted(_OPTIONS)}, got {option!r}")
    estimator = replace(_ESTIMATORS[name], **options)
    for field, choices in (
        ("mean_level", _LEVELS),
        ("std_level", _LEVELS),
        ("singleton", _SINGLETONS),
        ("ddof", (0, 1)),
        ("leave_one_out", (True, False)),
        ("eps_in_root", (True, False)),
    ):
        if getattr(estimator, field) not in choices:
            raise ValueError(f"compute_advantages: expected {field} in {choices}, got {getattr(estimator, field)!r}")
    if not 0 <= estimator.eps < math.inf:
        raise ValueError(f"compute_advantages: expected eps >= 0 and finite, got {estimator.eps}")
    if estimator.divide_by_mean and (estimator.mean_level == "none" or estimator.std_level != "none"):
        raise ValueError(f"compute_advantages: expected a mean_level and no std_level with {name}, got {options}")
    _check_options(name, estimator, options)
    return estimator


def _check_used(
    name: str,
    estimator: _Estimator,
    beta: float,
    gamma: float,
    lam: float,
    ref_logprobs: Tensor | None,
    values: Tensor | None,
    greedy_rewards: Tensor | None,
) -> None:
    """Refuse what the estimator would ignore."""
    unused = {
        "beta": (beta != 0 and estimator.kl == "none", "0", beta),
        "gamma": (gamma != 1, "1", gamma),
        "lam": (lam != 1, "1", lam),
        "ref_logprobs": (beta == 0 and ref_logprobs is not None, "None", "a tensor"),
        "values": (values is not None, "None", "a tensor"),
        "greedy_rewards": (greedy_rewards is not None, "None", "a tensor"),
    }
    for argument, (is_set, neutral, value) in unused.items():
        if is_set:
            user = "beta = 0" if argument == "ref_logprobs" else name
            raise ValueError(
                f"compute_advantages: expected {argument} = {neutral} with {user}, which does not use it, got {value}"
            )


def _check_options(name: str, estimator: _Estimator, options: dict[str, Any]) -> None:
    """Refuse an option without effect, such as ddof without a standard deviation."""
    uses = {
        "ddof": estimator.std_level != "none",
        "eps_in_root": estimator.std_level != "none",
        "eps": estimator.std_level != "none" or estimator.divide_by_mean,
        "leave_one_out": estimator.mean_level != "none",
        "singleton": estimator.mean_level != "none" or estimator.std_level != "none",
    }
    for option in options:
        if not uses.get(option, True):
            raise ValueError(
                f"compute_advantages: expected no {option} with {name}, which does not use it, got {options[option]}"
            )


def _token_count(*per_token: Tensor | None, cu_seqlens: Tensor) -> int:
    """T, from a per-token tensor when there is one: cu_seqlens may live on a GPU, where reading it would wait."""
    for tensor in per_token:
        if tensor is not None:
            return tensor.shape[0]
    return int(cu_seqlens[-1]) if cu_seqlens.numel() else 0


def _mask(loss_mask: Tensor | None) -> Tensor | None:
    return None if loss_mask is None else loss_mask.to(torch.bool).contiguous()


def _group_scores(rewards: Tensor, group_ids: Tensor, estimator: _Estimator) -> Tensor:
    sorted_ids, order = torch.sort(as_int64(group_ids, "compute_advantages", "group_ids"), stable=True)
    scores: Tensor = call(
        torch.ops.areal_core.group_scores.default,
        rewards.contiguous(),
        sorted_ids,
        order,
        _LEVELS.index(estimator.mean_level),
        _LEVELS.index(estimator.std_level),
        estimator.leave_one_out,
        estimator.divide_by_mean,
        estimator.ddof,
        estimator.eps,
        estimator.eps_in_root,
        estimator.singleton == "raw",
    )
    return scores


def _gae_fake(rewards: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rewards), torch.empty_like(rewards)


def _group_scores_fake(rewards: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(rewards, dtype=torch.float64)


def _spread_scores_fake(scores: Tensor, cu_seqlens: Tensor, tokens: int, *args: Any) -> Tensor:
    return scores.new_empty(tokens, dtype=torch.float64 if args[-1] else torch.float32)


def _log_ratio_sums_fake(logprobs: Tensor, ref_logprobs: Tensor, cu_seqlens: Tensor, loss_mask: Any) -> Tensor:
    return logprobs.new_empty(cu_seqlens.shape[0] - 1, dtype=torch.float64)


torch.library.register_fake("areal_core::gae", _gae_fake)
torch.library.register_fake("areal_core::group_scores", _group_scores_fake)
torch.library.register_fake("areal_core::spread_scores", _spread_scores_fake)
torch.library.register_fake("areal_core::log_ratio_sums", _log_ratio_sums_fake)
