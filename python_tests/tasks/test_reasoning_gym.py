from __future__ import annotations

import sys
from typing import Any

import pytest

from areal_core.errors import DataError, MissingPackageError
from areal_core.tasks import ReasoningGymTask, Task, get_task


@pytest.fixture
def _package() -> None:
    pytest.importorskip("reasoning_gym", reason="the optional package reasoning-gym is not installed")


pytestmark = pytest.mark.usefixtures("_package")
NAMES = ["chain_sum", "gsm_symbolic", "leg_counting", "countdown", "spell_backward", "number_sorting"]


@pytest.mark.parametrize("name", NAMES)
def test_a_problem_is_a_function_of_index_and_seed(name: str) -> None:
    one, other = get_task("reasoning_gym", dataset=name), get_task("reasoning_gym", dataset=name)
    forward = [one.problem(i, seed=3) for i in range(12)]
    assert [other.problem(i, seed=3) for i in reversed(range(12))][::-1] == forward
    assert [one.problem(i, seed=4) for i in range(12)] != forward
    assert isinstance(one, Task)


@pytest.mark.parametrize("name", NAMES)
def test_the_right_answer_scores_and_a_wrong_one_does_not(name: str) -> None:
    task = ReasoningGymTask(name)
    for index in range(5):
        problem = task.problem(index, held_out=True)
        right = f"<answer>no</answer> hm, <answer> {problem.answer}\n</answer>"
        assert task.verify(problem, right) == 1.0
        assert task.verify(problem, f"<answer>{problem.answer}</answer> <answer>none</answer>") == 0.0
        for wrong in (
            "",
            problem.answer,
            f"<answer>{problem.answer}",
            f"{problem.answer}</answer>",
            "<answer></answer>",
        ):
            assert task.verify(problem, wrong) == 0.0
        assert "<answer>" in problem.prompt


def test_held_out_questions_never_train() -> None:
    task = ReasoningGymTask("chain_sum", {"max_terms": 2, "max_digits": 1})  # few questions: they do come again
    train = {task.problem(i).problem_id for i in range(1500)}
    held_out = {task.problem(i, held_out=True).problem_id for i in range(100)}
    assert len(train) < 1500
    assert held_out
    assert not train & held_out


def test_scores_below_the_threshold_are_nothing() -> None:
    problem = ReasoningGymTask("chain_sum").problem(0)
    response = f"<answer>It is {problem.answer}, I think</answer>"  # holds the answer: part of the score
    assert 0 < ReasoningGymTask("chain_sum", threshold=None).verify(problem, response) < 1
    assert ReasoningGymTask("chain_sum").verify(problem, response) == 0.0
    assert ReasoningGymTask("chain_sum", threshold=0.01).verify(problem, response) == 1.0


@pytest.mark.parametrize(("answer_in", "response"), [("boxed", "so \\boxed{{{}}}"), ("text", " {}\n")])
def test_where_the_answer_stands_can_be_chosen(answer_in: Any, response: str) -> None:
    task = ReasoningGymTask("chain_sum", answer_in=answer_in, template="Q {prompt}")
    problem = task.problem(0)
    assert problem.prompt.startswith("Q ")
    assert task.verify(problem, response.format(problem.answer)) == 1.0
    assert task.verify(problem, f"<answer>{problem.answer}</answer>") == 0.0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dataset": "chess"}, "dataset: expected one of ab, acre, .*got 'chess'"),
        (
            {"dataset": "chain_sum", "config": {"terms": 2}},
            "config: expected settings of chain_sum among min_terms, .*got 'terms'",
        ),
        ({"dataset": "chain_sum", "config": {"size": 2}}, "got 'size'"),
        ({"dataset": "chain_sum", "config": {"min_terms": -1}}, "config: chain_sum: AssertionError"),
        ({"dataset": "chain_sum", "threshold": 0}, r"threshold: expected a number in \(0, 1\] or null, got 0"),
        ({"dataset": "chain_sum", "answer_in": "box"}, "answer_in: expected one of tag, boxed, text, got 'box'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        get_task("reasoning_gym", **options)


class OneQuestion:
    """A dataset that always asks the same."""

    def __getitem__(self, item: int) -> dict[str, str]:
        return {"question": "1 + 1", "answer": "2"}


def test_a_dataset_with_one_question_has_one_side(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ReasoningGymTask("chain_sum")
    monkeypatch.setattr(task, "_items", OneQuestion())
    assert task.problem(0).answer == "2"
    with pytest.raises(DataError, match="chain_sum: expected a held-out question within 2000 draws, got none"):
        task.problem(0, held_out=True)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(MissingPackageError, match=r"task reasoning_gym: .*pip install areal-core\[reasoning-gym\]"):
        get_task("reasoning_gym", dataset="chain_sum")
