from __future__ import annotations

import random

import pytest

from areal_core.tasks import ChainArithmetic, Problem, Task, get_task


def evaluate_chain(prompt: str, modulus: int) -> int:
    """The answer by another road: the same text with brackets, through Python's own arithmetic."""
    terms = prompt.removesuffix("=")
    operations = (len(terms) - 1) // 2
    bracketed = "(" * operations + terms[0]
    for i in range(1, len(terms), 2):
        bracketed += terms[i : i + 2] + ")"
    return int(eval(bracketed)) % modulus


@pytest.mark.parametrize("task", [ChainArithmetic(), ChainArithmetic(2, 9, 7), ChainArithmetic(3, 3, 2)])
def test_problems_are_what_they_claim(task: ChainArithmetic) -> None:
    for index in range(200):
        problem = task.problem(index)
        terms = len(problem.prompt) // 2
        assert task.min_terms <= terms <= task.max_terms
        assert len(problem.prompt) <= task.max_prompt_chars
        assert problem.answer == str(evaluate_chain(problem.prompt, task.modulus))
        for think in (True, False):
            demonstration = task.demonstration(problem, think=think)
            assert task.verify(problem, demonstration) == 1.0
            assert len(demonstration) <= task.max_response_chars


def test_a_trace_restates_operator_operand_and_running_value() -> None:
    problem = Problem("7*3+5=", "6", "x", {"trace": "*31+56"})
    assert ChainArithmetic().demonstration(problem, think=True) == "(*31+56)6"
    rng = random.Random(0)
    for _ in range(50):
        drawn = ChainArithmetic().sample(rng)
        trace, terms = drawn.metadata["trace"], drawn.prompt[1:-1]
        assert "".join(trace[i : i + 2] for i in range(0, len(trace), 3)) == terms
        for i in range(3, len(trace) + 1, 3):
            assert trace[i - 1] == str(evaluate_chain(drawn.prompt[: 1 + 2 * i // 3] + "=", 10))


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("6", 1.0),
        ("(*31+56)6", 1.0),
        ("(nonsense)6", 1.0),
        (")(1)6", 1.0),
        ("(*31+56)", 0.0),
        ("(*31+56", 0.0),
        ("(6)5", 0.0),
        ("66", 0.0),
        (" 6", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_text_after_the_last_bracket_counts(response: str, reward: float) -> None:
    assert ChainArithmetic().verify(Problem("7*3+5=", "6", "x"), response) == reward


def test_streams_are_pure_functions_of_seed_and_index() -> None:
    task = ChainArithmetic()
    first = [task.problem(i, seed=3) for i in range(20)]
    assert [task.problem(i, seed=3) for i in reversed(range(20))] == first[::-1]
    assert [task.problem(i, seed=4) for i in range(20)] != first
    assert task.sample(random.Random(5)) == task.sample(random.Random(5))
    assert task.size() is None


def test_held_out_prompts_never_occur_in_training() -> None:
    task = ChainArithmetic(2, 3)
    held_out = {task.problem(i, held_out=True).prompt for i in range(300)}
    training = {task.problem(i).prompt for i in range(3000)}
    assert len(held_out) > 50
    assert not held_out & training


@pytest.mark.parametrize("options", [{"min_terms": 1}, {"min_terms": 5, "max_terms": 4}, {"modulus": 11}])
def test_bounds_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="ChainArithmetic: expected"):
        get_task("chain_arithmetic", **options)


def test_get_task_names_what_it_does_not_know() -> None:
    assert get_task("chain_arithmetic", max_terms=4) == ChainArithmetic(max_terms=4)
    assert isinstance(get_task("chain_arithmetic"), Task)
    with pytest.raises(ValueError, match="got 'chess'"):
        get_task("chess")
    with pytest.raises(ValueError, match="get_task: chain_arithmetic: "):
        get_task("chain_arithmetic", min_terms="two")
    with pytest.raises(ValueError, match=r"options of chain_arithmetic among min_terms, .*, got 'depth'"):
        get_task("chain_arithmetic", depth=3)
