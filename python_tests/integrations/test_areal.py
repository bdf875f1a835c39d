"""AReaL's functions, patched against unpatched: values, gradients, every option; what falls through; strict."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from areal_core.errors import UnsupportedVersionError
from areal_core.integrations import areal as ours

actor = pytest.importorskip("areal.trainer.ppo.actor", reason="areal is not installed", exc_type=ImportError)
data_utils = pytest.importorskip("areal.utils.data")
functional = pytest.importorskip("areal.utils.functional")
seqpack = pytest.importorskip("areal.utils.seqpack")
NormConfig = pytest.importorskip("areal.api.cli_args").NormConfig


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """AReaL compiles its log-probabilities; eager they give the same numbers in less time."""
    with torch.compiler.set_stance("force_eager"):
        yield


def both(*calls: Callable[[], Any], **options: Any) -> tuple[list[Any], list[Any], dict[str, int]]:
    """What AReaL gives for each call, what the patched AReaL gives, and what fell through."""
    theirs = [call() for call in calls]
    with ours.apply(**options) as patches:
        patched = [call() for call in calls]
    return theirs, patched, patches.fallbacks


def one(call: Callable[[], Any], **options: Any) -> tuple[Any, Any, dict[str, int]]:
    (theirs,), (patched,), fallbacks = both(call, **options)
    return theirs, patched, fallbacks


def close(mine: Any, theirs: Any, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def graded(function: Callable[..., Any], leaf: Tensor, *args: Any, **options: Any) -> Any:
    """The result and the gradient of a random projection of its first output."""
    leaf = leaf.detach().clone().requires_grad_()
    result = function(leaf, *args, **options)
    outputs = result if isinstance(result, tuple) else (result,)
    heads = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    weights = [torch.linspace(-1, 1, x.numel()).reshape(x.shape) if x.dim() else torch.tensor(0.7) for x in heads]
    gradient = torch.autograd.grad(heads, leaf, weights)[0]
    return result, gradient


# -- the seams ---------------------------------------------------------------------------------------------------------


def modules() -> list[ModuleType]:
    return [actor, data_utils, functional, functional.functional, functional.vocab_parallel, seqpack]


def test_apply_reaches_every_importer_and_undo_restores_identity() -> None:
    before = {module.__name__: dict(vars(module)) for module in modules()} | {"class": dict(vars(actor.PPOActor))}
    with ours.apply() as patches:
        assert len(patches.replaced) == len(ours.SEAMS)
        for module, name in ((functional, "gather_logprobs"), (actor, "ppo_actor_loss_fn"), (actor, "sapo_loss_fn")):
            assert getattr(module, name) is not before[module.__name__][name]
        assert seqpack.get_allocate_fn("ffd") is not before["areal.utils.seqpack"]["ffd_allocate"]
    for module in modules():
        assert all(vars(module)[key] is value for key, value in before[module.__name__].items()), module
    assert all(vars(actor.PPOActor)[key] is value for key, value in before["class"].items())


def test_another_version_is_refused_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def sapo_loss_fn(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, tau: float) -> Tensor:
        return logprobs

    monkeypatch.setattr(functional.functional, "sapo_loss_fn", sapo_loss_fn)
    before = {module.__name__: dict(vars(module)) for module in modules()}
    with pytest.raises(
        UnsupportedVersionError, match=r"areal 1.*sapo_loss_fn\(logprobs, old_logprobs, .*nothing was rep"
    ):
        ours.apply()
    assert all(vars(module)[key] is value for module in modules() for key, value in before[module.__name__].items())
    with ours.apply(only=["ffd_allocate"]) as patches:
        assert patches.replaced == ("ffd_allocate",)


# -- log-probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gather_logprobs", "gather_logprobs_entropy"])
def test_logprobs_and_entropy(name: str) -> None:
    cases = [
        ((5 * torch.randn(*shape, 67)).to(dtype), torch.randint(67, shape), temperature)
        for shape, temperature, dtype in itertools.product(
            ((1,), (33,), (3, 7), (1030,)), (1.0, 0.7), (torch.float32, torch.bfloat16, torch.float64)
        )
    ]
    calls = [partial(lambda *case: graded(getattr(functional, name), *case, chunk_size=100), *case) for case in cases]
    theirs, patched, fallbacks = both(*calls)
    assert not fallbacks
    for (logits, _, _), (expected, expected_grad), (result, grad) in zip(cases, theirs, patched, strict=True):
        close(result, expected, 5e-6)
        assert grad.dtype == logits.dtype
        close(grad.float(), expected_grad.float(), 1e-2 if logits.dtype == torch.bfloat16 else 1e-5)


def test_impossible_tokens_have_no_part_in_entropy_unless_strict() -> None:
    logits = torch.randn(5, 40)
    logits[1, 3:9] = -torch.inf
    logits[2] = -torch.inf
    labels = torch.tensor([0, 1, 0, 3, 4])
    call = lambda: graded(functional.gather_logprobs_entropy, logits, labels)  # noqa: E731
    theirs, result, _ = one(call)
    assert theirs[0][1][1].isnan()
    p = logits[1].double().softmax(0)
    close(result[0][1][1].double(), -torch.special.xlogy(p, p).sum())
    assert result[1].isfinite().all()
    theirs, result, fallbacks = one(call, strict=True)
    assert fallbacks == {"gather_logprobs_entropy: strict: logits of -inf": 1}
    close(result[0], theirs[0])
    close(result[1], theirs[1])


def test_what_the_kernels_do_not_take_falls_through() -> None:
    logits, labels = torch.randn(3, 11), torch.tensor([1, 2, 3])
    calls = (
        lambda: functional.gather_logprobs(logits, labels, torch.tensor(2.0)),
        lambda: functional.gather_logprobs(logits.repeat_interleave(2, -1)[:, ::2], labels),
    )
    theirs, result, fallbacks = both(*calls)
    reasons = ("a temperature that is no positive number", "logits with a stride in the vocabulary")
    assert fallbacks == {f"gather_logprobs: {reason}": 1 for reason in reasons}
    close(result, theirs)
    with ours.apply(strict=True), pytest.raises(AssertionError):
        functional.gather_logprobs(logits[:0], labels[:0])
    with ours.apply():
        assert functional.gather_logprobs(logits[:0], labels[:0]).shape == (0,)


def score_shard(rank: int, folder: str, queue: Any) -> None:
    """One of two ranks that share a vocabulary, in a process forked from the tests."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    logits, labels = vocabulary_case()
    shard = logits.chunk(2, -1)[rank].contiguous()
    call = lambda: graded(functional.gather_logprobs_entropy, shard, labels, 0.8, dist.group.WORLD)  # noqa: E731
    (_, (result, grad), fallbacks) = one(call)
    queue.put((rank, [x.detach().numpy() for x in (*result, grad)], fallbacks))
    dist.destroy_process_group()


