"""The C library computes the same bits as the torch ops."""

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from c_header import (
    StatusError,
    call,
    call_on,
    library,
    make,
    struct_type,
)
from op_checks import assert_same_bits
from torch import Tensor

from areal_core import ops
from areal_core.ops.loss_config import AGGREGATIONS, BEHAVIOR_LEVELS, KL_ESTIMATORS, OBJECTIVES, RATIO_LEVELS
from areal_core.ops.loss_stats import _MAXIMA, _SUMS

ROOT = Path(__file__).parents[2]
CU = torch.tensor([0, 3, 3, 10, 12])
T, S = 12, 4
native = torch.ops.areal_core


def per_token(device: torch.device, dtype: torch.dtype, *, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(T, dtype=torch.float64)).to(device, dtype)


def some_mask(device: torch.device) -> Tensor:
    return torch.tensor([1, 1, 0, 1, 0, 1, 1, 1, 1, 0, 1, 1], dtype=torch.bool, device=device)


reals = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


# -- the same bits as the torch ops -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("per_row", [False, True])
def test_logprob(device: torch.device, dtype: torch.dtype, per_row: bool) -> None:
    if device.type == "cuda" and dtype == torch.float64:
        pytest.skip("float64 logits are for the CPU")
    real = torch.float64 if dtype == torch.float64 else torch.float32
    logits = torch.randn(5, 40, device=device).to(dtype)[:, :37]
    labels = torch.tensor([3, 0, -7, 36, 5], device=device)
    mask = torch.tensor([1, 1, 1, 1, 0], dtype=torch.bool, device=device)
    temperatures = torch.rand(5, device=device).to(real) + 0.5 if per_row else None
    expected = native.logprob_forward.default(logits, labels, temperatures, 0.7, mask, -7, False)
    fields: dict[str, Any] = {"row_stride": 40, "rows": 5, "vocab": 37, "labels": labels, "ignore_index": -7}
    source = make("areal_logprob_input", dtype=dtype, temperature=0.7, loss_mask=mask, **fields)
    source.logits = logits.data_ptr()
    source.temperatures = temperatures.data_ptr() if temperatures is not None else None
    names = ("logprobs", "entropy", "lse", "row_max", "log_sum")
    results = {name: torch.full((5,), 7.0, dtype=real, device=device) for name in names}
    scratch = []
    if device.type == "cuda":
        needed = ctypes.c_int64()
        call("areal_logprob_workspace_bytes", source, ctypes.byref(needed))
        workspace = torch.empty(needed.value, dtype=torch.uint8, device=device)
        bad_row = torch.zeros(1, dtype=torch.int64, device=device)
        scratch = [
            make("areal_logprob_scratch", workspace=workspace, workspace_bytes=workspace.numel(), bad_row=bad_row)
        ]
    call_on(device, "logprob_forward", source, make("areal_logprob_output", **results), *scratch)
    for got, want in zip(results.values(), expected, strict=True):
        assert_same_bits(got, want)

    upstream = torch.randn(5, device=device).to(real)
    saved = {name: results[name] for name in ("logprobs", "entropy", "row_max", "log_sum")}
    gradient = torch.full((5, 37), 7.0, dtype=dtype, device=device)
    outputs = {"grad_logits": gradient, "grad_row_stride": 37}
    call_on(
        device, "logprob_backward", source, make("areal_logprob_gradient", grad_logprobs=upstream, **saved, **outputs)
    )
    options = (labels, temperatures, 0.7, mask, -7)
    assert_same_bits(gradient, native.logprob_backward.default(upstream, None, None, logits, *options, *saved.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_logprob_over_two_shards(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cuda" and dtype == torch.float64:
        pytest.skip("float64 logits are for the CPU")
    real = torch.float64 if dtype == torch.float64 else torch.float32
    logits = torch.randn(5, 40, device=device).to(dtype)
    labels = torch.tensor([3, 0, -7, 36, 25], device=device)
    parts = torch.full((2, 5, 4), 7.0, dtype=real, device=device)
    bad_row, workspace = torch.zeros(1, dtype=torch.int64, device=device), torch.empty(1 << 16, device=device)
    scratch = make("areal_logprob_scratch", workspace=workspace, workspace_bytes=4 << 16, bad_row=bad_row)
    given: dict[str, Any] = {"dtype": dtype, "row_stride": 40, "rows": 5, "labels": labels, "ignore_index": -7}
    shards = [(0, 25), (25, 15)]
    sources = [make("areal_logprob_input", temperature=0.7, vocab_start=b, vocab=n, **given) for b, n in shards]
    for (begin, size), source, part in zip(shards, sources, parts, strict=True):
        columns = logits[:, begin : begin + size]
        source.logits = columns.data_ptr()
        call_on(device, "logprob_partial", source, 40, part, *([scratch] if device.type == "cuda" else []))
        want = native.logprob_partial.default(columns, labels, None, 0.7, None, -7, begin, 40)
        assert_same_bits(part, want)
    results = {
        n: torch.full((5,), 7.0, dtype=real, device=device)
        for n in ("logprobs", "entropy", "lse", "row_max", "log_sum")
    }
    call_on(device, "logprob_merge", sources[1], parts, 2, make("areal_logprob_output", **results))
    expected = native.logprob_merge.default(logits[:, 25:], parts, labels, None, 0.7, None, -7, 25, False)
    for got, want in zip(results.values(), expected, strict=True):
        assert_same_bits(got, want)
    with pytest.raises(StatusError, match="expected vocab_start = 0"):
        call_on(device, "logprob_forward", sources[1], make("areal_logprob_output", **results))


LOSSES = {
    "ppo": ops.PPOLossConfig(clip_low=0.2, clip_high=0.28),
    "everything": ops.PPOLossConfig(
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=1.5,
        behavior_mode="mask",
        behavior_low=0.8,
        behavior_cap=1.2,
        kl_estimator="k2",
        kl_coef=0.1,
        entropy_coef=0.01,
        distill_coef=0.2,
    ),
    "gspo": ops.PPOLossConfig(
        ratio_level="sequence", aggregation="sequence_mean_token_mean", behavior_level="geometric"
    ),
    "gmpo": ops.PPOLossConfig(objective="gmpo", ratio_level="sequence", aggregation="sequence_mean_token_sum"),
    "sapo": ops.PPOLossConfig(objective="sapo", tau_positive=0.9),
    "cispo": ops.PPOLossConfig(objective="cispo", aggregation="constant"),
    "reinforce": ops.PPOLossConfig(objective="reinforce", ratio_level="off"),
}


def loss_options(config: ops.PPOLossConfig) -> dict[str, Any]:
    choices = {
        "objective": OBJECTIVES,
        "ratio_level": RATIO_LEVELS,
        "behavior_level": BEHAVIOR_LEVELS,
        "kl_estimator": KL_ESTIMATORS,
        "aggregation": AGGREGATIONS,
    }
    numbers = ("clip_low", "dual_clip", "tau_positive", "tau_negative", "behavior_low", "behavior_cap")
    coefficients = ("kl_coef", "entropy_coef", "distill_coef")
    return {
        **{name: values.index(getattr(config, name)) for name, values in choices.items()},
        **{name: getattr(config, name) or 0.0 for name in (*numbers, *coefficients)},
        "clip_high": config.clip_low if config.clip_high is None else config.clip_high,
        "behavior_mode": 0 if config.behavior_mode == "truncate" else 1,
    }


@reals
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("own_scratch", [False, True])
def test_policy_loss(device: torch.device, dtype: torch.dtype, name: str, own_scratch: bool) -> None:
    config = LOSSES[name]
    required = ("logprobs", "proximal_logprobs", "advantages")
    optional = ("behavior_logprobs", "ref_logprobs", "entropy", "teacher_logprobs") if name != "ppo" else ()
    given = {x: per_token(device, dtype, scale=0.3) for x in (*required, *optional)}
    given["loss_mask"] = some_mask(device)
    if name != "ppo":
        given |= {
            "keep_mask": some_mask(device).flip(0),
            "versions": torch.arange(T, device=device),
            "current_version": torch.tensor([T], device=device),
            "normalizer": torch.tensor([7.0], dtype=torch.float64, device=device),
            "cu_seqlens": CU.to(device),
        }
    leaves = {x: given[x].clone().requires_grad_() for x in ("logprobs", "entropy") if x in given}
    expected = ops.ppo_loss(**{**given, **leaves}, config=config)
    gradients = torch.autograd.grad(expected.loss, list(leaves.values()), allow_unused=True)

    lib = library()
    count, bytes_ = (
        lib.areal_policy_loss_stat_count(),
        lib.areal_policy_loss_scratch_bytes(ctypes.c_int64(T), ctypes.c_int64(S)),
    )
    loss, scale = (torch.empty((), dtype=dtype, device=device) for _ in range(2))
    grads = {f"grad_{x}": torch.full((T,), 7.0, dtype=dtype, device=device) for x in leaves}
    stats = torch.empty(count, dtype=torch.float64, device=device)
    outputs = {"loss": loss, "scale": scale, **grads, "stats": stats, "stats_count": count}
    if device.type == "cuda" or own_scratch:
        scratch = torch.empty(bytes_, dtype=torch.uint8, device=device)
        outputs |= {"scratch": scratch, "scratch_bytes": bytes_}
    sizes = {"dtype": dtype, "tokens": T, "sequences": S}
    call_on(device, "policy_loss", make("areal_policy_loss_args", **sizes, **given, **loss_options(config), **outputs))
    assert_same_bits(loss, expected.loss)
    assert_same_bits(stats, expected.stats.raw)
    assert_same_bits(grads["grad_logprobs"] * scale, gradients[0])
    if config.entropy_coef != 0:
        assert_same_bits(grads["grad_entropy"] * scale, gradients[1])


@reals
@pytest.mark.parametrize("bounded", [False, True])
def test_value_loss(device: torch.device, dtype: torch.dtype, bounded: bool) -> None:
    given = {name: per_token(device, dtype) for name in ("values", "old_values", "returns")}
    given["loss_mask"] = some_mask(device)
    options = {"clip": 0.2, "huber_delta": 0.5} if bounded else {}
    leaf = given["values"].clone().requires_grad_()
    expected = ops.value_loss(**{**given, "values": leaf}, **options)
    (gradient,) = torch.autograd.grad(expected.loss, leaf)
    loss, scale = (torch.empty((), dtype=dtype, device=device) for _ in range(2))
    grad, stats = torch.empty(T, dtype=dtype, device=device), torch.empty(8, dtype=torch.float64, device=device)
    outputs = {"loss": loss, "scale": scale, "grad_values": grad, "stats": stats}
    if device.type == "cuda":
        size = library().areal_value_loss_scratch_bytes(ctypes.c_int64(T))
        outputs |= {"scratch": torch.empty(size, dtype=torch.uint8, device=device), "scratch_bytes": size}
    call_on(device, "value_loss", make("areal_value_loss_args", dtype=dtype, tokens=T, **given, **options, **outputs))
    assert_same_bits(loss, expected.loss)
    assert_same_bits(stats, expected.stats.raw)
    assert_same_bits(grad * scale, gradient)


def test_statistics_have_the_names_of_the_python_summary() -> None:
    lib = library()
    names = [
        lib.areal_policy_loss_stat_name(ctypes.c_int64(i)).decode() for i in range(lib.areal_policy_loss_stat_count())
    ]
    assert lib.areal_policy_loss_stat_name(ctypes.c_int64(len(names))) is None
    bare = [re.sub("^clip_fraction_|_(mean|fraction)$", "", name) for name in (*_SUMS, *_MAXIMA)]
    assert [name.removeprefix("clip_").replace("dual_clip", "dual") for name in names] == bare


@reals
@pytest.mark.parametrize("masked", [False, True])
def test_gae(device: torch.device, dtype: torch.dtype, masked: bool) -> None:
    rewards, values, cu = per_token(device, dtype), per_token(device, dtype), CU.to(device)
    mask = some_mask(device) if masked else None
    expected = ops.gae(rewards, values, cu, gamma=0.9, lam=0.8, loss_mask=mask)
    given = {"rewards": rewards, "values": values, "cu_seqlens": cu} | ({"loss_mask": mask} if masked else {})
    out = {name: torch.full((T,), 7.0, dtype=dtype, device=device) for name in ("advantages", "returns")}
    sizes = {"tokens": T, "sequences": S}
    call_on(device, "gae", make("areal_gae_args", dtype=dtype, gamma=0.9, lam=0.8, **sizes, **given, **out))
    for name, tensor in out.items():
        assert_same_bits(tensor, getattr(expected, name))


@reals
def test_discounted_returns(device: torch.device, dtype: torch.dtype) -> None:
    rewards, cu = per_token(device, dtype), CU.to(device)
    returns = torch.full((T,), 7.0, dtype=dtype, device=device)
    given = {"rewards": rewards, "cu_seqlens": cu, "tokens": T, "sequences": S, "gamma": 0.9, "lam": 1.0}
    call_on(device, "gae", make("areal_gae_args", dtype=dtype, returns=returns, **given))
    assert_same_bits(returns, ops.discounted_returns(rewards, cu, gamma=0.9))


@reals
def test_group_scores_by_length(device: torch.device, dtype: torch.dtype) -> None:
    sorted_ids = torch.tensor([1, 1, 1, 2, 2], device=device)
    order = torch.tensor([4, 0, 2, 1, 3], device=device)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 3.0], dtype=dtype, device=device)
    lengths = torch.tensor([3.0, 1.0, 0.0, 2.0, 5.0], dtype=torch.float64, device=device)
    options = (1, 1, False, True, True, False, 1, 1e-6, False, False)
    want = native.group_scores.default(rewards, lengths, sorted_ids, order, None, *options)
    out = {name: torch.full((5,), 7.0, dtype=torch.float64, device=device) for name in ("scores", "mean_lengths")}
    out["has_signal"] = torch.zeros(5, dtype=torch.bool, device=device)
    flags = {"mean_level": 1, "std_level": 1, "leave_one_out_std": 1, "length_weighted": 1, "ddof": 1}
    scratch = torch.empty(library().areal_group_scores_scratch_bytes(), dtype=torch.uint8, device=device)
    given = {"rewards": rewards, "lengths": lengths, "sorted_ids": sorted_ids, "order": order, "scratch": scratch}
    extra = {"sequences": 5, "eps": 1e-6, "scratch_bytes": scratch.numel()}
    call_on(device, "group_scores", make("areal_group_scores_args", dtype=dtype, **given, **out, **flags, **extra))
    for got, expected in zip(out.values(), want, strict=True):
        assert_same_bits(got, expected)


@reals
def test_best_of_scores(device: torch.device, dtype: torch.dtype) -> None:
    sorted_ids = torch.tensor([1, 1, 1, 2, 2], device=device)
    order = torch.tensor([4, 2, 0, 1, 3], device=device)  # rewards ascend within a group
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0], dtype=dtype, device=device)
    want = native.best_of_scores.default(rewards, sorted_ids, order, 2, True, 1e-6, True, False)
    scores = torch.full((5,), 7.0, dtype=torch.float64, device=device)
    given = {"rewards": rewards, "sorted_ids": sorted_ids, "order": order, "scores": scores, "sequences": 5}
    options = {"k": 2, "divide_by_std": 1, "eps": 1e-6, "eps_in_root": 1}
    call_on(device, "best_of_scores", make("areal_best_of_scores_args", dtype=dtype, **given, **options))
    assert_same_bits(scores, want)


