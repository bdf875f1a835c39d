"""Batches and variants that the tests of ppo_loss share."""

from typing import Any

import torch
from op_checks import ISAS
from torch import Tensor

from areal_core import _C
from areal_core.ops import PPOLossConfig, PPOLossStats, ppo_loss
from areal_core.reference import loss as reference

RUNNABLE_ISAS = ISAS[: ISAS.index(_C.best_isa()) + 1]

VARIANTS = {
    "default": PPOLossConfig(),
    "clip_higher": PPOLossConfig(clip_low=0.1, clip_high=0.3),
    "dual": PPOLossConfig(dual_clip=1.1),
    "truncate": PPOLossConfig(behavior_cap=1.2),
    "mask": PPOLossConfig(behavior_cap=1.2, behavior_mode="mask"),
    "mask_low": PPOLossConfig(behavior_low=0.9, behavior_mode="mask"),
    "icepop": PPOLossConfig(behavior_low=0.8, behavior_cap=1.3, behavior_mode="icepop"),
    "k1": PPOLossConfig(kl_coef=0.3, kl_estimator="k1"),
    "k2": PPOLossConfig(kl_coef=0.3, kl_estimator="k2"),
    "k3": PPOLossConfig(kl_coef=0.3, kl_estimator="k3"),
    "entropy": PPOLossConfig(entropy_coef=0.1),
    "all": PPOLossConfig(clip_high=0.28, dual_clip=1.5, behavior_cap=1.5, kl_coef=0.1, entropy_coef=0.01),
}


def make_batch(
    tokens: int, dtype: torch.dtype = torch.float32, *, live: float = 0.7, seed: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(tokens, generator=generator, dtype=torch.float64)

    proximal = -normal(1.0).abs() - 0.5
    batch = {
        "logprobs": proximal + normal(0.25),
        "proximal_logprobs": proximal,
        "advantages": normal(1.0),
        "behavior_logprobs": proximal + normal(0.2),
        "ref_logprobs": proximal + normal(0.3),
        "entropy": normal(1.0).abs(),
    }
    batch = {name: tensor.to(dtype) for name, tensor in batch.items()}
    batch["loss_mask"] = torch.rand(tokens, generator=generator) < live
    return batch


def run(batch: dict[str, Tensor], config: PPOLossConfig, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, gradients of logprobs and entropy, raw statistics."""
    leaves = {name: batch[name].clone().requires_grad_() for name in ("logprobs", "entropy")}
    out = ppo_loss(**{**batch, **leaves}, config=config, **kwargs)
    grads = torch.autograd.grad(out.loss, list(leaves.values()))
    return out.loss.detach(), *grads, out.stats.raw


def run_reference(batch: dict[str, Tensor], config: PPOLossConfig, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    leaves = {name: batch[name].double().requires_grad_() for name in ("logprobs", "entropy")}
    loss, stats = reference.ppo_loss(**{**batch, **leaves}, config=config, **kwargs)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return loss.detach(), *grads, stats


def assert_summary(raw: Tensor, stats: dict[str, Tensor], rtol: float, atol: float) -> None:
    summary = PPOLossStats(raw).finalize()._asdict()
    assert summary.keys() == stats.keys()
    for name, value in summary.items():
        torch.testing.assert_close(value, stats[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
