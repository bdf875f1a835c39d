"""Run by test_loss_ranks.py in processes of their own: losses of a batch in parts against those of the whole batch."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from loss_cases import VARIANTS, make_batch, run, sequences_of

from areal_core import ops


def run_rank(rank: int, ranks: int, folder: str) -> None:
    """One process: uneven shares of the sequences, cut further into micro-batches; the last rank has nothing."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=2))
    batch = make_batch(3000, torch.float64)
    count = len(batch["cu_seqlens"]) - 1
    bounds = [0, count // 3, count, count]
    first, last = bounds[rank], bounds[rank + 1]
    for variant in ("all", "gspo_weight_sequence", "gmpo", "weight_geometric"):
        whole = run(batch, VARIANTS[variant], normalizer=77.0)
        middle = (first + last) // 2
        parts = [
            run(sequences_of(batch, a, b), VARIANTS[variant], normalizer=77.0)
            for a, b in ((first, middle), (middle, last))
        ]
        stats = ops.PPOLossStats.merge([ops.PPOLossStats(part[3]) for part in parts]).all_reduce(dist.group.WORLD)
        torch.testing.assert_close(stats.raw, whole[3], rtol=1e-12, atol=1e-12)
        loss = parts[0][0] + parts[1][0]
        dist.all_reduce(loss)
        torch.testing.assert_close(loss, whole[0], rtol=1e-12, atol=1e-12)
    tokens = slice(int(batch["cu_seqlens"][first]), int(batch["cu_seqlens"][last]))
    pair = [batch[name] for name in ("proximal_logprobs", "behavior_logprobs", "loss_mask")]
    for threshold in (0.04, 0.01, 1e-7, 1.0):
        mine = ops.m2po_mask(*(x[tokens] for x in pair), threshold=threshold, group=dist.group.WORLD)
        assert torch.equal(mine, ops.m2po_mask(*pair, threshold=threshold)[tokens])
    values, old, returns = batch["logprobs"], batch["proximal_logprobs"], batch["advantages"]
    whole_stats = ops.value_loss(values, old, returns, pair[2], clip=0.2).stats
    mine_stats = ops.value_loss(values[tokens], old[tokens], returns[tokens], pair[2][tokens], clip=0.2).stats
    for a, b in zip(mine_stats.all_reduce().finalize(), whole_stats.finalize(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    dist.barrier()  # the first to leave would take the store with it
    dist.destroy_process_group()
