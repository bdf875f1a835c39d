"""Scans, whitening, KL in the reward and group scores against what plain torch makes of them.

Scans: a Python loop over time, all sequences abreast. Groups: a Python loop over groups.

python bench/bench_scan.py --sequences 512 --length 4096 --threads 1
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_core import ops
from areal_core.reference import advantages as reference

from harness import Bench, argument_parser, assert_close, reuse_freed_memory

GAMMA, LAM = 0.99, 0.95
CHECKED_SEQUENCES = 3
GROUP_SIZE = 8


def eager_gae(rewards: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """[S, L]: all sequences step back through time together; masked tokens carry the state across."""
    advantages = torch.zeros_like(rewards)
    advantage = next_value = torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        value = values[:, t]
        stepped = rewards[:, t] + GAMMA * next_value - value + GAMMA * LAM * advantage
        if mask is None:
            advantage, next_value = stepped, value
            advantages[:, t] = stepped
        else:
            advantage = torch.where(mask[:, t], stepped, advantage)
            next_value = torch.where(mask[:, t], value, next_value)
            advantages[:, t] = torch.where(mask[:, t], stepped, 0.0)
    returns = advantages + values
    return advantages, returns if mask is None else torch.where(mask, returns, 0.0)


def gae_case(bench: Bench, sequences: int, length: int, device: str, masked: bool) -> None:
    rewards, values = torch.randn(2, sequences, length, device=device)
    # A prompt, then turns of 200 live and 50 masked tokens.
    columns = torch.arange(length, device=device)
    mask = ((columns >= length // 8) & (columns % 250 < 200)).expand(sequences, length) if masked else None
    cu_seqlens = torch.arange(sequences + 1, device=device) * length
    packed = (rewards.flatten(), values.flatten(), cu_seqlens)
    packed_mask = None if mask is None else mask.flatten()
    few = CHECKED_SEQUENCES * length
    truth = reference.gae(
        packed[0][:few],
        packed[1][:few],
        cu_seqlens[: CHECKED_SEQUENCES + 1],
        gamma=GAMMA,
        lam=LAM,
        loss_mask=None if packed_mask is None else packed_mask[:few],
    )

    def check(name: str, result: tuple[Tensor, Tensor]) -> None:
        for value, true in zip(result, truth, strict=True):
            assert_close(name, value.flatten()[:few], true, 1e-4, 1e-5)

    tokens = sequences * length
    bench.compare(
        f"GAE, {sequences} sequences of {length} tokens" + (", masked turns" if masked else ""),
        {
            "torch, loop over time": lambda: eager_gae(rewards, values, mask),
            "ours": lambda: ops.gae(*packed, gamma=GAMMA, lam=LAM, loss_mask=packed_mask),
        },
        check=check,
        read_bytes=tokens * (9 if masked else 8),
        written_bytes=8 * tokens,
        flops=6 * tokens,  # delta, two multiply-adds of the recurrence, the return
    )


def eager_returns(rewards: Tensor) -> Tensor:
    returns = torch.empty_like(rewards)
    ahead = torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        ahead = returns[:, t] = rewards[:, t] + GAMMA * ahead
    return returns


def eager_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Masked mean and variance as the libraries write them, in float32."""
    count = mask.sum()
    mean = (x * mask).sum() / count
    variance = ((x - mean).square() * mask).sum() / (count - 1)
    return torch.where(mask, (x - mean) * (variance + 1e-8).rsqrt(), 0.0)


def returns_case(bench: Bench, sequences: int, length: int, device: str) -> None:
    rewards = torch.randn(sequences, length, device=device)
    few = rewards[:CHECKED_SEQUENCES]
    zeros = torch.zeros_like(few).flatten()
    cu_seqlens = torch.arange(CHECKED_SEQUENCES + 1) * length
    truth = reference.gae(few.flatten(), zeros, cu_seqlens, gamma=GAMMA, lam=1.0)[1].reshape(few.shape)
    tokens = sequences * length
    bench.compare(
        f"discounted returns, {sequences} sequences of {length} tokens",
        {
            "torch, loop over time": lambda: eager_returns(rewards),
            "ours": lambda: ops.discounted_returns(rewards, gamma=GAMMA),
        },
        check=lambda name, result: assert_close(name, result[:CHECKED_SEQUENCES], truth, 1e-4, 1e-5),
        read_bytes=4 * tokens,
        written_bytes=4 * tokens,
        flops=2 * tokens,
    )


