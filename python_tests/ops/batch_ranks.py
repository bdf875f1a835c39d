"""Run by test_moments.py in processes of their own: a batch in parts against the same batch in one place."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from op_checks import assert_same_bits

from areal_core import ops

# What a name needs and what makes it look at the whole batch.
BATCH_WIDE: list[tuple[str, dict[str, Any]]] = [
    ("reinforce_pp", {"beta": 0.3}),
    ("reinforce_pp_baseline", {}),
    ("gpg", {}),
    ("grpo_r1", {"std_level": "batch"}),
    ("reinforce", {"mean_level": "batch", "leave_one_out": True}),
    ("grpo_r1", {"whiten": True}),
]


def run_rank(rank: int, ranks: int, folder: str) -> None:
    """One process: the last rank has nothing, the others uneven shares of the groups."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=2))
    torch.manual_seed(0)
    lengths = torch.randint(0, 20, (12,))
    bounds = [0, 3, 12, 12]
    batch = {
        "rewards": 1000 + 0.1 * torch.randn(12),
        "group_ids": torch.arange(12) // 3,
        "loss_mask": torch.rand(int(lengths.sum())) < 0.7,
        "logprobs": -torch.rand(int(lengths.sum())),
        "ref_logprobs": -torch.rand(int(lengths.sum())),
    }
    batch["rewards"][4] = torch.nan
    batch["rewards"][6:9] = 1.0
    first, last = bounds[rank], bounds[rank + 1]
    cu_seqlens = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])
    tokens = slice(int(cu_seqlens[first]), int(cu_seqlens[last]))
    part = {key: x[first:last] if len(x) == 12 else x[tokens] for key, x in batch.items()}
    for name, options in BATCH_WIDE:
        used = [key for key in batch if key != "ref_logprobs" or "beta" in options]
        whole = ops.compute_advantages(name, **{k: batch[k] for k in used}, cu_seqlens=cu_seqlens, **options)
        mine = ops.compute_advantages(
            name,
            **{k: part[k] for k in used},
            cu_seqlens=cu_seqlens[first : last + 1] - cu_seqlens[first],
            group=dist.group.WORLD,
            **options,
        )
        assert_same_bits(mine, whole[tokens])
    numbers = batch["logprobs"]
    moments = ops.masked_moments(numbers[tokens], loss_mask=batch["loss_mask"][tokens], group=dist.group.WORLD)
    for a, b in zip(moments, ops.masked_moments(numbers, loss_mask=batch["loss_mask"]), strict=True):
        assert_same_bits(a, b)
    dist.barrier()  # the first to leave would take the store with it
    dist.destroy_process_group()
