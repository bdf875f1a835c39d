"""ppo_loss against its definition in fp64, and the promises of its docstring."""

from typing import Any

import pytest
import torch
from torch import Tensor

from areal_core import _C, ops
from areal_core.reference import loss as reference

PPOLossConfig = ops.PPOLossConfig

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
# 16, 2048: the vector and block sizes of the CPU kernel; the others leave every kind of remainder.
SIZES = [0, 1, 3, 15, 16, 17, 31, 33, 255, 2047, 2048, 2049, 5000]
ISAS = ["baseline", "avx2", "avx512"]
ISAS = ISAS[: 1 + ISAS.index(_C.best_isa())]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Any:
    _C.set_active_isa(request.param)
    yield request.param
    _C.set_active_isa(_C.best_isa())


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
    out = ops.ppo_loss(**{**batch, **leaves}, config=config, **kwargs)
    grads = torch.autograd.grad(out.loss, list(leaves.values()), allow_unused=True)
    return out.loss.detach(), *grads, out.stats.raw


def run_reference(batch: dict[str, Tensor], config: PPOLossConfig, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    leaves = {name: batch[name].double().requires_grad_() for name in ("logprobs", "entropy")}
    loss, stats = reference.ppo_loss(**{**batch, **leaves}, config=config, **kwargs)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return loss.detach(), *grads, stats


def assert_summary(raw: Tensor, stats: dict[str, Tensor], rtol: float, atol: float) -> None:
    summary = ops.PPOLossStats(raw).finalize()._asdict()
    assert summary.keys() == stats.keys()
    for name, value in summary.items():
        torch.testing.assert_close(value, stats[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens", [1, 17, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_matches_the_definition(variant: str, tokens: int, dtype: torch.dtype) -> None:
    batch, config = make_batch(tokens, dtype, seed=tokens), VARIANTS[variant]
    loss, grad, grad_entropy, raw = run(batch, config)
    true_loss, true_grad, true_grad_entropy, stats = run_reference(batch, config)
    rtol, atol = (2e-6, 1e-6) if dtype == torch.float32 else (1e-12, 1e-13)
    torch.testing.assert_close(loss.double(), true_loss, rtol=rtol, atol=atol)
    torch.testing.assert_close(grad.double(), true_grad, rtol=rtol, atol=atol / tokens)
    torch.testing.assert_close(grad_entropy.double(), true_grad_entropy, rtol=rtol, atol=atol / tokens)
    assert_summary(raw, stats, rtol, atol)