@reals
@pytest.mark.parametrize("level", [1, 2])
def test_group_scores(device: torch.device, dtype: torch.dtype, level: int) -> None:
    ids = torch.tensor([5, -1, 5, 9, 5, -1, 2])
    sorted_ids, order = torch.zeros_like(ids), torch.zeros_like(ids)
    call("areal_sort_groups_cpu", ids, ids.numel(), sorted_ids, order)
    expected_ids, expected_order = torch.sort(ids, stable=True)
    assert torch.equal(sorted_ids, expected_ids)
    assert torch.equal(order, expected_order)
    rewards = torch.tensor([1.0, 0.0, 0.5, float("nan"), 1.0, 3.0, 2.0], dtype=dtype, device=device)
    sorted_ids, order = sorted_ids.to(device), order.to(device)
    moments = torch.stack(ops.masked_moments(rewards, loss_mask=~rewards.isnan()))
    levels = (1, level, True, False, False, False, 1, 1e-6, True, True)
    want, _, _ = native.group_scores.default(rewards, None, sorted_ids, order, moments, *levels)
    scores = torch.empty(7, dtype=torch.float64, device=device)
    scratch = torch.empty(library().areal_group_scores_scratch_bytes(), dtype=torch.uint8, device=device)
    flags = {"mean_level": 1, "std_level": level, "leave_one_out": 1, "ddof": 1, "eps_in_root": 1, "singleton_raw": 1}
    arrays = {"rewards": rewards, "sorted_ids": sorted_ids, "order": order, "scores": scores, "scratch": scratch}
    extra = {"sequences": 7, "eps": 1e-6, "scratch_bytes": scratch.numel()}
    call_on(device, "group_scores", make("areal_group_scores_args", dtype=dtype, **arrays, **flags, **extra))
    assert_same_bits(scores, want)


