from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.rl.batch import Batch, build_batch, cut_microbatches, split_minibatches
from areal_core.rl.config import RolloutConfig
from areal_core.rl.data import Group

from .trajectories import make_groups, make_model, whole_sequence_logprobs

CPU = torch.device("cpu")
ANY_AGE = RolloutConfig(eta=math.inf)


def edited(group: Group, index: int, **changes: object) -> Group:
    trajectories = list(group.trajectories)
    trajectories[index] = replace(trajectories[index], **changes)
    return replace(group, trajectories=tuple(trajectories))


def make_batch(sizes: list[int], seed: int = 0, config: RolloutConfig = ANY_AGE) -> Batch:
    return build_batch(make_groups(np.random.default_rng(seed), sizes), 5, config)


def test_arrays_hold_the_trajectories_end_to_end() -> None:
    groups = make_groups(np.random.default_rng(1), [3, 1, 2])
    batch = build_batch(groups, 5, ANY_AGE)
    trajectories = [t for g in groups for t in g.trajectories]
    assert batch.samples == 6
    assert batch.group_of.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.keys == [(t.group_id, t.sample_index) for t in trajectories]
    assert batch.rewards.tolist() == [t.reward for t in trajectories]
    assert batch.response_ids.tolist() == [i for t in trajectories for i in t.response_ids]
    assert batch.logprobs.tolist() == [x for t in trajectories for x in t.logprobs.tolist()]
    assert batch.ages.tolist() == [5 - v for t in trajectories for v in t.versions.tolist()]
    assert batch.prompt_ids.tolist() == [i for g in groups for i in g.trajectories[0].prompt_ids]
    assert batch.lengths.tolist() == [len(t.response_ids) for t in trajectories]
    assert batch.current.tolist() == [all(v == 5 for v in t.versions) for t in trajectories]
    assert batch.live.all()


def test_failed_and_empty_samples_are_left_out() -> None:
    groups = make_groups(np.random.default_rng(2), [3, 2, 1])
    groups[0] = edited(groups[0], 1, reward=math.nan)
    groups[1] = edited(edited(groups[1], 0, reward=math.nan), 1, reward=math.nan)
    nothing = np.zeros(0, dtype=np.int32)
    groups[0] = edited(groups[0], 2, response_ids=nothing, logprobs=nothing.astype(np.float32), versions=nothing)
    batch = build_batch(groups, 5, ANY_AGE)
    assert batch.keys == [(100, 0), (114, 0)]
    assert batch.group_of.tolist() == [0, 1]
    assert len(batch.prompt_bounds) == 3


def test_no_groups_make_an_empty_batch() -> None:
    batch = build_batch([], 5, ANY_AGE)
    assert batch.samples == 0
    assert batch.zero_variance.tolist() == batch.current.tolist() == []
    assert split_minibatches(batch, np.zeros(0, dtype=np.int64), 4, np.random.default_rng(0)) == []
    assert cut_microbatches(batch, np.zeros(0, dtype=np.int64), 10, CPU) == []


def test_old_tokens_are_not_live() -> None:
    batch = make_batch([4, 4], config=RolloutConfig(eta=1))
    assert not batch.live.all()
    assert batch.live.tolist() == (batch.ages <= 1).tolist()


@pytest.mark.parametrize("rule", ["keep", "mask", "penalise"])
def test_truncated_responses_are_masked_on_request(rule: str) -> None:
    batch = make_batch([8, 8], config=RolloutConfig(eta=math.inf, truncated=rule))
    assert batch.truncated.any()
    expected = ~np.repeat(batch.truncated, batch.lengths) if rule == "mask" else np.ones(len(batch.live), dtype=bool)
    assert batch.live.tolist() == expected.tolist()


def test_groups_of_equal_rewards_are_found() -> None:
    groups = make_groups(np.random.default_rng(3), [2, 2, 1])
    groups[1] = edited(edited(groups[1], 0, reward=0.25), 1, reward=0.25)
    assert build_batch(groups, 5, ANY_AGE).zero_variance.tolist() == [False, True, True]


