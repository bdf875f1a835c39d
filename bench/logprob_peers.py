"""What other libraries call for log-probabilities of labels, where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

Function = Callable[[Tensor, Tensor], Any]


class Peer(NamedTuple):
    """logprobs(logits, labels) -> [T]; with_entropy(logits, labels) -> ([T], [T])."""

    logprobs: Function
    with_entropy: Function


def installed_peers() -> dict[str, Peer]:
    """Name -> functions, of each library that can be imported."""
    peers = {}
    for name, load in {"TRL": _trl, "AReaL": _areal, "verl": _verl}.items():
        try:
            peers[name] = load()
        except ImportError as error:
            print(f"{name}: not timed ({error})")
    return peers


def _trl() -> Peer:
    from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy

    return Peer(selective_log_softmax, selective_log_softmax_and_entropy)


def _areal() -> Peer:
    from areal.utils.functional.vocab_parallel import gather_logprobs, gather_logprobs_entropy

    return Peer(gather_logprobs, gather_logprobs_entropy)  # compiled by AReaL itself


def _verl() -> Peer:
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    def with_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_from_logits(logits, labels), entropy_from_logits(logits)

    return Peer(lambda logits, labels: logprobs_from_logits(logits, labels, inplace_backward=False), with_entropy)
