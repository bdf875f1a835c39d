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
        ({"answer": "1"}, "text under 'prompt'"),
        ({"prompt": 3, "answer": "1"}, "text under 'prompt'"),
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


def verify(verifier: str, response: str, answer: str, tmp_path: Path) -> float:
    task = JsonlTask(write(tmp_path / "one.jsonl", {"prompt": "x", "answer": answer}), verifier=verifier)
    return task.verify(task.problem(0), response)


@pytest.mark.parametrize(
    ("verifier", "response", "answer", "reward"),
    [
        ("exact", " Paris\n", "Paris", 1.0),
        ("exact", "paris", "Paris", 0.0),
        ("numeric", "$1,234.50", "1234.5", 1.0),
        ("numeric", "2/4", "0.5", 1.0),
        ("numeric", "+7.", "7", 1.0),
        ("numeric", ".5", "1/2", 1.0),
        ("numeric", "-3", "3", 0.0),
        ("numeric", "the answer is 3", "3", 0.0),
        ("numeric", "3/0", "3", 0.0),
        ("numeric", "1" * 5000, "1", 0.0),
        ("numeric", "1e400", "1", 0.0),
        ("numeric", "nan", "0", 0.0),
        ("numeric", "", "0", 0.0),
        ("last_number", "so 2 + 3 = 5.", "5", 1.0),
        ("last_number", "5 and then 6", "5", 0.0),
        ("last_number", "it is -4", "-4", 1.0),
        ("last_number", "10-4", "4", 1.0),
        ("last_number", "(10)-4", "4", 1.0),
        ("last_number", "x = 1,000,000 people", "1000000", 1.0),
        ("last_number", "roughly 3.25%", "3.25", 1.0),
        ("last_number", "no number", "0", 0.0),
        ("last_number", "1" * 5000, "1", 0.0),
    ],
)
def test_verifiers(tmp_path: Path, verifier: str, response: str, answer: str, reward: float) -> None:
    assert verify(verifier, response, answer, tmp_path) == reward
