"""Sources of prompts and verifiers of responses, used by training and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from areal_core.tasks.base import Problem, Task
from areal_core.tasks.chain import ChainArithmetic
from areal_core.tasks.jsonl import JsonlTask
from areal_core.tasks.parquet import ParquetTask
from areal_core.tasks.reasoning_gym import ReasoningGymTask

__all__ = ["ChainArithmetic", "JsonlTask", "ParquetTask", "Problem", "ReasoningGymTask", "Task", "get_task"]

_TASKS: dict[str, Callable[..., Task]] = {
    "chain_arithmetic": ChainArithmetic,
    "jsonl": JsonlTask,
    "parquet": ParquetTask,
    "reasoning_gym": ReasoningGymTask,
}


def get_task(name: str, **options: Any) -> Task:
    """Build the task of that name with its options; docs/tasks.md shows each.

    "chain_arithmetic" (`ChainArithmetic`), "jsonl" (`JsonlTask`), "parquet" (`ParquetTask`) or "reasoning_gym"
    (`ReasoningGymTask`).

    Raises: ValueError for a name or an option that does not exist; what the task raises.
    """
    if name not in _TASKS:
        raise ValueError(f"get_task: expected a task among {', '.join(_TASKS)}, got {name!r}")
    parameters = signature(_TASKS[name]).parameters
    known = list(parameters)
    for option in options:
        if option not in known:
            raise ValueError(f"get_task: expected options of {name} among {', '.join(known)}, got {option!r}")
    for option, parameter in parameters.items():
        if parameter.default is Parameter.empty and option not in options:
            raise ValueError(f"get_task: expected option {option} of {name}, got None")
    try:
        return _TASKS[name](**options)
    except TypeError as error:  # a text where a number should be
        raise ValueError(f"get_task: {name}: {error}") from error
