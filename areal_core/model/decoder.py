"""The decoder shared by trainer and generator: Llama- or Qwen2-shaped, on packed sequences, in one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from areal_core.model import layers
from areal_core.model.config import DecoderConfig


class _Layer(NamedTuple):
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class PackedDecoder(nn.Module):
    """A decoder whose parameters are one flat tensor, in the order of `DecoderConfig.tensor_shapes`.

    The flat layout makes an optimizer step, a gradient norm and a publication one operation on one tensor, and puts
    the matrices that multiply the same input (q, k, v; gate, up) side by side, so that each group is one product.

    config: the shape.
    weights: float [config's number of parameters], adopted without a copy; drawn from torch's default generator when
        omitted (normal, scaled by fan-in, residual branches scaled down by depth).
    Raises: ValueError when `weights` has another size.
    """

    _rope: Tensor

    def __init__(self, config: DecoderConfig, weights: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self._shapes = config.tensor_shapes()
        total = sum(math.prod(shape) for shape in self._shapes.values())
        if weights is not None and weights.shape != (total,):
            raise ValueError(f"PackedDecoder: expected weights of shape [{total}], got {list(weights.shape)}")
        self.weights = nn.Parameter(torch.empty(total) if weights is None else weights)
        self._sections = _sections(config)
        self.register_buffer("_rope", torch.empty(0, 2, config.head_dim // 2), persistent=False)
        if weights is None:
            self._initialize()

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Logits of the next token after each packed token.

        input_ids: int64 [T]. cu_seqlens: int32 or int64 [S + 1], starting at 0; empty sequences are legal.
        Returns: [T, V], prediction-aligned (row t predicts token t + 1), in the dtype of the weights.
        Determinism: equal inputs give equal bits for a fixed number of threads.
        """
        hidden, head = self._run(input_ids, cu_seqlens)
        return F.linear(hidden, head)

    def hidden_states(self, input_ids: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """The states that `forward` multiplies with the head, [T, H], and the head, [V, H]: for fused LM heads."""
        return self._run(input_ids, cu_seqlens)

    def named_weights(self) -> dict[str, Tensor]:
        """Views of the parameters under Hugging Face's names, detached and sharing memory with the model."""
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        parts = self.weights.detach().split_with_sizes(sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def _run(self, input_ids: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        config, cu = self.config, cu_seqlens.long()
        embedding, blocks, final_norm, head = self._unflatten()
        table = self._rope_table(int(cu.diff().max()) if len(cu) > 1 else 0)
        x = F.embedding(input_ids, embedding)
        for block in blocks:
            h = layers.rms_norm(x, block.input_norm, config.rms_norm_eps)
            qkv = F.linear(h, block.qkv, block.qkv_bias)
            mixed = layers.rotary_attention(qkv, table, cu, config.num_heads, config.num_kv_heads)
            x = x + F.linear(mixed, block.output)
            h = layers.rms_norm(x, block.mlp_norm, config.rms_norm_eps)
            x = x + F.linear(layers.swiglu(F.linear(h, block.gate_up)), block.down)
        return layers.rms_norm(x, final_norm, config.rms_norm_eps), head

    def _unflatten(self) -> tuple[Tensor, list[_Layer], Tensor, Tensor]:
        """Cut the flat buffer once, so that backward is one concatenation of the gradients."""
        parts = self.weights.split_with_sizes([math.prod(shape) for shape in self._sections])
        section = iter([part.view(shape) for part, shape in zip(parts, self._sections, strict=True)])
        embedding = next(section)
        blocks = [self._layer(section) for _ in range(self.config.num_layers)]
        final_norm = next(section)
        return embedding, blocks, final_norm, embedding if self.config.tie_word_embeddings else next(section)

    def _layer(self, section: Iterator[Tensor]) -> _Layer:
        norm, qkv = next(section), next(section)
        bias = next(section) if self.config.qkv_bias else None
        return _Layer(norm, qkv, bias, next(section), next(section), next(section), next(section))

    def _rope_table(self, positions: int) -> Tensor:
        """The rotary table, grown by doubling to cover `positions`."""
        table = self._rope
        if len(table) < positions:
            config = self.config
            table = layers.rope_table(max(64, 2 * positions), config.head_dim, config.rope_theta)
            self._rope = table = table.to(self.weights)
        return table

    @torch.no_grad()
    def _initialize(self) -> None:
        residual = 1.0 / math.sqrt(2 * self.config.num_layers)
        for name, weight in self.named_weights().items():
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
            elif name.endswith("bias"):
                weight.zero_()
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                weight.normal_(std=0.02)
            else:
                scale = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                weight.normal_(std=scale / math.sqrt(self.config.hidden_size))


def _sections(config: DecoderConfig) -> list[tuple[int, ...]]:
    """The shapes the forward pass cuts the flat buffer into: those of `tensor_shapes` with neighbours merged."""
    hidden, qkv = config.hidden_size, config.q_size + 2 * config.kv_size
    layer: list[tuple[int, ...]] = [(hidden,), (qkv, hidden)]
    layer += [(qkv,)] if config.qkv_bias else []
    layer += [(hidden, config.q_size), (hidden,)]
    layer += [(2 * config.intermediate_size, hidden), (hidden, config.intermediate_size)]
    embedding = (config.vocab_size, hidden)
    head = [] if config.tie_word_embeddings else [embedding]
    return [embedding, *layer * config.num_layers, (hidden,), *head]
