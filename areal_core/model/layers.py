"""The layers of a decoder on packed tokens, as plain torch: any device, any floating dtype, differentiable twice."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from areal_core.model.config import DecoderConfig
from areal_core.model.flat import Weights


def rope_table(positions: int, head_dim: int, theta: float) -> Tensor:
    """Cosines and sines of the rotary angles: fp32 [positions, 2, head_dim / 2]."""
    frequency = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    angle = torch.outer(torch.arange(positions, dtype=torch.float32), frequency)
    return torch.stack((angle.cos(), angle.sin()), dim=1)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Turn the halves of each head, x [T, heads, D], by the angles of its token, cos_sin [T, 2, D / 2]."""
    cos, sin = cos_sin[:, :1], cos_sin[:, 1:]
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of x [T, H] to unit root mean square, then by weight [H]."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [T, 2 I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def hidden_states(
    weights: Weights, config: DecoderConfig, input_ids: Tensor, where: Layout, rows: Tensor | None, table: Tensor
) -> tuple[Tensor, Tensor]:
    """The normalised states of all tokens, or of `rows`, [T or R, H], and the head, [V, H]."""
    x = F.embedding(input_ids, weights.embedding)
    for block in weights.blocks:
        h = rms_norm(x, block.input_norm, config.rms_norm_eps)
        qkv = F.linear(h, block.qkv, block.qkv_bias)
        mixed = rotary_attention(qkv, table, where, config.num_heads, config.num_kv_heads)
        x = x + F.linear(mixed, block.output)
        h = rms_norm(x, block.mlp_norm, config.rms_norm_eps)
        x = x + F.linear(swiglu(F.linear(h, block.gate_up)), block.down)
    x = x if rows is None else x[rows]
    return rms_norm(x, weights.final_norm, config.rms_norm_eps), weights.head


class Layout(NamedTuple):
    """Where packed tokens stand in their sequences; see `layout`."""

    positions: Tensor  # int64 [T], place of each token in its sequence, prefix included
    gather: Tensor  # int64 [E], the tokens of every sequence with its prefix written out
    own: Tensor  # int64 [T], place of each token in `gather`
    cu_seqlens: Tensor  # int64 [S + 1], boundaries in `gather`


def layout(cu_seqlens: Tensor, cu_groups: Tensor | None) -> Layout:
    """Write out shared prefixes.

    cu_seqlens: int64 [S + 1]. cu_groups: int64 [G + 1]; group g holds the sequences cu_groups[g] to cu_groups[g + 1],
    of which the first is the prefix that the others continue. None: every sequence stands alone.
    """
    lengths, starts = cu_seqlens.diff(), cu_seqlens[:-1]
    prefix = torch.zeros_like(lengths)
    prefix_start = starts
    if cu_groups is not None:
        sizes, roots = cu_groups.diff(), cu_groups[:-1]
        root = roots[sizes > 0].repeat_interleave(sizes[sizes > 0])
        prefix, prefix_start = lengths[root], starts[root]
        prefix = prefix.masked_fill(root == torch.arange(len(root), device=root.device), 0)
    whole = prefix + lengths
    cu_whole = torch.cat((cu_seqlens[:1], whole.cumsum(0)))
    place = torch.arange(int(whole.sum()), device=whole.device) - cu_whole[:-1].repeat_interleave(whole)
    before = prefix.repeat_interleave(whole)
    source = torch.where(
        place < before, prefix_start.repeat_interleave(whole) + place, starts.repeat_interleave(whole) + place - before
    )
    own = (place >= before).nonzero()[:, 0]
    return Layout(place[own], source, own, cu_whole)


def rotary_attention(qkv: Tensor, table: Tensor, where: Layout, heads: int, kv_heads: int) -> Tensor:
    """Causal attention inside each packed sequence, with rotary positions and grouped keys.

    qkv: [T, (heads + 2 kv_heads) D], queries, keys and values side by side.
    table: of `rope_table`, longer than the largest position.
    Returns: [T, heads D].
    """
    dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    cos_sin = table[where.positions].to(qkv.dtype)
    q, k, v = qkv.view(len(qkv), heads + 2 * kv_heads, dim).split_with_sizes((heads, kv_heads, kv_heads), dim=1)
    q, k, v = (x[where.gather] for x in (rotate(q, cos_sin), rotate(k, cos_sin), v))
    out = torch.empty_like(q)
    for index, live in _length_buckets(where.cu_seqlens):
        bq, bk, bv = (x[index].transpose(1, 2) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(bq, bk, bv, is_causal=True, enable_gqa=heads != kv_heads)
        out = out.index_put((index[live],), mixed.transpose(1, 2)[live])
    return out[where.own].reshape(len(qkv), heads * dim)


def _length_buckets(cu_seqlens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Group sequences by length rounded up to a power of two.

    Each bucket: the tokens of its sequences padded by repeating their last, int64 [B, L], and bool [B, L], which of
    them are not padding. Padding stands at the end, where causal attention cannot see it.
    """
    lengths = cu_seqlens.diff()
    bucket = torch.ceil(torch.log2(lengths.clamp(min=1).double())).long().masked_fill(lengths == 0, -1)
    out = []
    for size in sorted(set(bucket.tolist()) - {-1}):
        member = bucket == size
        length = lengths[member, None]
        offset = torch.arange(int(length.max()), device=lengths.device)
        out.append((cu_seqlens[:-1][member, None] + torch.minimum(offset, length - 1), offset < length))
    return out
