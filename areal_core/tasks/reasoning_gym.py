"""Procedural problems of the optional package reasoning-gym, made up without end."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from areal_core.errors import DataError, MissingPackageError
from areal_core.tasks.base import Problem
from areal_core.tasks.latex import last_boxed
from areal_core.tasks.prompts import PromptFormat

__all__ = ["ReasoningGymTask"]

AnswerIn = Literal["tag", "boxed", "text"]
_TEMPLATES: dict[str, str | None] = {
    "tag": "{prompt}\n\nPut the final answer alone between <answer> and </answer>.",
    "boxed": "{prompt}\n\nPut the final answer alone in \\boxed{}.",
    "text": None,
}
_ITEMS = 2**18  # some datasets draw something for each of their items when they are made
_HELD_OUT_ONE_IN = 16
_MAX_DRAWS = 2000


class ReasoningGymTask:
    """Any dataset of reasoning-gym by name; a sixteenth of all questions, by checksum, is held out.

    dataset: its name, such as "chain_sum" or "gsm_symbolic".
    config: settings of the dataset (its config class; not size and seed, which index and stream decide).
    threshold: scores below it are 0.0, others 1.0, because wrong answers score something in many datasets; None keeps
        the score.
    answer_in: where a response holds its answer: in the last <answer>...</answer> ("tag"), in the last LaTeX box
        ("boxed"), or all of it is the answer ("text"). The default template asks for it there.
    template, chat_template, system_prompt, chat_template_options: see `PromptFormat`.
    Raises: MissingPackageError; ValueError for a dataset or setting that does not exist, with the list of them.
    """

    def __init__(
        self,
        dataset: str,
        config: Mapping[str, Any] | None = None,
        threshold: float | None = 1.0,
        answer_in: AnswerIn = "tag",
        template: str | None = None,
        chat_template: str | Path | None = None,
        system_prompt: str | None = None,
        chat_template_options: Mapping[str, Any] | None = None,
    ) -> None:
        if answer_in not in get_args(AnswerIn):
            raise ValueError(f"answer_in: expected one of {', '.join(get_args(AnswerIn))}, got {answer_in!r}")
        if threshold is not None and not 0 < threshold <= 1:
            raise ValueError(f"threshold: expected a number in (0, 1] or null, got {threshold!r}")
        self.dataset = dataset
        self._items = _create(dataset, dict(config or {}))
        self._threshold = threshold
        self._answer_in = answer_in
        self._format = PromptFormat(
            _TEMPLATES[answer_in] if template is None else template, chat_template, system_prompt, chat_template_options
        )
        self._scored: tuple[int, Any] | None = None

    def problem(self, index: int, *, seed: int = 0, held_out: bool = False) -> Problem:
        """Problem number `index` of stream `seed`; see `Task.problem`."""
        return self.sample(random.Random(f"{self.dataset}/{seed}/{index}/{held_out}"), held_out=held_out)

    def sample(self, rng: random.Random, *, held_out: bool = False) -> Problem:
        """A problem drawn with `rng`.

        Raises: DataError when a dataset has so few questions that none is found on the side asked for.
        """
        for _ in range(_MAX_DRAWS):
            item = rng.randrange(_ITEMS)
            entry = self._items[item]
            question = str(entry["question"])
            text = question.encode("utf-8", "backslashreplace")
            if (zlib.crc32(text) % _HELD_OUT_ONE_IN == 0) == held_out:
                return Problem(
                    self._format.render(question),
                    str(entry["answer"]),
                    f"{self.dataset}:{hashlib.sha256(text).hexdigest()[:24]}",
                    {"item": item},
                    special_tokens=self._format.chat is None,
                )
        side = "held-out" if held_out else "training"
        raise DataError(f"{self.dataset}: expected a {side} question within {_MAX_DRAWS} draws, got none")

    def size(self, *, held_out: bool = False) -> int | None:
        """None: problems are made up."""
        return None

    def verify(self, problem: Problem, response_text: str) -> float:
        """The dataset's score of the answer in the response, after the threshold; 0.0 without an answer."""
        answer = self._answer(response_text)
        if answer is None:
            return 0.0
        score = float(self._items.score_answer(answer, self._entry(problem.metadata["item"])))
        return score if self._threshold is None else float(score >= self._threshold)

    def _answer(self, response: str) -> str | None:
        if self._answer_in == "text":
            return response.strip()
        if self._answer_in == "boxed":
            return last_boxed(response)
        start = response.rfind("<answer>")
        end = response.find("</answer>", start)
        return response[start + len("<answer>") : end].strip() if 0 <= start < end else None

    def _entry(self, item: int) -> Any:
        """What scoring needs is made again from the number of the item, which travels better; a group shares one."""
        if self._scored is None or self._scored[0] != item:
            self._scored = (item, self._items[item])
        return self._scored[1]


def _create(name: str, config: dict[str, Any]) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise MissingPackageError(
            f"task reasoning_gym: expected the package (pip install areal-core[reasoning-gym]), got: {error}"
        ) from error
    if name not in DATASETS:
        raise ValueError(f"dataset: expected one of {', '.join(sorted(DATASETS))}, got {name!r}")
    known = [key for key in DATASETS[name][1].__dataclass_fields__ if key not in ("size", "seed")]
    for key in config:
        if key not in known:
            raise ValueError(f"config: expected settings of {name} among {', '.join(known)}, got {key!r}")
    try:
        return create_dataset(name, size=_ITEMS, seed=0, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"config: {name}: {type(error).__name__}: {error}") from None
