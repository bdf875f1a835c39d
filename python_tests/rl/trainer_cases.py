"""Batches and runs that the tests of the trainer share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from areal_core.model import PackedDecoder
from areal_core.rl.config import (
    Config,
    RolloutConfig,
    TrainConfig,
)
from areal_core.rl.data import Group
from areal_core.rl.trainer import Trainer

from .trajectories import make_groups, make_model, whole_sequence_logprobs

VERSION = 5


def make_config(**sections: Any) -> Config:
    train = TrainConfig(learning_rate=1e-3, lr_warmup_steps=0, minibatches=1, **sections.pop("train", {}))
    return Config(**{"rollout": RolloutConfig(eta=math.inf), "train": train, **sections})


def batch_of(seed: int = 0, sizes: tuple[int, ...] = (4, 3, 5, 2), **options: Any) -> list[Group]:
    return make_groups(np.random.default_rng(seed), list(sizes), version=VERSION, **options)


def with_exact_logprobs(model: PackedDecoder, groups: list[Group], temperature: float = 1.0) -> list[Group]:
    """The same responses as if `model` had just sampled them."""
    out = []
    for group in groups:
        trajectories = [
            replace(
                t,
                logprobs=whole_sequence_logprobs(model, t, temperature).detach().numpy(),
                versions=np.full(len(t.response_ids), VERSION, dtype=np.int64),
            )
            for t in group.trajectories
        ]
        out.append(replace(group, trajectories=tuple(trajectories)))
    return out


def trained(config: Config, *batches: list[Group]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Weights after training from the same start, and the metrics of the last step."""
    trainer = Trainer(make_model(), config)
    metrics: dict[str, Any] = {}
    for number, batch in enumerate(batches):
        metrics, _ = trainer.step(batch, VERSION + number)
    return trainer.model.weights.detach(), metrics


def step_gradient(
    config: Config, groups: list[Group], monkeypatch: pytest.MonkeyPatch, reference: PackedDecoder | None = None
) -> torch.Tensor:
    """The gradient that reaches the optimizer, before clipping."""
    trainer = Trainer(make_model(), config, reference=reference)
    seen: list[torch.Tensor] = []
    update = trainer._update

    def spy(rate: float) -> float:
        seen.append(trainer.model.weights.grad.clone())
        return update(rate)

    monkeypatch.setattr(trainer, "_update", spy)
    trainer.step(groups, VERSION)
    (gradient,) = seen
    return gradient
