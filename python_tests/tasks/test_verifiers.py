from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.tasks.latex import last_boxed, plain_answer
from areal_core.tasks.verifiers import VERIFIERS, get_verifier, parse_number


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
def test_numbers_and_texts(verifier: str, response: str, answer: str, reward: float) -> None:
    assert get_verifier(verifier)(response, answer) == reward


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\boxed{7} + 1}", r"\boxed{7} + 1"),
        (r"\boxed{x = \boxed{7} + 1}", r"x = \boxed{7} + 1"),
        (r"\fbox{9}", "9"),
        (r"\boxed 5 and no more", "5"),
        (r"\boxed5", "5"),
        (r"$\boxed  {5}$", "5"),
        (r"\boxed{}", ""),
        (r"{ stray { \boxed{3}", "3"),
        (r"} stray } \boxed{3}", "3"),
        (r"\boxed{ broken \boxed{3}", "3"),
        (r"\boxed{3} and then \boxed{4", None),
        (r"\boxed{4", None),
        (r"\boxed", None),
        (r"\boxed{4\}", None),
        (r"boxed{4}", None),
        ("no box", None),
        ("", None),
        ("\\", None),
        (r"\boxed{line" + "\n" + "break}", "line\nbreak"),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_a_hundred_thousand_boxes_take_no_time() -> None:
    many = 100_000
    assert last_boxed("\\boxed{" * many) is None
    assert last_boxed("\\boxed{" * many + "5" + "}" * many) is not None
    assert last_boxed("\\boxed{5}" * many) == "5"
    assert last_boxed("}" * many + "{" * many) is None


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("$5$", "5"),
        (r"\(5\)", "5"),
        (r"\dfrac{1}{2}", "1/2"),
        (r"\frac12", "1/2"),
        (r"-\tfrac{3}{4}", "-3/4"),
        (r"\frac{-3}{4}", "-3/4"),
        (r"-\frac{-3}{4}", "3/4"),
        (r"\frac{a}{2}", r"\frac{a}{2}"),
        (r"5\text{ cm}", "5"),
        (r"5 \, \mathrm{cm}^2", "5"),
        (r"\text{Paris}", "Paris"),
        (r"5\text{ or }6", "5or6"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        ("90°", "90"),
        (r"50\%", "50"),
        ("50%", "50"),
        (r"\$1{,}234", "1234".replace("1", "1,", 1)),
        (r"\left( 1, 2 \right]", "(1,2]"),
        (r"\leftarrow", r"\leftarrow"),
        ("\u22125", "-5"),
        (" 5. ", "5"),
        ("", ""),
        ("$", "$"),
    ],
)
def test_plain_answer(text: str, plain: str) -> None:
    assert plain_answer(text) == plain


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"\boxed{18}", "18", 1.0),
        (r"\boxed{18.0}", "18", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{\frac12}", r"\dfrac{1}{2}", 1.0),
        (r"\boxed{18\text{ apples}}", "18", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{[1,2)}", "(1,2)", 0.0),
        (r"\boxed{" + "\u2212" + "3}", "-3", 1.0),
        (r"\boxed{3}", "-3", 0.0),
        (r"\boxed{17} \boxed{18}", "18", 1.0),
        (r"\boxed{18} \boxed{17}", "18", 0.0),
        (r"\boxed{18} \boxed{1", "18", 0.0),
        ("18", "18", 0.0),
        (r"\boxed{}", "18", 0.0),
        (r"\boxed{$}", "$", 1.0),
        (r"\boxed{" + "9" * 100_000 + "}", "9", 0.0),
        (r"\boxed{" + "9" * 100_000 + "}", "9" * 100_000, 1.0),
    ],
)
def test_boxed(response: str, answer: str, reward: float) -> None:
    assert get_verifier("boxed")(response, answer) == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so\n#### 18", "18", 1.0),
        ("#### 1,234\n", "1234", 1.0),
        ("#### $18.00", "18", 1.0),
        ("#### 18 apples", "18", 1.0),
        ("#### \u22123", "-3", 1.0),
        ("#### 17\n#### 18", "18", 1.0),
        ("#### 18\n#### 17", "18", 0.0),
        ("#### 18\nand 19 more", "18", 1.0),
        ("####\n18", "18", 1.0),
        ("####", "18", 0.0),
        (r"the answer is \boxed{18} of 20", "18", 1.0),
        ("16 + 2 = 18", "18", 1.0),
        ("18 is not 17", "18", 0.0),
    ],
)
def test_gsm8k(response: str, answer: str, reward: float) -> None:
    assert get_verifier("gsm8k")(response, answer) == reward


