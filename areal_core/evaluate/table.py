"""The tables of an evaluation, as text and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from areal_core.evaluate.metrics import Estimate
from areal_core.evaluate.summary import CONFIDENCE, Cell, Summary

__all__ = ["Table", "caption", "details", "markdown", "overview", "shorten", "text", "with_interval"]

_NAME_LENGTH = 24


class Table(NamedTuple):
    """Cells as text: the first column is a name, the others are numbers."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def overview(summary: Summary) -> Table:
    """pass@1 of every model (a row) on every data set (a column), in percent, with its interval."""
    rows = [
        (model, *(with_interval(summary.cells[model, data].pass_at[1]) for data in summary.data))
        for model in summary.models
    ]
    return Table("pass@1, %", ("model", *summary.data), rows)


def details(summary: Summary) -> Iterator[Table]:
    """For every data set all that was estimated, a model a column."""
    for data in summary.data:
        cells = [summary.cells[model, data] for model in summary.models]
        head = ("", *(shorten(cell.model) for cell in cells))
        yield Table(f"{data}, {cells[0].problems} problems", head, list(_quantities(cells)))


def caption(summary: Summary) -> str:
    """How the numbers of the tables came about."""
    settings = summary.settings
    sampled = f"{settings.samples} samples for each problem" if settings.samples > 1 else "one sample for each problem"
    at = "decoded greedily" if settings.temperature == 0 else f"at temperature {settings.temperature:g}"
    limits = [f"top-p {settings.top_p:g}"] if settings.top_p < 1 else []
    limits += [f"top-k {settings.top_k}"] if settings.top_k else []
    longest = settings.max_new_tokens
    limits.append("responses as long as the context allows" if longest is None else f"at most {longest} tokens")
    return (
        f"pass@1 averaged over {sampled}, {at}, {', '.join(limits)}. Intervals: {CONFIDENCE:.0%}, BCa bootstrap over "
        "problems."
    )


def text(table: Table) -> str:
    """The table in columns."""
    lines = [table.head, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.head))]
    shown = [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(pairs))
        for pairs in (zip(line, widths, strict=True) for line in lines)
    ]
    rule = "-" * len(shown[0])
    return "\n".join([table.title, rule, shown[0], rule, *(line.rstrip() for line in shown[1:]), rule])


def markdown(table: Table) -> str:
    """The table in GitHub's Markdown."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    rule = f"|---|{'---:|' * (len(table.head) - 1)}"
    return "\n".join([f"**{table.title}**", "", line(table.head), rule, *map(line, table.rows)])


def with_interval(estimate: Estimate, *, signed: bool = False) -> str:
    """A share in percent and the ends of its interval: "41.8 [39.0, 44.5]"."""
    value = f"{100 * estimate.value:{'+' if signed else ''}.1f}"
    if math.isnan(estimate.low):
        return value
    return f"{value} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def shorten(name: str, length: int = _NAME_LENGTH) -> str:
    """A name cut at its front, where paths of checkpoints are alike."""
    return name if len(name) <= length else "…" + name[1 - length :]


def _quantities(cells: Sequence[Cell]) -> Iterator[tuple[str, ...]]:
    """Rows of the detailed table: a name, and a text for every cell."""
    for k in cells[0].pass_at:
        yield f"pass@{k}, %", *(with_interval(cell.pass_at[k]) for cell in cells)
    for k in cells[0].maj_at:
        if k > 1:
            yield f"maj@{k}, %", *(with_interval(cell.maj_at[k]) for cell in cells)
    if len(cells) > 1:
        gains = ["" if cell.gain is None else with_interval(cell.gain, signed=True) for cell in cells]
        yield "pass@1 gained, points", *gains
    if any(abs(cell.reward.value - cell.pass_at[1].value) > 1e-9 for cell in cells):
        yield "mean reward", *(f"{cell.reward.value:.3f}" for cell in cells)
    yield "truncated, %", *(f"{100 * cell.truncated.value:.1f}" for cell in cells)
    yield "tokens of a response", *(f"{cell.tokens.value:.1f}" for cell in cells)
    if any(cell.failed for cell in cells):
        yield "verifier failed", *(str(cell.failed) for cell in cells)
