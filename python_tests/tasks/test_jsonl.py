from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from areal_core.errors import DataError
from areal_core.tasks import JsonlTask, Problem, Task, get_task


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    return write(tmp_path / "train.jsonl", *({"prompt": f"{i}+1=", "answer": i + 1, "level": i} for i in range(7)))


def test_a_line_becomes_a_problem(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"q": "2+2", "a": 4, "source": "test"}, "", {"q": "capital?", "a": "Paris"})
    task = JsonlTask(path, prompt_key="q", answer_key="a")
    problems = {task.problem(i).prompt: task.problem(i) for i in range(2)}
    assert problems["2+2"] == Problem("2+2", "4", f"{path}:1", {"source": "test"})
    assert problems["capital?"] == Problem("capital?", "Paris", f"{path}:3")
    assert task.size() == 2
    assert isinstance(task, Task)


def test_each_pass_is_a_fresh_shuffle_of_all_problems(numbers: Path) -> None:
    task = JsonlTask(numbers)
    passes = [[task.problem(7 * epoch + i, seed=1).problem_id for i in range(7)] for epoch in range(4)]
    assert all(sorted(one) == sorted(passes[0]) for one in passes)
    assert len({tuple(one) for one in passes}) > 1
    assert [JsonlTask(numbers).problem(i, seed=1).problem_id for i in range(7)] == passes[0]
    assert [task.problem(i, seed=2).problem_id for i in range(28)] != [x for one in passes for x in one]


def test_sample_draws_every_problem(numbers: Path) -> None:
    task, rng = JsonlTask(numbers), random.Random(0)
    assert len({task.sample(rng).problem_id for _ in range(200)}) == 7


def test_held_out_problems_come_from_their_own_file(numbers: Path, tmp_path: Path) -> None:
    held_out = write(tmp_path / "eval.jsonl", {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"})
    task = JsonlTask(numbers, eval_path=held_out)
    assert [task.problem(i, held_out=True).prompt for i in range(3)] == ["a", "b", "a"]
    assert task.size(held_out=True) == 2
    with pytest.raises(ValueError, match="eval_path"):
        JsonlTask(numbers).problem(0, held_out=True)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{not json", "a JSON object"),
        ([1, 2], "a JSON object"),
        ({"answer": "1"}, "text or a list of messages under 'prompt'"),
        ({"prompt": 3, "answer": "1"}, "text or a list of messages under 'prompt'"),
        ({"prompt": "x"}, "text or a number under 'answer'"),
        ({"prompt": "x", "answer": True}, "text or a number under 'answer'"),
        ({"prompt": "x", "answer": [1]}, "text or a number under 'answer'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, what: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"prompt": "ok", "answer": "1"}, line)
    with pytest.raises(DataError, match=f"bad.jsonl:2: expected {what}"):
        JsonlTask(path)


def test_numeric_answers_are_checked_when_read(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", {"prompt": "x", "answer": "seven"})
    with pytest.raises(DataError, match=r"bad\.jsonl:1: expected a number"):
        JsonlTask(path, verifier="numeric")
    assert JsonlTask(path, verifier="exact").size() == 1


def test_an_empty_file_and_an_unknown_verifier_are_refused(tmp_path: Path, numbers: Path) -> None:
    with pytest.raises(DataError, match="at least one problem"):
        JsonlTask(write(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match="got 'fuzzy'"):
        get_task("jsonl", path=numbers, verifier="fuzzy")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"prompt": "x", "answer": "\xff"}', "a JSON object"),
        (b"[" * 100_000, "a JSON object"),
        (b'{"prompt": "x", "answer": ' + b"9" * 5000 + b"}", "a JSON object"),
        (b'{"prompt": "x", "answer": NaN}', "text or a number under 'answer'"),
        (b'{"prompt": "x", "answer": -Infinity}', "text or a number under 'answer'"),
    ],
)
def test_bytes_that_are_no_record_are_named(tmp_path: Path, line: bytes, what: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "ok", "answer": "1"}\r\n' + line)
    with pytest.raises(DataError, match=f"bad.jsonl:2: expected {what}"):
        JsonlTask(tmp_path / "bad.jsonl")


def test_a_missing_file_names_its_option(tmp_path: Path, numbers: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"task.options.path: expected an existing file, got '.*gone.jsonl'"):
        JsonlTask(tmp_path / "gone.jsonl")
    with pytest.raises(FileNotFoundError, match=r"task.options.eval_path: expected an existing file"):
        JsonlTask(numbers, eval_path=tmp_path / "gone.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"task.options.path: expected \*.jsonl in '.*empty', got none"):
        JsonlTask(tmp_path / "empty")


def test_a_folder_holds_the_parts_of_a_dataset(tmp_path: Path) -> None:
    for part in ("b", "a"):
        write(tmp_path / f"{part}.jsonl", {"prompt": part, "answer": "1"})
    write(tmp_path / "notes.txt", "none of it")
    task = JsonlTask(tmp_path, eval_path=tmp_path)
    assert [task.problem(i, held_out=True).prompt for i in range(2)] == ["a", "b"]
