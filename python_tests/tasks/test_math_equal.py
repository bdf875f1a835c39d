from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.errors import MissingPackageError
from areal_core.tasks.verifiers import get_verifier

PIECES = [
    "\\boxed{",
    "}",
    "{",
    "\\frac",
    "\\sqrt",
    "^",
    "_",
    "1",
    "x",
    "=",
    ",",
    "\\{",
    "\\}",
    "$",
    "\\infty",
    "\\cup",
    "(",
]
PIECES += [
    "[",
    "\\text{",
    "%",
    "\u2212",
    "\x00",
    "\ud800",
    "9" * 400,
    "\\begin{pmatrix}",
    "&",
    "\\\\",
    "!",
    "\\int",
    "/0",
]


@pytest.fixture(autouse=True)
def _needs_the_package() -> None:
    pytest.importorskip("math_verify", reason="the optional package math-verify is not installed")


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"so \boxed{0.5}", r"\frac12", 1.0),
        (r"so $\frac{2}{4}$", r"\frac12", 1.0),
        (r"\boxed{\frac{\sqrt{3}}{3}}", r"\frac{1}{\sqrt{3}}", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1.0),
        (r"\boxed{(1, 2)}", r"(2, 1)", 0.0),
        (r"\boxed{(-\infty, 3]}", r"(-\infty,3]", 1.0),
        (r"\boxed{(-\infty, 3)}", r"(-\infty,3]", 0.0),
        (r"\boxed{[0,1] \cup [2,3]}", r"[2,3]\cup[0,1]", 1.0),
        (r"\boxed{x = 5}", "5", 1.0),
        (r"\boxed{1 + x}", "x + 1", 1.0),
        (r"\boxed{2^{10}}", "1024", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1.0),
        (r"\boxed{" + "\u2212" + r"\frac{2}{3}}", r"-\frac{2}{3}", 1.0),
        (r"\boxed{5}, no: \boxed{6}", "5", 0.0),
        (r"\boxed{6}, no: \boxed{5}", "5", 1.0),
        (r"\boxed{5} \boxed{6", "5", 0.0),
        (r"\boxed{}", "5", 0.0),
        ("", "5", 0.0),
        ("no idea", "5", 0.0),
        (r"\boxed{" + "9" * 100_000 + "}", "5", 0.0),
        ("9" * 100_000, "5", 0.0),
    ],
)
def test_math(response: str, answer: str, reward: float) -> None:
    assert get_verifier("math")(response, answer) == reward


def test_only_a_box_counts_when_asked_for() -> None:
    assert get_verifier("math")("it is $5$", "5") == 1.0
    assert get_verifier("math", boxed_only=True)("it is $5$", "5") == 0.0


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.sampled_from(["5", r"\frac{1}{2}", "", "{", "x"])
)
def test_no_text_makes_it_raise(text: str, answer: str) -> None:
    verify = get_verifier("math")
    assert verify(text, answer) in (0.0, 1.0)
    assert verify(f"\\boxed{{{text}}}", answer) in (0.0, 1.0)


def test_a_deadline_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """What interrupts a verifier derives from BaseException, and must not count as a wrong answer."""

    class DeadlineError(BaseException):
        pass

    def late(*args: object, **options: object) -> None:
        raise DeadlineError

    verify = get_verifier("math")
    monkeypatch.setattr("math_verify.verify", late)
    with pytest.raises(DeadlineError):
        verify(r"\boxed{x}", "5")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingPackageError, match=r"verifier math: .*pip install areal-core\[math\]"):
        get_verifier("math")
