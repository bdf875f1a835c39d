"""Judges of a response's text against a reference answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

# A sign belongs to the number unless it stands after a word or a closing bracket, where it means subtraction.
_NUMBER = re.compile(r"(?:(?<![\w)\]])[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/0*[1-9]\d*)?|(?<![\w.])[-+]?\.\d+")
_MAX_NUMBER_CHARS = 1000  # parsing time grows with the square of the length

Verifier = Callable[[str, str], float]


def parse_number(text: str) -> Fraction | None:
    """The number that `text` is ("1,234", "-3.50", "$7", "2/3"), or None."""
    text = text.strip().removeprefix("$").removesuffix("%").removesuffix(".").strip()
    if len(text) > _MAX_NUMBER_CHARS or not _NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.replace(",", "").partition("/")
    return Fraction(numerator) / Fraction(denominator or 1)


def exact(response: str, answer: str) -> float:
    """1.0 when the texts are equal but for surrounding white space."""
    return float(response.strip() == answer.strip())


def numeric(response: str, answer: str) -> float:
    """1.0 when the whole response is a number equal to the answer."""
    number = parse_number(response)
    return float(number is not None and number == parse_number(answer))


def last_number(response: str, answer: str) -> float:
    """1.0 when the last number in the response equals the answer."""
    found = _NUMBER.findall(response)
    return numeric(found[-1], answer) if found else 0.0


VERIFIERS: dict[str, Verifier] = {"exact": exact, "numeric": numeric, "last_number": last_number}
