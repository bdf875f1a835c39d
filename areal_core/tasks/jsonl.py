"""Problems read from a JSON Lines file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from areal_core.errors import DataError
from areal_core.tasks.base import Problem
from areal_core.tasks.verifiers import VERIFIERS, parse_number


class JsonlTask:
    """One problem a line: a JSON object with a prompt and an answer; its other keys become metadata.

    path: the training file, UTF-8; blank lines are skipped.
    prompt_key, answer_key: where a line holds the prompt (text) and the answer (text or number).
    verifier: "exact", "numeric" or "last_number" (see `areal_core.tasks.verifiers`).
    eval_path: the file of held-out problems; without it, asking for one raises ValueError.
    Raises: FileNotFoundError; DataError naming file and line of what cannot be read, and of an answer that is no
        number where the verifier compares numbers.
    """

    def __init__(
        self,
        path: str | Path,
        prompt_key: str = "prompt",
        answer_key: str = "answer",
        verifier: str = "exact",
        eval_path: str | Path | None = None,
    ) -> None:
        if verifier not in VERIFIERS:
            raise ValueError(f"JsonlTask: expected verifier {', '.join(VERIFIERS)}, got {verifier!r}")
        self.path = Path(path)
        self._verify = VERIFIERS[verifier]
        self._numeric = verifier != "exact"
        self._prompt_key, self._answer_key = prompt_key, answer_key
        self._order_kept: tuple[tuple[int, int], list[int]] | None = None
        self._train = self._read(self.path)
        self._eval = self._read(Path(eval_path)) if eval_path is not None else None

    def problem(self, index: int, *, seed: int = 0, held_out: bool = False) -> Problem:
        """Problem number `index`: training shuffles anew each pass, evaluation follows the file."""
        problems = self._problems(held_out)
        epoch, offset = divmod(index, len(problems))
        if held_out:
            return problems[offset]
        return problems[self._order(epoch, seed)[offset]]

    def sample(self, rng: random.Random, *, held_out: bool = False) -> Problem:
        """A problem drawn with `rng`, each with the same chance."""
        return rng.choice(self._problems(held_out))

    def size(self, *, held_out: bool = False) -> int | None:
        """The number of problems."""
        return len(self._problems(held_out))

    def verify(self, problem: Problem, response_text: str) -> float:
        """1.0 when the verifier accepts the response."""
        return self._verify(response_text, problem.answer)

    def _problems(self, held_out: bool) -> list[Problem]:
        if not held_out:
            return self._train
        if self._eval is None:
            raise ValueError(f"JsonlTask: expected eval_path beside {self.path} for held-out problems, got None")
        return self._eval

    def _order(self, epoch: int, seed: int) -> list[int]:
        """The order of one pass, kept until another is asked for."""
        kept = self._order_kept
        if kept is None or kept[0] != (epoch, seed):
            order = list(range(len(self._train)))
            random.Random(f"jsonl/{seed}/{epoch}").shuffle(order)
            self._order_kept = kept = ((epoch, seed), order)
        return kept[1]

    def _read(self, path: Path) -> list[Problem]:
        problems = []
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    problems.append(self._parse(line, f"{path}:{number}"))
        if not problems:
            raise DataError(f"{path}: expected at least one problem, got none")
        return problems

    def _parse(self, line: str, where: str) -> Problem:
        try:
            record: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: expected a JSON object, got {line.strip()[:80]!r} ({error.msg})") from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected a JSON object, got {line.strip()[:80]!r}")
        prompt, answer = record.pop(self._prompt_key, None), record.pop(self._answer_key, None)
        if not isinstance(prompt, str):
            raise DataError(f"{where}: expected text under {self._prompt_key!r}, got {prompt!r}")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise DataError(f"{where}: expected text or a number under {self._answer_key!r}, got {answer!r}")
        if self._numeric and parse_number(str(answer)) is None:
            raise DataError(f"{where}: expected a number under {self._answer_key!r}, got {answer!r}")
        return Problem(prompt, str(answer), where, record)
