"""Name maps as tables that a person can read.

A table says, for each canonical tensor (Hugging Face name), in which of a framework's buffers it lies and how ranks
divide it::

    canonical                                  | buffer                                     | split      | over
    model.layers.{layer}.self_attn.q_proj.*    | model.layers.{layer}.self_attn.qkv_proj.*  | heads      | tp
    model.layers.{layer}.self_attn.k_proj.*    | model.layers.{layer}.self_attn.qkv_proj.*  | kv heads   | tp
    model.layers.{layer}.self_attn.v_proj.*    | model.layers.{layer}.self_attn.qkv_proj.*  | kv heads   | tp

canonical   {layer} and {expert} stand for numbers, a `*` at the end for what a projection has: weight, bias,
            weight_scale_inv (of 8-bit weights, one for each 128 x 128 block; it is divided as the weight is).
buffer      `=`: the canonical name. Rows of one buffer lie one after the other in the order of the table. A buffer
            without the {expert} of its tensor stacks a rank's experts in a leading dimension.
split       whole        every rank of the group holds all of it
            buffer       the same, and FSDP does not divide it either: it is no parameter
            rows         dimension 0 in equal parts; a bias too
            columns      dimension 1 in equal parts; a bias is whole
            heads        rows, by whole attention heads
            kv heads     rows, by whole key/value heads; of fewer heads than ranks, neighbours hold the same one
            groups       rows, by key/value groups; a group's query, key and value heads lie together in the buffer
            vocabulary   rows, after padding to what the framework asks for
over        the group of ranks that divides it: tp, experts, attention; `-`: of a whole tensor's stage, every rank
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["SPLITS", "NameTable", "Row"]

SPLITS = ("whole", "buffer", "rows", "columns", "heads", "kv heads", "groups", "vocabulary")
_GROUPS = ("tp", "experts", "attention", "-")
# The word before a number -> what stands for the number in patterns.
_PLACEHOLDERS = {"layers": "{layer}", "experts": "{expert}"}


@dataclass(frozen=True)
class Row:
    """One line of a table; see the module for what its columns mean."""

    canonical: str
    buffer: str
    split: str
    over: str

    @property
    def is_stacked(self) -> bool:
        """Whether the buffer holds a rank's experts in a leading dimension."""
        return "{expert}" in self.canonical and "{expert}" not in self.buffer


@dataclass(frozen=True)
class Match:
    """A canonical name taken apart by the row that describes it."""

    row: Row
    layer: int  # -1: no layer
    expert: int  # -1: no expert
    suffix: str  # what stands for the row's `*`; empty without one

    def name(self, pattern: str) -> str:
        """Another canonical pattern with this name's numbers and suffix."""
        return fill(pattern, self.layer, self.expert, self.suffix)


def fill(pattern: str, layer: int | str, expert: int | str, suffix: str) -> str:
    """Put numbers and suffix in the place of {layer}, {expert} and `*`."""
    return pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert)).replace("*", suffix)


class NameTable:
    """The rows of one framework, found by canonical name."""

    def __init__(self, text: str) -> None:
        """Parse a table. Raises ValueError naming the line that is no row or names a tensor again."""
        self.rows = tuple(_rows(text))
        self._by_pattern: Mapping[str, Row] = {row.canonical: row for row in self.rows}
        if len(self._by_pattern) != len(self.rows):
            raise ValueError("name table: expected every canonical name once")
        self._parts: dict[str, list[Row]] = {}
        for row in self.rows:
            self._parts.setdefault(row.buffer, []).append(row)

    def match(self, name: str) -> Match:
        """Find the row of a canonical name.

        Raises:
            ValueError: the table has no row for it.
        """
        words = name.split(".")
        numbers = {}
        for before, placeholder in _PLACEHOLDERS.items():
            at = words.index(before) + 1 if before in words else len(words)
            if at < len(words) and words[at].isdecimal():
                numbers[before] = int(words[at])
                words[at] = placeholder
        layer, expert = numbers.get("layers", -1), numbers.get("experts", -1)
        pattern = ".".join(words)
        row = self._by_pattern.get(pattern)
        if row is not None:
            return Match(row, layer, expert, "")
        stem, _, suffix = pattern.rpartition(".")
        row = self._by_pattern.get(f"{stem}.*")
        if row is None:
            raise ValueError(f"name map: expected a tensor that the table describes, got {name}")
        return Match(row, layer, expert, suffix)

    def parts(self, row: Row) -> list[Row]:
        """All rows of the buffer of `row`, in the order in which they lie in it."""
        return self._parts[row.buffer]

    def __str__(self) -> str:
        return "\n".join(" | ".join(column) for column in _aligned(self.rows))


def _rows(text: str) -> Iterator[Row]:
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 4 or cells[2] not in SPLITS or cells[3] not in _GROUPS:
            raise ValueError(f"name table: expected `canonical | buffer | split | over`, got {line!r}")
        canonical, buffer = cells[0], cells[0] if cells[1] == "=" else cells[1]
        if ("*" in canonical) != ("*" in buffer):
            raise ValueError(f"name table: expected a buffer that keeps the `*` of its tensor, got {line!r}")
        if (cells[3] == "-") != (cells[2] in ("whole", "buffer")):
            raise ValueError(f"name table: expected a group exactly where a tensor is split, got {line!r}")
        yield Row(canonical, buffer, cells[2], cells[3])


def _aligned(rows: tuple[Row, ...]) -> list[tuple[str, ...]]:
    cells = [(row.canonical, "=" if row.buffer == row.canonical else row.buffer, row.split, row.over) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return [(*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]) for line in cells]
