"""The live display of a run in a terminal, and its plain substitute where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from areal_core.telemetry.format import compact, duration, finite, percent, sparkline

# Colour of a token by its version's age when it is trained on: 0 first. Readable on dark and light terminals.
AGE_STYLES = ("green", "cyan", "blue", "magenta", "red", "yellow")

_BAR_WIDTH = 24
_SPARKLINE_WIDTH = 48
_SAMPLE_TOKENS = 96
_ETA_STEPS = 20


class Progress:
    """Shows how a run goes, step by step.

    Args:
        total_steps: steps the run will make; None when it is not known.
        title: what runs.
        plain: print one line every `every` steps instead of the live display; None: when `file` is no terminal.
        every: steps per line of the plain output.
        file: where to; standard output by default.
        clock: seconds, monotonic; tests replace it.

    Used as a context manager it gives the terminal back whatever happens inside.
    """

    def __init__(
        self,
        total_steps: int | None,
        title: str,
        plain: bool | None = None,
        every: int = 10,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every < 1:
            raise ValueError(f"Progress: expected every >= 1, got {every}")
        self._total = total_steps
        self._title = title
        self._every = every
        self._file = file
        self._clock = clock
        self._console = Console(file=file, highlight=False)
        self._plain = not self._console.is_terminal if plain is None else plain
        self._metrics: dict[str, Any] = {}
        self._sample: Mapping[str, Any] | None = None
        self._accuracies: list[float] = []
        self._times: list[tuple[int, float]] = []
        self._started = clock()
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        """Start the display."""
        self._started = self._clock()
        if not self._plain:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Leave the last state on the screen and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._metrics and self._step % self._every:
            self._print(self.line())  # the last step, unless it was printed

    def update(self, metrics: Mapping[str, Any], sample: Mapping[str, Any] | None = None) -> None:
        """Show a step. Metrics that are missing are left as they were (evaluations) or not shown.

        Args:
            metrics: as given to `MetricsLog.log`.
            sample: a trajectory (`tokens`, `versions`, and if known `prompt`, `reward`) to show with it.
        """
        self._metrics.update({key: value for key, value in metrics.items() if value is not None})
        self._sample = sample or self._sample
        self._times = [*self._times[-_ETA_STEPS:], (self._step, self._clock())]
        accuracy = finite(metrics.get("reward/accuracy"))
        if accuracy is not None:
            self._accuracies.append(accuracy)
        if self._plain and self._step % self._every == 0:
            self._print(self.line())

    def message(self, text: str) -> None:
        """Print a line that stays, e.g. that a generator was restarted."""
        if self._plain:
            self._print(text)
        else:
            self._console.print(Text(text))

    def line(self) -> str:
        """The state of the run in one line."""
        get = self._metrics.get
        of_total = "" if self._total is None else f"/{self._total}"
        fields = [
            ("step", f"{self._step}{of_total}"),
            ("acc", percent(get("reward/accuracy"))),
            ("eval", percent(get("eval/accuracy_greedy"))),
            ("reward", compact(get("reward/mean"))),
            ("len", compact(get("response/tokens_mean"))),
            ("stale", _slashed(compact(get("staleness/mean")), compact(get("staleness/max")))),
            ("gen", _unit(compact(get("rate/generated_tokens_per_s")), " tok/s")),
            ("train", _unit(compact(get("rate/trained_tokens_per_s")), " tok/s")),
            ("idle gen", percent(get("idle/generator"))),
            ("idle train", percent(get("idle/trainer"))),
            ("left", duration(self._seconds_left())),
        ]
        return "  ".join(f"{name} {value}" for name, value in fields if value is not None)

    @property
    def _step(self) -> int:
        return int(finite(self._metrics.get("step")) or 0)

    def _print(self, text: str) -> None:
        print(text, file=self._file or sys.stdout, flush=True)

    def _seconds_left(self) -> float | None:
        if self._total is None or len(self._times) < 2:
            return None
        (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
        if last_step <= first_step:
            return None
        since = self._clock() - last_time
        left = (last_time - first_time) / (last_step - first_step) * (self._total - last_step)
        return max(0.0, left - since)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._header()]
        if self._metrics:
            parts += [Text(), self._numbers()]
        if len(self._accuracies) > 1:
            parts += [Text(), self._curve()]
        if self._sample:
            published = finite(self._metrics.get("version"))
            parts += [Text(), sample_text(self._sample, None if published is None else published - 1)]
        return Panel(Group(*parts), title=Text(self._title, style="bold"), title_align="left", border_style="dim")

    def _header(self) -> RenderableType:
        of_total = "" if self._total is None else f" of {self._total}"
        words = [f"step {self._step}{of_total}", f"elapsed {duration(self._clock() - self._started)}"]
        left = duration(self._seconds_left())
        if left is not None:
            words.append(f"left {left}")
        row = Table.grid(padding=(0, 2))
        if self._total:
            row.add_row(_bar(self._step / self._total, _BAR_WIDTH, "green"), "   ".join(words))
        else:
            row.add_row("   ".join(words))
        return row

    def _numbers(self) -> RenderableType:
        get = self._metrics.get
        evaluated = "  ".join(
            f"{name} {value}"
            for name, value in (
                ("greedy", percent(get("eval/accuracy_greedy"))),
                ("sampled", percent(get("eval/accuracy_sampled"))),
            )
            if value is not None
        )
        left = [
            ("accuracy", percent(get("reward/accuracy"))),
            ("evaluated", evaluated or None),
            ("reward", compact(get("reward/mean"))),
            ("response", _unit(compact(get("response/tokens_mean")), " tokens")),
            ("staleness", _slashed(compact(get("staleness/mean")), compact(get("staleness/max")), " mean / ", " max")),
        ]
        right = [
            ("generation", _unit(compact(get("rate/generated_tokens_per_s")), " tokens/s")),
            ("training", _unit(compact(get("rate/trained_tokens_per_s")), " tokens/s")),
            ("generator idle", _share_bar(get("idle/generator"))),
            ("trainer idle", _share_bar(get("idle/trainer"))),
            ("entropy", compact(get("loss/entropy"))),
        ]
        grid = Table.grid(padding=(0, 6))
        grid.add_row(_name_value_table(left), _name_value_table(right))
        return grid

    def _curve(self) -> RenderableType:
        first, last = self._accuracies[0], self._accuracies[-1]
        curve = sparkline(self._accuracies, _SPARKLINE_WIDTH)
        return Text.assemble(("accuracy  ", "dim"), (curve, "green"), (f"  {percent(first)} → {percent(last)}", "dim"))


def sample_text(sample: Mapping[str, Any], version: float | None = None) -> Text:
    """A trajectory as text, its tokens coloured by the age of the version that produced them.

    Args:
        sample: `tokens`, `versions`, and if known `prompt`, `reward`, `step`.
        version: the version that trains on it; by default the newest of the sample.
    """
    tokens: Sequence[Any] = sample.get("tokens") or []
    versions: Sequence[Any] = sample.get("versions") or []
    newest = max([*versions, version or 0])
    text = Text.assemble((_visible(str(sample.get("prompt", ""))), "dim"), " ")
    for index, token in enumerate(tokens[:_SAMPLE_TOKENS]):
        age = newest - versions[index] if index < len(versions) else 0
        text.append(_visible(str(token)), style=AGE_STYLES[min(int(age), len(AGE_STYLES) - 1)])
    if len(tokens) > _SAMPLE_TOKENS:
        text.append(f" … {len(tokens) - _SAMPLE_TOKENS} more tokens", style="dim")
    reward = compact(sample.get("reward"))
    if reward is not None:
        text.append(f"   reward {reward}", style="bold")
    for seen in sorted(set(versions), reverse=True):
        text.append(f"  v{seen}", style=AGE_STYLES[min(int(newest - seen), len(AGE_STYLES) - 1)])
    return text


def _visible(text: str) -> str:
    """Text without characters that would move the cursor or change the terminal's state."""
    text = text.replace("\n", "⏎")
    return "".join(letter if letter.isprintable() else "·" for letter in text)


def _name_value_table(rows: Sequence[tuple[str, RenderableType | None]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    for name, value in rows:
        table.add_row(name, value if value is not None else Text("-", style="dim"))
    return table


def _share_bar(value: Any) -> RenderableType | None:
    share = finite(value)
    if share is None:
        return None
    return Text.assemble(_bar(share, 12, "yellow"), f" {percent(share)}")


def _bar(share: float, width: int, style: str) -> Text:
    filled = round(min(max(share, 0.0), 1.0) * width)
    return Text.assemble(("━" * filled, style), ("━" * (width - filled), "bright_black"))


def _slashed(first: str | None, second: str | None, between: str = "/", end: str = "") -> str | None:
    return None if first is None or second is None else f"{first}{between}{second}{end}"


def _unit(value: str | None, unit: str) -> str | None:
    return None if value is None else value + unit
