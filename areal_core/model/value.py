"""A critic: the decoder with a scalar head in place of its vocabulary."""

from __future__ import annotations

from torch import Tensor, nn

from areal_core.model.decoder import PackedDecoder


class ValueModel(nn.Module):
    """Values of states: what a policy may expect after the tokens read so far.

    decoder: adopted, not copied; give a copy of the policy's, so that the critic starts from what that knows. Its
        vocabulary head gets no gradient unless it is tied to the embedding.
    The head starts at zero: every value is 0 before training.
    """

    def __init__(self, decoder: PackedDecoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = nn.Linear(decoder.config.hidden_size, 1, dtype=decoder.weights.dtype, device=decoder.weights.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self, input_ids: Tensor, cu_seqlens: Tensor, *, cu_groups: Tensor | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Value after each packed token, or after those that `rows` names: [T] or [R]; arguments as `PackedDecoder`'s.

        The value after token t - 1 is that of the state in which token t is drawn.
        """
        hidden, _ = self.decoder.hidden_states(input_ids, cu_seqlens, cu_groups=cu_groups, rows=rows)
        values: Tensor = self.head(hidden).squeeze(-1)
        return values

    @classmethod
    def from_policy(cls, policy: PackedDecoder) -> ValueModel:
        """A critic on a copy of a policy's weights."""
        return cls(PackedDecoder(policy.config, policy.weights.detach().clone()))
