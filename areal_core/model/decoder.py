"""The decoder shared by trainer and generator: Llama- or Qwen2-shaped, on packed sequences, in one flat buffer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from areal_core.model import fused, layers
from areal_core.model.config import DecoderConfig
from areal_core.model.flat import parameter_count, unflatten


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
        total = parameter_count(config)
        if weights is not None and weights.shape != (total,):
            raise ValueError(f"PackedDecoder: expected weights of shape [{total}], got {list(weights.shape)}")
        self.weights = nn.Parameter(torch.empty(total) if weights is None else weights)
        self.register_buffer("_rope", torch.empty(0, 2, config.head_dim // 2), persistent=False)
        if weights is None:
            self._initialize()

    def forward(
        self, input_ids: Tensor, cu_seqlens: Tensor, *, cu_groups: Tensor | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Logits of the next token after each packed token, or after those that `rows` names.

        input_ids: int64 [T].
        cu_seqlens: int32 or int64 [S + 1], starting at 0; empty sequences are legal.
        cu_groups: int32 or int64 [G + 1], boundaries of groups of sequences: the first of a group is a prefix (a
            prompt) that the others continue, each on its own, so that it is computed once. None: no sharing.
        rows: int64 [R], the tokens whose logits are wanted, in any order, repeated at will. None: all.
        Returns: [T, V] or [R, V], prediction-aligned (row t predicts token t + 1), in the dtype of the weights.
        Determinism: equal inputs give equal bits for a fixed number of threads.
        """
        hidden, head = self.hidden_states(input_ids, cu_seqlens, cu_groups=cu_groups, rows=rows)
        return F.linear(hidden, head)

    def hidden_states(
        self, input_ids: Tensor, cu_seqlens: Tensor, *, cu_groups: Tensor | None = None, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The states that `forward` multiplies with the head, [T or R, H], and the head, [V, H]: for fused LM heads."""
        cu_seqlens = cu_seqlens.long()
        cu_groups = None if cu_groups is None else cu_groups.long()
        longest = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
        table = self._rope_table(longest if cu_groups is None else 2 * longest)
        if self.weights.dtype == torch.float32 and self.weights.device.type == "cpu":
            packing = fused.Packing(input_ids, cu_seqlens, cu_groups, rows, table)
            return fused.hidden_states(self.weights, self.config, packing), self._head()
        where = layers.layout(cu_seqlens, cu_groups)
        return layers.hidden_states(unflatten(self.weights, self.config), self.config, input_ids, where, rows, table)

    def named_weights(self) -> dict[str, Tensor]:
        """Views of the parameters under Hugging Face's names, detached and sharing memory with the model."""
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        parts = self.weights.detach().split_with_sizes(sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def _head(self) -> Tensor:
        """The view of the head alone."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        size = math.prod(shape)
        start = 0 if self.config.tie_word_embeddings else len(self.weights) - size
        return self.weights.narrow(0, start, size).view(shape)

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
