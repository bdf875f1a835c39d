"""The answer that a response gives, for votes among responses."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from areal_core.tasks import Problem, Task

__all__ = ["Answering", "answer_of"]


@runtime_checkable
class Answering(Protocol):
    """A task that can say what a response answers."""

    def extract_answer(self, problem: Problem, response_text: str, /) -> str | None:
        """The answer as text, equal for equal answers; None when the response gives none."""
        ...


def answer_of(task: Task, problem: Problem, response_text: str) -> str | None:
    """What a response answers; None when nothing, or when the task cannot say (`Answering`)."""
    return task.extract_answer(problem, response_text) if isinstance(task, Answering) else None
