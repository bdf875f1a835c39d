"""What is evaluated on: a file of problems or the held-out problems of a task, as named on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from areal_core.errors import ConfigError
from areal_core.tasks import Problem, Task, get_task

__all__ = ["DEFAULT_PROBLEMS", "DataSet", "load_data_sets", "split_label"]

DEFAULT_PROBLEMS = 256  # of a task that makes them up
_DRAWS_PER_PROBLEM = 20  # before a task counts as having no other problems


@dataclass(frozen=True)
class DataSet:
    """Problems and their verifier.

    label: what the table calls it. task: verifies responses. problems: in order. options: of the task, which tell
    apart two evaluations on the same problems.
    """

    label: str
    task: Task
    problems: tuple[Problem, ...]
    options: dict[str, Any]


def load_data_sets(specs: Sequence[str], problems: int | None = None) -> list[DataSet]:
    """Read every ``[LABEL=]SOURCE[:key=value,...]``.

    A source is a file of problems, JSON Lines or Parquet (options are those of the task ``jsonl``), or a task by name,
    whose held-out problems are taken (options are its own). The label is the name of the file, or the task as it is
    written.

    Args:
        specs: as on the command line.
        problems: how many different ones of each, from the first on, as far as there are so many; None: all, or 256 of
            a task that makes them up.

    Raises: ConfigError for a spec that names nothing or options that do not exist, or a label used twice; what the task
        raises for a file it cannot read.
    """
    if problems is not None and problems < 1:
        raise ConfigError(f"--problems: expected >= 1, got {problems}")
    sets = [_load(spec, problems) for spec in specs]
    labels = [data.label for data in sets]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"--data: expected different labels, got {label!r} twice; write LABEL={label}")
    return sets


def split_label(text: str) -> tuple[str | None, str]:
    """Split ``LABEL=REST``; no label where the first = comes after a / or a colon."""
    match = re.fullmatch(r"([^=:/]+)=(.+)", text)
    return (match[1], match[2]) if match else (None, text)


def _load(spec: str, problems: int | None) -> DataSet:
    label, rest = split_label(spec)
    source, options = _split_options(rest)
    path = Path(source)
    if path.is_file() or path.suffix in (".jsonl", ".parquet"):
        task = get_task("parquet" if path.suffix == ".parquet" else "jsonl", path=source, eval_path=source, **options)
        default_label = path.stem
    else:
        task, default_label = get_task(source, **options), rest
    return DataSet(label or default_label, task, _choose(task, problems), options)


def _choose(task: Task, count: int | None) -> tuple[Problem, ...]:
    size = task.size(held_out=True)
    if size is not None:
        return tuple(task.problem(index, held_out=True) for index in range(min(count or size, size)))
    count = count or DEFAULT_PROBLEMS
    chosen: dict[str, Problem] = {}  # a task that makes up problems repeats some
    for index in range(_DRAWS_PER_PROBLEM * count):
        problem = task.problem(index, held_out=True)
        chosen.setdefault(problem.problem_id, problem)
        if len(chosen) == count:
            break
    return tuple(chosen.values())


def _split_options(text: str) -> tuple[str, dict[str, Any]]:
    """``source:key=value,key=value`` as source and options; a colon without = after it belongs to the source."""
    source, colon, listed = text.rpartition(":")
    if not colon or "=" not in listed:
        return text, {}
    options: dict[str, Any] = {}
    for item in listed.split(","):
        key, equals, value = item.partition("=")
        if not (key and equals) or key in ("path", "eval_path"):
            raise ConfigError(f"--data: expected key=value after the colon of {text!r}, got {item!r}")
        options[key] = yaml.safe_load(value)
    return source, options
