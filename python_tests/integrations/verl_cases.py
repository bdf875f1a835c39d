"""Batches, options and comparisons that the tests of verl's functions share; verl itself is imported late."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
TOTALS: tuple[dict[str, Any], ...] = (
    {},
    {"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 12, "loss_scale_factor": 9},
    {"dp_size": 1, "batch_num_tokens": torch.tensor(50), "global_batch_size": None, "loss_scale_factor": None},
)


class Config(SimpleNamespace):
    """The fields of verl's ActorConfig that its losses read, with its `get`."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def actor_config(totals: dict[str, Any] | None = None, **changes: Any) -> Any:
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **changes)
    config.global_batch_info.update(totals or {})
    return config


def unpatched(function: Callable[..., Any]) -> Callable[..., Any]:
    original = getattr(function, "__wrapped__", None)
    assert original is not None, f"{function} is not replaced"
    return original


def batch(dtype: torch.dtype = torch.float32, seed: int = 0, rows: int = 6, columns: int = 11) -> dict[str, Tensor]:
    """Rows of every length from 0 up, with a hole in one of them, and ratios on both sides of every bound."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape, scale=1.0: torch.randn(*shape, generator=g, dtype=torch.float64) * scale  # noqa: E731
    old = -normal(rows, columns).abs() - 0.1
    mask = torch.arange(columns) < torch.arange(rows)[:, None] * 2 + 1
    mask[0] = False
    mask[-1, 3:6] = False
    x = {
        "old_log_prob": old,
        "log_prob": old + normal(rows, columns, scale=0.5),
        "advantages": normal(rows, 1).expand(rows, columns).clone(),
        "rollout_is_weights": normal(rows, columns, scale=0.3).exp(),
    }
    x["rollout_is_weights"][2, :3] = 0
    return {name: tensor.to(dtype) for name, tensor in x.items()} | {"response_mask": mask}


def run_loss(
    function: Callable[..., Any], x: dict[str, Any], **options: Any
) -> tuple[Tensor, Tensor, dict[str, float]]:
    x = dict(x)
    leaf = x.pop("log_prob").clone().requires_grad_()
    x["response_mask"] = x["response_mask"].clone()
    loss, metrics = function(x.pop("old_log_prob"), leaf, **x, **options)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad, metrics


def assert_same(ours: Any, theirs: Any, tolerance: float) -> None:
    """Loss, gradient and metrics alike, NaN nowhere."""
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        scale = max(float(b.abs().max()), 1e-3)
        assert a.dtype == b.dtype
        assert bool(((a - b).abs() <= tolerance * scale).all()), (a, b)
    assert set(ours[2]) == set(theirs[2])
    for name in theirs[2]:
        assert ours[2][name] == pytest.approx(theirs[2][name], abs=10 * tolerance), name


def rewards_batch(name: str, options: dict[str, Any]) -> dict[str, Any]:
    g = torch.Generator().manual_seed(3)
    rows, columns = 9, 12
    mask = torch.arange(columns) < torch.tensor([12, 3, 7, 1, 9, 12, 5, 8, 10])[:, None]
    mask[0, 4:7] = False  # a tool's turn
    x: dict[str, Any] = {
        "token_level_rewards": torch.randn(rows, columns, generator=g) * mask,
        "response_mask": mask.float(),
    }
    if name == "gae":
        x["values"] = torch.randn(rows, columns, generator=g)
    elif name == "remax":
        x["reward_baselines"] = torch.randn(rows, generator=g)
    elif name != "reinforce_plus_plus":
        x["index"] = np.array(["a", "b", "a", "c", "b", "a", "c", "d", "d"], dtype=object)
    if name == "gdpo" and "kinds" in options:
        x["batch"] = {
            "prompts": torch.zeros(rows, 2),
            "attention_mask": torch.ones(rows, 2 + columns, dtype=torch.int64),
        }
        x["non_tensor_batch"] = {k: torch.randn(rows, generator=g).numpy() for k in ("format", "accuracy")}
        x["config"] = Config(gdpo_reward_keys=["format", "accuracy"], gdpo_reward_weights=options["kinds"])
    return x | {k: v for k, v in options.items() if k != "kinds"}
