"""ppo_loss against torch: decoupled PPO, forward and backward, with the statistics that a trainer logs.

python bench/bench_loss.py --tokens 1000000 --threads 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from areal_core import ops
from areal_core.ops import PPOLossConfig
from areal_core.reference import loss as reference

from harness import Bench, argument_parser, assert_close, reuse_freed_memory

CONFIG = PPOLossConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0, behavior_cap=5.0)
FLOPS = 40  # per token, about: two exp, two ratios, clips, the gradient, twelve statistics
LIVE = 0.8  # share of tokens that the loss mask keeps


def make_batch(tokens: int, device: str) -> dict[str, Tensor]:
    proximal = -torch.rand(tokens, device=device) * 3
    return {
        "logprobs": proximal + 0.1 * torch.randn(tokens, device=device),
        "proximal_logprobs": proximal,
        "advantages": torch.randn(tokens, device=device),
        "loss_mask": torch.rand(tokens, device=device) < LIVE,
        "behavior_logprobs": proximal + 0.1 * torch.randn(tokens, device=device),
    }


def eager_terms(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, behavior_logprobs: Tensor
) -> tuple[Tensor, ...]:
    """Loss, per-token ratio, weight before the cap, and the clipped tokens."""
    log_ratio = torch.where(loss_mask, logprobs - proximal_logprobs, 0.0).clamp(-20, 20)
    log_weight = torch.where(loss_mask, proximal_logprobs - behavior_logprobs, 0.0).clamp(-20, 20)
    ratio, weight = log_ratio.exp(), log_weight.exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - CONFIG.clip_low, 1 + CONFIG.clip_high) * advantages
    dual = -CONFIG.dual_clip * advantages
    term = torch.maximum(unclipped, clipped)
    term = torch.where(advantages < 0, torch.minimum(term, dual), term) * weight.clamp(max=CONFIG.behavior_cap)
    loss = torch.where(loss_mask, term, 0.0).sum() / loss_mask.sum()
    return loss, log_ratio, ratio, log_weight, weight, unclipped < clipped


def eager_loss(batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return eager_terms(**batch)[0], {}


def eager_loss_and_statistics(batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss, log_ratio, ratio, log_weight, weight, was_clipped = eager_terms(**batch)
    with torch.no_grad():
        mask, advantages = batch["loss_mask"], batch["advantages"]
        live = mask.sum()

        def mean(x: Tensor) -> Tensor:
            return torch.where(mask, x, 0).sum() / live

        applied = torch.where(mask, weight.clamp(max=CONFIG.behavior_cap), 0.0)
        statistics = {
            "ratio_mean": mean(ratio),
            "ratio_min": torch.where(mask, ratio, torch.inf).min(),
            "ratio_max": torch.where(mask, ratio, 0.0).max(),
            "clip_fraction_low": mean(was_clipped & (advantages < 0)),
            "clip_fraction_high": mean(was_clipped & (advantages > 0)),
            "clip_fraction_dual": mean((advantages < 0) & (ratio > CONFIG.dual_clip)),
            "kl_proximal_current_k1": mean(-log_ratio),
            "kl_proximal_current_k3": mean(torch.expm1(log_ratio) - log_ratio),
            "kl_behavior_proximal_k1": mean(-log_weight),
            "kl_behavior_proximal_k3": mean(torch.expm1(log_weight) - log_weight),
            "behavior_weight_mean": mean(weight),
            "behavior_weight_max": torch.where(mask, weight, 0.0).max(),
            "behavior_capped_fraction": mean(weight > CONFIG.behavior_cap),
            "effective_sample_size": applied.sum().square() / applied.square().sum(),
        }
    return loss, statistics


def ours(batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    out = ops.ppo_loss(**batch, config=CONFIG)
    return out.loss, out.stats.finalize()._asdict()


def forward_and_backward(
    function: Callable[[dict[str, Tensor]], Any], batch: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    leaf = batch["logprobs"].detach().requires_grad_()
    loss, statistics = function({**batch, "logprobs": leaf})
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad, statistics


def run_case(bench: Bench, tokens: int, device: str, compiled: bool) -> None:
    batch = make_batch(tokens, device)
    leaf = batch["logprobs"].double().requires_grad_()
    true_loss, true_statistics = reference.ppo_loss(**{**batch, "logprobs": leaf}, config=CONFIG)
    (true_grad,) = torch.autograd.grad(true_loss, leaf)

    def check(name: str, result: tuple[Tensor, Tensor, dict[str, Tensor]]) -> None:
        loss, grad, statistics = result
        assert_close(f"{name}: loss", loss, true_loss, 1e-6)
        assert_close(f"{name}: gradient", grad, true_grad, 1e-5 / tokens, 1e-5)
        for statistic, value in statistics.items():
            assert_close(f"{name}: {statistic}", value, true_statistics[statistic], 1e-5, 1e-4)

    providers = {
        "torch, with statistics": lambda: forward_and_backward(eager_loss_and_statistics, batch),
        "torch, loss only": lambda: forward_and_backward(eager_loss, batch),
        "ours (with statistics)": lambda: forward_and_backward(ours, batch),
    }
    if compiled:
        fused = torch.compile(eager_loss_and_statistics, dynamic=False)
        providers["torch.compile of the first"] = lambda: forward_and_backward(fused, batch)
    # Four fp32 inputs and a mask are read, the gradient is written; backward scales it by the upstream scalar.
    bench.compare(
        f"T = {tokens}: decoupled PPO, forward and backward",
        providers,
        check=check,
        read_bytes=21 * tokens,
        written_bytes=8 * tokens,
        flops=FLOPS * tokens,
    )


def main() -> None:
    parser = argument_parser("Benchmark of ppo_loss.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--compile", action="store_true", help="also time torch.compile of the eager code")
    args = parser.parse_args()
    reuse_freed_memory()
    bench = Bench("loss", args)
    for tokens in args.tokens:
        run_case(bench, tokens, args.device, args.compile)
    bench.save()


if __name__ == "__main__":
    main()
