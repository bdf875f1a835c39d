"""What a task is: a source of problems and a judge of responses."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Problem:
    """One prompt and what a right response to it is.

    prompt: text put before the model. answer: text the verifier compares with. problem_id: equal for equal problems
    of one task, different otherwise. metadata: whatever else the task knows of the problem. special_tokens: whether
    the tokenizer adds its own around the prompt; False when a chat template has written them.
    """

    prompt: str
    answer: str
    problem_id: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: bool = True


@runtime_checkable
class Task(Protocol):
    """A source of problems and their verifier. Problems held out for evaluation never occur in training."""

    def problem(self, index: int, *, seed: int = 0, held_out: bool = False) -> Problem:
        """Problem number `index` of the endless stream that `seed` names.

        A pure function of its arguments: an index is all that a run must remember of its data position.
        """
        ...

    def sample(self, rng: random.Random, *, held_out: bool = False) -> Problem:
        """A problem drawn with `rng`."""
        ...

    def size(self, *, held_out: bool = False) -> int | None:
        """How many problems there are, None if they are made up without end."""
        ...

    def verify(self, problem: Problem, response_text: str) -> float:
        """The reward of a response without its end-of-sequence token: 1.0 right, 0.0 wrong."""
        ...
