"""Arguments of the LM head's ops: checks, and the form in which the native ops take them."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_core.ops._linear_chunks import row_dtype


def check_linear(op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None) -> torch.dtype:
    """Check what is multiplied; give the dtype of the operands on a GPU."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if hidden.dtype not in dtypes:
        raise TypeError(f"{op}: expected hidden dtype in {{float32, bfloat16, float16, float64}}, got {hidden.dtype}")
    if hidden.dim() != 2:
        raise ValueError(f"{op}: expected hidden of shape [T, H], got {list(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"{op}: expected weight of shape [V, {hidden.shape[1]}], got {list(weight.shape)}")
    check_tensor(op, "bias", bias, weight, (weight.shape[0],))
    check_tensor(op, "main_grad", main_grad, weight, tuple(weight.shape))
    if weight.device != hidden.device:
        raise ValueError(f"{op}: expected weight on {hidden.device}, got {weight.device}")
    device, operand_dtype = hidden.device.type, hidden.dtype
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        operand_dtype = torch.get_autocast_dtype(device)
    elif weight.dtype != hidden.dtype:
        raise TypeError(f"{op}: expected weight dtype = {hidden.dtype}, got {weight.dtype}")
    if bias is not None and bias.dtype != weight.dtype:
        raise TypeError(f"{op}: expected bias dtype = {weight.dtype}, got {bias.dtype}")
    if main_grad is not None:
        if main_grad.dtype != row_dtype(weight.dtype):
            raise TypeError(f"{op}: expected main_grad dtype = {row_dtype(weight.dtype)}, got {main_grad.dtype}")
        if torch.is_grad_enabled() and not weight.requires_grad:
            raise ValueError(f"{op}: expected a weight that requires a gradient with main_grad, got one that does not")
    return operand_dtype


def check_tensor(op: str, name: str, tensor: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{op}: expected {name} of shape {list(shape)}, got {list(tensor.shape)}")
    if tensor is not None and tensor.device != like.device:
        raise ValueError(f"{op}: expected {name} on {like.device}, got {tensor.device}")


def row_arguments(op: str, hidden: Tensor, labels: Tensor, loss_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise TypeError(f"{op}: expected labels of an integer dtype, got {labels.dtype}")
    check_tensor(op, "labels", labels, hidden, (hidden.shape[0],))
    check_tensor(op, "loss_mask", loss_mask, hidden, (hidden.shape[0],))
    return labels.to(torch.int64), None if loss_mask is None else loss_mask.to(torch.bool)


def loss_inputs(op: str, like: Tensor, keep_mask: Tensor | None, **named: Tensor | None) -> list[Tensor | None]:
    """The per-row inputs of a loss, detached: those of `named` in its order, then the mask."""
    dtype, inputs = row_dtype(like.dtype), []
    for name, tensor in named.items():
        check_tensor(op, name, tensor, like, (like.shape[0],))
        if tensor is not None and tensor.dtype != dtype:
            raise TypeError(f"{op}: expected {name} dtype = {dtype}, got {tensor.dtype}")
        inputs.append(None if tensor is None else tensor.detach().contiguous())
    check_tensor(op, "keep_mask", keep_mask, like, (like.shape[0],))
    return [*inputs, None if keep_mask is None else keep_mask.to(torch.bool).contiguous()]


def split_temperature(op: str, temperature: float | Tensor, hidden: Tensor) -> tuple[Tensor | None, float]:
    """Give (one per row, 1) or (None, the number)."""
    if not isinstance(temperature, Tensor):
        if not 2.0**-126 <= temperature < 2.0**128:
            raise ValueError(f"{op}: expected temperature > 0 and finite, got {temperature}")
        return None, float(temperature)
    if temperature.requires_grad:
        raise ValueError(f"{op}: expected temperature without requires_grad (it gets no gradient)")
    values = temperature.to(device=hidden.device, dtype=row_dtype(hidden.dtype))
    values = values.reshape(1).expand(hidden.shape[0]) if values.numel() == 1 else values
    check_tensor(op, "temperature", values, hidden, (hidden.shape[0],))
    return values, 1.0


def check_counts(op: str, chunk_tokens: int | None, live_tokens: int | None) -> None:
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"{op}: expected chunk_tokens >= 1, got {chunk_tokens}")
    if live_tokens is not None and live_tokens < 0:
        raise ValueError(f"{op}: expected live_tokens >= 0, got {live_tokens}")
