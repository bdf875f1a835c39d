"""The three steps of compute_advantages: a score for each sequence, its tokens' advantages, and their normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_core.ops._dispatch import as_int64, call, register_fake
from areal_core.ops._estimator import Estimator
from areal_core.ops.moments import masked_moments, whiten

_OP = "compute_advantages"
_ops = torch.ops.areal_core
_LEVELS = ("none", "group", "batch")
_KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True)
class Batch:
    """Inputs of compute_advantages, packed and checked."""

    rewards: Tensor
    cu_seqlens: Tensor
    group_ids: Tensor | None
    greedy_rewards: Tensor | None
    loss_mask: Tensor | None
    token_rewards: Tensor | None
    logprobs: Tensor | None
    ref_logprobs: Tensor | None
    values: Tensor | None
    num_tokens: int
    beta: float
    gamma: float
    lam: float
    process_group: Any

    @property
    def dtype(self) -> torch.dtype:
        """Of the advantages and of the per-token inputs."""
        return self.rewards.dtype

    @property
    def policies(self) -> tuple[Tensor | None, Tensor | None]:
        """Logprobs of the policy and of the reference, where the KL counts."""
        return (self.logprobs, self.ref_logprobs) if self.beta != 0 else (None, None)


def sequence_scores(estimator: Estimator, batch: Batch) -> Tensor:
    """Float64 [S]; NaN for failed samples, and for no other."""
    rewards = batch.rewards
    wanted = 2 if estimator.per_reward else 1
    if rewards.dim() != wanted:
        raise ValueError(
            f"{_OP}: expected rewards of shape {'[S, R]' if wanted == 2 else '[S]'}, got {list(rewards.shape)}"
        )
    if estimator.per_reward:
        failed = rewards.isnan().any(dim=1, keepdim=True)
        rewards = rewards.masked_fill(failed, torch.nan)
    if estimator.greedy_baseline and batch.greedy_rewards is not None:
        if batch.greedy_rewards.shape != rewards.shape:
            raise ValueError(
                f"{_OP}: expected greedy_rewards of shape {list(rewards.shape)}, got {list(batch.greedy_rewards.shape)}"
            )
        rewards = rewards.to(torch.float64) - batch.greedy_rewards.detach().to(torch.float64)
    if not estimator.is_scan:
        rewards = _with_token_rewards(estimator, batch, rewards)
    if estimator.mean_level == estimator.std_level == "none":
        scores = rewards.to(torch.float64)
        return scores.sum(dim=1) if estimator.per_reward else scores
    columns = rewards.unbind(dim=1) if estimator.per_reward else [rewards]
    parts = [_group_scores(estimator, batch, column) for column in columns]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)


def without_offset(estimator: Estimator, batch: Batch, scores: Tensor) -> Tensor:
    """The scores less the largest of them, where whitening would take an offset off all tokens anyway.

    Rewards far from 0 would cost their float32 tokens the digits that differ. The largest is the same on all ranks.
    """
    is_offset_of_tokens = batch.gamma == 1 and not estimator.critic and estimator.length_norm == "none"
    if not (estimator.whiten and is_offset_of_tokens):
        return scores
    known = torch.where(scores.isnan(), -torch.inf, scores)
    largest = torch.cat([known, known.new_full((1,), -torch.inf)]).amax()
    if batch.process_group is not None:
        import torch.distributed as dist

        dist.all_reduce(largest, dist.ReduceOp.MAX, batch.process_group)
    return scores - torch.where(largest.isfinite(), largest, 0.0)


def token_advantages(estimator: Estimator, batch: Batch, scores: Tensor) -> Tensor:
    """[T], the scores spread over the tokens."""
    if estimator.critic:
        advantages: Tensor = call(
            _ops.gae.default,
            _token_rewards(estimator, batch),
            batch.values,
            scores,
            batch.cu_seqlens,
            batch.loss_mask,
            batch.gamma,
            batch.lam,
        )[0]
        return advantages
    rewards = _token_rewards(estimator, batch) if estimator.is_scan else None
    if rewards is None and batch.gamma != 1:
        rewards = scores.new_zeros(batch.num_tokens, dtype=batch.dtype)
    if rewards is not None:
        returns: Tensor = call(
            _ops.discounted_returns.default, rewards, scores, batch.cu_seqlens, batch.loss_mask, batch.gamma
        )
        return returns
    token_beta = batch.beta if estimator.kl == "token" else 0.0
    spread: Tensor = call(
        _ops.spread_scores.default,
        scores,
        _divisors(estimator, batch),
        batch.cu_seqlens,
        batch.num_tokens,
        batch.loss_mask,
        *(batch.policies if token_beta != 0 else (None, None)),
        token_beta,
        batch.dtype == torch.float64,
    )
    return spread


def normalized_tokens(estimator: Estimator, batch: Batch, scores: Tensor, advantages: Tensor) -> Tensor:
    """The advantages at mean 0 and variance 1 over the live tokens of the samples that did not fail."""
    ones = torch.where(scores.isnan(), scores, 1.0)
    live = call(
        _ops.spread_scores.default,
        ones,
        None,
        batch.cu_seqlens,
        batch.num_tokens,
        batch.loss_mask,
        None,
        None,
        0.0,
        False,
    )
    return whiten(
        advantages,
        loss_mask=live,
        ddof=estimator.ddof,
        eps=estimator.eps,
        eps_in_root=estimator.eps_in_root,
        group=batch.process_group,
    )


def _kl_index(estimator: Estimator) -> int:
    return _KL_ESTIMATORS.index(estimator.kl_estimator)


def _token_rewards(estimator: Estimator, batch: Batch) -> Tensor | None:
    """[T]: what each token is rewarded with beside the score of its sequence; None: nothing."""
    if batch.beta == 0:
        return batch.token_rewards
    rewards: Tensor = call(
        _ops.token_rewards.default,
        batch.token_rewards,
        *batch.policies,
        batch.loss_mask,
        batch.beta,
        _kl_index(estimator),
    )
    return rewards


def _with_token_rewards(estimator: Estimator, batch: Batch, rewards: Tensor) -> Tensor:
    """The rewards of the sequences with those of their tokens and with the KL summed over them."""
    policies = batch.policies if estimator.kl == "sequence" else (None, None)
    if batch.token_rewards is None and policies[0] is None:
        return rewards
    sums = call(
        _ops.sequence_rewards.default,
        batch.token_rewards,
        *policies,
        batch.cu_seqlens,
        batch.loss_mask,
        batch.beta,
        _kl_index(estimator),
    )
    total: Tensor = rewards.to(torch.float64) + (sums[:, None] if estimator.per_reward else sums)
    return total


def _live_tokens(batch: Batch) -> Tensor:
    counts: Tensor = call(_ops.live_tokens.default, batch.cu_seqlens, batch.loss_mask, batch.num_tokens)
    return counts


def _divisors(estimator: Estimator, batch: Batch) -> Tensor | None:
    if estimator.length_norm == "none":
        return None
    if estimator.length_norm == "sequence":
        return _live_tokens(batch)
    rewards = batch.rewards.sum(dim=1) if estimator.per_reward else batch.rewards
    return _grouped(estimator, batch, rewards, _live_tokens(batch))[1]


def _group_scores(estimator: Estimator, batch: Batch, rewards: Tensor) -> Tensor:
    if estimator.k > 0:
        return _best_of_scores(estimator, batch, rewards)
    lengths = _live_tokens(batch) if estimator.length_weighted else None
    scores, _, has_signal = _grouped(estimator, batch, rewards, lengths)
    if estimator.rescale_by_signal:
        counts = torch.stack([(~rewards.isnan()).sum(), has_signal.sum()]).to(torch.float64)
        if batch.process_group is not None:
            import torch.distributed as dist

            dist.all_reduce(counts, dist.ReduceOp.SUM, batch.process_group)
        scores = scores * (counts[0] / counts[1].clamp(min=1))
    return scores


def _best_of_scores(estimator: Estimator, batch: Batch, rewards: Tensor) -> Tensor:
    assert batch.group_ids is not None
    ids = as_int64(batch.group_ids, _OP, "group_ids")
    by_reward = torch.sort(rewards, stable=True).indices  # NaN last
    sorted_ids, order = torch.sort(ids[by_reward], stable=True)
    scores: Tensor = call(
        _ops.best_of_scores.default,
        rewards.contiguous(),
        sorted_ids,
        by_reward[order],
        estimator.k,
        estimator.std_level == "group",
        estimator.eps,
        estimator.eps_in_root,
        estimator.singleton == "raw",
    )
    return scores


def _grouped(
    estimator: Estimator, batch: Batch, rewards: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, mean length of the group, and whether its rewards differ, each [S]."""
    ids = batch.group_ids if batch.group_ids is not None else torch.zeros_like(rewards, dtype=torch.int64)
    sorted_ids, order = torch.sort(as_int64(ids, _OP, "group_ids"), stable=True)
    statistics = None
    if "batch" in (estimator.mean_level, estimator.std_level):
        moments = masked_moments(rewards, loss_mask=~rewards.isnan(), group=batch.process_group)
        statistics = torch.stack([moments.live, moments.mean, moments.squares, moments.min, moments.max])
    grouped: tuple[Tensor, Tensor, Tensor] = call(
        _ops.group_scores.default,
        rewards.contiguous(),
        lengths,
        sorted_ids,
        order,
        statistics,
        _LEVELS.index(estimator.mean_level),
        _LEVELS.index(estimator.std_level),
        estimator.leave_one_out,
        estimator.leave_one_out_std,
        estimator.length_weighted,
        estimator.divide_by_mean,
        estimator.ddof,
        estimator.eps,
        estimator.eps_in_root,
        estimator.singleton == "raw",
    )
    return grouped


