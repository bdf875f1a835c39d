"""AReaL's advantages of a rollout and its micro-batches, patched against unpatched; what falls through."""

from __future__ import annotations

import itertools
import re
from functools import partial
from typing import Any

import pytest
import torch
from areal_calls import both, close, one
from torch import Tensor

from areal_core.integrations import areal as ours

actor = pytest.importorskip("areal.trainer.ppo.actor", reason="areal is not installed", exc_type=ImportError)
data_utils = pytest.importorskip("areal.utils.data")
seqpack = pytest.importorskip("areal.utils.seqpack")
NormConfig = pytest.importorskip("areal.api.cli_args").NormConfig

pytestmark = pytest.mark.usefixtures("eager")


def rollout(seed: int = 0) -> dict[str, Tensor]:
    """Prompt, response, tool output, response; rows of all lengths, two of them cut off at the full width."""
    g = torch.Generator().manual_seed(seed)
    rows, columns = 8, 23
    lengths = torch.tensor([23, 5, 17, 23, 9, 2, 14, 21])
    place = torch.arange(columns)
    attention = place < lengths[:, None]
    mask = attention & (place >= 3) & ~((place > 7) & (place < 11))
    mask[0, 0] = True  # AReaL's shift takes it to the last column
    return {
        "input_ids": torch.zeros(rows, columns, dtype=torch.long),
        "attention_mask": attention,
        "loss_mask": mask.int(),
        "logprobs": -torch.rand(rows, columns, generator=g),
        "prox_logp": -torch.rand(rows, columns, generator=g),
        "ref_logp": -torch.rand(rows, columns, generator=g),
        "values": torch.randn(rows, columns, generator=g),
        "rewards": 3 * torch.randn(rows, generator=g),
    }


def make_learner(options: dict[str, Any]) -> Any:
    """An actor without an engine."""
    config = actor.PPOActorConfig(experiment_name="e", trial_name="t", **options)
    return actor.PPOActor(config, engine=None)


def advantages_of(options: dict[str, Any], drop: tuple[str, ...] = ()) -> dict[str, Tensor]:
    return make_learner(options)._compute_advantages({k: v for k, v in rollout().items() if k not in drop})  # type: ignore[no-any-return]


ADVANTAGES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ()),
    ({"discount": 0.97, "gae_lambda": 0.9, "kl_ctl": 0.1}, ()),
    ({"discount": 0.97, "gae_lambda": 0.9, "kl_ctl": 0.1, "kl_estimator": "k3", "mask_no_eos_with_zero": True}, ()),
    ({"gae_lambda": 0.5, "reward_bias": -0.5, "reward_scaling": 2.0, "reward_clip": 1.5}, ("values", "ref_logp")),
    ({"use_decoupled_loss": True, "kl_ctl": 0.2}, ()),
    ({"use_decoupled_loss": False, "recompute_logprob": True, "kl_ctl": 0.2}, ()),
    ({"use_decoupled_loss": False, "recompute_logprob": False, "kl_ctl": 0.2}, ()),
    (
        {
            "overlong_reward_penalty": True,
            "overlong_tokens": 8,
            "overlong_penalty_factor": 0.7,
            "max_new_tokens": 16,
        },
        (),
    ),
]
NORMS: list[dict[str, Any] | None] = [
    None,
    {"mean_level": "batch", "std_level": "batch"},
    {"mean_level": "batch", "std_level": "batch", "std_unbiased": False, "eps": 1e-3},
    {"mean_level": "group", "std_level": "group", "group_size": 4},
    {"mean_level": "batch", "std_level": None},
]


@pytest.mark.parametrize("strict", [False, True])
def test_advantages(strict: bool) -> None:
    calls = []
    for (options, drop), norm in itertools.product(ADVANTAGES, NORMS):
        normed = None if norm is None else NormConfig(**norm)
        norms = {"adv_norm": normed, "reward_norm": normed if norm and norm["mean_level"] == "group" else None}
        calls.append(partial(advantages_of, norms | options, drop))
    theirs, patched, fallbacks = both(*calls, strict=strict)
    assert not fallbacks
    for expected, result in zip(theirs, patched, strict=True):
        assert result.keys() == expected.keys()
        live = expected["loss_mask"].bool()
        dead = ~live
        dead[:, -1] = False
        for name, value in expected.items():
            if name in ("advantages", "returns") and not strict:
                close(result[name][live], value[live])
                assert not result[name][dead].any()
            else:
                close(result[name], value)


def test_nan_under_the_mask_stays_there() -> None:
    clean = rollout()
    for name in ("logprobs", "ref_logp", "values"):
        shifted = clean["loss_mask"].roll(0 if name == "logprobs" else -1, -1) == 0
        shifted[:, -1] = False
        clean[name][shifted] = torch.nan
    learner = make_learner({"kl_ctl": 0.1, "discount": 0.9, "gae_lambda": 0.9, "adv_norm": None})
    with ours.apply():
        result = actor.PPOActor._compute_advantages(learner, clean)
    assert result["advantages"].isfinite().all()
    assert result["advantages"].any()


