"""Problems read from JSON Lines files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_core.errors import DataError
from areal_core.tasks.dataset import DatasetTask

__all__ = ["JsonlTask"]


class JsonlTask(DatasetTask):
    """One problem a line, a JSON object in UTF-8; blank lines are skipped. Options: `DatasetTask`."""

    name = "jsonl"
    suffix = ".jsonl"

    def _records(self, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{path}:{number}"
                    yield where, _parse(line, where)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record: Any = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, a number of too many digits
        raise DataError(f"{where}: expected a JSON object, got {_shown(line)} ({error})") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, got {_shown(line)}")
    return record


def _shown(line: bytes) -> str:
    return repr(line.decode("utf-8", "replace").strip()[:80])
