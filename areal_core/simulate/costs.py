"""Seconds of a decode step, of a prompt, of a training batch and of an update.

Decoding reads all weights and the keys and values of every token in context, and computes two operations per weight and
sequence; training computes six per weight and token, two more for proximal log-probabilities, and attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal_core.reshard.models import ModelSizes, load_model
from areal_core.simulate.config import SimulateConfig, TrainConfig

__all__ = ["Costs", "DecodeCost", "active_parameters", "kv_bytes_per_token", "train_flops", "train_seconds"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DecodeCost:
    """A decode step of n sequences with c tokens in context takes step_s + sequence_s * n + context_s * c seconds.

    prompt_token_s is the time of a token whose keys and values are computed at once (prompts, recomputation).
    """

    step_s: float
    sequence_s: float
    context_s: float
    prompt_token_s: float


@dataclass(frozen=True)
class Costs:
    """All a simulation needs to know of hardware and model.

    train_s: seconds of a batch, of the lengths of its sequences (prompt and response) and a random generator.
    publish_s, pause_s, other_s: see `UpdateConfig`.
    """

    decode: DecodeCost
    train_s: Callable[[Ints, np.random.Generator], float]
    publish_s: float
    pause_s: float
    other_s: float

    @classmethod
    def of(cls, config: SimulateConfig) -> Costs:
        """The costs by formula.

        Raises:
            ValueError: an unknown model.
        """
        model, cluster, generate = load_model(config.model.name), config.cluster, config.generate
        bandwidth = cluster.hbm_bytes_per_s * cluster.memory_efficiency * generate.gpus_per_generator
        compute = cluster.flops_per_s * cluster.compute_efficiency * generate.gpus_per_generator
        token_s = 2 * active_parameters(model) / compute
        decode = DecodeCost(
            step_s=generate.step_overhead_s + config.model.bytes_per_weight * all_parameters(model) / bandwidth,
            sequence_s=token_s,
            context_s=kv_bytes_per_token(model) / bandwidth,
            prompt_token_s=token_s,
        )

        def train_s(lengths: Ints, rng: np.random.Generator) -> float:
            return train_seconds(lengths, model, config.train, config.replicas, rng)

        switch = config.update.switch_s if cluster.colocated else 0.0
        return cls(decode, train_s, config.update.publish_s + 2 * switch, config.update.pause_s, config.update.other_s)


def kv_bytes_per_token(model: ModelSizes) -> float:
    """Bytes of keys and values of one token, in 16 bits."""
    per_layer = model.kv_lora_rank + model.qk_rope_head_dim if model.is_mla else 2 * model.kv_heads * model.head_dim
    return 2.0 * per_layer * model.layers


def all_parameters(model: ModelSizes) -> float:
    """Weights that a decode step of many sequences reads: with a mixture of experts, all of them."""
    return _parameters(model, model.experts)


def active_parameters(model: ModelSizes) -> float:
    """Weights that a token is multiplied with. A mixture is taken to route a token to eight experts."""
    return _parameters(model, min(model.experts, 8))


def _parameters(model: ModelSizes, experts: int) -> float:
    hidden, width = model.hidden, model.heads * model.head_dim
    if model.is_mla:
        query = model.q_lora_rank * (hidden + width) if model.q_lora_rank else hidden * width
        latent = hidden * (model.kv_lora_rank + model.qk_rope_head_dim)
        expanded = model.kv_lora_rank * model.heads * (model.qk_nope_head_dim + model.v_head_dim)
        attention = query + latent + expanded + model.heads * model.v_head_dim * hidden
    else:
        attention = 2 * hidden * width + 2 * hidden * model.kv_heads * model.head_dim
    dense = 3 * hidden * model.intermediate
    sparse = 3 * hidden * model.moe_intermediate * (experts + model.shared_experts)
    mlp = sum(sparse if model.is_sparse(layer) else dense for layer in range(model.layers))
    return float(model.layers * attention + mlp + model.vocabulary * hidden)


def train_flops(lengths: Ints, model: ModelSizes, passes: float) -> Floats:
    """Operations of each sequence: `passes` times a forward pass over its weights and its causal attention."""
    tokens = lengths.astype(np.float64)
    attention = 2.0 * model.layers * model.heads * model.head_dim * tokens**2
    return passes * (2.0 * active_parameters(model) * tokens + attention)


def train_seconds(
    lengths: Ints, model: ModelSizes, train: TrainConfig, replicas: int, rng: np.random.Generator
) -> float:
    """Seconds of a batch: each mini-batch waits for its slowest replica.

    Args:
        lengths: int64 [N], tokens of each sequence, prompt included.
        replicas: copies of the model that share a mini-batch.
    """
    shuffled = rng.permutation(lengths)
    rate = train.tflops_per_gpu * 1e12 * train.gpus_per_replica
    total = 0.0
    for part in np.array_split(shuffled, train.minibatches):
        dealt = _deal(part, replicas, by_length=train.microbatching == "dynamic")
        seconds = train_flops(dealt, model, passes=3.0) / rate
        proximal = train_flops(dealt, model, passes=1.0) / rate if train.proximal else 0.0 * seconds
        total += float(max(_replica_seconds(dealt, seconds, train)) + train.step_overhead_s)
        if train.proximal:
            total += float(max(_replica_seconds(dealt, proximal, train)))
    return total


def _deal(lengths: Ints, replicas: int, *, by_length: bool) -> Ints:
    """Sequences dealt to replicas, [rounds, replicas], 0 where there is none; by length to and fro, or as they come."""
    rounds = -(-lengths.size // replicas)
    dealt = np.zeros(rounds * replicas, dtype=np.int64)
    dealt[: lengths.size] = np.sort(lengths)[::-1] if by_length else lengths
    table = dealt.reshape(rounds, replicas)
    if by_length:
        table[1::2] = table[1::2, ::-1].copy()
    return table


def _replica_seconds(dealt: Ints, seconds: Floats, train: TrainConfig) -> Floats:
    """Seconds of each replica: its micro-batches one after the other, and the way of the last through the pipeline."""
    if train.microbatching == "dynamic":
        count = np.maximum(np.ceil(dealt.sum(0) / train.max_tokens_per_microbatch), 1.0)
        longest = np.maximum(seconds.sum(0) / count, seconds.max(0))
    else:
        parts = [part.sum(0) for part in np.array_split(seconds, min(train.microbatches, len(seconds)))]
        count = np.full(dealt.shape[1], float(len(parts)))
        longest = np.max(parts, axis=0)
    stages = train.pipeline_stages
    fill = (stages - 1) * (longest + train.microbatch_overhead_s)
    return np.asarray(seconds.sum(0) + count * train.microbatch_overhead_s + fill)
