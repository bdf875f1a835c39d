"""Batches and variants that the tests of ppo_loss share."""

from typing import Any

import torch
from op_checks import ISAS
from torch import Tensor

from areal_core import _C
from areal_core.ops import PPOLossConfig, PPOLossStats, ppo_loss
from areal_core.reference import loss as reference

RUNNABLE_ISAS = ISAS[: ISAS.index(_C.best_isa()) + 1]
CURRENT_VERSION = 7

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
    "k3_unbiased": PPOLossConfig(kl_coef=0.3, kl_estimator="k3_unbiased", behavior_cap=1.2),
    "entropy": PPOLossConfig(entropy_coef=0.1),
    "distill": PPOLossConfig(distill_coef=0.5),
    "all": PPOLossConfig(
        clip_high=0.28, dual_clip=1.5, behavior_cap=1.5, kl_coef=0.1, entropy_coef=0.01, distill_coef=0.1
    ),
    "cispo": PPOLossConfig(objective="cispo", clip_low=0.1, clip_high=0.2, behavior_cap=1.2),
    "sapo": PPOLossConfig(objective="sapo", behavior_cap=1.2),
    "reinforce": PPOLossConfig(objective="reinforce", behavior_cap=1.2),
    "log_likelihood": PPOLossConfig(objective="reinforce", ratio_level="off"),
    "gspo": PPOLossConfig(ratio_level="sequence", clip_low=0.02, clip_high=0.03),
    "gspo_dual": PPOLossConfig(ratio_level="sequence", clip_low=0.02, clip_high=0.03, dual_clip=1.05, distill_coef=0.1),
    "gspo_weighted": PPOLossConfig(ratio_level="sequence", clip_low=0.02, behavior_cap=1.2, kl_coef=0.1),
    "product": PPOLossConfig(ratio_level="sequence_product", clip_low=0.2, clip_high=0.3),
    "cispo_sequence": PPOLossConfig(objective="cispo", ratio_level="sequence", clip_low=0.02, clip_high=0.02),
    "sapo_sequence": PPOLossConfig(objective="sapo", ratio_level="sequence"),
    "reinforce_sequence": PPOLossConfig(objective="reinforce", ratio_level="sequence_product"),
    "gmpo": PPOLossConfig(objective="gmpo", ratio_level="sequence", clip_low=0.2, clip_high=0.25),
    "weight_sequence": PPOLossConfig(behavior_level="sequence", behavior_cap=1.5),
    "weight_geometric": PPOLossConfig(
        behavior_level="geometric", behavior_mode="icepop", behavior_low=0.97, behavior_cap=1.03
    ),
    "gspo_weight_sequence": PPOLossConfig(
        ratio_level="sequence", clip_low=0.02, behavior_level="sequence", behavior_cap=1.5, entropy_coef=0.01
    ),
}
AGGREGATIONS = ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant")


def make_batch(
    tokens: int, dtype: torch.dtype = torch.float32, *, live: float = 0.7, seed: int = 0
) -> dict[str, Tensor]:
    """Every input there is. Sequences of mixed lengths, some of them empty."""
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
        "teacher_logprobs": proximal + normal(0.3),
    }
    batch = {name: tensor.to(dtype) for name, tensor in batch.items()}
    batch["loss_mask"] = torch.rand(tokens, generator=generator) < live
    batch["keep_mask"] = torch.rand(tokens, generator=generator) < 0.9
    batch["versions"] = torch.randint(-1, CURRENT_VERSION + 1, (tokens,), generator=generator)
    ends = [0, 0]
    while ends[-1] < tokens:
        length = (1, 3, 0, 40, 7, 333)[int(torch.randint(6, (), generator=generator))]
        ends.append(min(tokens, ends[-1] + length))
    batch["cu_seqlens"] = torch.tensor(ends)
    return batch


def sequences_of(batch: dict[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    """The sequences [first, last) as a batch of their own."""
    cu = batch["cu_seqlens"]
    tokens = slice(int(cu[first]), int(cu[last]))
    part = {name: x[tokens] for name, x in batch.items() if name != "cu_seqlens"}
    return {**part, "cu_seqlens": cu[first : last + 1] - cu[first]}


def run(batch: dict[str, Tensor], config: PPOLossConfig, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, gradients of logprobs and entropy, raw statistics."""
    leaves = {name: batch[name].clone().requires_grad_() for name in ("logprobs", "entropy")}
    out = ppo_loss(**{**batch, **leaves}, current_version=CURRENT_VERSION, config=config, **kwargs)
    grads = torch.autograd.grad(out.loss, list(leaves.values()))
    return out.loss.detach(), *grads, out.stats.raw


def run_reference(batch: dict[str, Tensor], config: PPOLossConfig, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    """The same from the oracle, on one thread: its many small operations only wait for more. (conftest resets it.)"""
    torch.set_num_threads(1)
    leaves = {name: batch[name].double().requires_grad_() for name in ("logprobs", "entropy")}
    loss, stats = reference.ppo_loss(**{**batch, **leaves}, current_version=CURRENT_VERSION, config=config, **kwargs)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return loss.detach(), *grads, stats


def assert_summary(raw: Tensor, stats: dict[str, Tensor], rtol: float, atol: float) -> None:
    summary = PPOLossStats(raw).finalize()._asdict()
    assert summary.keys() == stats.keys()
    for name, value in summary.items():
        torch.testing.assert_close(value, stats[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
