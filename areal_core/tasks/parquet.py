"""Problems read from Parquet files, with the optional package pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_core.errors import DataError, MissingPackageError
from areal_core.tasks.dataset import DatasetTask

__all__ = ["ParquetTask"]


class ParquetTask(DatasetTask):
    """One problem a row. Options: `DatasetTask`. Raises MissingPackageError without pyarrow."""

    name = "parquet"
    suffix = ".parquet"

    def _records(self, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise MissingPackageError(
                f"task parquet: expected the package pyarrow (pip install areal-core[parquet]), got: {error}"
            ) from error
        number = 0
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches():
                    for record in batch.to_pylist():
                        number += 1
                        yield f"{path}:row {number}", record
        except pyarrow.ArrowException as error:
            raise DataError(f"{path}: expected a Parquet file, got: {error} (after row {number})") from None
