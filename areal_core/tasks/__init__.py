"""Sources of prompts and verifiers of responses, used by training and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from areal_core.tasks.base import Problem, Task
from areal_core.tasks.chain import ChainArithmetic
from areal_core.tasks.jsonl import JsonlTask

__all__ = ["ChainArithmetic", "JsonlTask", "Problem", "Task", "get_task"]


def get_task(name: str, **options: Any) -> Task:
    """Build the task of that name: "chain_arithmetic" (`ChainArithmetic`) or "jsonl" (`JsonlTask`), with its options.

    Raises: ValueError for a name or an option that does not exist.
    """
    tasks: dict[str, Callable[..., Task]] = {"chain_arithmetic": ChainArithmetic, "jsonl": JsonlTask}
    if name not in tasks:
        raise ValueError(f"get_task: expected a task among {', '.join(tasks)}, got {name!r}")
    parameters = signature(tasks[name]).parameters
    known = list(parameters)
    for option in options:
        if option not in known:
            raise ValueError(f"get_task: expected options of {name} among {', '.join(known)}, got {option!r}")
    for option, parameter in parameters.items():
        if parameter.default is Parameter.empty and option not in options:
            raise ValueError(f"get_task: expected option {option} of {name}, got None")
    try:
        return tasks[name](**options)
    except TypeError as error:  # a text where a number should be
        raise ValueError(f"get_task: {name}: {error}") from error
