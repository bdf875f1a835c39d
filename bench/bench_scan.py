"""gae against a Python loop over time, and compute_advantages against a Python loop over groups.

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
    parser = argument_parser("Benchmark of gae and compute_advantages.")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--length", type=int, default=4096)
    args = parser.parse_args()
    reuse_freed_memory()
    bench = Bench("scan", args)
    for masked in (False, True):
        gae_case(bench, args.sequences, args.length, args.device, masked)
    group_case(bench, args.sequences, args.length, args.device)
    bench.save()


if __name__ == "__main__":
    main()
