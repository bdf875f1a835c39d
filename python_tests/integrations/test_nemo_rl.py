"""NeMo-RL's functions, patched against unpatched: values, gradients, options; what falls through; strict."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from areal_core.errors import UnsupportedVersionError
from areal_core.integrations import nemo_rl as integration

from patched import both, close

model_utils = pytest.importorskip(
    "nemo_rl.distributed.model_utils", reason="nemo_rl is not installed", exc_type=ImportError
)
packing = pytest.importorskip("nemo_rl.data.packing.algorithms")
estimators = pytest.importorskip(
    "nemo_rl.algorithms.advantage_estimator", reason="nemo_rl lacks what it needs", exc_type=ImportError
)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def case() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    return 3 * torch.randn(2, 9, 34, generator=g), torch.randint(34, (2, 9), generator=g)


def scored(logits: Tensor, target: Tensor, rank: int, group: Any) -> list[Tensor]:
    columns = logits.shape[-1]
    bounds = (rank * columns, (rank + 1) * columns)
    results: list[Tensor] = []
    for chunked in (False, True):
        leaf = logits.detach().clone().requires_grad_()
        function = model_utils.ChunkedDistributedLogprob if chunked else model_utils.DistributedLogprob
        options = (4, group) if chunked else (group,)
        logprobs = function.apply(leaf, target, *bounds, *options, False)
        (grad,) = torch.autograd.grad(logprobs, leaf, torch.linspace(-1, 1, target.numel()).view_as(target))
        silent = function.apply(leaf, target, *bounds, *options, True)
        results += [logprobs.detach(), grad.float(), silent.detach()]
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("alone")
def test_logprobs(dtype: torch.dtype) -> None:
    logits, target = case()
    theirs, mine, fallbacks = both(integration, lambda: scored(logits.to(dtype), target, 0, None))
    assert not fallbacks
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    close(mine, theirs, rtol=tolerance, atol=tolerance)
    with integration.apply():
        leaf = logits.clone().requires_grad_()
        assert not model_utils.DistributedLogprob.apply(leaf, target, 0, 34, None, True).requires_grad


@pytest.mark.usefixtures("alone")
def test_shards_of_several_sizes_fall_through() -> None:
    logits, target = case()
    run = lambda: model_utils.DistributedLogprob.apply(logits[..., :20], target, 0, 34, None, True)  # noqa: E731
    target.clamp_(max=19)
    theirs, mine, fallbacks = both(integration, run)
    assert fallbacks == {"DistributedLogprob: shards of several sizes": 1}
    close(mine, theirs)


def score_shard(rank: int, folder: str, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/two", rank=rank, world_size=2)
    logits, target = case()
    shard = logits.chunk(2, -1)[rank].contiguous()
    theirs, mine, fallbacks = both(integration, lambda: scored(shard, target, rank, dist.group.WORLD))
    queue.put(([x.numpy() for x in theirs], [x.numpy() for x in mine], fallbacks))
    dist.destroy_process_group()


def test_a_vocabulary_split_over_ranks(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=score_shard, args=(rank, str(tmp_path), queue)) for rank in range(2)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=120) for _ in range(2)]
    for process in processes:
        process.join(60)
    for theirs, mine, fallbacks in found:
        assert not fallbacks
        for result, expected in zip(mine, theirs, strict=True):
            close(torch.from_numpy(result), torch.from_numpy(expected), rtol=2e-6, atol=2e-6)


def gae_inputs() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(4)
    mask = (torch.rand(6, 19, generator=g) < 0.6).float()
    mask[2] = 0
    return torch.randn(6, 19, generator=g), torch.randn(6, 19, generator=g), mask


@pytest.mark.parametrize("strict", [False, True])
def test_gae(strict: bool) -> None:
    rewards, values, mask = gae_inputs()
    function = lambda gamma, lam: estimators.GeneralizedAdvantageEstimator._compute_gae(  # noqa: E731
        SimpleNamespace(gae_lambda=lam, gae_gamma=gamma), rewards * mask, values, mask
    )
    factors = list(itertools.product((1.0, 0.97), (1.0, 0.9, 0.0)))
    theirs, mine, fallbacks = both(integration, lambda: [function(*f) for f in factors], strict=strict)
    assert not fallbacks
    live = mask.bool()
    for expected, result in zip(theirs, mine, strict=True):
        for one, other in zip(result, expected, strict=True):
            close(one[live], other[live])
            if strict:
                close(one, other)
            else:
                assert not one[~live].any()


def test_gae_that_falls_through() -> None:
    rewards, values, mask = gae_inputs()
    me = SimpleNamespace(gae_lambda=0.9, gae_gamma=0.9)

    def run() -> list[Any]:
        function = estimators.GeneralizedAdvantageEstimator._compute_gae
        return [
            function(me, rewards, values, mask, torch.rand(6, generator=torch.Generator().manual_seed(0))),
            function(me, rewards, values, mask, 1.5),
            function(me, rewards, values, mask / 2),
            function(me, rewards.bfloat16(), values.bfloat16(), mask.bfloat16()),
        ]

    theirs, mine, fallbacks = both(integration, run)
    assert len(fallbacks) == 4
    close(mine, theirs)


@pytest.mark.parametrize("algorithm", ["first_fit_decreasing", "modified_first_fit_decreasing"])
def test_packing(algorithm: str) -> None:
    lengths = torch.randint(1, 900, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    for least, multiple in ((None, None), (4, 8), (160, None)):
        packer = packing.get_packer(algorithm, 1000, min_bin_count=least, bin_count_multiple=multiple)
        theirs, mine, fallbacks = both(integration, lambda packer=packer: packer.pack(lengths))
        assert not fallbacks
        assert len(mine) <= len(theirs)
        assert multiple is None or len(mine) % multiple == 0
        assert sorted(i for b in mine for i in b) == list(range(300))
        assert all(b and sum(lengths[i] for i in b) <= 1000 for b in mine)
        theirs, mine, _ = both(integration, lambda packer=packer: packer.pack(lengths), strict=True)
        assert mine == theirs
    with integration.apply(), pytest.raises(ValueError, match="exceeds bin capacity"):
        packing.get_packer(algorithm, 10).pack([5, 11])


def test_undo_and_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = (packing.FirstFitDecreasingPacker, estimators.GeneralizedAdvantageEstimator)
    before = [dict(vars(cls)) for cls in classes]
    with integration.apply() as patches:
        assert len(patches.replaced) == len(integration.SEAMS)
        assert "_pack_implementation" in vars(packing.FirstFitDecreasingPacker)
    assert [dict(vars(cls)) for cls in classes] == before
    monkeypatch.setattr(estimators.GeneralizedAdvantageEstimator, "_compute_gae", lambda self, rewards: rewards)
    with pytest.raises(UnsupportedVersionError, match="_compute_gae"):
        integration.apply()
    assert "_pack_implementation" not in vars(packing.FirstFitDecreasingPacker)
