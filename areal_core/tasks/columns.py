"""Where a record of a dataset keeps prompt and answer: the columns of public datasets, recognised by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from areal_core.errors import DataError
from areal_core.tasks.latex import last_boxed

__all__ = ["ANSWER_FORMATS", "AnswerFormat", "Columns", "Row", "find_columns"]

AnswerFormat = Literal["auto", "text", "gsm8k", "boxed"]
ANSWER_FORMATS: tuple[AnswerFormat, ...] = ("auto", "text", "gsm8k", "boxed")

# In order of preference, compared without case. A dot leads into a nested record.
_PROMPTS = ("prompt", "messages", "question", "problem", "query", "instruction", "input")
_ANSWERS: tuple[str, ...] = (
    "answer",
    "final_answer",
    "expected_answer",
    "ground_truth",
    "reward_model.ground_truth",
    "answerkey",
)
_ANSWERS += ("target", "solution")  # a solution holds its answer in a box
_CHOICES = ("choices", "options")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Row(NamedTuple):
    """What a record says: the prompt as text or messages, the answer, and everything else."""

    content: str | Sequence[Mapping[str, Any]]
    answer: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Columns:
    """The columns of one file, and what its answers look like (the verifier that suits them)."""

    prompt: str
    answer: str
    choices: str | None
    answer_format: AnswerFormat
    suits: str = "exact"

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        """Read a record. Raises DataError naming `where`, the column, and what was expected."""
        content, answer = _get(record, self.prompt), _get(record, self.answer)
        if not isinstance(content, str | list):
            raise DataError(f"{where}: expected text or a list of messages under {self.prompt!r}, got {content!r:.80}")
        choices = _choices(record, self.choices, where) if self.choices is not None else None
        if choices is not None and isinstance(content, str):
            content += "".join(f"\n{letter}. {text}" for letter, text in choices.items())
        if choices is not None and isinstance(answer, int) and not isinstance(answer, bool):
            if not 0 <= answer < len(choices):
                raise DataError(f"{where}: expected 0 to {len(choices) - 1} under {self.answer!r}, got {answer}")
            answer = list(choices)[answer]
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer in (math.inf, -math.inf):
            raise DataError(f"{where}: expected text or a number under {self.answer!r}, got {answer!r:.80}")
        if isinstance(answer, float) and (math.isnan(answer)):
            raise DataError(f"{where}: expected text or a number under {self.answer!r}, got {answer!r}")
        metadata = {k: v for k, v in record.items() if k not in (self.prompt, self.answer, self.choices)}
        if not isinstance(answer, str):
            return Row(content, _number_text(answer), metadata)
        final = self._final(answer, where)
        if final != answer:
            metadata.setdefault("solution", answer)
        return Row(content, final, metadata)

    def _final(self, answer: str, where: str) -> str:
        """The answer itself, of a text that may derive it first."""
        _, marker, tail = answer.rpartition("####")
        box = last_boxed(answer) if "\\boxed" in answer or "\\fbox" in answer else None
        is_solution = self.answer_format == "boxed" or (
            self.answer_format == "auto" and self.answer.lower() == "solution" and not marker
        )
        if is_solution:
            if box is None:
                raise DataError(f"{where}: expected \\boxed{{...}} under {self.answer!r}, got {answer[-80:]!r}")
            return box
        if self.answer_format == "gsm8k" and not marker:
            raise DataError(f"{where}: expected '#### <number>' under {self.answer!r}, got {answer[-80:]!r}")
        if marker and self.answer_format in ("auto", "gsm8k"):
            return tail.strip()
        return box if box is not None and self.answer_format == "auto" else answer


def find_columns(
    record: Mapping[str, Any],
    where: str,
    *,
    prompt: str | None = None,
    answer: str | None = None,
    answer_format: AnswerFormat = "auto",
) -> Columns:
    """The columns of a file, from its first record; `prompt` and `answer` override what would be recognised.

    Raises: DataError listing the columns there are when none is recognised.
    """
    prompt = prompt or _recognise(record, _PROMPTS, "prompt", "prompt_key", where)
    answer = answer or _recognise(record, _ANSWERS, "answer", "answer_key", where)
    choices = next((key for key in record if key.lower() in _CHOICES and key not in (prompt, answer)), None)
    value = _get(record, answer)
    suits = "exact"
    if choices is not None:
        suits = "multiple_choice"
    elif answer_format == "gsm8k" or (answer_format == "auto" and isinstance(value, str) and "####" in value):
        suits = "gsm8k"
    elif answer_format == "boxed" or (answer_format == "auto" and isinstance(value, str) and "\\boxed" in value):
        suits = "boxed"
    return Columns(prompt, answer, choices, answer_format, suits)


def _recognise(record: Mapping[str, Any], names: Sequence[str], what: str, option: str, where: str) -> str:
    by_name = {key.lower(): key for key in reversed(list(record))}
    for name in names:
        first, _, rest = name.partition(".")
        if first in by_name and (not rest or _get(record, f"{by_name[first]}.{rest}") is not None):
            return f"{by_name[first]}.{rest}" if rest else by_name[first]
    raise DataError(
        f"{where}: expected a column of the {what} among {', '.join(names)} (or option {option}), "
        f"got columns {', '.join(record) or 'none'}"
    )


def _get(record: Mapping[str, Any], key: str) -> Any:
    """The value under `key`, or under the parts of a dotted key; None without one."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _choices(record: Mapping[str, Any], key: str, where: str) -> dict[str, str]:
    """Letter -> text, of a list of texts or of {"label": [...], "text": [...]}."""
    value = record.get(key)
    labels: Any = None
    if isinstance(value, Mapping):
        labels, value = value.get("label"), value.get("text")
    if not isinstance(value, list) or not 2 <= len(value) <= len(_LETTERS):
        raise DataError(f"{where}: expected a list of 2 to 26 texts under {key!r}, got {record.get(key)!r:.80}")
    labels = labels if labels is not None else list(_LETTERS[: len(value)])
    if not isinstance(labels, list) or len(set(map(str, labels))) != len(value):
        raise DataError(f"{where}: expected {len(value)} different labels under {key!r}, got {labels!r:.80}")
    return {str(label): str(text) for label, text in zip(labels, value, strict=True)}


def _number_text(number: int | float) -> str:
    if isinstance(number, float) and number.is_integer() and abs(number) < 2**53:
        return str(int(number))  # 27.0, as a table of floats holds 27
    return str(number)