def test_strict_gsm8k_wants_the_marker() -> None:
    strict = get_verifier("gsm8k", strict=True)
    assert strict("#### 18", "18") == 1.0
    assert strict(r"\boxed{18} 18", "18") == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("B", "B", 1.0),
        ("(B)", "B", 1.0),
        ("**B.**", "B", 1.0),
        ("b", "B", 0.0),
        ("The answer is (C).", "C", 1.0),
        ("Answer: **D**", "D", 1.0),
        ("**Answer:** D", "D", 1.0),
        ("The answer is A. No, the answer is B.", "B", 1.0),
        ("The answer is a dog", "A", 0.0),
        ("The answer is A dog", "A", 0.0),
        ("Answer: Bob", "B", 0.0),
        (r"\boxed{B}", "B", 1.0),
        (r"\boxed{\text{(B)}}", "B", 1.0),
        (r"\boxed{B, C}", "B", 0.0),
        (r"The answer is A, so \boxed{B}", "A", 0.0),
        ("thinking\nC) because", "C", 1.0),
        ("A and B are wrong", "A", 0.0),
        ("A\nB", "A", 0.0),
        ("", "A", 0.0),
    ],
)
def test_multiple_choice(response: str, answer: str, reward: float) -> None:
    assert get_verifier("multiple_choice")(response, answer) == reward


def test_tolerances() -> None:
    near = get_verifier("numeric", rel_tol=0.01)
    assert near("3.14", "3.141592") == 1.0
    assert near("3.0", "3.141592") == 0.0
    assert near("-3.14", "3.141592") == 0.0
    assert near("0.001", "0") == 0.0
    assert get_verifier("last_number", abs_tol=0.5)("about 7.5", "7") == 1.0
    assert get_verifier("last_number", abs_tol=0.5)("about 7.51", "7") == 0.0


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("fuzzy", {}, "verifier: expected one of exact, .* got 'fuzzy'"),
        ("numeric", {"tol": 1}, "expected options of numeric among rel_tol, abs_tol, got 'tol'"),
        ("exact", {"tol": 1}, "expected options of exact none, got 'tol'"),
        ("numeric", {"rel_tol": -1}, "verifier_options.rel_tol: expected a finite number >= 0, got -1"),
        ("numeric", {"rel_tol": float("nan")}, "expected a finite number"),
        ("numeric", {"rel_tol": True}, "expected a finite number"),
        ("numeric", {"rel_tol": "1"}, "expected a finite number"),
        ("gsm8k", {"strict": 1}, "expected true or false, got 1"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        get_verifier(name, **options)


PIECES = [
    *"{}\\$#(),.%-+/0123456789ABCab \n\x00\u2212\u00b0\ud800\u0663",
    *("\\boxed", "\\boxed{", "\\fbox", "\\frac", "\\frac{", "####", "answer is ", "<answer>", "\\text{", "\\left"),
    "9" * 1200,
]
NASTY = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=25).map("".join))


@pytest.mark.parametrize("name", [name for name in VERIFIERS if name != "math"])
@settings(max_examples=60, deadline=None)
@given(response=NASTY, answer=NASTY)
def test_no_text_makes_a_verifier_raise(name: str, response: str, answer: str) -> None:
    verify = get_verifier(name)
    assert verify(response, answer) in (0.0, 1.0)


@pytest.mark.parametrize("name", [name for name in VERIFIERS if name != "math"])
def test_long_texts_take_no_time(name: str) -> None:
    """What grows with the square of the length would take minutes here."""
    verify = get_verifier(name)
    for piece in [*PIECES[:-1], "answer ", "1,111,", "1/0", " \\,"]:
        assert verify("answer is 5 " + piece * 20_000 + " is 5", "7") == 0.0


@settings(max_examples=100, deadline=None)
@given(st.fractions(max_denominator=10**6))
def test_numbers_written_as_fractions_are_read_back(number: Any) -> None:
    assert parse_number(f"{number.numerator}/{number.denominator}") == number
    assert get_verifier("boxed")(f"\\boxed{{\\frac{{{number.numerator}}}{{{number.denominator}}}}}", str(number)) == 1.0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["x", r"\{", r"\}", r"\,", " ", "{", "{", "}"]), max_size=20))
def test_balanced_braces_come_back_whole(pieces: list[str]) -> None:
    content, depth = "y", 0
    for piece in pieces:
        if piece != "}" or depth > 0:
            content += piece
            depth += {"{": 1, "}": -1}.get(piece, 0)
    content += "}" * depth + "z"
    assert last_boxed(f"so \\boxed{{{content}}} and so on") == content
