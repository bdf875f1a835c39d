"""Logits that are not computed unless something reads them: the loss of a causal LM does not have to."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from areal_core import ops

Step = Callable[[Tensor], Tensor]


class DeferredLogits:
    """What a linear layer would give for `hidden`, as far as a loss can tell.

    Cast to float32, flattened, scaled by a positive number and given to `torch.nn.functional.cross_entropy` they stay
    uncomputed, and the loss is that of `ops.linear_logprob`. Anything else computes them first, once, and `on_read` is
    told; from then on they are those logits, with whatever is done to them in place.
    """

    def __init__(
        self,
        hidden: Tensor,
        head: torch.nn.Linear,
        on_read: Callable[[], None],
        *,
        empty_is_nan: bool = False,
        steps: tuple[Step, ...] = (),
        temperature: float = 1.0,
    ) -> None:
        self._hidden, self._head, self._on_read = hidden, head, on_read
        self._empty_is_nan, self._steps, self._temperature = empty_is_nan, steps, temperature
        self.computed: Tensor | None = None

    def logits(self) -> Tensor:
        """Compute them after all."""
        if self.computed is None:
            self._on_read()
            logits = torch.nn.functional.linear(self._hidden, self._head.weight, self._head.bias)
            for step in self._steps:
                logits = step(logits)
            self.computed = logits
        return self.computed

    @property
    def shape(self) -> torch.Size:
        """Of the logits."""
        return torch.Size((*self._hidden.shape[:-1], self._head.out_features))

    @property
    def device(self) -> torch.device:
        """Of the logits."""
        return self._hidden.device

    def size(self, dim: int | None = None) -> Any:
        """Of the logits."""
        return self.shape if dim is None else self.shape[dim]

    def float(self) -> Any:
        """Not computed: the loss has float32 logits anyway."""
        return self._then(Tensor.float)

    def contiguous(self) -> DeferredLogits:
        """Not computed."""
        return self

    def view(self, *shape: Any) -> Any:
        """Not computed where rows stay rows."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if len(sizes) != 2 or sizes[1] != self._head.out_features:
            return self.logits().view(*shape)
        flat = self._hidden.reshape(-1, self._hidden.shape[-1])
        if sizes[0] not in (-1, len(flat)):
            return self.logits().view(*shape)
        return self._then(lambda logits: logits.reshape(sizes), hidden=flat)

    reshape = view

    def __mul__(self, factor: Any) -> Any:
        if isinstance(factor, int | float) and factor > 0:
            return self._then(lambda logits: logits * factor, temperature=self._temperature / factor)
        return self.logits() * factor

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if isinstance(divisor, int | float) and divisor > 0:
            return self._then(lambda logits: logits / divisor, temperature=self._temperature * divisor)
        return self.logits() / divisor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.logits(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.cross_entropy and args and isinstance(args[0], cls):
            loss = args[0]._cross_entropy(*args[1:], **kwargs or {})
            if loss is not None:
                return loss
        args, kwargs = tree_map(lambda x: x.logits() if isinstance(x, cls) else x, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _then(self, step: Step, hidden: Tensor | None = None, temperature: builtins.float | None = None) -> Any:
        if self.computed is not None:
            return step(self.computed)
        return DeferredLogits(
            self._hidden if hidden is None else hidden,
            self._head,
            self._on_read,
            empty_is_nan=self._empty_is_nan,
            steps=(*self._steps, step),
            temperature=self._temperature if temperature is None else temperature,
        )

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: builtins.float = 0.0,
    ) -> Tensor | None:
        """The loss; None where it needs the logits."""
        is_plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
        is_plain = is_plain and self.computed is None
        rows = self._hidden.shape[:-1]
        if not is_plain or len(rows) != 1 or target.shape != rows:
            return None
        out = ops.linear_logprob(
            self._hidden,
            self._head.weight,
            target,
            bias=self._head.bias,
            temperature=self._temperature,
            ignore_index=ignore_index,
        )
        if reduction == "none":
            return -out.logprobs
        if reduction == "sum":
            return -out.logprobs.sum()
        live = (target != ignore_index).sum()
        return -out.logprobs.sum() / (live if self._empty_is_nan else live.clamp(min=1))


def _computed(name: str) -> Callable[..., Any]:
    def operate(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.logits(), name)(*args)

    return operate


_OPERATORS = (
    *("add", "radd", "sub", "rsub", "rtruediv", "floordiv", "mod", "pow", "rpow", "matmul", "rmatmul"),
    *("neg", "abs", "eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem", "len", "iter"),
)
for _name in _OPERATORS:
    setattr(DeferredLogits, f"__{_name}__", _computed(f"__{_name}__"))
