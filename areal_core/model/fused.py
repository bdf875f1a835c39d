"""The decoder in float32 on the CPU: native layers, and a backward written out by hand.

At the sizes a CPU trains, autograd over two dozen small operations a layer costs more than the matrix products. Here
the decoder is one autograd function, whose backward writes every weight gradient to its place in one flat buffer.
`areal_core.model.layers` computes the same in plain torch, for other devices and dtypes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from areal_core import ops  # noqa: F401  (registers torch.ops.areal_core)
from areal_core.model import fused_shapes  # noqa: F401  (what torch has to know to trace them)
from areal_core.model.config import DecoderConfig
from areal_core.model.flat import Block, Weights, unflatten
from areal_core.ops._dispatch import call

_native = torch.ops.areal_core


class Packing(NamedTuple):
    """What a forward pass reads besides the weights: arguments of `PackedDecoder.forward`, and the rotary table."""

    input_ids: Tensor
    cu_seqlens: Tensor
    cu_groups: Tensor | None
    rows: Tensor | None
    table: Tensor


class _KeptBlock(NamedTuple):
    """What the backward of one layer needs of its forward."""

    x: Tensor
    inverse: Tensor
    h: Tensor
    qkv: Tensor  # queries and keys turned
    mixed: Tensor
    lse: Tensor
    middle: Tensor
    middle_inverse: Tensor
    middle_h: Tensor
    gate_up: Tensor
    gated: Tensor


class _Kept(NamedTuple):
    blocks: list[_KeptBlock]
    x: Tensor
    inverse: Tensor


def hidden_states(flat: Tensor, config: DecoderConfig, packing: Packing) -> Tensor:
    """The normalised states of all tokens, or of `packing.rows`: float32 [T or R, H]."""
    if torch.is_grad_enabled() and flat.requires_grad:
        hidden: Tensor = _Decoder.apply(flat, config, packing)  # type: ignore[no-untyped-call]
        return hidden
    return _forward(unflatten(flat, config), config, packing, keep=False)[0]


class _Decoder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, config: DecoderConfig, packing: Packing) -> Tensor:
        ctx.weights, ctx.config, ctx.packing = unflatten(flat, config), config, packing
        hidden, kept = _forward(ctx.weights, config, packing, keep=True)
        # Saved, the weights are checked for a change in between, and the activations go when the backward is done.
        ctx.save_for_backward(flat, *(x for block in kept.blocks for x in block), kept.x, kept.inverse)
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_hidden: Tensor) -> tuple[Tensor | None, ...]:
        flat, *activations, x, inverse = ctx.saved_tensors
        size = len(_KeptBlock._fields)
        blocks = [_KeptBlock(*activations[i : i + size]) for i in range(0, len(activations), size)]
        gradient = torch.zeros_like(flat)
        _backward(
            grad_hidden,
            _Kept(blocks, x, inverse),
            ctx.weights,
            unflatten(gradient, ctx.config),
            ctx.config,
            ctx.packing,
        )
        return gradient, None, None


def _forward(weights: Weights, config: DecoderConfig, packing: Packing, *, keep: bool) -> tuple[Tensor, _Kept]:
    kept = []
    x = weights.embedding.index_select(0, packing.input_ids)
    for block in weights.blocks:
        x, kept_block = _block_forward(x, block, config, packing)
        if keep:
            kept.append(kept_block)
    x = x if packing.rows is None else x.index_select(0, packing.rows)
    hidden, inverse = _native.rms_norm_forward(x, weights.final_norm, config.rms_norm_eps)
    return hidden, _Kept(kept, x, inverse)


def _block_forward(x: Tensor, w: Block, config: DecoderConfig, packing: Packing) -> tuple[Tensor, _KeptBlock]:
    h, inverse = _native.rms_norm_forward(x, w.input_norm, config.rms_norm_eps)
    qkv = torch.mm(h, w.qkv.t()) if w.qkv_bias is None else torch.addmm(w.qkv_bias, h, w.qkv.t())
    mixed, lse = call(_native.attention_forward_.default, qkv, *_attention(config, packing))
    middle = torch.addmm(x, mixed, w.output.t())
    middle_h, middle_inverse = _native.rms_norm_forward(middle, w.mlp_norm, config.rms_norm_eps)
    gate_up = torch.mm(middle_h, w.gate_up.t())
    gated = _native.swiglu_forward(gate_up)
    out = torch.addmm(middle, gated, w.down.t())
    return out, _KeptBlock(x, inverse, h, qkv, mixed, lse, middle, middle_inverse, middle_h, gate_up, gated)


def _backward(
    grad_hidden: Tensor, kept: _Kept, w: Weights, out: Weights, config: DecoderConfig, packing: Packing
) -> None:
    """Write the gradients of all weights but the head to `out`, whose embedding is zero before."""
    grad = torch.zeros_like(kept.x)
    _native.rms_norm_backward_(grad_hidden.contiguous(), kept.x, w.final_norm, kept.inverse, grad, out.final_norm)
    if packing.rows is not None:
        grad = grad.new_zeros(len(packing.input_ids), config.hidden_size).index_add_(0, packing.rows, grad)
    for block, w_block, out_block in zip(reversed(kept.blocks), reversed(w.blocks), reversed(out.blocks), strict=True):
        _block_backward_(grad, block, w_block, out_block, config, packing)
    out.embedding.index_add_(0, packing.input_ids, grad)


def _block_backward_(
    grad: Tensor, kept: _KeptBlock, w: Block, out: Block, config: DecoderConfig, packing: Packing
) -> None:
    """Turn `grad` from the gradient of the block's output into that of its input; write those of its weights."""
    torch.mm(grad.t(), kept.gated, out=out.down)
    grad_gate_up = _native.swiglu_backward(torch.mm(grad, w.down), kept.gate_up)
    torch.mm(grad_gate_up.t(), kept.middle_h, out=out.gate_up)
    grad_h = torch.mm(grad_gate_up, w.gate_up)
    _native.rms_norm_backward_(grad_h, kept.middle, w.mlp_norm, kept.middle_inverse, grad, out.mlp_norm)

    torch.mm(grad.t(), kept.mixed, out=out.output)
    grad_mixed = torch.mm(grad, w.output)
    grad_qkv = _native.attention_backward(grad_mixed, kept.qkv, kept.mixed, kept.lse, *_attention(config, packing))
    torch.mm(grad_qkv.t(), kept.h, out=out.qkv)
    if out.qkv_bias is not None:
        torch.sum(grad_qkv, 0, out=out.qkv_bias)
    grad_h = torch.mm(grad_qkv, w.qkv)
    _native.rms_norm_backward_(grad_h, kept.x, w.input_norm, kept.inverse, grad, out.input_norm)


def _attention(config: DecoderConfig, packing: Packing) -> tuple[Any, ...]:
    return packing.table, packing.cu_seqlens, packing.cu_groups, config.num_heads, config.num_kv_heads