def test_a_mask_that_weights_tokens_falls_through() -> None:
    batch = rollout()
    batch["loss_mask"] = batch["loss_mask"] * 0.5
    learner = make_learner({"adv_norm": None})
    with ours.apply() as patches:
        actor.PPOActor._compute_advantages(learner, batch)
    assert patches.fallbacks == {"compute_advantages: a loss mask that weights tokens": 1}


# -- micro-batches -----------------------------------------------------------------------------------------------------


def check_groups(groups: list[list[int]], lengths: list[int], capacity: float) -> list[int]:
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in group) for group in groups]
    assert max(loads) <= capacity
    assert all(groups)
    return loads


@pytest.mark.parametrize(("capacity", "least", "divisor"), [(10**12, 4, 1), (900, 1, 1), (900, 3, 4), (500, 70, 2)])
@pytest.mark.parametrize("name", ["ffd_allocate", "kk_allocate"])
def test_allocation(name: str, capacity: int, least: int, divisor: int) -> None:
    g = torch.Generator().manual_seed(capacity % 97)
    lengths = torch.randint(1, 400, (128,), generator=g).tolist()
    theirs, result, fallbacks = one(lambda: getattr(seqpack, name)(lengths, capacity, least, divisor))
    assert not fallbacks
    spread = lambda loads: max(loads) - min(loads)  # noqa: E731
    loads, their_loads = check_groups(result, lengths, capacity), check_groups(theirs, lengths, capacity)
    assert len(loads) <= len(their_loads)
    assert len(loads) % divisor == 0
    assert len(loads) >= least
    assert len(loads) < len(their_loads) or spread(loads) <= spread(their_loads)
    strict = one(lambda: getattr(seqpack, name)(lengths, capacity, least, divisor), strict=True)
    assert strict[0] == strict[1]


@pytest.mark.parametrize("arguments", [([5, 9], 8, 1), ([5, 7], 8, 3), ([5, 7, 2], 8, 2, 2), ([1] * 5, 8, 1, 6)])
@pytest.mark.parametrize("name", ["ffd_allocate", "kk_allocate"])
def test_impossible_allocations_end_as_in_areal(name: str, arguments: tuple[Any, ...]) -> None:
    try:
        theirs = getattr(seqpack, name)(*arguments)
    except RuntimeError as error:
        with ours.apply(), pytest.raises(RuntimeError, match=re.escape(str(error)[:10])):
            getattr(seqpack, name)(*arguments)
        return
    with ours.apply():
        assert len(getattr(seqpack, name)(*arguments)) <= len(theirs)


def test_equal_sizes() -> None:
    lengths = torch.randint(1, 4000, (96,), generator=torch.Generator().manual_seed(1)).tolist()
    theirs, result, _ = one(lambda: seqpack.balanced_greedy_partition(lengths, 8))
    loads, their_loads = (check_groups(groups, lengths, 10**9) for groups in (result, theirs))
    assert {len(group) for group in result} == {12}
    assert max(loads) - min(loads) <= max(their_loads) - min(their_loads)
    _, result, _ = one(lambda: seqpack.kk_allocate(lengths, 10**9, 8, equal_size=True))
    assert {len(group) for group in result} == {12}
    for wrong in (([1, 2, 3], 2), ([1], 2)):
        with ours.apply(), pytest.raises(ValueError, match="must be"):
            seqpack.balanced_greedy_partition(*wrong)


def test_packing() -> None:
    batch = rollout() | {
        "pixels": torch.randn(8, 23, 3, 2, dtype=torch.bfloat16),
        "flags": torch.rand(8, 23) < 0.5,
        "names": ["a"] * 8,
        "position_ids": torch.arange(23).expand(8, -1),
    }
    theirs, result, fallbacks = one(lambda: data_utils.pack_tensor_dict(batch))
    assert not fallbacks
    assert list(result) == list(theirs)
    for name, value in theirs.items():
        if isinstance(value, Tensor):
            assert result[name].dtype == value.dtype
            assert torch.equal(result[name], value), name
        else:
            assert result[name] == value
    values = batch["values"].clone().requires_grad_()
    gradients = one(
        lambda: torch.autograd.grad(
            (data_utils.pack_tensor_dict(batch | {"values": values})["values"] ** 2).sum(), values
        )[0]
    )
    close(gradients[1], gradients[0])


def test_microbatches_end_to_end() -> None:
    spec = actor.MicroBatchSpec(n_mbs=2, max_tokens_per_mb=50)
    for patched in (False, True):
        with ours.apply(only=None if patched else ()):
            split = data_utils.split_padded_tensor_dict_into_mb_list(rollout(), spec)
            packs = [data_utils.pack_tensor_dict(mb) for mb in split.mbs]
        order = split.backward_indices
        rows = [x for p in packs for x in p["logprobs"].split(p["cu_seqlens"].diff().tolist())]
        assert all(torch.equal(rows[order[i]], rollout()["logprobs"][i, : len(rows[order[i]])]) for i in range(8))
        assert max(split.group_lens) <= 50
