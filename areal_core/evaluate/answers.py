"""The answer that a response gives, for votes among responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from areal_core.tasks import Problem, Task

__all__ = ["Answering", "answer_of", "votes"]

_RIGHT = "\0right"  # no response answers this


@runtime_checkable
class Answering(Protocol):
    """A task that can say what a response answers."""

    def extract_answer(self, problem: Problem, response_text: str, /) -> str | None:
        """The answer as text, equal for equal answers; None when the response gives none."""
        ...


def answer_of(task: Task, problem: Problem, response_text: str) -> str | None:
    """What a response answers; None when nothing, or when the task cannot say (`Answering`)."""
    return task.extract_answer(problem, response_text) if isinstance(task, Answering) else None


def votes(answers: Sequence[str | None], right: Sequence[bool]) -> list[str | None]:
    """What each response votes for: right ones for the same answer, however they write it, others for what they say."""
    return [_RIGHT if is_right else answer for answer, is_right in zip(answers, right, strict=True)]
