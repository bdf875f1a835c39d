from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from areal_core.model import DecoderConfig, PackedDecoder

from .small_models import CONFIGS, make_model

LENGTHS = [1, 5, 0, 17, 2, 33, 16, 0, 8]


def packed_input(config: DecoderConfig, lengths: list[int], seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return torch.randint(0, config.vocab_size, (int(cu_seqlens[-1]),), generator=generator), cu_seqlens


def hugging_face(model: PackedDecoder) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    hf = transformers.AutoConfig.for_model(**model.config.to_hf())
    peer = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="eager").to(model.weights.dtype)
    missing, unexpected = peer.load_state_dict(model.named_weights(), strict=False)
    assert not unexpected
    assert all(name == "lm_head.weight" for name in missing)
    peer.tie_weights()
    return peer.eval()


def per_sequence(peer: torch.nn.Module, ids: Tensor, cu_seqlens: Tensor) -> Tensor:
    rows = [peer(ids[None, a:b]).logits[0] for a, b in itertools.pairwise(cu_seqlens.tolist()) if b > a]
    return torch.cat(rows)


def test_logits_equal_transformers_sequence_by_sequence(config: DecoderConfig) -> None:
    model = make_model(config)
    ids, cu_seqlens = packed_input(config, LENGTHS)
    expected = per_sequence(hugging_face(model), ids, cu_seqlens)
    torch.testing.assert_close(model(ids, cu_seqlens), expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(model(ids, cu_seqlens.int()), expected, rtol=1e-4, atol=2e-5)


def test_gradients_equal_transformers(config: DecoderConfig) -> None:
    model = make_model(config)
    peer = hugging_face(model)
    ids, cu_seqlens = packed_input(config, LENGTHS)
    upstream = torch.randn(len(ids), config.vocab_size, generator=torch.Generator().manual_seed(2))
    model(ids, cu_seqlens).backward(upstream)
    per_sequence(peer, ids, cu_seqlens).backward(upstream)
    ours = PackedDecoder(config, model.weights.grad).named_weights()
    theirs = {name: parameter.grad for name, parameter in peer.named_parameters()}
    assert set(ours) == set(theirs)
    for name, gradient in ours.items():
        scale = theirs[name].abs().max().item()
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-3, atol=1e-5 * max(scale, 1.0), msg=name)


def test_double_precision_gradient(config: DecoderConfig) -> None:
    model = make_model(config).double()
    ids, cu_seqlens = packed_input(config, [3, 1, 5])
    torch.manual_seed(3)
    direction = torch.randn_like(model.weights)
    weight = torch.randn(len(ids), config.vocab_size, dtype=torch.float64)

    def objective(step: float) -> Tensor:
        shifted = PackedDecoder(config, (model.weights + step * direction).detach())
        return (shifted(ids, cu_seqlens) * weight).sum()

    (model(ids, cu_seqlens) * weight).sum().backward()
    slope = (objective(1e-6) - objective(-1e-6)) / 2e-6
    assert math.isclose((model.weights.grad @ direction).item(), slope.item(), rel_tol=1e-6)


def test_a_sequence_does_not_see_its_neighbours() -> None:
    model = make_model(CONFIGS["llama-gqa-tied"])
    ids, cu_seqlens = packed_input(model.config, [7, 9, 4])
    changed = ids.clone()
    changed[7:16] = (changed[7:16] + 1) % model.config.vocab_size
    before, after = model(ids, cu_seqlens), model(changed, cu_seqlens)
    assert torch.equal(before[:7], after[:7])
    assert torch.equal(before[16:], after[16:])
    assert not torch.allclose(before[7:16], after[7:16])


def test_a_token_does_not_see_later_ones() -> None:
    model = make_model(CONFIGS["qwen2-gqa"])
    ids, cu_seqlens = packed_input(model.config, [12])
    changed = ids.clone()
    changed[8] = (changed[8] + 1) % model.config.vocab_size
    before, after = model(ids, cu_seqlens), model(changed, cu_seqlens)
    torch.testing.assert_close(before[:8], after[:8], rtol=0, atol=1e-6)
    assert not torch.allclose(before[8:], after[8:])


GROUPS = [[3, 5, 1, 0, 7], [4], [1, 2], [0, 3], [6, 9, 9]]  # lengths: a prefix, then what continues it


