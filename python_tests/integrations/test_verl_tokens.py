"""verl's log-probabilities, balancing and padding with our kernels against verl without them."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch

from areal_core.integrations import verl as integration

pytest.importorskip("verl", reason="verl is not installed", exc_type=ImportError)
pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl lacks what it needs", exc_type=ImportError)
functional = sys.modules["verl.utils.torch_functional"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["packed", "padded", "sliced"])
def test_logprobs_and_entropy(dtype: torch.dtype, layout: str) -> None:
    g = torch.Generator().manual_seed(1)
    shape = {"packed": (7, 131), "padded": (3, 4, 131), "sliced": (3, 5, 131)}[layout]
    base = (torch.randn(*shape, generator=g) * 3).to(dtype)
    view = (lambda x: x[:, :-1]) if layout == "sliced" else (lambda x: x)
    labels = torch.randint(131, view(base).shape[:-1], generator=g)
    wide = view(base.double()).requires_grad_()
    truth = (functional.logprobs_from_logits(wide, labels), functional.entropy_from_logits(wide))
    low = dtype in (torch.bfloat16, torch.float16)
    for strict in (False, True):
        with integration.apply(strict=strict) as patches:
            leaf = base.clone().requires_grad_()
            logits = view(leaf)
            found = [functional.logprobs_from_logits(logits, labels), functional.entropy_from_logits(logits)]
            if logits.dim() == 2 and dtype != torch.float64:
                found.append(functional.entropy_from_logits_with_chunking(logits, chunk_size=3))
            assert patches.fallbacks == {}
        for value, expected in zip(found, (*truth, truth[1]), strict=False):
            rounded = low and strict and value.dtype == dtype
            assert value.dtype in ((dtype,) if rounded or dtype == torch.float64 else (torch.float32,))
            torch.testing.assert_close(value.double(), expected, rtol=1e-2 if rounded else 2e-6, atol=1e-5)
        ours, theirs = (torch.stack([x.double() for x in pair]).sum() for pair in (found[:2], truth))
        (grad,) = torch.autograd.grad(ours, leaf)
        (expected,) = torch.autograd.grad(theirs, wide, retain_graph=True)
        torch.testing.assert_close(
            view(grad).double(), expected, rtol=1e-2 if low else 2e-5, atol=1e-2 if low else 2e-6
        )


def test_logits_of_minus_infinity_and_other_inputs() -> None:
    logits = torch.randn(4, 9)
    logits[1, 3:] = -math.inf
    p = logits[1, :3].softmax(0)
    with integration.apply() as patches:
        assert functional.entropy_from_logits(logits)[1] == pytest.approx(float(-(p * p.log()).sum()), rel=1e-5)
        assert torch.compile(functional.entropy_from_logits, backend="eager", fullgraph=True)(logits).isfinite().all()
        assert patches.fallbacks == {}
        with pytest.raises(RuntimeError):
            functional.logprobs_from_logits(logits, torch.zeros(3, dtype=torch.int64))
        labels = torch.zeros(9, dtype=torch.int64)
        functional.logprobs_from_logits(logits.t(), labels)
        assert set(patches.fallbacks) == {
            "logprobs: labels of another shape than the rows of the logits",
            "logprobs: logits with a stride in the vocabulary",
        }
    with integration.apply(strict=True) as patches:
        assert functional.entropy_from_logits(logits)[1].isnan()
        assert functional.entropy_from_logits_with_chunking(logits)[1].isnan()
        assert sum(patches.fallbacks.values()) == 2


def test_logits_are_overwritten_only_where_verl_would(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.tensor([1, 2])
    for available, disabled, wanted, expected in (
        (False, "0", True, False),
        (True, "1", True, False),
        (True, "0", False, False),
        (True, "0", True, True),
    ):
        monkeypatch.setattr(functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", available)
        monkeypatch.setenv("VERL_DISABLE_FLASH_ATTN_CE", disabled)
        logits = torch.randn(2, 5, requires_grad=True)
        before = logits.detach().clone()
        with integration.apply(strict=True):
            functional.logprobs_from_logits(logits, labels, inplace_backward=wanted).sum().backward()
        assert logits.detach().equal(before) != expected


def test_balancing() -> None:
    from verl.utils import seqlen_balancing

    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 5000, (96,), generator=g).tolist()

    def spread(bins: list[list[int]]) -> int:
        loads = [sum(lengths[i] for i in members) for members in bins]
        return max(loads) - min(loads)

    for k, equal in itertools.product((1, 2, 8, 32, 96), (True, False)):
        theirs = seqlen_balancing.get_seqlen_balanced_partitions(lengths, k, equal)
        with integration.apply() as patches:
            ours = seqlen_balancing.get_seqlen_balanced_partitions(lengths, k, equal)
            assert patches.fallbacks == {}
        assert sorted(itertools.chain(*ours)) == list(range(96))
        assert spread(ours) <= spread(theirs)
        assert not equal or {len(members) for members in ours} == {96 // k}
    with integration.apply() as patches:
        heavy = seqlen_balancing.karmarkar_karp([5, 9, 1], 2, False)
        assert heavy == [[1], [0, 2]]
        with pytest.raises(AssertionError):
            seqlen_balancing.get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)
        assert seqlen_balancing.karmarkar_karp([0.5, 2.5], 2, False) == [[1], [0]]
        assert sum(patches.fallbacks.values()) == 2
    batch = {"input_ids": torch.zeros(96, 5000), "attention_mask": torch.arange(5000) < torch.tensor(lengths)[:, None]}
    with integration.apply():
        from tensordict import TensorDict

        parts, index = seqlen_balancing.rearrange_micro_batches(TensorDict(batch, batch_size=96), max_token_len=20_000)
    assert sorted(itertools.chain(*index)) == list(range(96))
    assert all(int(part["attention_mask"].sum()) <= 20_000 for part in parts)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_padding_of_responses(nested: bool, shape: tuple[int, ...]) -> None:
    from tensordict import TensorDict
    from verl.workers.utils import padding

    prompts, responses = [2, 1, 4], [3, 5, 0]
    total = sum(prompts) + sum(responses)
    if nested:
        jagged = [
            torch.nested.as_nested_tensor([torch.zeros(n) for n in sizes], layout=torch.jagged)
            for sizes in (prompts, responses)
        ]
        data = TensorDict({"prompts": jagged[0], "responses": jagged[1]}, batch_size=3)
    else:
        mask = torch.cat(
            [
                torch.arange(5).flip(0) < torch.tensor(prompts)[:, None],
                torch.arange(6) < torch.tensor(responses)[:, None],
            ],
            1,
        )
        data = TensorDict(
            {"prompts": torch.zeros(3, 5), "responses": torch.zeros(3, 6), "attention_mask": mask.long()}, batch_size=3
        )
    values = torch.randn(total, *shape, dtype=torch.float64)
    results = []
    for patched in (True, False):
        leaf = values.clone().requires_grad_()
        if patched:
            with integration.apply() as patches:
                out = padding.no_padding_2_padding(leaf, data)
                assert patches.fallbacks == {}
        else:
            out = padding.no_padding_2_padding(leaf, data)
        (grad,) = torch.autograd.grad((out * torch.arange(out.numel()).view_as(out)).sum(), leaf)
        results.append((out.detach(), grad))
    assert results[0][0].equal(results[1][0])
    assert results[0][1].equal(results[1][1])
    with integration.apply() as patches, pytest.raises(AssertionError):
        padding.no_padding_2_padding(values[1:], data)
