"""Mathematical equality of answers in LaTeX, judged by the optional package math-verify."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from areal_core.errors import MissingPackageError

__all__ = ["math_equal", "require_math_verify"]

_MAX_ANSWER_CHARS = 1000  # a longer one is no answer, and takes seconds to parse
_TAIL_CHARS = 2000  # where the answer is looked for in a response without a box


def require_math_verify() -> None:
    """Load math-verify. Raises MissingPackageError when it is not installed."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"verifier math: expected the package math-verify (pip install areal-core[math]), got: {error}"
        ) from error
    # It warns at every call without a timeout of its own, which is a SIGALRM: rewards have a deadline already.
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_equal(response: str, box: str | None, answer: str) -> bool:
    """Whether the box of a response, or without one the end of the response, equals the answer; False if unreadable."""
    if len(answer if box is None else box) > _MAX_ANSWER_CHARS:
        return False
    try:
        from math_verify import verify

        found = _parse(f"\\boxed{{{box}}}" if box is not None else response[-_TAIL_CHARS:])
        return bool(verify(list(_parse_answer(answer)), found, timeout_seconds=None))
    except Exception:  # sympy and the parser raise anything on nonsense; a deadline is no Exception and passes
        return False


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(text, parsing_timeout=None))


@lru_cache(maxsize=256)
def _parse_answer(answer: str) -> tuple[Any, ...]:
    """Every response of a group asks for the same one."""
    return tuple(_parse(answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"))
