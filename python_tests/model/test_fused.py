"""The native float32 path against plain torch in double precision."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_core import _C
from areal_core.model import DecoderConfig, PackedDecoder, fused, layers
from areal_core.model.flat import unflatten

from .small_models import CONFIGS, make_model
from .test_decoder import grouped_input, packed_input

WIDE = DecoderConfig("llama", 50, 48, 72, 2, num_heads=4, num_kv_heads=2, head_dim=34, rope_theta=100.0)


def differentiate(logits: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient of the weights under a fixed upstream gradient."""
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(7)).to(logits.dtype)
    (gradient,) = torch.autograd.grad(logits, weights, upstream)
    return logits.detach(), gradient


def plain(
    model: PackedDecoder,
    dtype: torch.dtype,
    ids: Tensor,
    cu_seqlens: Tensor,
    cu_groups: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same by the layers in plain torch."""
    config, weights = model.config, model.weights.detach().to(dtype).requires_grad_()
    where = layers.layout(cu_seqlens, cu_groups)
    table = layers.rope_table(512, config.head_dim, config.rope_theta)
    hidden, head = layers.hidden_states(unflatten(weights, config), config, ids, where, rows, table)
    return differentiate(hidden @ head.T, weights)


def assert_agree(
    model: PackedDecoder, ids: Tensor, cu_seqlens: Tensor, cu_groups: Tensor | None = None, rows: Tensor | None = None
) -> None:
    """The error against double precision is of the size that plain torch's has in single precision."""
    fused = differentiate(model(ids, cu_seqlens, cu_groups=cu_groups, rows=rows), model.weights)
    single = plain(model, torch.float32, ids, cu_seqlens, cu_groups, rows)
    double = plain(model, torch.float64, ids, cu_seqlens, cu_groups, rows)
    names = ["logits", *model.named_weights()]
    tensors = [
        (result[0], *PackedDecoder(model.config, result[1]).named_weights().values())
        for result in (fused, single, double)
    ]
    for name, ours, theirs, exact in zip(names, *tensors, strict=True):
        error, usual = ((x.double() - exact).abs().max().item() for x in (ours, theirs))
        assert error <= 4 * usual + 4e-6 * exact.abs().max().item() + 1e-9, name


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("config", [*CONFIGS.values(), WIDE], ids=[*CONFIGS, "wide"])
def test_sequences_alone_and_with_shared_prefixes(config: DecoderConfig, isa: str) -> None:
    best = _C.best_isa()
    try:
        _C.set_active_isa(isa)
    except ValueError:
        pytest.skip(f"no {isa} here")
    try:
        model = make_model(config)
        ids, cu_seqlens, cu_groups, *_ = grouped_input(config)
        rows = torch.tensor([2, 40, 2, 9, 2])
        assert_agree(model, ids, cu_seqlens)
        assert_agree(model, ids, cu_seqlens, cu_groups)
        assert_agree(model, ids, cu_seqlens, cu_groups, rows)
    finally:
        _C.set_active_isa(best)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 63, 65, 200])
def test_every_tail_of_a_sequence(length: int) -> None:
    config = CONFIGS["llama-gqa-tied"]
    ids, cu_seqlens = packed_input(config, [length, 3, length])
    assert_agree(make_model(config), ids, cu_seqlens)
    assert_agree(make_model(config), ids, cu_seqlens, torch.tensor([0, 3]))


def test_extreme_activations_stay_finite() -> None:
    """Scores of hundreds and gates beyond the range of exp."""
    config = replace(CONFIGS["llama"], num_layers=1)
    model = make_model(config)
    with torch.no_grad():
        for name, weight in model.named_weights().items():
            if "q_proj" in name or "gate_proj" in name:
                weight.mul_(300)
    ids, cu_seqlens = packed_input(config, [40, 7])
    logits, gradient = differentiate(model(ids, cu_seqlens), model.weights)
    exact, exact_gradient = plain(model, torch.float64, ids, cu_seqlens)
    assert (logits.double() - exact).abs().max() <= 1e-3 * exact.abs().max()
    assert (gradient.double() - exact_gradient).norm() <= 1e-2 * exact_gradient.norm()


def test_bits_do_not_depend_on_threads() -> None:
    ids, cu_seqlens = packed_input(WIDE, [30, 1, 80, 0, 200] * 8)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            qkv = torch.randn(len(ids), 8 * 34, generator=torch.Generator().manual_seed(0))
            table = torch.randn(256, 2, 17, generator=torch.Generator().manual_seed(1))
            packing = (table, cu_seqlens, None, 4, 2)
            mixed, lse = torch.ops.areal_core.attention_forward_(qkv, *packing)
            grad = torch.ops.areal_core.attention_backward(mixed, qkv, mixed, lse, *packing)
            x, weight = torch.randn(3000, 48, generator=torch.Generator().manual_seed(2)), torch.ones(48)
            y, inverse = torch.ops.areal_core.rms_norm_forward(x, weight, 1e-6)
            grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight)
            torch.ops.areal_core.rms_norm_backward_(x, x, weight, inverse, grad_x, grad_weight)
            gated = torch.ops.areal_core.swiglu_forward(x)
            results.append((qkv, mixed, lse, grad, y, grad_x, grad_weight, gated))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_weights_changed_before_backward_are_noticed() -> None:
    model = make_model(CONFIGS["llama"])
    ids, cu_seqlens = packed_input(model.config, [5])
    logits = model(ids, cu_seqlens)
    with torch.no_grad():
        model.weights.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()


def test_backward_twice_gives_the_same() -> None:
    model = make_model(CONFIGS["qwen2-gqa"])
    ids, cu_seqlens = packed_input(model.config, [5, 9])
    loss = model(ids, cu_seqlens).square().sum()
    first, second = (torch.autograd.grad(loss, model.weights, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("cu_seqlens", "cu_groups", "message"),
    [
        ([0, 3], None, r"cu_seqlens\[-1\] = 5 .*got 3"),
        ([0, 4, 3, 5], None, "non-decreasing cu_seqlens"),
        ([1, 5], None, r"cu_seqlens\[0\] = 0, got 1"),
        ([0, 2, 5], [0, 1], r"cu_groups.*= 2 .*got 1"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    cu_seqlens: list[int], cu_groups: list[int] | None, message: str
) -> None:
    model = make_model(CONFIGS["llama"])
    groups = None if cu_groups is None else torch.tensor(cu_groups)
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(5, dtype=torch.int64), torch.tensor(cu_seqlens), cu_groups=groups)


def test_the_activations_go_with_the_backward_and_not_with_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref[Tensor]] = []
    forward = fused._forward

    def watched_forward(*args: Any, **options: Any) -> Any:
        hidden, saved = forward(*args, **options)
        kept.extend(weakref.ref(x) for x in (*saved.blocks[0], *saved.blocks[1], saved.x, saved.inverse))
        return hidden, saved

    monkeypatch.setattr(fused, "_forward", watched_forward)
    model = make_model(CONFIGS["llama"])
    loss = model(*packed_input(model.config, [5, 7])).sum()
    assert kept
    assert all(x() is not None for x in kept)
    loss.backward()
    assert loss.grad_fn is not None
    assert all(x() is None for x in kept)
