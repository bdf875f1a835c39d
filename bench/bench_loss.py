"""The losses against torch, forward and backward, with the statistics that a trainer logs: decoupled PPO, the variants
of ppo_loss beside each other, and the value loss.

python bench/bench_loss.py --tokens 1000000 --threads 1 --length 1000
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


# Each beside the default, with behavior weights.
VARIANTS = {
    "decoupled PPO": CONFIG,
    "CISPO": PPOLossConfig.preset("cispo"),
    "SAPO": PPOLossConfig(objective="sapo"),
    "REINFORCE with ratio": PPOLossConfig(objective="reinforce"),
    "k3 penalty": PPOLossConfig(kl_coef=0.1),
    "sequence means": PPOLossConfig(aggregation="sequence_mean_token_mean"),
    "sequence weights": PPOLossConfig(behavior_level="geometric", behavior_cap=2.0),
    "GSPO": PPOLossConfig.preset("gspo"),
    "GMPO": PPOLossConfig.preset("gmpo"),
}


def run_variants(bench: Bench, tokens: int, length: int, device: str) -> None:
    batch = make_batch(tokens, device)
    bounds = torch.arange(0, tokens, length, device=device)
    cu_seqlens = torch.cat((bounds, torch.tensor([tokens], device=device)))

    def inputs(config: PPOLossConfig) -> dict[str, Any]:
        given: dict[str, Any] = {"ref_logprobs": batch["proximal_logprobs"]} if config.kl_coef else {}
        return given | ({"cu_seqlens": cu_seqlens} if config.needs_sequences else {})

    def provider(config: PPOLossConfig) -> Callable[[], Any]:
        def loss(leaves: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            out = ops.ppo_loss(**leaves, **inputs(config), config=config)
            return out.loss, out.stats.finalize()._asdict()

        return lambda: forward_and_backward(loss, batch)

    def check(name: str, result: tuple[Tensor, Tensor, dict[str, Tensor]]) -> None:
        config = VARIANTS[name]
        leaf = batch["logprobs"].double().cpu().requires_grad_()
        given = {key: x.cpu() for key, x in (batch | inputs(config)).items()}
        truth, _ = reference.ppo_loss(**{**given, "logprobs": leaf}, config=config)
        (true_grad,) = torch.autograd.grad(truth, leaf)
        assert_close(f"{name}: loss", result[0], truth, 2e-6)
        assert_close(f"{name}: gradient", result[1], true_grad, 1e-5 * float(true_grad.abs().max()), 1e-5)

    bench.compare(
        f"T = {tokens}, sequences of {length}: variants of ppo_loss, forward and backward",
        {name: provider(config) for name, config in VARIANTS.items()},
        check=check,
        read_bytes=21 * tokens,
        written_bytes=8 * tokens,
    )


def eager_value_loss(batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    values, old, returns, mask = (batch[k] for k in ("logprobs", "proximal_logprobs", "advantages", "loss_mask"))
    held = (old + (values - old).clamp(-0.2, 0.2) - returns).square()
    free = (values - returns).square()
    live = mask.sum()
    loss = 0.5 * torch.where(mask, torch.maximum(free, held), 0.0).sum() / live
    with torch.no_grad():
        error = (returns - values)[mask].double()
        explained = 1 - error.var(correction=0) / returns[mask].double().var(correction=0)
        clipped = ((held > free) & mask).sum() / live
    return loss, {"clip_fraction": clipped, "explained_variance": explained}


def our_value_loss(batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    names = ("logprobs", "proximal_logprobs", "advantages", "loss_mask")
    out = ops.value_loss(*(batch[name] for name in names), clip=0.2)
    return out.loss, out.stats.finalize()._asdict()


def run_value_loss(bench: Bench, tokens: int, device: str) -> None:
    batch = make_batch(tokens, device)
    first = forward_and_backward(
        eager_value_loss, {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
    )

    def check(name: str, result: tuple[Tensor, Tensor, dict[str, Tensor]]) -> None:
        assert_close(f"{name}: loss", result[0], first[0], 1e-6, 1e-6)
        assert_close(f"{name}: gradient", result[1], first[1], 1e-5 / tokens, 1e-5)
        for statistic in ("clip_fraction", "explained_variance"):
            assert_close(f"{name}: {statistic}", result[2][statistic], first[2][statistic], 1e-5, 1e-5)

    bench.compare(
        f"T = {tokens}: value loss with clipping, forward and backward",
        {
            "torch, with statistics": lambda: forward_and_backward(eager_value_loss, batch),
            "ours (with statistics)": lambda: forward_and_backward(our_value_loss, batch),
        },
        check=check,
        read_bytes=17 * tokens,
        written_bytes=8 * tokens,
    )


def main() -> None:
    parser = argument_parser("Benchmark of ppo_loss.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--length", type=int, default=1000, help="tokens of a sequence, for what goes by sequence")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile of the eager code")
    args = parser.parse_args()
    reuse_freed_memory()
    bench = Bench("loss", args)
    for tokens in args.tokens:
        run_case(bench, tokens, args.device, args.compile)
        run_variants(bench, tokens, args.length, args.device)
        run_value_loss(bench, tokens, args.device)
    bench.save()


if __name__ == "__main__":
    main()
