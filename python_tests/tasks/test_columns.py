"""Records as public datasets write them, and what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_core.errors import DataError
from areal_core.tasks import JsonlTask

GSM8K = {"question": "48 + 24?", "answer": "48+24 = <<48+24=72>>72\n#### 72"}
MATH = {"problem": "Half?", "level": "Level 1", "type": "Algebra", "solution": r"So $\boxed{\frac{1}{2}}$."}
MATH_500 = {**MATH, "answer": r"\frac{1}{2}", "unique_id": "test/1"}
AIME = {"ID": "2024-I-1", "Problem": "Find $n$.", "Solution": r"\boxed{204}", "Answer": 204}
AMC = {"id": 0, "problem": "Count.", "answer": 27.0, "url": "https://example.org"}
DEEPSCALER = {"problem": "Sum.", "answer": "-\\frac{2}{3}", "solution": ""}
VERL = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve."}],
    "reward_model": {"ground_truth": "34", "style": "rule"},
}
ARC = {"question": "Which?", "choices": {"text": ["sun", "moon"], "label": ["A", "B"]}, "answerKey": "B"}
MMLU = {"question": "Which?", "subject": "astronomy", "choices": ["sun", "moon"], "answer": 1}


def load(tmp_path: Path, *records: dict[str, Any], **options: Any) -> JsonlTask:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return JsonlTask(path, eval_path=path, **options)


@pytest.mark.parametrize(
    ("record", "prompt", "answer", "verifier", "metadata"),
    [
        (GSM8K, "48 + 24?", "72", "gsm8k", {"solution": GSM8K["answer"]}),
        (MATH, "Half?", r"\frac{1}{2}", "boxed", {"level": "Level 1", "type": "Algebra"}),
        (MATH_500, "Half?", r"\frac{1}{2}", "exact", {"solution": MATH["solution"], "unique_id": "test/1"}),
        (AIME, "Find $n$.", "204", "exact", {"ID": "2024-I-1"}),
        (AMC, "Count.", "27", "exact", {"url": "https://example.org"}),
        (DEEPSCALER, "Sum.", r"-\frac{2}{3}", "exact", {"solution": ""}),
        (VERL, "Solve.", "34", "exact", {"data_source": "math_dapo"}),
        (ARC, "Which?\nA. sun\nB. moon", "B", "multiple_choice", {}),
        (MMLU, "Which?\nA. sun\nB. moon", "B", "multiple_choice", {"subject": "astronomy"}),
    ],
)
def test_public_formats(
    tmp_path: Path, record: dict[str, Any], prompt: str, answer: str, verifier: str, metadata: dict[str, Any]
) -> None:
    task = load(tmp_path, record)
    problem = task.problem(0)
    assert (problem.prompt, problem.answer, task.verifier) == (prompt, answer, verifier)
    assert metadata.items() <= problem.metadata.items()
    assert problem.special_tokens


def test_columns_can_be_named(tmp_path: Path) -> None:
    record = {"prompt": "no", "x": "yes", "answer": "no", "deep": {"er": 3}}
    problem = load(tmp_path, record, prompt_key="x", answer_key="deep.er").problem(0)
    assert (problem.prompt, problem.answer) == ("yes", "3")


@pytest.mark.parametrize(
    ("answer_format", "answer"), [("auto", "2"), ("text", r"\boxed{1} #### 2"), ("gsm8k", "2"), ("boxed", "1")]
)
def test_answer_formats(tmp_path: Path, answer_format: Any, answer: str) -> None:
    record = {"prompt": "x", "answer": r"\boxed{1} #### 2"}
    assert load(tmp_path, record, answer_format=answer_format, verifier="exact").problem(0).answer == answer


@pytest.mark.parametrize(
    ("record", "options", "text"),
    [
        (
            {"text": "x"},
            {},
            r"data.jsonl:1: expected a column of the prompt among prompt, .*prompt_key\), got columns text",
        ),
        ({"prompt": "x"}, {}, r"data.jsonl:1: expected a column of the answer among answer, .*answer_key\)"),
        ({}, {}, "got columns none"),
        (
            {"prompt": "x", "answer": "1"},
            {"prompt_key": "q"},
            "expected text or a list of messages under 'q', got None",
        ),
        ({"prompt": "x", "solution": "5"}, {}, r"expected \\boxed\{...\} under 'solution', got '5'"),
        (
            {"prompt": "x", "answer": "5"},
            {"answer_format": "gsm8k"},
            "expected '#### <number>' under 'answer', got '5'",
        ),
        ({"prompt": "x", "answer": "#### 5 #### x"}, {}, "data.jsonl:1: expected a number under 'answer', got 'x'"),
        ({"prompt": "x", "answer": " "}, {"verifier": "boxed"}, "expected a text that is not empty under 'answer'"),
        ({"prompt": "x", "answer": "BC"}, {"verifier": "multiple_choice"}, "expected a capital letter under 'answer'"),
        ({**MMLU, "answer": 2}, {}, "expected 0 to 1 under 'answer', got 2"),
        ({**MMLU, "choices": "sun"}, {}, "expected a list of 2 to 26 texts under 'choices', got 'sun'"),
        ({**ARC, "choices": {"text": ["a", "b"], "label": ["A", "A"]}}, {}, "expected 2 different labels"),
        ({"prompt": ["x"], "answer": "1"}, {}, "'prompt': expected messages with a text each under role and content"),
        ({"prompt": [], "answer": "1"}, {}, "'prompt': expected a last message that asks, got none"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}, {}, "expected a last message that asks"),
        (
            {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}], "answer": "1"},
            {},
            "expected option chat_template for a prompt of 2 messages",
        ),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, record: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(DataError, match=text):
        load(tmp_path, record, **options)


def test_a_row_that_differs_from_the_first_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.jsonl:2: expected text or a number under 'answer', got None"):
        load(tmp_path, GSM8K, {"question": "x", "solution": r"\boxed{1}"})


def test_a_wrong_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="answer_format: expected one of auto, text, gsm8k, boxed, got 'latex'"):
        load(tmp_path, GSM8K, answer_format="latex")
