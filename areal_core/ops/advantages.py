"""Scans over packed sequences, from the end of each: GAE and discounted returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_core.ops._dispatch import call, register_fake
from areal_core.ops._packed import as_mask, packed_tokens


class GAEOutput(NamedTuple):
    """Per-token results in the shape and dtype of the values; 0 where masked."""

    advantages: Tensor
    returns: Tensor


def gae(
    rewards: Tensor | None,
    values: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    loss_mask: Tensor | None = None,
    terminal_rewards: Tensor | None = None,
) -> GAEOutput:
    """Generalised advantage estimation over packed sequences, scanned from the end of each.

    Over the live tokens of a sequence, with t+ the next live token and value 0 after the last:
    A_t = r_t + gamma V_t+ - V_t + gamma lam A_t+, and returns_t = A_t + V_t.

    Args:
        rewards: float32 or float64 [T]; None: 0, for outcome rewards alone.
        values: same dtype [T]; no gradient flows to either.
        cu_seqlens: int32 or int64 [S+1]; read on the CPU only, so on a GPU it must be valid. None: the per-token
            tensors are padded [S, L].
        gamma: discount per live transition, in [0, 1].
        lam: in [0, 1].
        loss_mask: bool or number [T], nonzero = live. None: every token is live.
        terminal_rewards: [S], added to the reward of the last live token of each sequence. NaN: a failed sample, whose
            outputs are 0.

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
    tokens = {"values": values, "rewards": rewards, "loss_mask": as_mask(loss_mask)}
    cu_seqlens, flat, _ = packed_tokens("gae", cu_seqlens, tokens)
    advantages, returns = call(
        torch.ops.areal_core.gae.default,
        flat["rewards"],
        flat["values"],
        _terminal(terminal_rewards),
        cu_seqlens,
        flat["loss_mask"],
        gamma,
        lam,
    )
    return GAEOutput(advantages.reshape(values.shape), returns.reshape(values.shape))


def discounted_returns(
    rewards: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    gamma: float = 1.0,
    loss_mask: Tensor | None = None,
    terminal_rewards: Tensor | None = None,
) -> Tensor:
    """Discounted sum of the rewards from each token on; with gamma = 1 the reward to go.

    Over the live tokens of a sequence, with t+ the next live token: G_t = r_t + gamma G_t+. With gamma = 0 that is the
    rewards themselves, the terminal ones at their tokens.

    Args:
        rewards: float32 or float64 [T]; no gradient flows. With a KL penalty taken off: see kl_penalty.
        cu_seqlens: int32 or int64 [S+1]; read on the CPU only, so on a GPU it must be valid. None: the per-token
            tensors are padded [S, L].
        gamma: discount per live transition, in [0, 1].
        loss_mask: bool or number [T], nonzero = live. None: every token is live.
        terminal_rewards: [S], added to the reward of the last live token of each sequence. NaN: a failed sample, whose
            returns are 0.

    Returns:
        Tensor like rewards.

    A masked token is never read, the recurrence crosses it unchanged (no discount), and its return is 0. A non-finite
    live reward reaches the earlier tokens of its own sequence only. A sequence gives the same bits alone or packed,
    from run to run and for any number of threads.

    Raises:
        ValueError: wrong shape, gamma out of [0, 1], cu_seqlens that do not cover the T tokens.
        TypeError: wrong dtype.

    Source: arXiv 1506.02438, eq. 1.
    """
    tokens = {"rewards": rewards, "loss_mask": as_mask(loss_mask)}
    cu_seqlens, flat, _ = packed_tokens("discounted_returns", cu_seqlens, tokens)
    returns: Tensor = call(
        torch.ops.areal_core.discounted_returns.default,
        flat["rewards"],
        _terminal(terminal_rewards),
        cu_seqlens,
        flat["loss_mask"],
        gamma,
    )
    return returns.reshape(rewards.shape)


def _terminal(rewards: Tensor | None) -> Tensor | None:
    return None if rewards is None else rewards.detach().to(torch.float64).contiguous()


def _gae_fake(rewards: Any, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(values), torch.empty_like(values)


def _discounted_returns_fake(rewards: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(rewards)


register_fake("gae", _gae_fake)
register_fake("discounted_returns", _discounted_returns_fake)