def vocabulary_case() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    return 3 * torch.randn(9, 34, generator=g), torch.randint(34, (9,), generator=g)


def test_a_vocabulary_split_over_ranks(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=score_shard, args=(rank, str(tmp_path), queue)) for rank in range(2)]
    for process in processes:
        process.start()
    found = {rank: (arrays, fallbacks) for rank, arrays, fallbacks in (queue.get(timeout=120) for _ in range(2))}
    for process in processes:
        process.join(60)
    logits, labels = vocabulary_case()
    (logprobs, entropy), grad = graded(functional.gather_logprobs_entropy, logits, labels, 0.8)
    for rank in range(2):
        arrays, fallbacks = found[rank]
        assert not fallbacks
        for mine, whole in zip(arrays, (logprobs, entropy, grad.chunk(2, -1)[rank]), strict=True):
            close(torch.from_numpy(mine), whole.detach(), 1e-5)


# -- losses ------------------------------------------------------------------------------------------------------------


def policy_batch(packed: bool, seed: int = 0) -> SimpleNamespace:
    """Ragged sequences, one without a live token, stale logprobs."""
    g = torch.Generator().manual_seed(seed)
    shape = (61,) if packed else (6, 17)
    logp = -3 * torch.rand(shape, generator=g)
    mask = torch.rand(shape, generator=g) < 0.7
    cu_seqlens = torch.tensor([0, 9, 9, 20, 31, 61], dtype=torch.int32)
    if packed:
        mask[9:20] = False
    else:
        mask[2] = False
    noise = lambda scale: scale * torch.randn(shape, generator=g)  # noqa: E731
    prox = logp + noise(0.4)
    return SimpleNamespace(
        logp=logp,
        prox=prox,
        old=prox + noise(0.5),
        advantages=noise(1.0),
        mask=mask,
        cu_seqlens=cu_seqlens if packed else None,
    )


def rejections() -> list[Any]:
    config = actor.RejectionSamplingConfig
    token = [
        config(level="token", action=action, metric=metric, upper=upper, lower=lower)
        for action, metric, (upper, lower) in itertools.product(
            ("mask", "clamp"), ("ratio", "kl_k1", "kl_k2", "kl_k3"), ((1.3, None), (1.3, 0.7))
        )
        if not (action == "clamp" and metric != "ratio")
    ]
    sequence = [
        config(level="sequence", action=action, metric=metric, agg=agg, upper=1.05, lower=lower)
        for action, metric, agg, lower in itertools.product(
            ("mask", "clamp"), ("ratio", "kl_k2"), ("sum", "mean", "max"), (None, 0.6)
        )
        if not (action == "clamp" and metric != "ratio")
    ]
    return [None, *token, *sequence]


