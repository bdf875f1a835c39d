"""verl's advantage estimators on our ops: (advantages, returns), both [S, L], from rewards per token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_core import ops
from areal_core.integrations._adapters import (
    any_true,
    carried_back,
    computed_dtype,
    group_ids,
    has_kernels,
    is_not_binary,
    is_not_finite,
)
from areal_core.integrations._patch import Original

# estimate(scores [S], mask [S, L], options by name) -> advantages [S, L]; the options have "groups".
Estimate = Callable[[Tensor, Tensor, Mapping[str, Any]], Tensor]


def gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: Any, lam: Any, *, original: Original
) -> Any:
    """GAE, then advantages of mean 0 and variance 1 over the live tokens of the batch."""
    reason = _why_not(token_level_rewards, response_mask, values, strict=original.strict)
    if reason is None and (values.shape != token_level_rewards.shape or not (0 <= gamma <= 1 and 0 <= lam <= 1)):
        reason = "values of another shape, or gamma or lam outside [0, 1]"
    if reason is not None:
        return original.fall_through(reason, token_level_rewards, values, response_mask, gamma, lam)
    live, dtype = response_mask.bool(), computed_dtype(token_level_rewards, values)
    rewards, values = token_level_rewards.to(dtype), values.to(dtype)
    out = ops.gae(rewards, values, gamma=float(gamma), lam=float(lam), loss_mask=live)
    if not original.strict:
        return ops.whiten(out.advantages, loss_mask=live), out.returns
    advantages = carried_back(out.advantages, live)  # what verl leaves at masked tokens
    return _verl_whiten(advantages, response_mask), advantages + values.detach()


def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, *, original: Original, **kwargs: Any
) -> Any:
    """Discounted returns, whitened over the live tokens of the batch."""
    reason = _why_not(token_level_rewards, response_mask, strict=original.strict)
    if reason is None and (config is None or not 0 <= config.gamma <= 1):
        reason = "no config, or gamma outside [0, 1]"
    if reason is not None:
        return original.fall_through(reason, token_level_rewards, response_mask, config, **kwargs)
    rewards, live = _rewards(token_level_rewards), response_mask.bool()
    returns = ops.discounted_returns(rewards, gamma=float(config.gamma), loss_mask=live)
    if original.strict:
        return _verl_whiten(returns, response_mask) * response_mask, returns
    return ops.whiten(returns, loss_mask=live), returns


def remax(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: Any = None,
    *,
    original: Original,
    **kwargs: Any,
) -> Any:
    """Rewards to go less the reward of the greedy response."""
    reason = _why_not(token_level_rewards, response_mask, reward_baselines, strict=original.strict)
    if reason is not None:
        arguments = (token_level_rewards, reward_baselines, response_mask, config)
        return original.fall_through(reason, *arguments, **kwargs)
    live = response_mask.bool()
    returns = ops.discounted_returns(_rewards(token_level_rewards), loss_mask=live)
    if original.strict:
        returns = carried_back(returns, live)
    return returns - torch.where(live, reward_baselines.detach().unsqueeze(-1), 0.0), returns


def by_group(*names: str) -> Callable[[Estimate], Callable[..., Any]]:
    """Decorate an estimate into an adapter; `names` are those of verl's parameters after index, in their order."""

    def decorate(estimate: Estimate) -> Callable[..., Any]:
        @functools.wraps(estimate)
        def adapter(
            token_level_rewards: Tensor,
            response_mask: Tensor,
            index: Any,
            *args: Any,
            original: Original,
            **kwargs: Any,
        ) -> Any:
            options = {"epsilon": 1e-6, **dict(zip(names, args, strict=False)), **kwargs}
            reason = _why_not(token_level_rewards, response_mask, strict=original.strict)
            if reason is None and len(index) != len(token_level_rewards):
                reason = "an index of another length"
            if reason is not None:
                return original.fall_through(reason, token_level_rewards, response_mask, index, *args, **kwargs)
            options["groups"] = group_ids(index).to(token_level_rewards.device)
            advantages = estimate(_rewards(token_level_rewards).sum(-1), response_mask, options)
            return advantages, advantages

        return adapter

    return decorate


_GRPO = ("epsilon", "norm_adv_by_std_in_grpo", "config")
_PLAIN = ("epsilon", "config")


def _compare(estimator: str, scores: Tensor, mask: Tensor, options: Mapping[str, Any], **more: Any) -> Tensor:
    settings = {"singleton": "raw", **more}  # a group of one keeps its reward, so that one sample a prompt trains
    groups, live = options["groups"], mask.bool()
    return ops.compute_advantages(estimator, rewards=scores, group_ids=groups, loss_mask=live, **settings)


