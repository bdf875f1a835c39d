"""The progress of an evaluation on standard error: bars in a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TextIO

import numpy as np
from rich import progress as bars
from rich.console import Console

from areal_core.evaluate.data import DataSet
from areal_core.evaluate.metrics import is_right
from areal_core.evaluate.results import Response, Results
from areal_core.telemetry.format import compact, duration, percent

__all__ = ["Progress"]


class Progress:
    """A bar for every model on every data set.

    Args:
        models: by label, in order.
        data_sets: likewise.
        results: what is there already counts as done.
        file: where to; standard error by default.
        clock: seconds, monotonic; tests replace it.
    """

    def __init__(
        self,
        models: Sequence[str],
        data_sets: Sequence[DataSet],
        results: Results,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        console = Console(file=file or sys.stderr, highlight=False)
        self._print = console.print
        self._clock = clock
        self._bars = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[note]}", markup=False),
            bars.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._plain = not console.is_terminal
        self._lines: dict[tuple[str, str], _Line] = {}
        for model in models:
            for data in data_sets:
                done = len(data.problems) - len(results.missing(model, data.label))
                name, total = f"{model} on {data.label}", len(data.problems)
                task = self._bars.add_task(name, start=False, total=total, completed=done, note="")
                self._lines[model, data.label] = _Line(name, task, total, done)

    def __enter__(self) -> Progress:
        """Start the display."""
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Leave the last state on the screen."""
        self._bars.stop()

    def of(self, model: str) -> Callable[[DataSet, list[Response]], None]:
        """What to call when a problem of a data set is done by `model`."""

        def done(data: DataSet, responses: list[Response]) -> None:
            line = self._lines[model, data.label]
            if line.started is None:
                line.started = self._clock()
                self._bars.start_task(line.task)
            line.done += 1
            line.tokens += sum(response.tokens for response in responses)
            line.right += int((is_right(np.array([response.reward for response in responses], np.float64))).sum())
            line.responses += len(responses)
            self._bars.update(line.task, completed=line.done, note=f"pass@1 {percent(line.right / line.responses)}")
            if self._plain and line.done == line.total:
                self._print(self._sentence(line), markup=False)

        return done

    def _sentence(self, line: _Line) -> str:
        seconds = self._clock() - (line.started or 0.0)
        return f"{line.name}: {line.total} problems, {compact(line.tokens)} tokens, {duration(seconds)}"


class _Line:
    """A bar and its counts."""

    def __init__(self, name: str, task: bars.TaskID, total: int, done: int) -> None:
        self.name, self.task, self.total, self.done = name, task, total, done
        self.started: float | None = None
        self.tokens = self.right = self.responses = 0
