"""Made-up batches for the tests of batch and trainer."""

from __future__ import annotations

import numpy as np
import torch

from areal_core.model import DecoderConfig, PackedDecoder
from areal_core.rl.data import Group, Trajectory

CONFIG = DecoderConfig("llama", 23, 16, 24, 2, num_heads=2, num_kv_heads=1, head_dim=8, rope_theta=100.0)


def make_model(seed: int = 0) -> PackedDecoder:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = PackedDecoder(CONFIG)
        with torch.no_grad():
            model.weights.add_(torch.randn_like(model.weights), alpha=0.2)
    return model


def make_groups(
    rng: np.random.Generator,
    sizes: list[int],
    *,
    version: int = 5,
    max_age: int = 2,
    max_prompt: int = 9,
    max_response: int = 8,
) -> list[Group]:
    """Groups of the given sizes with random tokens, rewards 0 or 1 and plausible behaviour logprobs."""
    groups = []
    for number, size in enumerate(sizes):
        prompt = rng.integers(0, CONFIG.vocab_size, rng.integers(1, max_prompt + 1)).astype(np.int32)
        trajectories = []
        for index in range(size):
            length = int(rng.integers(1, max_response + 1))
            ages = np.sort(rng.integers(0, max_age + 1, length))[::-1]
            trajectories.append(
                Trajectory(
                    prompt_ids=prompt,
                    response_ids=rng.integers(0, CONFIG.vocab_size, length).astype(np.int32),
                    logprobs=rng.normal(-3.0, 0.5, length).astype(np.float32),
                    versions=(version - ages).astype(np.int64),
                    finish_reason="length" if rng.random() < 0.2 else "stop",
                    reward=float(index == 0 or (index > 1 and rng.random() < 0.5)),
                    group_id=100 + 7 * number,
                    sample_index=index,
                )
            )
        groups.append(Group(100 + 7 * number, f"prompt {number}", number, tuple(trajectories)))
    return groups


def whole_sequence_logprobs(model: PackedDecoder, trajectory: Trajectory, temperature: float = 1.0) -> torch.Tensor:
    """Logprobs [R] of a response by the plainest road: the whole sequence alone, log-softmax, gather."""
    ids = torch.from_numpy(np.concatenate((trajectory.prompt_ids, trajectory.response_ids)).astype(np.int64))
    logits = model(ids, torch.tensor([0, len(ids)])) / temperature
    first = len(trajectory.prompt_ids) - 1
    return logits[first:-1].log_softmax(-1).gather(1, ids[first + 1 :, None])[:, 0]
