"""Names and a batch for the tests of compute_advantages."""

import math
from typing import Any

import torch
from torch import Tensor

from areal_core import ops

TABLE = [
    "dapo",
    "dr_grpo",
    "gpg",
    "grpo_original",
    "grpo_r1",
    "maxrl",
    "opo",
    "orz",
    "pass_at_k",
    "ppo",
    "reinforce",
    "reinforce_kl",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
]
SEED = ["reinforce", "reinforce_kl", "reinforce_pp", "rloo", "remax", "ppo", "orz"]
SEED += ["grpo_original", "grpo_r1", "dapo", "dr_grpo"]
WITH_KL = [n for n in TABLE if n.startswith(("reinforce", "grpo")) or n in ("rloo", "remax", "ppo")]
CRITICS = ["orz", "ppo"]


def make_batch(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """Ragged groups in any order, empty sequences, all-masked ones, and a failed sample."""
    torch.manual_seed(seed)
    lengths = torch.tensor([0, 5, 0, 17, 3, 1, 33, 8, 2, 20, 4, 4, 6])
    cu_seqlens = lengths.cumsum(0)
    tokens = int(cu_seqlens[-1])
    loss_mask = torch.rand(tokens) < 0.7
    loss_mask[cu_seqlens[7] : cu_seqlens[8]] = False
    rewards = torch.rand(12, dtype=torch.float64)
    rewards[[3, 6, 11]] = 0.25
    rewards[10] = math.nan
    logprobs = -torch.rand(tokens, dtype=torch.float64) - 0.1
    return {
        "rewards": rewards.to(dtype),
        "cu_seqlens": cu_seqlens,
        "group_ids": torch.tensor([7, -3, 7, 40, -3, 7, 40, 2**40, 7, 11, 7, 40]),
        "loss_mask": loss_mask,
        "logprobs": logprobs.to(dtype),
        "ref_logprobs": (logprobs + 0.3 * torch.randn(tokens, dtype=torch.float64)).to(dtype),
        "values": torch.randn(tokens, dtype=torch.float64).to(dtype),
        "greedy_rewards": torch.rand(12, dtype=torch.float64).to(dtype),
    }


def used_by(name: str, batch: dict[str, Tensor], beta: float) -> dict[str, Tensor]:
    """What of the batch the estimator takes."""
    unused = {"values"} - ({"values"} if name in CRITICS else set())
    unused |= set() if name == "remax" else {"greedy_rewards"}
    unused |= set() if beta != 0 else {"ref_logprobs"}
    return {key: x for key, x in batch.items() if key not in unused}


def estimate(name: str, batch: dict[str, Tensor], beta: float = 0.0, **options: Any) -> Tensor:
    """The estimator on what it takes of the batch."""
    return ops.compute_advantages(name, **used_by(name, batch, beta), beta=beta, **options)