def kl_to_go_case(bench: Bench, sequences: int, length: int, device: str) -> None:
    """REINFORCE with the KL trick: r less the KL from each token on."""
    logprobs, ref_logprobs = -torch.rand(2, sequences, length, device=device)
    rewards = torch.rand(sequences, device=device)
    mask = (torch.arange(length, device=device) >= length // 8).expand(sequences, length).contiguous()

    def eager() -> Tensor:
        kl = torch.where(mask, logprobs - ref_logprobs, 0.0)
        to_go = kl.flip(1).cumsum(1).flip(1)
        return torch.where(mask, rewards[:, None] - 0.1 * to_go, 0.0)

    kl = torch.where(mask, logprobs.double() - ref_logprobs.double(), 0.0)
    truth = torch.where(mask, rewards[:, None] - 0.1 * kl.flip(1).cumsum(1).flip(1), 0.0)
    tokens = sequences * length
    bench.compare(
        f"KL-shaped rewards to go, {sequences} sequences of {length} tokens",
        {
            "torch, cumsum": eager,
            "ours": lambda: ops.compute_advantages(
                "reinforce_kl",
                rewards=rewards,
                loss_mask=mask,
                logprobs=logprobs,
                ref_logprobs=ref_logprobs,
                beta=0.1,
            ),
        },
        check=lambda name, result: assert_close(name, result, truth, 1e-3, 1e-4),
        read_bytes=9 * tokens,
        written_bytes=4 * tokens,
        flops=4 * tokens,
    )


def whiten_case(bench: Bench, sequences: int, length: int, device: str) -> None:
    tokens = sequences * length
    numbers = torch.randn(tokens, device=device)
    mask = torch.rand(tokens, device=device) < 0.8
    live = numbers[mask].double()
    truth = torch.where(mask, (numbers.double() - live.mean()) / (live.var() + 1e-8).sqrt(), 0.0)
    bench.compare(
        f"whitening over {tokens} tokens",
        {"torch": lambda: eager_whiten(numbers, mask), "ours": lambda: ops.whiten(numbers, loss_mask=mask)},
        check=lambda name, result: assert_close(name, result, truth, 1e-4, 1e-4),
        read_bytes=5 * tokens,
        written_bytes=4 * tokens,
        flops=6 * tokens,
    )


def eager_grpo(rewards: Tensor, group_ids: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    scores = torch.zeros_like(rewards)
    for group in group_ids.unique():
        members = group_ids == group
        scores[members] = (rewards[members] - rewards[members].mean()) / (rewards[members].std() + 1e-6)
    return torch.where(mask, scores.repeat_interleave(lengths), 0.0)


def group_case(bench: Bench, sequences: int, length: int, device: str) -> None:
    rewards = torch.randint(0, 2, (sequences,), device=device).float()
    group_ids = torch.randperm(sequences, device=device) // GROUP_SIZE
    lengths = torch.randint(1, length, (sequences,), device=device)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    tokens = int(cu_seqlens[-1])
    mask = torch.rand(tokens, device=device) < 0.8
    scores = reference.group_scores(rewards, group_ids, mean_level="group", std_level="group")
    truth = torch.where(mask, scores.repeat_interleave(lengths), 0.0)
    bench.compare(
        f"GRPO advantages, {sequences} sequences in groups of {GROUP_SIZE}, {tokens} tokens",
        {
            "torch, loop over groups": lambda: eager_grpo(rewards, group_ids, lengths, mask),
            "ours": lambda: ops.compute_advantages(
                "grpo_r1", rewards=rewards, cu_seqlens=cu_seqlens, group_ids=group_ids, loss_mask=mask
            ),
        },
        check=lambda name, result: assert_close(name, result, truth, 1e-5),
        read_bytes=tokens,
        written_bytes=4 * tokens,
        flops=6 * sequences,  # mean, variance, division
    )


def main() -> None:
    parser = argument_parser("Benchmark of the scans, whitening and compute_advantages.")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--length", type=int, default=4096)
    args = parser.parse_args()
    reuse_freed_memory()
    bench = Bench("scan", args)
    for masked in (False, True):
        gae_case(bench, args.sequences, args.length, args.device, masked)
    for case in (returns_case, kl_to_go_case, whiten_case, group_case):
        case(bench, args.sequences, args.length, args.device)
    bench.save()


if __name__ == "__main__":
    main()
