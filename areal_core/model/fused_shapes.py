"""Shapes of what the native layers return, by which torch traces them (the layers compute on the CPU only)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0])


def _nothing(*args: Any) -> None:
    return None


def _swiglu_forward(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _swiglu_backward(grad_y: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up)


def _attention_forward(
    qkv: Tensor, table: Tensor, cu_seqlens: Tensor, cu_groups: Tensor | None, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    tokens, width = qkv.shape
    return qkv.new_empty(tokens, width // (heads + 2 * kv_heads) * heads), qkv.new_empty(tokens, heads)


def _attention_backward(grad_out: Tensor, qkv: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(qkv)


torch.library.register_fake("areal_core::rms_norm_forward", _rms_norm_forward)
torch.library.register_fake("areal_core::rms_norm_backward_", _nothing)
torch.library.register_fake("areal_core::swiglu_forward", _swiglu_forward)
torch.library.register_fake("areal_core::swiglu_backward", _swiglu_backward)
torch.library.register_fake("areal_core::attention_forward_", _attention_forward)
torch.library.register_fake("areal_core::attention_backward", _attention_backward)