def test_a_group_has_one_prompt() -> None:
    groups = make_groups(np.random.default_rng(4), [2])
    other = edited(groups[0], 1, prompt_ids=np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], dtype=np.int32))
    with pytest.raises(ValueError, match="one non-empty prompt in group 100"):
        build_batch([other], 5, ANY_AGE)
    empty = np.zeros(0, dtype=np.int32)
    with pytest.raises(ValueError, match="one non-empty prompt in group 100"):
        build_batch([edited(edited(groups[0], 0, prompt_ids=empty), 1, prompt_ids=empty)], 5, ANY_AGE)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_minibatches_partition_the_samples(sizes: list[int], count: int, seed: int) -> None:
    batch = make_batch(sizes)
    samples = np.flatnonzero(np.random.default_rng(seed).random(batch.samples) < 0.8)
    parts = split_minibatches(batch, samples, count, np.random.default_rng(seed))
    assert sorted(np.concatenate([*parts, samples[:0]]).tolist()) == samples.tolist()
    groups = [set(batch.group_of[part].tolist()) for part in parts]
    present = len(set(batch.group_of[samples].tolist()))
    assert len(parts) == min(count, len(samples))
    assert all((np.diff(part) > 0).all() for part in parts)
    if present >= count:
        assert sum(len(g) for g in groups) == present
        assert max(len(g) for g in groups) - min(len(g) for g in groups) <= 1
    else:
        assert max(len(p) for p in parts) - min(len(p) for p in parts) <= 1 if parts else True


def test_minibatches_differ_from_draw_to_draw() -> None:
    batch = make_batch([2] * 12)
    everything = np.arange(batch.samples)
    draws = [split_minibatches(batch, everything, 3, np.random.default_rng((0, step))) for step in range(3)]
    assert len({str([p.tolist() for p in parts]) for parts in draws}) == 3


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(16, 60), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_microbatches_keep_the_cap_and_predict_each_live_token_once(sizes: list[int], cap: int, seed: int) -> None:
    batch = make_batch(sizes, seed, RolloutConfig(eta=1))
    samples = np.arange(batch.samples)[:: 1 + seed % 2]
    micros = cut_microbatches(batch, samples, cap, CPU)
    expected = [n for s in samples for n in range(batch.response_bounds[s], batch.response_bounds[s + 1])]
    assert sorted(n for m in micros for n in m.tokens.tolist()) == [n for n in expected if batch.live[n]]
    for micro in micros:
        assert 0 < len(micro.input_ids) <= cap
        assert micro.cu_seqlens[-1] == len(micro.input_ids)
        assert micro.cu_groups[-1] == len(micro.cu_seqlens) - 1
        assert len(micro.rows) == len(micro.tokens)


@pytest.mark.parametrize("cap", [20, 48, 1000])
def test_microbatches_give_the_logprobs_of_whole_sequences(cap: int) -> None:
    model = make_model()
    groups = make_groups(np.random.default_rng(6), [4, 1, 3, 5])
    batch = build_batch(groups, 5, ANY_AGE)
    found = torch.full((len(batch.response_ids),), math.nan)
    for micro in cut_microbatches(batch, np.arange(batch.samples), cap, CPU):
        logits = model(micro.input_ids, micro.cu_seqlens, cu_groups=micro.cu_groups, rows=micro.rows)
        labels = torch.from_numpy(batch.response_ids)[micro.tokens]
        found[micro.tokens] = logits.detach().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    expected = torch.cat([whole_sequence_logprobs(model, t).detach() for g in groups for t in g.trajectories])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_siblings_share_their_prompt() -> None:
    batch = make_batch([8, 8])
    (micro,) = cut_microbatches(batch, np.arange(16), 10_000, CPU)
    assert len(micro.input_ids) == len(batch.prompt_ids) + len(batch.response_ids) - 16


def test_a_sample_beyond_the_cap_is_named() -> None:
    batch = make_batch([3, 3])
    with pytest.raises(ValueError, match=r"max_tokens_per_microbatch >= \d+ .*group 10[07]\), got 4"):
        cut_microbatches(batch, np.arange(6), 4, CPU)