def _group_scores_fake(rewards: Tensor, lengths: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    scores = torch.empty_like(rewards, dtype=torch.float64)
    mean_lengths = torch.empty_like(scores) if lengths is not None else scores.new_empty(0)
    return scores, mean_lengths, torch.empty_like(rewards, dtype=torch.bool)


def _best_of_scores_fake(rewards: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(rewards, dtype=torch.float64)


def _spread_scores_fake(scores: Tensor, divisors: Any, cu_seqlens: Tensor, tokens: int, *args: Any) -> Tensor:
    return scores.new_empty(tokens, dtype=torch.float64 if args[-1] else torch.float32)


def _token_rewards_fake(rewards: Tensor | None, logprobs: Tensor | None, *_: Any) -> Tensor:
    like = rewards if rewards is not None else logprobs
    assert like is not None
    return torch.empty_like(like)


def _sequence_rewards_fake(
    rewards: Tensor | None, logprobs: Tensor | None, ref: Any, cu_seqlens: Tensor, *_: Any
) -> Tensor:
    return cu_seqlens.new_empty(cu_seqlens.shape[0] - 1, dtype=torch.float64)


def _live_tokens_fake(cu_seqlens: Tensor, *_: Any) -> Tensor:
    return cu_seqlens.new_empty(cu_seqlens.shape[0] - 1, dtype=torch.float64)


register_fake("group_scores", _group_scores_fake)
register_fake("best_of_scores", _best_of_scores_fake)
register_fake("spread_scores", _spread_scores_fake)
register_fake("token_rewards", _token_rewards_fake)
register_fake("sequence_rewards", _sequence_rewards_fake)
register_fake("live_tokens", _live_tokens_fake)
