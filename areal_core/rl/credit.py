"""Credit: an advantage for every response token of a batch, from rewards, reference, critic and greedy baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_core import ops
from areal_core.rl.batch import Batch
from areal_core.rl.config import Config

__all__ = ["CreditAssigner", "mean_advantages"]


class CreditAssigner:
    """Shapes rewards and estimates advantages as a run configures it; keeps the KL coefficient where it adapts."""

    def __init__(self, config: Config) -> None:
        self._config = config.advantage
        self._estimator = ops.get_estimator(config.advantage.name, **config.advantage.options)
        shaping = {f.name: getattr(config.reward, f.name) for f in fields(ops.RewardConfig)}
        self._shaping = ops.RewardConfig(**shaping)
        self._target = config.reward
        loss = config.loss  # what gives tokens a gradient even without an advantage
        self._loss_has_more = any((loss.distill_coef, loss.kl_coef, loss.entropy_coef))
        self.metrics: dict[str, float] = {}  # of the last batch

    @property
    def drops_zero_variance(self) -> bool:
        """Whether groups of equal rewards stay out of the update: as configured, or where they get no advantage."""
        config, estimator = self._config, self._estimator
        if config.drop_zero_variance is not None:
            return config.drop_zero_variance
        shaped = self._shaping.kl_coef != 0 or self._shaping.overlong_buffer > 0 or config.beta != 0
        others = estimator.critic or estimator.whiten or shaped or self._loss_has_more
        return estimator.mean_level == "group" and not others

    def assign(
        self,
        batch: Batch,
        *,
        logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Advantages, and without their whitening: float32 [N] on the CPU; 0 for tokens that are not live.

        The second is what a critic learns from, since whitened advantages are no longer on the scale of its values.

        Args:
            batch: the batch.
            logprobs, ref_logprobs: [N] of the policy before the step and of the reference, where a KL counts.
            values: [N] of the critic before the step, for estimators that have one.
        """
        if not batch.samples:
            return torch.zeros(0), torch.zeros(0)
        config, shaping = self._config, self._shaping
        layout: dict[str, Any] = {
            "cu_seqlens": torch.from_numpy(batch.response_bounds),
            "loss_mask": torch.from_numpy(batch.live),
        }
        policies = {"logprobs": _double(logprobs), "ref_logprobs": _double(ref_logprobs)}
        unused = dict.fromkeys(policies)
        shaped = ops.shape_rewards(
            torch.from_numpy(batch.rewards), shaping, **layout, **(policies if shaping.kl_coef else unused)
        )
        separate = self._estimator.critic and self._estimator.whiten
        greedy = None
        if self._estimator.greedy_baseline:
            lengths = torch.from_numpy(batch.greedy_lengths)
            bounds = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
            rewards = torch.from_numpy(batch.greedy_rewards)
            greedy = ops.shape_rewards(rewards, replace(shaping, kl_coef=0.0), cu_seqlens=bounds).rewards
        plain = ops.compute_advantages(
            replace(self._estimator, whiten=False) if separate else self._estimator,
            rewards=shaped.rewards[:, None] if self._estimator.per_reward else shaped.rewards,  # a task has one
            token_rewards=shaped.token_rewards,
            group_ids=torch.from_numpy(batch.group_of),
            values=_double(values),
            greedy_rewards=greedy,
            beta=config.beta,
            gamma=config.gamma,
            lam=config.lam,
            **layout,
            **(policies if config.beta else unused),
        )
        if shaping.kl_coef:
            self._adapt(batch, policies)
        if not separate:
            return plain.float(), plain.float()
        e = self._estimator
        advantages = ops.whiten(plain, loss_mask=layout["loss_mask"], ddof=e.ddof, eps=e.eps, eps_in_root=e.eps_in_root)
        return advantages.float(), plain.float()

    def state_dict(self) -> dict[str, Any]:
        """The KL coefficient, which adapts."""
        return {"kl_coef": self._shaping.kl_coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, where the coefficient adapts."""
        if self._target.kl_target is not None and state.get("kl_coef"):
            self._shaping = replace(self._shaping, kl_coef=float(state["kl_coef"]))

    def _adapt(self, batch: Batch, policies: Mapping[str, Tensor | None]) -> None:
        logprobs, reference = policies["logprobs"], policies["ref_logprobs"]
        assert logprobs is not None
        assert reference is not None
        live = torch.from_numpy(batch.live)
        kl = float(ops.kl_penalty(logprobs, reference, loss_mask=live).sum()) / batch.samples
        self.metrics = {"reward/kl_coef": self._shaping.kl_coef, "reward/kl_per_response": kl}
        if self._target.kl_target is not None:
            control = ops.AdaptiveKL(self._shaping.kl_coef, self._target.kl_target, self._target.kl_horizon)
            self._shaping = replace(self._shaping, kl_coef=control.update(kl, batch.samples).coef)


def mean_advantages(batch: Batch, advantages: Tensor) -> list[float]:
    """Mean over the live tokens of each sample; 0 for a sample without any."""
    if not batch.samples:
        return []
    starts = batch.response_bounds[:-1]
    sums = np.add.reduceat(np.where(batch.live, advantages.numpy(), 0.0), starts)
    means: list[float] = (sums / np.maximum(np.add.reduceat(batch.live, starts, dtype=np.int64), 1)).tolist()
    return means


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().double().cpu()
