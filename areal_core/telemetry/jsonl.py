"""Line-delimited JSON that survives crashes.

A line is written and flushed as one piece; a tail torn by a crash is skipped when read and cut off before anything is
appended; a resumed run removes what lies beyond its checkpoint by an atomic replacement of the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

Row = dict[str, Any]


def json_value(value: Any) -> Any:
    """Turn `value` into what JSON can carry: tensors and arrays become lists, NaN and infinities become None."""
    if hasattr(value, "tolist"):  # torch tensors, numpy arrays and scalars
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return value


def read_json_lines(path: Path) -> tuple[list[Row], list[int]]:
    """Read the objects of a file, and the numbers (from 1) of the lines that are not whole JSON objects.

    A missing file reads as empty.
    """
    rows: list[Row] = []
    broken: list[int] = []
    if not path.exists():
        return rows, broken
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            row = parse_object(line)
            if row is None:
                broken.append(number)
            else:
                rows.append(row)
    return rows, broken


def parse_object(line: bytes) -> Row | None:
    """Parse one line; None unless it is a whole JSON object."""
    try:
        row = json.loads(line)
    except ValueError:  # covers torn JSON and torn UTF-8
        return None
    return row if isinstance(row, dict) else None


def keep_rows(path: Path, wanted: Callable[[Row], bool]) -> None:
    """Atomically remove the lines of `path` that are broken or whose object is not `wanted`."""
    if not path.exists():
        return
    kept: list[bytes] = []
    removed = 0
    with path.open("rb") as file:
        for line in file:
            row = parse_object(line)
            if row is not None and wanted(row):
                kept.append(line.rstrip(b"\n") + b"\n")
            else:
                removed += 1
    if removed:
        replace_file(path, b"".join(kept))


def replace_file(path: Path, content: bytes) -> None:
    """Give `path` the new content; a crash leaves either the old or the new file, never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class JsonLinesWriter:
    """Appends objects to a file, one per line, each flushed before `write` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_tail(path)
        self._file = path.open("ab")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append `row`. Raises TypeError, before anything is written, when it holds what JSON cannot carry."""
        line = json.dumps(json_value(row), allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> JsonLinesWriter:
        """Return the writer itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close the file."""
        self.close()


def _cut_torn_tail(path: Path) -> None:
    """Without this the next line would be glued to the torn one, and both be lost."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
