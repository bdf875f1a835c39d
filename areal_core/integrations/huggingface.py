"""Hugging Face transformers: the training loss of a causal language model, without its logits.

`apply_to(model)` lets `model(input_ids, labels=labels)` compute the loss by `ops.linear_logprob` while it trains; a
`Trainer` notices nothing but the memory. The model's own forward runs, with its own loss function: only the output
embedding hands out logits that are not computed until something other than that loss reads them.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from areal_core.errors import PatchError
from areal_core.integrations._adapters import cannot_multiply
from areal_core.integrations._deferred import DeferredLogits
from areal_core.integrations._patch import Patches, _lock, logger

__all__ = ["apply_to"]

_STATE = "_areal_core_loss"


def apply_to(model: Any, *, strict: bool = False) -> Patches:
    """Let a causal language model compute its training loss without logits.

    In training mode, with `labels` and with gradients, the loss and its gradients are those of the model's own forward,
    in float32 from half-precision weights, and `logits` of the output are None. Everything else, such as generation and
    evaluation, is as before. Call it before accelerate, FSDP or a Trainer wrap the model. A deep copy of the model has
    it too, a pickled one or `from_pretrained` does not; torch.nn.DataParallel cannot replicate it.

    Args:
        model: with `get_output_embeddings()` a torch.nn.Linear, with or without bias, tied or not, and a forward that
            takes `labels`. Of a PEFT model: `model.get_base_model()`.
        strict: a batch without a live label gives NaN, as torch's mean over nothing does; otherwise 0.

    Returns:
        Patches, a context manager. `undo` restores the model; `fallbacks` counts the calls that computed logits, and
        why: a loss with label smoothing or class weights, a softcap, hooks on the head, a parameter that is sharded, an
        output embedding that has been replaced since.

    Raises:
        TypeError: the model is not such a model.
        PatchError: its forward, or that of its head, is replaced already.
    """
    head = _output_head(model)
    state = _State(strict)
    vars(model)[_STATE] = state
    cls: Any = type(model)
    model.forward = MethodType(_forward_of(cls), model)
    head.forward = MethodType(_head_forward, head)
    name = cls.__name__
    logger.info("%s: the training loss computes no logits", name)
    return _ModelPatches(name, ("forward", "get_output_embeddings().forward"), state.fallbacks, [], model, head)


@dataclass
class _State:
    """What the replaced methods of one model share; copied with the model."""

    strict: bool
    fallbacks: Counter[str] = field(default_factory=Counter)

    def fall_back(self, reason: str) -> None:
        with _lock:
            self.fallbacks[reason] += 1
            is_first = self.fallbacks[reason] == 1
        if is_first:
            logger.info("the training loss computes logits (%s)", reason)


@dataclass
class _ModelPatches(Patches):
    model: Any = None
    head: Any = None

    def undo(self) -> None:
        """Restore both methods. One that something else has wrapped meanwhile stays, without effect."""
        cls: Any = type(self.model)
        for module, function in ((self.model, _forward_of(cls)), (self.head, _head_forward)):
            if _own_forward(module) is function:
                del module.forward
        vars(self.model).pop(_STATE, None)


# The state of the model whose forward runs with labels, and the head whose output its loss will take.
_running: ContextVar[tuple[_State, Any] | None] = ContextVar("areal_core_running", default=None)


@functools.cache
def _forward_of(cls: Any) -> Callable[..., Any]:
    """The method that takes the place of the class's forward in one model; it holds no model, so that copies work."""
    forward = cls.forward
    position = list(inspect.signature(forward).parameters).index("labels") - 1  # without self

    @functools.wraps(forward)
    def loss_without_logits(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = vars(self).get(_STATE)  # gone after undo
        labels = args[position] if len(args) > position else kwargs.get("labels")
        trains = self.training and torch.is_grad_enabled() and labels is not None
        if state is None or not trains or torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        head = self.get_output_embeddings()
        if _own_forward(head) is not _head_forward:
            state.fall_back("the output embedding has been replaced, or its forward")
            return forward(self, *args, **kwargs)
        token = _running.set((state, head))
        try:
            return _without_logits(forward(self, *args, **kwargs))
        finally:
            _running.reset(token)

    loss_without_logits.__name__ = "forward"  # what a bound method is pickled by: the class's own comes back
    return loss_without_logits


def _head_forward(self: Any, hidden: Tensor) -> Any:
    running = _running.get()
    if running is None or running[1] is not self:
        return type(self).forward(self, hidden)
    state, _ = running
    if reason := _needs_logits(self, hidden):
        state.fall_back(reason)
        return type(self).forward(self, hidden)
    on_read = functools.partial(state.fall_back, "something other than a plain cross entropy reads the logits")
    return DeferredLogits(hidden, self, on_read, empty_is_nan=state.strict)


_head_forward.__name__ = "forward"


def _own_forward(module: Any) -> Any:
    """The function that the module itself holds as its forward; None where that is its class's."""
    held = vars(module).get("forward")
    function = getattr(held, "__func__", held)
    return None if function is type(module).forward else function


def _without_logits(outputs: Any) -> Any:
    """The model's outputs, None for logits that nothing has read."""
    if isinstance(outputs, Mapping):
        kept = {name: x.computed if isinstance(x, DeferredLogits) else x for name, x in outputs.items()}
        return type(outputs)(**kept)
    if isinstance(outputs, tuple):
        return tuple(x.logits() if isinstance(x, DeferredLogits) else x for x in outputs)
    return outputs


def _needs_logits(head: Any, hidden: Tensor) -> str | None:
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
        return "hooks on the output embedding"
    return cannot_multiply(hidden, head.weight, head.bias)


def _output_head(model: Any) -> Any:
    find = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    takes_labels = isinstance(model, torch.nn.Module) and "labels" in inspect.signature(model.forward).parameters
    if type(head) is not torch.nn.Linear or not takes_labels:
        raise TypeError(
            "apply_to: expected a model whose get_output_embeddings() is a torch.nn.Linear and whose forward takes "
            f"labels (of a PEFT model its get_base_model()), got {type(model).__name__} with {type(head).__name__}"
        )
    for module, what in ((model, "the model"), (head, "its output embedding")):
        if _own_forward(module) is not None:
            raise PatchError(f"apply_to: expected {what} with the forward of its class, got one that is replaced")
    return head