@reals
def test_spread_scores_sequence_rewards_and_live_tokens(device: torch.device, dtype: torch.dtype) -> None:
    pair = {name: per_token(device, dtype) for name in ("logprobs", "ref_logprobs")}
    cu, mask, scores = CU.to(device), some_mask(device), torch.randn(S, dtype=torch.float64).to(device)
    common = {"dtype": dtype, "tokens": T, "sequences": S, "cu_seqlens": cu, "loss_mask": mask, **pair}
    out = torch.full((T,), 7.0, dtype=dtype, device=device)
    lengths = torch.full((S,), 7.0, dtype=torch.float64, device=device)
    counted = {name: x for name, x in common.items() if name not in ("dtype", *pair)}
    call_on(device, "live_tokens", make("areal_live_tokens_args", counts=lengths, **counted))
    assert_same_bits(lengths, native.live_tokens.default(cu, mask, T))
    spread = make("areal_spread_scores_args", scores=scores, divisors=lengths, beta=0.1, advantages=out, **common)
    call_on(device, "spread_scores", spread)
    float64 = dtype == torch.float64
    assert_same_bits(out, native.spread_scores.default(scores, lengths, cu, T, mask, *pair.values(), 0.1, float64))
    sums = torch.full((S,), 7.0, dtype=torch.float64, device=device)
    rewards = per_token(device, dtype)
    made = make("areal_sequence_rewards_args", rewards=rewards, beta=0.1, kl=2, sums=sums, **common)
    call_on(device, "sequence_rewards", made)
    per = torch.full((T,), 7.0, dtype=dtype, device=device)
    token = {name: x for name, x in common.items() if name not in ("sequences", "cu_seqlens")}
    call_on(
        device, "token_rewards", make("areal_token_rewards_args", rewards=rewards, beta=0.1, kl=2, out=per, **token)
    )
    assert_same_bits(per, native.token_rewards.default(rewards, *pair.values(), mask, 0.1, 2))
    assert_same_bits(sums, native.sequence_rewards.default(rewards, *pair.values(), cu, mask, 0.1, 2))


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_copy_segments(device: torch.device, shift: int) -> None:
    cu = CU.to(device)
    sources = [torch.randn(T, 3).to(device), torch.randint(100, (T,)).to(device), torch.randn(T).bfloat16().to(device)]
    targets = [torch.full_like(x, 99) for x in sources]
    fills = [torch.tensor(0.5), torch.tensor(-100), None]
    map_ = make(
        "areal_segment_map", segments=S, source_begin=cu, target_begin=cu, shift=shift, source_rows=T, target_rows=T
    )
    map_.target_end = cu[1:].data_ptr()
    rows = [x.element_size() * x[0].numel() for x in sources]
    structs = [
        make("areal_row_tensor", source=x, target=y, row_bytes=n)
        for x, y, n in zip(sources, targets, rows, strict=True)
    ]
    for struct, fill in zip(structs, fills, strict=True):
        if fill is not None:
            struct.fill, struct.fill_bytes = fill.data_ptr(), fill.element_size()
    tensors = (struct_type("areal_row_tensor") * 3)(*structs)
    call_on(device, "copy_segments", map_, tensors, 3)
    for source, target, fill in zip(sources, targets, (0.5, -100, 0), strict=True):
        assert_same_bits(target, native.shift_tokens.default(source, cu, shift, float(fill)))


