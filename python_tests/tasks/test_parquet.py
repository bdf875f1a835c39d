from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from areal_core.errors import DataError, MissingPackageError
from areal_core.tasks import get_task


def write(path: Path, **columns: list[object]) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="the optional package pyarrow (110 MB) is not installed")
    importlib.import_module("pyarrow.parquet").write_table(pyarrow.table(columns), path)
    return path


def test_rows_become_problems(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": f"{i}?"}] for i in range(5)]
    answers = [{"ground_truth": str(i)} for i in range(5)]
    path = write(tmp_path / "a.parquet", prompt=messages, reward_model=answers, level=list(range(5)))
    task = get_task("parquet", path=str(path), eval_path=str(tmp_path))
    held_out = [task.problem(i, held_out=True) for i in range(5)]
    assert [p.prompt for p in held_out] == ["0?", "1?", "2?", "3?", "4?"]
    assert held_out[3].answer == "3"
    assert held_out[3].metadata["level"] == 3
    assert held_out[3].problem_id == f"{path}:row 4"
    assert sorted(task.problem(i).answer for i in range(5)) == ["0", "1", "2", "3", "4"]
    assert task.verify(held_out[3], "3") == 1.0


def test_bad_rows_and_files_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", question=["x", None], answer=["1", "2"])
    with pytest.raises(
        DataError, match=r"a.parquet:row 2: expected text or a list of messages under 'question', got None"
    ):
        get_task("parquet", path=path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"a.parquet: expected a Parquet file"):
        get_task("parquet", path=path)


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"task parquet: .*pip install areal-core\[parquet\]"):
        get_task("parquet", path=tmp_path / "a.parquet")