def grouped_input(config: DecoderConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same sequences with shared prefixes and written out, and where each shared token stands in the latter."""
    lengths = [length for group in GROUPS for length in group]
    ids, cu_seqlens = packed_input(config, lengths)
    cu_groups = torch.tensor([0, *(len(group) for group in GROUPS)]).cumsum(0)
    pieces = ids.split(lengths)
    whole, place, count = [], [], 0
    for begin, end in itertools.pairwise(cu_groups.tolist()):
        prefix = pieces[begin]
        for piece in (prefix[:0], *pieces[begin + 1 : end]):
            place.append(torch.arange(len(piece)) + count + len(prefix))
            whole.append(torch.cat((prefix, piece)))
            count += len(whole[-1])
        place[-(end - begin)] = torch.arange(len(prefix)) + count - sum(len(w) for w in whole[-(end - begin) :])
    cu_whole = torch.tensor([0, *(len(w) for w in whole)]).cumsum(0)
    return ids, cu_seqlens, cu_groups, torch.cat(whole), cu_whole, torch.cat(place)


def test_a_shared_prefix_equals_one_written_out(config: DecoderConfig) -> None:
    model = make_model(config).double()
    ids, cu_seqlens, cu_groups, whole, cu_whole, place = grouped_input(config)
    assert torch.equal(whole[place], ids)
    shared = model(ids, cu_seqlens, cu_groups=cu_groups)
    apart = model(whole, cu_whole)[place]
    torch.testing.assert_close(shared, apart, rtol=1e-9, atol=1e-12)
    upstream = torch.randn(shared.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    (of_shared,) = torch.autograd.grad(shared, model.weights, upstream)
    (of_apart,) = torch.autograd.grad(apart, model.weights, upstream)
    torch.testing.assert_close(of_shared, of_apart, rtol=1e-9, atol=1e-12)


def test_rows_select_and_repeat(config: DecoderConfig) -> None:
    model = make_model(config)
    ids, cu_seqlens = packed_input(config, [4, 3])
    rows = torch.tensor([6, 3, 3, 0])
    torch.testing.assert_close(model(ids, cu_seqlens, rows=rows), model(ids, cu_seqlens)[rows])
    assert model(ids, cu_seqlens, rows=rows[:0]).shape == (0, config.vocab_size)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_in_nothing_out(lengths: list[int]) -> None:
    model = make_model(CONFIGS["llama"])
    ids, cu_seqlens = packed_input(model.config, lengths)
    logits = model(ids, cu_seqlens)
    assert logits.shape == (0, model.config.vocab_size)
    logits.sum().backward()
    assert torch.equal(model.weights.grad, torch.zeros_like(model.weights))


def test_hidden_states_times_head_are_the_logits(config: DecoderConfig) -> None:
    model = make_model(config)
    ids, cu_seqlens = packed_input(config, [4, 6])
    hidden, head = model.hidden_states(ids, cu_seqlens)
    assert hidden.shape == (10, config.hidden_size)
    torch.testing.assert_close(hidden @ head.T, model(ids, cu_seqlens))


def test_named_weights_share_memory_and_cover_the_buffer(config: DecoderConfig) -> None:
    model = make_model(config)
    named = model.named_weights()
    assert {name: tuple(weight.shape) for name, weight in named.items()} == config.tensor_shapes()
    assert not any(weight.requires_grad for weight in named.values())
    torch.testing.assert_close(torch.cat([w.flatten() for w in named.values()]), model.weights.detach())
    for weight in named.values():
        weight.zero_()
    assert not model.weights.any()


def test_sequences_beyond_the_first_rope_table() -> None:
    model = make_model(CONFIGS["llama"])
    long_ids, long_cu = packed_input(model.config, [200])
    short = model(long_ids[:10], torch.tensor([0, 10]))
    torch.testing.assert_close(model(long_ids, long_cu)[:10], short, rtol=1e-4, atol=1e-5)
    expected = per_sequence(hugging_face(model), long_ids, long_cu)
    torch.testing.assert_close(model(long_ids, long_cu), expected, rtol=1e-4, atol=5e-5)


def test_weights_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \[3\]"):
        PackedDecoder(CONFIGS["llama"], torch.zeros(3))
