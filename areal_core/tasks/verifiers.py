"""Judges of a response's text against a reference answer: 1.0 right, 0.0 wrong, whatever the text is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from inspect import Parameter, signature
from typing import Any, NamedTuple

from areal_core.tasks.latex import last_boxed, plain_answer
from areal_core.tasks.math_equal import math_equal, require_math_verify

__all__ = ["VERIFIERS", "Verifier", "extract_answer", "get_verifier", "parse_number"]

# A sign belongs to the number unless it stands after a word or a closing bracket, where it means subtraction.
_NUMBER = re.compile(r"(?:(?<![\w)\]])[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/0*[1-9]\d*)?|(?<![\w.])[-+]?\.\d+")
_MAX_NUMBER_CHARS = 1000  # parsing time grows with the square of the length
_MINUS = str.maketrans({"\u2212": "-", "\ufe63": "-", "\uff0d": "-"})
_ANSWER_IS = re.compile(r"\banswer\b(?:\s+is)?[\s:*(]*([A-Z])(?![\w'])(?!\s+[a-z])", re.IGNORECASE)
_CHOICE = re.compile(r"[\s*(\[]*([A-Z])\s*[)\].:*]*\s*")  # "B", "(B)", "**B.**"
_CHOICE_LINE = re.compile(r"[\s*(\[]*([A-Z])(?:\s*[).\]:]\s.*|[\s).\]:*]*)")  # the same, or "B) because ..."

Verifier = Callable[[str, str], float]


def parse_number(text: str) -> Fraction | None:
    """The number that `text` is ("1,234", "-3.50", "$7", "2/3"), or None."""
    text = text.translate(_MINUS).strip().removeprefix("$").removesuffix("%").removesuffix(".").strip()
    if len(text) > _MAX_NUMBER_CHARS or not _NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.replace(",", "").partition("/")
    return Fraction(numerator) / Fraction(denominator or 1)


def exact(response: str, answer: str) -> float:
    """1.0 when the texts are equal but for surrounding white space."""
    return float(response.strip() == answer.strip())


def numeric(response: str, answer: str, *, rel_tol: float = 0.0, abs_tol: float = 0.0) -> float:
    """1.0 when the whole response is a number equal to the answer, within rel_tol * |answer| or abs_tol."""
    number, expected = parse_number(response), parse_number(answer)
    if number is None or expected is None:
        return 0.0
    return float(abs(number - expected) <= max(Fraction(rel_tol) * abs(expected), Fraction(abs_tol)))


def last_number(response: str, answer: str, *, rel_tol: float = 0.0, abs_tol: float = 0.0) -> float:
    """1.0 when the last number in the response equals the answer; tolerances as `numeric`."""
    found = _NUMBER.findall(response.translate(_MINUS))
    return numeric(found[-1], answer, rel_tol=rel_tol, abs_tol=abs_tol) if found else 0.0


def gsm8k(response: str, answer: str, *, strict: bool = False) -> float:
    """1.0 when the response's final number equals the answer.

    It is the last number after the last "####", without one the last number of the last box, without a box of the
    whole response. strict: only the number after "####" counts.
    """
    _, marker, tail = response.rpartition("####")
    if marker:
        return last_number(tail.strip().partition("\n")[0], answer)
    if strict:
        return 0.0
    box = last_boxed(response)
    return last_number(response if box is None else plain_answer(box), answer)


def boxed(response: str, answer: str) -> float:
    r"""1.0 when the last \boxed{...} holds the answer: the same number, or the same text in `plain_answer`."""
    box = last_boxed(response)
    return float(box is not None and _same(box, answer))


def math(response: str, answer: str, *, boxed_only: bool = False) -> float:
    r"""1.0 when the answer in the last \boxed{...}, or at the end of the response, is mathematically the right one.

    Judged by the package math-verify: "\frac12", "0.5" and "1/2" are equal, so are sets in any order. boxed_only: a
    response without a box is wrong.
    """
    box = last_boxed(response)
    if box is not None and _same(box, answer):
        return 1.0
    if box is None and (boxed_only or "\\boxed" in response):  # none, or one that was cut off
        return 0.0
    return float(math_equal(response, box, answer))


def multiple_choice(response: str, answer: str) -> float:
    r"""1.0 when the letter chosen is the answer's, a capital.

    The choice is, of these, the first that the response has: the letter in the last \boxed{...}; that after the last
    "answer is" or "Answer:"; the one that the last line is or begins with, as "B", "(B)" or "B) ...".
    """
    return float(_choice(response) == answer.strip())


def _choice(response: str) -> str | None:
    box = last_boxed(response)
    if box is not None:
        inside = _CHOICE.fullmatch(plain_answer(box)[:10])
        return inside[1] if inside else None
    said = [m[1] for m in _ANSWER_IS.finditer(response) if m[1].isupper()]
    if said:
        return said[-1]
    last_line = response.strip().rpartition("\n")[2]
    line = _CHOICE_LINE.fullmatch(last_line)
    return line[1] if line else None


def _same(found: str, answer: str) -> bool:
    found, answer = plain_answer(found), plain_answer(answer)
    if found == answer:
        return found != ""
    number = parse_number(found)
    return number is not None and number == parse_number(answer)


class _Kind(NamedTuple):
    verify: Callable[..., float]
    expected: str  # what its answers must be, for messages; "" when any text will do
    accepts: Callable[[str], bool]  # whether a reference answer is one


def _is_number(answer: str) -> bool:
    return parse_number(answer) is not None


def _is_letter(answer: str) -> bool:
    return len(answer.strip()) == 1 and answer.strip().isascii() and answer.strip().isupper()


def _any(answer: str) -> bool:
    return answer.strip() != ""


VERIFIERS: Mapping[str, _Kind] = {
    "exact": _Kind(exact, "", lambda _: True),
    "numeric": _Kind(numeric, "a number", _is_number),
    "last_number": _Kind(last_number, "a number", _is_number),
    "gsm8k": _Kind(gsm8k, "a number", _is_number),
    "boxed": _Kind(boxed, "a text that is not empty", _any),
    "math": _Kind(math, "a text that is not empty", _any),
    "multiple_choice": _Kind(multiple_choice, "a capital letter", _is_letter),
}


def get_verifier(name: str, **options: Any) -> Verifier:
    """The verifier of that name with its options.

    Raises: ValueError for a name or an option that does not exist; MissingPackageError for "math" without math-verify.
    """
    if name not in VERIFIERS:
        raise ValueError(f"verifier: expected one of {', '.join(VERIFIERS)}, got {name!r}")
    verify = VERIFIERS[name].verify
    parameters = signature(verify).parameters.values()
    known = {p.name: p for p in parameters if p.kind is Parameter.KEYWORD_ONLY}
    for option, value in options.items():
        if option not in known:
            among = f"among {', '.join(known)}" if known else "none"
            raise ValueError(f"verifier_options: expected options of {name} {among}, got {option!r}")
        _check_option(option, value, known[option].default)
    if name == "math":
        require_math_verify()
    return partial(verify, **options) if options else verify


def _check_option(option: str, value: Any, default: Any) -> None:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"verifier_options.{option}: expected true or false, got {value!r}")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"verifier_options.{option}: expected a finite number >= 0, got {value!r}")


def extract_answer(verifier: str, response: str) -> str | None:
    """What a response answers, as that verifier reads it: equal texts are equal answers; None when it answers nothing.

    Numbers are written as fractions, and others in `plain_answer`, so that forms of one answer mostly count as one.
    """
    if verifier == "exact":
        return response.strip() or None
    if verifier == "multiple_choice":
        return _choice(response)
    if verifier == "gsm8k":
        _, marker, tail = response.rpartition("####")
        box = last_boxed(response)
        response = tail.strip().partition("\n")[0] if marker else response if box is None else plain_answer(box)
    elif verifier in ("boxed", "math"):
        box = last_boxed(response)
        response = "" if box is None else plain_answer(box)
        number = parse_number(response)
        return (response or None) if number is None else str(number)
    if verifier in ("gsm8k", "last_number"):
        response = (_NUMBER.findall(response.translate(_MINUS)) or [""])[-1]
    number = parse_number(response)
    return None if number is None else str(number)