def test_position_ids_and_mask_extents(device: torch.device) -> None:
    cu, positions = CU.to(device), torch.full((T,), 7, device=device)
    sizes = {"tokens": T, "sequences": S}
    call_on(device, "position_ids", make("areal_position_ids_args", cu_seqlens=cu, positions=positions, **sizes))
    assert torch.equal(positions, ops.position_ids(cu, total_tokens=T))
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0]], dtype=torch.bool, device=device)
    out = torch.full((3, 3), 7, device=device)
    rows = dict(zip(("starts", "lengths", "counts"), out, strict=True))
    call_on(device, "mask_extents", make("areal_mask_extents_args", rows=3, columns=4, mask=mask, **rows))
    assert torch.equal(out, native.mask_extents.default(mask))


@pytest.mark.parametrize(("method", "name"), [(0, "ffd"), (1, "mffd"), (2, "kk")])
def test_allocation(method: int, name: Any) -> None:
    lengths = torch.randint(1, 1000, (300,))
    bin_of, count = torch.full((300,), -1), torch.zeros(1, dtype=torch.int64)
    common = {"sequences": 300, "lengths": lengths, "bin_of": bin_of}
    call(
        "areal_allocate_microbatches",
        make("areal_allocate_args", max_tokens=2048, multiple_of=4, method=method, bin_count=count, **common),
    )
    bins = [torch.nonzero(bin_of == b).flatten().tolist() for b in range(int(count))]
    assert bins == ops.allocate_microbatches(lengths, 2048, multiple_of=4, method=name)
    call(
        "areal_partition_balanced",
        make("areal_partition_args", bins=7, quadratic_cost=0.5, linear_cost=1.0, equal_size=1, **common),
    )
    bins = [torch.nonzero(bin_of == b).flatten().tolist() for b in range(7)]
    assert bins == ops.partition_balanced(lengths, 7, cost=(1.0, 0.5), equal_size=True)
