"""What responses answer, and how they vote."""

import pytest

from areal_core.evaluate.answers import Answering, votes
from areal_core.evaluate.data import load_data_sets
from areal_core.tasks import ChainArithmetic, get_task
from areal_core.tasks.verifiers import VERIFIERS, extract_answer


@pytest.mark.parametrize(
    ("verifier", "response", "answer"),
    [
        ("exact", " 6\n", "6"),
        ("exact", " ", None),
        ("numeric", "0.50", "1/2"),
        ("numeric", "6 or 7", None),
        ("last_number", "1 + 1,000 is 1,001.", "1001"),
        ("last_number", "no idea", None),
        ("gsm8k", "3 apples\n#### 12\nor 13", "12"),
        ("gsm8k", r"so \boxed{7}, after 9 tries", "7"),
        ("gsm8k", "it is 5", "5"),
        ("gsm8k", "none", None),
        ("boxed", r"\boxed{\frac{1}{2}}", "1/2"),
        ("boxed", r"\boxed{x + 1}", "x+1"),
        ("boxed", "1/2", None),
        ("math", r"\boxed{0.5}", "1/2"),
        ("math", r"\boxed{\frac12", None),
        ("multiple_choice", "The answer is B.", "B"),
        ("multiple_choice", "hm", None),
    ],
)
def test_answers_as_their_verifier_reads_them(verifier, response, answer):
    assert extract_answer(verifier, response) == answer


@pytest.mark.parametrize("verifier", sorted(set(VERIFIERS) - {"math"}))
def test_a_right_response_answers_the_reference(verifier):
    reference = "B" if verifier == "multiple_choice" else "1/2"
    for response in (reference, f"\\boxed{{{reference}}}", f"#### {reference}", "0.5"):
        if VERIFIERS[verifier].verify(response, reference):
            expected = "0.5" if (verifier, response) == ("exact", "0.5") else reference
            assert extract_answer(verifier, response) == expected


def test_a_chain_answers_after_its_thought():
    task = ChainArithmetic()
    problem = task.problem(0)
    assert task.extract_answer(problem, "(+12)5") == "5"
    assert task.extract_answer(problem, "5") == "5"
    assert task.extract_answer(problem, "(+12)") is None


def test_right_responses_are_votes_for_one_answer():
    cast = votes(["1/2", "0.50", "3", "3", None, None], [True, True, False, False, True, False])
    assert cast[0] == cast[1] == cast[4] != cast[2]
    assert cast[2] == cast[3] == "3"
    assert cast[5] is None


def test_tasks_that_tell_answers(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text('{"question": "1+2=", "answer": "so #### 3"}\n')
    (data,) = load_data_sets([str(path)])
    assert isinstance(data.task, Answering)
    assert data.task.extract_answer(data.problems[0], "#### 3.0") == "3"
    assert isinstance(get_task("chain_arithmetic"), Answering)
    with pytest.raises(ValueError, match="verifier: expected one of"):
        load_data_sets([f"{path}:verifier=judge"])