def policy_loss(batch: SimpleNamespace, **options: Any) -> Any:
    options = {"eps_clip": 0.2, **options}
    return graded(
        lambda logp: functional.ppo_actor_loss_fn(
            logp, batch.prox, batch.old, batch.advantages, loss_mask=batch.mask, cu_seqlens=batch.cu_seqlens, **options
        ),
        batch.logp,
    )


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_policy_loss(level: str, packed: bool, strict: bool) -> None:
    batch = policy_batch(packed)
    clips = ((0.2, None, None), (0.2, 0.28, None), (0.2, 0.4, 1.5), (1.7, 0.1, 3.0))
    calls = [
        partial(
            policy_loss,
            batch,
            eps_clip=low,
            eps_clip_higher=high,
            c_clip=dual,
            rejection_sampling=rejection,
            importance_sampling_level=level,
        )
        for (low, high, dual), rejection in itertools.product(clips, rejections())
    ]
    theirs, patched, fallbacks = both(*calls, strict=strict)
    assert not fallbacks
    for expected, result in zip(theirs, patched, strict=True):
        same_loss(result, expected)


def same_loss(result: Any, expected: Any) -> None:
    """The loss, its gradient and every statistic."""
    close(result[0][0], expected[0][0])
    close(result[1], expected[1])
    assert result[0][1].keys() == expected[0][1].keys()
    for name, value in expected[0][1].items():
        close(result[0][1][name], value)
        if isinstance(value, Tensor):
            assert not result[0][1][name].requires_grad, name


def test_overflow_under_the_mask_and_beyond_reaches_nothing() -> None:
    batch = policy_batch(packed=True)
    dead = (~batch.mask).nonzero()[:3, 0]
    batch.logp[dead[0]], batch.prox[dead[1]], batch.advantages[dead[2]] = 1e4, torch.nan, torch.nan
    batch.old[dead] = -torch.inf
    clean = policy_batch(packed=True)
    (_, their_grad), (result, grad), fallbacks = one(lambda: policy_loss(batch))
    assert not their_grad.isfinite().all()
    assert not fallbacks
    expected, expected_grad = policy_loss(clean)
    close(result[0], expected[0])
    close(grad, expected_grad)
    _, strict, fallbacks = one(lambda: policy_loss(batch), strict=True)
    assert fallbacks == {"ppo_actor_loss_fn: strict: log-ratios beyond 20": 1}
    close(strict[1], their_grad)


def test_a_behavior_logprob_of_minus_infinity_is_an_infinite_weight() -> None:
    batch = policy_batch(packed=True)
    token = int(batch.mask.nonzero()[0])
    batch.old[token] = -torch.inf
    for action, weight in (("mask", 0.0), ("clamp", 2.0)):
        rejection = actor.RejectionSamplingConfig(level="token", action=action, metric="ratio", upper=2.0)
        theirs, result, _ = one(lambda rejection=rejection: policy_loss(batch, rejection_sampling=rejection))
        assert theirs[0][1]["behave_imp_weight"][token] == 1
        assert result[0][1]["behave_imp_weight"][token] == weight
    batch.old[token] = torch.nan
    for action in ("mask", "clamp"):
        metric = "kl_k1" if action == "mask" else "ratio"
        rejection = actor.RejectionSamplingConfig(level="token", action=action, metric=metric, upper=2.0)
        assert one(lambda rejection=rejection: policy_loss(batch, rejection_sampling=rejection))[1][0][0].isnan()


def test_without_live_tokens_the_loss_is_zero() -> None:
    batch = policy_batch(packed=True)
    batch.mask[:] = False
    for rejection in (None, rejections()[1]):
        theirs, result, _ = one(lambda rejection=rejection: policy_loss(batch, rejection_sampling=rejection))
        close(result[0][0], theirs[0][0])
        assert result[0][0] == 0
        assert not result[1].any()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"eps_clip": -0.1}, "clipping bounds out of range"),
        ({"eps_clip_higher": float("inf")}, "clipping bounds out of range"),
        ({"half": True}, "half-precision logprobs or advantages"),
        ({"learned": True}, "gradients to what the loss holds constant"),
    ],
)
def test_what_a_policy_loss_does_not_take_falls_through(change: dict[str, Any], reason: str) -> None:
    batch = policy_batch(packed=True)
    options = {k: v for k, v in change.items() if k.startswith("eps")}
    if "half" in change:
        batch.prox = batch.prox.half()
    if "learned" in change:
        batch.advantages.requires_grad_()
    theirs, result, fallbacks = one(lambda: policy_loss(batch, **options))
    assert fallbacks == {f"ppo_actor_loss_fn: {reason}": 1}
    close(result[0][0], theirs[0][0], 0.0)


