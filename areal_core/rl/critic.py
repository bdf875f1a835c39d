"""The critic: a value model trained beside the policy, for estimators that need values (ppo, orz)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from areal_core import ops
from areal_core.model import PackedDecoder, ValueModel
from areal_core.rl.batch import Microbatch
from areal_core.rl.config import CriticConfig, TrainConfig

__all__ = ["Critic"]


class Critic:
    """A value model that starts as a copy of the policy, and its optimizer.

    Args:
        policy: the policy it starts from.
        config: learning rate and value clipping.
        train: the optimizer's other settings, shared with the policy.
    """

    def __init__(self, policy: PackedDecoder, config: CriticConfig, train: TrainConfig) -> None:
        self.model = ValueModel.from_policy(policy)
        self.config = config
        self._grad_clip = train.grad_clip
        options: Any = {"betas": train.betas, "weight_decay": train.weight_decay, "fused": True}
        self._optimizer = torch.optim.AdamW(self.model.parameters(), config.learning_rate, **options)

    def values(self, micro: Microbatch) -> Tensor:
        """Value [R] of the state in which each token of `micro.tokens` was drawn."""
        values: Tensor = self.model(micro.input_ids, micro.cu_seqlens, cu_groups=micro.cu_groups, rows=micro.rows)
        return values

    def update(self, microbatches: Sequence[Microbatch], old_values: Tensor, returns: Tensor) -> dict[str, float]:
        """One optimizer step towards the returns, as a mean over the mini-batch's live tokens.

        Args:
            microbatches: of one mini-batch.
            old_values: [N], values before the step, which clipping stays near.
            returns: [N], what the values should have been.

        Returns:
            metrics of the step. A gradient that is not finite leaves the critic alone.
        """
        normalizer = float(sum(len(micro.tokens) for micro in microbatches))
        stats = []
        for micro in microbatches:
            output = ops.value_loss(
                self.values(micro),
                old_values[micro.tokens],
                returns[micro.tokens],
                torch.ones_like(micro.tokens, dtype=torch.bool),
                clip=self.config.clip,
                normalizer=normalizer,
            )
            torch.autograd.backward(output.loss)
            stats.append(output.stats)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._grad_clip))
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad()
        summary = ops.ValueLossStats.merge(stats).finalize()
        return {"critic/loss": float(summary.loss), "critic/grad_norm": norm}

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer."""
        return {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
