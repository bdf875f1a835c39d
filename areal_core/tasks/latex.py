"""The little of LaTeX that answers need: finding the boxed one, and writing equal ones alike. Linear in the text."""

from __future__ import annotations

import re

__all__ = ["last_boxed", "plain_answer"]

# What matters to the nesting of braces: a box that opens, a box of one word, an escaped character, a brace.
_TOKEN = re.compile(
    r"\\(?:boxed|fbox)(?:\s*(?P<open>\{)|\s+(?P<word>[^\s{}$\\]+)|(?P<digits>-?\d+))|\\.|[{}]", re.DOTALL
)
_MAX_UNWRAPPED = 4  # boxes around the same answer

_MINUS = str.maketrans({"\u2212": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-"})
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_NOISE = re.compile(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\(?:displaystyle|quad|qquad)(?![a-zA-Z])|\\[!,;: ]|[\s~]")
_FONT = r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
_UNIT = re.compile(rf"(?<=[\w)}}\]%])(?:\s|\\[!,;: ]|~)*{_FONT}(?:\^\{{?\d\}}?)?\s*$")
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree(?![a-zA-Z])|\u00b0")
_FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)")
_NUMERIC_FRACTION = re.compile(r"([-+]?)\\frac\{([-+]?)(\d+)\}\{(\d+)\}")


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} (or \fbox{...}, or "\boxed 5"); None without one.

    Braces nest; escaped ones do not count. Of boxes inside each other the outermost counts, unless it holds nothing
    else. A box opened after the last complete one and never closed means that the answer was cut off: None.
    """
    for _ in range(_MAX_UNWRAPPED):
        span = _last_box(text)
        if span is None:
            return None
        text = text[span[0] : span[1]].strip()
        if not (text.startswith(("\\boxed", "\\fbox")) and text.endswith("}")):
            return text
    return text


def _last_box(text: str) -> tuple[int, int] | None:
    """Start and end of the content."""
    found: tuple[int, int] | None = None
    open_braces: list[int | None] = []  # where the content of a box begins; None for a brace that is no box
    for token in _TOKEN.finditer(text):
        if token["open"]:
            open_braces.append(token.end())
        elif token["word"] or token["digits"]:
            found = token.span("word" if token["word"] else "digits")
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                found = (start, token.start())
    unclosed = max((start for start in open_braces if start is not None), default=-1)
    return None if found is None or unclosed > found[1] else found


def plain_answer(text: str) -> str:
    r"""One spelling for answers that differ in form only.

    Removed: white space and LaTeX spacing, math delimiters, \left and \right, fonts, a unit in \text{...} after the
    value, degree and percent signs, a final full stop. \dfrac becomes \frac, a fraction of whole numbers "a/b",
    and the typographic minus signs "-".
    """
    text = text.translate(_MINUS).strip().removesuffix(".").strip()
    for left, right in _DELIMITERS:
        if len(text) >= len(left) + len(right) and text.startswith(left) and text.endswith(right):
            text = text[len(left) : len(text) - len(right)].strip()
            break
    text = _UNIT.sub("", _DEGREES.sub("", text))
    text = re.sub(_FONT, r"\1", text).replace("\\$", "").replace("{,}", ",")
    text = _NOISE.sub("", text).removesuffix("%").removesuffix("\\")
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", _FRACTION.sub(r"\\frac", text))
    return _NUMERIC_FRACTION.sub(lambda match: f"{_sign(match[1] + match[2])}{match[3]}/{match[4]}", text)


def _sign(signs: str) -> str:
    if signs.count("-") == 1:
        return "-"
    return signs[:1] if signs[:1] == "+" else ""
