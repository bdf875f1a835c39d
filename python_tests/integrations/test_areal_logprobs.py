"""AReaL's log-probabilities and entropies, patched against unpatched, whole and split over ranks."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from areal_calls import both, close, graded, one
from torch import Tensor

from areal_core.integrations import areal as ours

pytest.importorskip("areal.trainer.ppo.actor", reason="areal is not installed", exc_type=ImportError)
functional = pytest.importorskip("areal.utils.functional")

pytestmark = pytest.mark.usefixtures("eager")


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
