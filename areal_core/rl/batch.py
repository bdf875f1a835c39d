"""Training batches: groups of trajectories as flat arrays, and the packed micro-batches cut from them.

Per-token arrays cover response tokens alone, all responses end to end ("token-aligned": entry n belongs to response
token n). A micro-batch packs each group as its prompt once, then what the model reads of each response: all tokens
but the last, whose logits nobody asks for. `rows` then says after which packed token each response token is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_core import ops
from areal_core.rl.config import RolloutConfig
from areal_core.rl.data import Group
from areal_core.rl.staleness import tokens_within

__all__ = ["Batch", "Microbatch", "build_batch", "cut_microbatches", "split_minibatches"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
_Scalar = TypeVar("_Scalar", np.int64, np.float32)
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Batch:
    """The usable samples of a batch (S of them, N response tokens, G groups), in order of group.

    Attributes:
        prompt_ids, prompt_bounds: int64, all prompts end to end, and int64 [G+1] their boundaries.
        response_ids, response_bounds: the same for responses, [N] and [S+1].
        group_of: int64 [S], the group (0 .. G-1) of each sample.
        rewards: float64 [S].
        greedy_rewards, greedy_lengths: float64 and int64 [S], of the greedy response to the sample's prompt; NaN and 0
            where there is none.
        truncated: bool [S], whether the response was cut by the token limit.
        version: of the weights that this batch trains.
        logprobs: float32 [N], of the behaviour policy.
        ages: int64 [N], versions since each token was produced.
        live: bool [N], whether the loss falls on the token.
        keys: (group_id, sample_index) of each sample.
    """

    prompt_ids: Ints
    prompt_bounds: Ints
    response_ids: Ints
    response_bounds: Ints
    group_of: Ints
    rewards: npt.NDArray[np.float64]
    greedy_rewards: npt.NDArray[np.float64]
    greedy_lengths: Ints
    truncated: Bools
    version: int
    logprobs: Floats
    ages: Ints
    live: Bools
    keys: list[tuple[int, int]]

    @property
    def samples(self) -> int:
        """S."""
        return len(self.rewards)

    @cached_property
    def lengths(self) -> Ints:
        """int64 [S], tokens of each response."""
        return np.diff(self.response_bounds)

    @cached_property
    def prompt_lengths(self) -> Ints:
        """int64 [G], tokens of each prompt."""
        return np.diff(self.prompt_bounds)

    @cached_property
    def zero_variance(self) -> Bools:
        """bool [G], groups whose rewards are all equal: they teach nothing."""
        if not self.samples:
            return np.zeros(0, dtype=np.bool_)
        starts = np.flatnonzero(np.diff(self.group_of, prepend=-1))
        high, low = np.maximum.reduceat(self.rewards, starts), np.minimum.reduceat(self.rewards, starts)
        return np.asarray(high == low, dtype=np.bool_)

    @cached_property
    def current(self) -> Bools:
        """bool [S], samples all of whose tokens the version in training produced."""
        if not self.samples:
            return np.zeros(0, dtype=np.bool_)
        return np.asarray(np.maximum.reduceat(self.ages, self.response_bounds[:-1]) == 0, dtype=np.bool_)


@dataclass(frozen=True, eq=False)
class Microbatch:
    """What one forward pass reads, and the response tokens it predicts.

    Attributes:
        input_ids, cu_seqlens, cu_groups, rows: arguments of `PackedDecoder.forward`.
        tokens: int64 [R], the live response tokens predicted, as indices into the arrays of the batch.
        cu_tokens: int64 [samples + 1], boundaries of the samples in `tokens`.
    """

    input_ids: Tensor
    cu_seqlens: Tensor
    cu_groups: Tensor
    rows: Tensor
    tokens: Tensor
    cu_tokens: Tensor

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.cu_tokens) - 1


def build_batch(groups: Sequence[Group], version: int, config: RolloutConfig) -> Batch:
    """Flatten groups; failed samples (NaN reward) and empty responses are left out, and groups without any other.

    Tokens older than `config.eta` at `version` are not live, nor are those of truncated responses when
    `config.truncated` is "mask".

    Raises:
        ValueError: an empty prompt, or samples of one group with different prompts.
    """
    kept = [(g, [t for t in g.trajectories if not t.failed and len(t.response_ids)]) for g in groups]
    kept = [(g, trajectories) for g, trajectories in kept if trajectories]
    prompts = [trajectories[0].prompt_ids for _, trajectories in kept]
    for (group, trajectories), prompt in zip(kept, prompts, strict=True):
        if not len(prompt) or any(not _same(t.prompt_ids, prompt) for t in trajectories):
            raise ValueError(f"build_batch: expected one non-empty prompt in group {group.group_id}")
    samples = [t for _, trajectories in kept for t in trajectories]
    greedy = [group.greedy for group, trajectories in kept for _ in trajectories]
    lengths = np.array([len(t.response_ids) for t in samples], dtype=np.int64)
    truncated = np.array([t.finish_reason == "length" for t in samples], dtype=np.bool_)
    versions = _concatenate([t.versions for t in samples], np.int64)
    live = tokens_within(versions, version, config.eta)
    if config.truncated == "mask":
        live = live & ~np.repeat(truncated, lengths)
    return Batch(
        prompt_ids=_concatenate(prompts, np.int64),
        prompt_bounds=_bounds(np.array([len(p) for p in prompts], dtype=np.int64)),
        response_ids=_concatenate([t.response_ids for t in samples], np.int64),
        response_bounds=_bounds(lengths),
        group_of=np.repeat(np.arange(len(kept)), [len(trajectories) for _, trajectories in kept]),
        rewards=np.array([t.reward for t in samples], dtype=np.float64),
        greedy_rewards=np.array([math.nan if g is None else g.reward for g in greedy], dtype=np.float64),
        greedy_lengths=np.array([0 if g is None else len(g.response_ids) for g in greedy], dtype=np.int64),
        truncated=truncated,
        version=version,
        logprobs=_concatenate([t.logprobs for t in samples], np.float32),
        ages=version - versions,
        live=live,
        keys=[(t.group_id, t.sample_index) for t in samples],
    )


def split_minibatches(batch: Batch, samples: Ints, count: int, rng: np.random.Generator) -> list[Ints]:
    """Deal samples to at most `count` mini-batches, in random order: whole groups while there are enough of them."""
    groups = np.unique(batch.group_of[samples])
    order = rng.permutation(groups)
    if len(groups) >= count:
        parts = [samples[np.isin(batch.group_of[samples], part)] for part in np.array_split(order, count)]
    else:
        rank = np.empty(len(batch.prompt_bounds), dtype=np.int64)
        rank[order] = np.arange(len(order))
        dealt = samples[np.argsort(rank[batch.group_of[samples]], kind="stable")]
        parts = [np.sort(part) for part in np.array_split(dealt, count)]
    return [part for part in parts if len(part)]


def cut_microbatches(batch: Batch, samples: Ints, max_tokens: int, device: torch.device) -> list[Microbatch]:
    """Pack samples (ascending) into micro-batches of at most `max_tokens` packed tokens, siblings together.

    Raises:
        ValueError: a sample that alone exceeds `max_tokens`.
    """
    units = _siblings(batch, samples, max_tokens)
    sizes = [int(batch.prompt_lengths[batch.group_of[unit[0]]] + (batch.lengths[unit] - 1).sum()) for unit in units]
    bins = ops.allocate_microbatches(sizes, max_tokens)
    return [_pack(batch, np.concatenate([units[i] for i in chosen]), device) for chosen in bins]


def _siblings(batch: Batch, samples: Ints, max_tokens: int) -> list[Ints]:
    """Samples packed behind one copy of their prompt: whole groups, or as much of one as fits under the cap."""
    units: list[Ints] = []
    boundaries = np.flatnonzero(np.diff(batch.group_of[samples])) + 1
    for group in np.split(samples, boundaries) if len(samples) else []:
        own, prompt = batch.lengths[group] - 1, int(batch.prompt_lengths[batch.group_of[group[0]]])
        longest = prompt + int(own.max())
        if longest > max_tokens:
            raise ValueError(
                f"cut_microbatches: expected train.max_tokens_per_microbatch >= {longest} (a prompt with one response "
                f"of group {batch.keys[group[0]][0]}), got {max_tokens}"
            )
        room = max_tokens - prompt
        parts = [list(range(len(group)))] if own.sum() <= room else ops.allocate_microbatches(own.tolist(), room)
        units += [group[part] for part in parts]
    return units


def _pack(batch: Batch, samples: Ints, device: torch.device) -> Microbatch:
    """Lay out segments: each group's prompt, then its responses without their last token."""
    group = batch.group_of[samples]
    first = np.diff(group, prepend=-1) != 0  # samples before which a prompt is laid
    lengths = batch.lengths[samples]
    prompts = group[first]

    # Segment tables: where the segment of each sample (and of each prompt) comes in the order of the pack.
    sample_slot = np.arange(len(samples)) + np.cumsum(first)
    prompt_slot = sample_slot[first] - 1
    starts = np.empty(len(samples) + len(prompts), dtype=np.int64)  # in prompts and responses end to end
    sizes = np.empty_like(starts)
    starts[prompt_slot], sizes[prompt_slot] = batch.prompt_bounds[prompts], batch.prompt_lengths[prompts]
    starts[sample_slot], sizes[sample_slot] = len(batch.prompt_ids) + batch.response_bounds[samples], lengths - 1
    bounds = _bounds(sizes)
    source = np.repeat(starts - bounds[:-1], sizes) + np.arange(bounds[-1])

    # Response token 0 is predicted after the prompt's last token, token t after token t - 1.
    begin = _bounds(lengths)
    rows = np.repeat(bounds[sample_slot] - 1 - begin[:-1], lengths) + np.arange(begin[-1])
    rows[begin[:-1]] = bounds[prompt_slot + 1][np.cumsum(first) - 1] - 1
    everything = np.concatenate((batch.prompt_ids, batch.response_ids))
    tokens = _ranges(batch.response_bounds, samples)
    live = batch.live[tokens]
    cu_tokens = _bounds(np.add.reduceat(live, begin[:-1], dtype=np.int64))
    arrays = (everything[source], bounds, np.append(prompt_slot, len(starts)), rows[live], tokens[live], cu_tokens)
    return Microbatch(*(torch.from_numpy(array).to(device) for array in arrays))


def _same(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> bool:
    return a is b or np.array_equal(a, b)


def _ranges(bounds: Ints, chosen: Ints) -> Ints:
    """Indices of all tokens of the chosen segments, end to end."""
    sizes = bounds[chosen + 1] - bounds[chosen]
    out = _bounds(sizes)
    return np.asarray(np.repeat(bounds[chosen] - out[:-1], sizes) + np.arange(out[-1]), dtype=np.int64)


def _bounds(sizes: Ints) -> Ints:
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)))


def _concatenate(arrays: Sequence[npt.NDArray[Any]], dtype: type[_Scalar]) -> npt.NDArray[_Scalar]:
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype=dtype)