@pytest.mark.parametrize("options", [{"c_clip": 0.5}, {"importance_sampling_level": "word"}])
def test_refusals_of_areal_stay_its_own(options: dict[str, Any]) -> None:
    batch = policy_batch(packed=True)
    with ours.apply(), pytest.raises((AssertionError, ValueError)):
        policy_loss(batch, **options)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_sapo(level: str, packed: bool, strict: bool) -> None:
    batch = policy_batch(packed)
    calls = [
        lambda taus=taus: graded(
            lambda logp: functional.sapo_loss_fn(
                logp, batch.prox, batch.advantages, *taus, batch.mask, level, batch.cu_seqlens
            ),
            batch.logp,
        )
        for taus in ((1.0, 1.05), (3.0, 0.4))
    ]
    theirs, patched, fallbacks = both(*calls, strict=strict)
    assert not fallbacks
    for expected, result in zip(theirs, patched, strict=True):
        same_loss(result, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_value_loss(strict: bool) -> None:
    value, old, target = (8 * torch.randn(5, 13) for _ in range(3))
    calls = [
        lambda mask=mask, kind=kind: graded(
            lambda x: functional.ppo_critic_loss_fn(x, old, target, 3.0, mask, kind), value
        )
        for mask, kind in itertools.product((None, torch.rand(5, 13) < 0.6), ("mse", "huber"))
    ]
    theirs, patched, fallbacks = both(*calls, strict=strict)
    assert not fallbacks
    for expected, result in zip(theirs, patched, strict=True):
        same_loss(result, expected)


def test_value_loss_over_nothing() -> None:
    none = torch.zeros(4, dtype=torch.bool)
    call = lambda: functional.ppo_critic_loss_fn(torch.ones(4), torch.ones(4), torch.zeros(4), 0.2, none)[0]  # noqa: E731
    theirs, result, _ = one(call)
    assert theirs.isnan()
    assert result == 0
    assert one(call, strict=True)[1].isnan()


# -- stale tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_m2po(strict: bool) -> None:
    batch = policy_batch(packed=False)
    calls = [
        lambda threshold=t: actor._apply_m2po_masking(batch.old, batch.prox, batch.mask, threshold)
        for t in (5e-3, 0.04, 0.2, 9.0)
    ]
    theirs, patched, fallbacks = both(*calls, strict=strict)
    assert bool(fallbacks) == strict
    assert all(torch.equal(result, expected) for expected, result in zip(theirs, patched, strict=True))
    far = batch.old + 9
    theirs, result, _ = one(lambda: actor._apply_m2po_masking(far, batch.prox, batch.mask, 0.01), strict=strict)
    assert int(theirs.sum()) == 1
    assert int(result.sum()) == strict


@pytest.mark.parametrize("method", ["loglinear", "linear", "rollout", None])
def test_proximal_approximations(method: str | None) -> None:
    batch = policy_batch(packed=True)
    versions = torch.randint(-1, 6, batch.old.shape)
    call = lambda: actor.compute_prox_logp_approximations(batch.old, batch.logp, versions, 5, method)  # noqa: E731
    theirs, result, fallbacks = one(call)
    assert not fallbacks
    assert list(result) == list(theirs)
    for name in theirs:
        close(result[name], theirs[name])
    theirs, result, fallbacks = one(call, strict=True)
    assert bool(fallbacks) == (method in ("linear", None))
    for name in theirs:
        close(result[name], theirs[name])


# -- a whole loss and whole advantages ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prox_logp_method": "loglinear", "current_version": 4},
        {"prox_logp_method": "metrics", "current_version": 4},
        {"m2_threshold": 0.1},
        {"importance_sampling_level": "sequence"},
        {"use_sapo_loss": True},
    ],
)
def test_the_loss_of_a_step(options: dict[str, Any]) -> None:
    batch = policy_batch(packed=True)
    inputs = {
        "logprobs": batch.old,
        "advantages": batch.advantages,
        "loss_mask": batch.mask,
        "prox_logp": None if options.get("prox_logp_method") == "loglinear" else batch.prox,
        "versions": torch.arange(61) % 5,
        "cu_seqlens": batch.cu_seqlens,
        "teacher_logp": batch.prox - 0.1,
    }
    entropy = torch.ones_like(batch.logp)
    call = lambda: graded(  # noqa: E731
        lambda x: actor.grpo_loss_fn(x, entropy, dict(inputs), 0.2, 0.28, 3.0, **options), batch.logp
    )
    (theirs, their_grad), (result, grad), fallbacks = one(call)
    assert not fallbacks
    close(result, theirs)
    close(grad, their_grad)


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
