"""Problems read from files."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from areal_core.errors import DataError
from areal_core.tasks.base import Problem
from areal_core.tasks.columns import ANSWER_FORMATS, AnswerFormat, Columns, find_columns
from areal_core.tasks.prompts import PromptFormat
from areal_core.tasks.verifiers import VERIFIERS, extract_answer, get_verifier

__all__ = ["DatasetTask"]


class DatasetTask(ABC):
    """Problems of a file, one a record; columns beside prompt and answer become metadata.

    path: the training file, or a folder of such files, read in order of name.
    prompt_key, answer_key: columns of the prompt (text or a list of messages) and of the answer (text or number); None
        recognises those of the usual datasets. A dot leads into a nested record.
    verifier, verifier_options: what judges a response (`areal_core.tasks.verifiers`); None chooses by the first record:
        "gsm8k" for answers with "####", "boxed" for answers in a box, "multiple_choice" beside choices, else "exact".
    eval_path: file or folder of held-out problems; without it, asking for one raises ValueError.
    answer_format: "text" takes the answer as it stands, "gsm8k" what follows "####", "boxed" the last box, "auto" the
        first of these that is there.
    template, chat_template, system_prompt, chat_template_options: see `PromptFormat`.
    Raises: FileNotFoundError naming the option; ValueError for a wrong option; DataError naming file and record of what
        cannot be read, and of an answer that the verifier cannot compare with.
    """

    name: ClassVar[str]
    suffix: ClassVar[str]

    def __init__(
        self,
        path: str | Path,
        prompt_key: str | None = None,
        answer_key: str | None = None,
        verifier: str | None = None,
        eval_path: str | Path | None = None,
        verifier_options: Mapping[str, Any] | None = None,
        answer_format: AnswerFormat = "auto",
        template: str | None = None,
        chat_template: str | Path | None = None,
        system_prompt: str | None = None,
        chat_template_options: Mapping[str, Any] | None = None,
    ) -> None:
        if answer_format not in ANSWER_FORMATS:
            raise ValueError(f"answer_format: expected one of {', '.join(ANSWER_FORMATS)}, got {answer_format!r}")
        if verifier is not None:  # before a long file is read
            get_verifier(verifier, **verifier_options or {})
        self.path = Path(path)
        self.verifier = verifier
        self._keys: dict[str, Any] = {"prompt": prompt_key, "answer": answer_key, "answer_format": answer_format}
        self._format = PromptFormat(template, chat_template, system_prompt, chat_template_options)
        self._order_kept: tuple[tuple[int, int], list[int]] | None = None
        self._train = self._read(self.path, "path")
        self._eval = self._read(Path(eval_path), "eval_path") if eval_path is not None else None
        self._verify = get_verifier(self.verifier or "exact", **verifier_options or {})

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

    def extract_answer(self, _problem: Problem, response_text: str) -> str | None:
        """What a response answers, as the verifier reads it."""
        return extract_answer(self.verifier or "exact", response_text)

    @abstractmethod
    def _records(self, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Each record of a file, and the name of its place for messages."""

    def _problems(self, held_out: bool) -> list[Problem]:
        if not held_out:
            return self._train
        if self._eval is None:
            raise ValueError(
                f"task.options.eval_path: expected a file beside {self.path} for held-out problems, got None"
            )
        return self._eval

    def _order(self, epoch: int, seed: int) -> list[int]:
        """The order of one pass, kept until another is asked for."""
        kept = self._order_kept
        if kept is None or kept[0] != (epoch, seed):
            order = list(range(len(self._train)))
            random.Random(f"{self.name}/{seed}/{epoch}").shuffle(order)
            self._order_kept = kept = ((epoch, seed), order)
        return kept[1]

    def _read(self, path: Path, option: str) -> list[Problem]:
        problems = []
        for file in self._files(path, option):
            columns: Columns | None = None
            for where, record in self._records(file):
                columns = columns or find_columns(record, where, **self._keys)
                self.verifier = self.verifier or columns.suits
                problems.append(self._parse(record, columns, where))
        if not problems:
            raise DataError(f"{path}: expected at least one problem, got none")
        return problems

    def _files(self, path: Path, option: str) -> list[Path]:
        if path.is_dir():
            files = sorted(path.glob(f"*{self.suffix}"))
            if not files:
                raise FileNotFoundError(f"task.options.{option}: expected *{self.suffix} in {str(path)!r}, got none")
            return files
        if not path.is_file():
            raise FileNotFoundError(f"task.options.{option}: expected an existing file, got {str(path)!r}")
        return [path]

    def _parse(self, record: Mapping[str, Any], columns: Columns, where: str) -> Problem:
        content, answer, metadata = columns.row(record, where)
        kind = VERIFIERS[self.verifier or "exact"]
        if not kind.accepts(answer):
            raise DataError(f"{where}: expected {kind.expected} under {columns.answer!r}, got {answer!r:.80}")
        try:
            prompt = self._format.render(content)
        except ValueError as error:
            raise DataError(f"{where}: {columns.prompt!r}: {error}") from None
        return Problem(prompt, answer, where, metadata, special_tokens=self._format.chat is None)