def _grpo(scores: Tensor, mask: Tensor, options: Mapping[str, Any]) -> Tensor:
    """GRPO, or Dr.GRPO without the standard deviation."""
    if not options.get("norm_adv_by_std_in_grpo", True):
        return _compare("dr_grpo", scores, mask, options)
    return _compare("grpo_r1", scores, mask, options, eps=float(options["epsilon"]))


grpo = by_group(*_GRPO)(_grpo)


@by_group(*_PLAIN)
def rloo(scores: Tensor, mask: Tensor, options: Mapping[str, Any]) -> Tensor:
    """RLOO."""
    return _compare("rloo", scores, mask, options)


@by_group(*_PLAIN)
def rloo_vectorized(scores: Tensor, mask: Tensor, options: Mapping[str, Any]) -> Tensor:
    """RLOO whose groups of one have advantage 0 in verl too."""
    return _compare("rloo", scores, mask, options, singleton="zero")


@by_group(*_PLAIN)
def opo(scores: Tensor, mask: Tensor, options: Mapping[str, Any]) -> Tensor:
    """OPO."""
    return _compare("opo", scores, mask, options)


@by_group(*_PLAIN)
def reinforce_plus_plus_baseline(scores: Tensor, mask: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Rewards less the mean of the group, whitened over the live tokens of the batch."""
    return _compare("reinforce_pp_baseline", scores, mask, options)


@by_group("epsilon", "f_norm", "alpha", "config")
def gpg(scores: Tensor, mask: Tensor, options: Mapping[str, Any]) -> Tensor:
    """GPG as verl counts: the factor is rows / rows with a reward that is not 0."""
    factor = len(scores) / torch.count_nonzero(scores).clamp(min=1)
    return _compare("dr_grpo", scores * (factor / options.get("f_norm", 1.0)), mask, options)


def gdpo(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, *args: Any, original: Original, **kwargs: Any
) -> Any:
    """GDPO: each kind of reward by itself through GRPO, weighted and added up, then whitened."""
    names = (*_GRPO, "non_tensor_batch", "batch")
    options = {"epsilon": 1e-6, **dict(zip(names, args, strict=False)), **kwargs}
    reason = _why_not(token_level_rewards, response_mask, strict=original.strict)
    scores, weights = _score_kinds(_rewards(token_level_rewards).sum(-1), options)
    if reason is None and (not scores or len(scores) != len(weights) or len(index) != len(scores[0])):
        reason = "gdpo_reward_keys, weights or an index that do not fit"
    if reason is not None:
        return original.fall_through(reason, token_level_rewards, response_mask, index, *args, **kwargs)
    options["groups"] = group_ids(index).to(token_level_rewards.device)
    kinds = [w * _grpo(x, response_mask, options) for x, w in zip(scores, weights, strict=True)]
    total = torch.stack(kinds).sum(0)
    if original.strict:
        advantages = _verl_whiten(total, response_mask) * response_mask
    else:
        advantages = ops.whiten(total, loss_mask=response_mask.bool())
    return advantages, advantages


def _score_kinds(total: Tensor, options: Mapping[str, Any]) -> tuple[list[Tensor], list[float]]:
    """Scores [S] by kind of reward with their weights; nothing where a key is missing."""
    config, extra = options.get("config"), options.get("non_tensor_batch")
    if config is None or extra is None or options.get("batch") is None:
        return [total], [1.0]
    keys, weights = config.get("gdpo_reward_keys", None), config.get("gdpo_reward_weights", None)
    if not keys or any(key not in extra for key in keys):
        return [], []
    scores = [torch.as_tensor(np.asarray(extra[key], dtype=np.float32), device=total.device) for key in keys]
    return scores, [1.0] * len(keys) if weights is None else [float(x) for x in weights]


def _why_not(rewards: Tensor, mask: Tensor, *others: Tensor, strict: bool) -> str | None:
    """Why a call is one for verl's own function; None where ours takes it."""
    tensors = (rewards, mask, *others)
    if any(x.is_nested for x in tensors) or rewards.dim() != 2 or rewards.shape != mask.shape:
        return "shapes other than [S, L]"
    if not rewards.is_floating_point() or not has_kernels(*tensors):
        return "rewards that are integers, or another device"
    if any_true(is_not_binary(mask)):
        return "a mask that weights tokens"
    if strict and (rewards.dtype.itemsize < 4 or any_true(is_not_finite((rewards, *others)), ~mask.bool().any())):
        return "strict: 16-bit or non-finite rewards, or no live token"
    return None


def _rewards(rewards: Tensor) -> Tensor:
    return rewards.detach().to(computed_dtype(rewards))


def _verl_whiten(values: Tensor, mask: Tensor) -> Any:
    """verl's own, with its refusals: masked tokens move along with the others."""
    from verl.utils.torch_functional import masked_whiten

    return masked_whiten(values, mask)
