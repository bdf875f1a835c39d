"""The layers of a decoder on packed tokens, as plain torch: any device, any floating dtype, differentiable twice."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


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


def rotary_attention(qkv: Tensor, table: Tensor, cu_seqlens: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Causal attention inside each packed sequence, with rotary positions and grouped keys.

    qkv: [T, (heads + 2 kv_heads) D], queries, keys and values side by side.
    table: of `rope_table`, at least as long as the longest sequence.
    cu_seqlens: int64 [S + 1].
    Returns: [T, heads D].
    """
    dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    lengths = cu_seqlens.diff()
    positions = torch.arange(len(qkv), device=qkv.device) - cu_seqlens[:-1].repeat_interleave(lengths)
    cos_sin = table[positions].to(qkv.dtype)
    q, k, v = qkv.view(len(qkv), heads + 2 * kv_heads, dim).split_with_sizes((heads, kv_heads, kv_heads), dim=1)
    q, k = rotate(q, cos_sin), rotate(k, cos_sin)
    out = torch.empty_like(q)
    for index, live in _length_buckets(cu_seqlens):
        bq, bk, bv = (x[index].transpose(1, 2) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(bq, bk, bv, is_causal=True, enable_gqa=heads != kv_heads)
        out = out.index_put((index[live],), mixed.transpose(1, 2)[live])
    return out.reshape(len(qkv), heads * dim)


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
