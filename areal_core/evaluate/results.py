"""The record of an evaluation: a line for every problem that is done, which a rerun does not repeat."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from areal_core.errors import ConfigError
from areal_core.evaluate.data import DataSet
from areal_core.generate.engine import SamplingParams
from areal_core.tasks import Problem
from areal_core.telemetry.jsonl import JsonLinesWriter, Row, keep_rows, read_json_lines, replace_file

__all__ = ["ModelSource", "Response", "Results", "SamplingSettings"]

RESULTS_FILE = "results.jsonl"
SETTINGS_FILE = "settings.json"

Key = tuple[str, str, int]  # model, data set, problem


@dataclass(frozen=True)
class SamplingSettings:
    """What the responses depend on, beside model and problems.

    samples: responses to each problem. temperature, top_p, top_k, seed: see `SamplingParams`.
    max_new_tokens: of a response; None: what prompt and context leave.
    template: text with {prompt} where the prompt goes.
    """

    samples: int = 32
    temperature: float = 0.6
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int | None = None
    seed: int = 0
    template: str = "{prompt}"

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range."""
        self.params()
        if self.samples < 1:
            raise ConfigError(f"--samples: expected >= 1, got {self.samples}")
        if self.temperature == 0 and self.samples > 1:
            raise ConfigError(f"--samples: expected 1 at temperature 0, where all are alike, got {self.samples}")
        if "{prompt}" not in self.template:
            raise ConfigError(f"--template: expected a text with {{prompt}}, got {self.template!r}")

    def params(self, context: int = 1, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
        """The sampling parameters for a model with a context of so many tokens; ValueError for one out of range."""
        return SamplingParams(
            max_new_tokens=context if self.max_new_tokens is None else self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=stop_token_ids,
            seed=self.seed,
        )


@dataclass(frozen=True)
class ModelSource:
    """A model: what the table calls it, its directory, and a checksum of its files."""

    label: str
    directory: Path
    sha256: str

    @classmethod
    def open(cls, label: str, directory: Path) -> ModelSource:
        """Read the files of a model directory and take their checksum."""
        total = hashlib.sha256()
        for path in sorted(directory.iterdir()):
            if path.suffix in (".json", ".safetensors"):
                total.update(f"{path.name}\0".encode())
                with path.open("rb") as file:
                    while block := file.read(1 << 20):
                        total.update(block)
        return cls(label, directory, total.hexdigest())


@dataclass(frozen=True)
class Response:
    """One response.

    text: up to the stop token. reward: NaN when the verifier failed. tokens: with the stop token. finish: "stop" or
    "length". answer: what it answers, as a majority vote counts it; None: nothing.
    """

    text: str
    reward: float | None
    tokens: int
    finish: str
    answer: str | None


class Results:
    """The results in a folder, and a writer that appends to them.

    Raises: ConfigError when the folder holds an evaluation with other settings, other weights or options under a label,
        or other problems; nothing is changed then.
    """

    def __init__(self, folder: Path, settings: SamplingSettings, models: list[ModelSource], data: list[DataSet]):
        self.path = folder / RESULTS_FILE
        self._sets = {d.label: d for d in data}
        lines = read_json_lines(self.path)[0]
        known = _read_settings(folder / SETTINGS_FILE) if lines else {}
        described: dict[str, Any] = {
            "sampling": asdict(settings),
            "models": {m.label: {"path": str(m.directory), "sha256": m.sha256} for m in models},
            "data": {d.label: d.options for d in data},
        }
        _check_settings(folder, known, described)
        self.rows: dict[Key, list[Response]] = {}
        self._read(lines)
        folder.mkdir(parents=True, exist_ok=True)
        for part in ("models", "data"):
            described[part] = {**known.get(part, {}), **described[part]}
        replace_file(folder / SETTINGS_FILE, (json.dumps(described, indent=2) + "\n").encode())
        keep_rows(self.path, lambda row: True)  # a torn line in the middle goes, and is sampled again
        self._writer = JsonLinesWriter(self.path)

    def add(self, model: str, data: str, index: int, responses: list[Response]) -> None:
        """Append what a model answered to a problem."""
        problem = self._sets[data].problems[index]
        row = {"model": model, "data": data, "index": index, **_identity(problem)}
        self._writer.write({**row, "responses": [asdict(response) for response in responses]})
        self.rows[model, data, index] = responses

    def missing(self, model: str, data: str) -> list[int]:
        """Numbers of the problems of a data set that a model has not answered."""
        return [i for i in range(len(self._sets[data].problems)) if (model, data, i) not in self.rows]

    def of(self, model: str, data: str) -> list[list[Response]]:
        """Responses of a model to every problem of a data set; KeyError when one is missing."""
        return [self.rows[model, data, index] for index in range(len(self._sets[data].problems))]

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def __enter__(self) -> Results:
        """Return the results themselves."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close the file."""
        self.close()

    def _read(self, lines: list[Row]) -> None:
        for row in lines:
            data = self._sets.get(row["data"])
            if data is None or row["index"] >= len(data.problems):
                continue  # of an earlier call with more data sets or problems
            for field, now in _identity(data.problems[row["index"]]).items():
                if row[field] != now:
                    raise ConfigError(
                        f"{self.path}: expected {field} {row[field]!r} of problem {row['index']} of {row['data']}, "
                        f"got {now!r}; choose another --output"
                    )
            self.rows[row["model"], row["data"], row["index"]] = [Response(**r) for r in row["responses"]]


def _identity(problem: Problem) -> dict[str, str]:
    return {"prompt": problem.prompt, "answer": problem.answer}


def _read_settings(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _check_settings(folder: Path, known: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ConfigError naming the first setting in which an evaluation in the folder differs from this one."""

    def refuse(name: str, old: object, new: object) -> None:
        raise ConfigError(f"{folder} holds an evaluation with {name} {old!r}, got {new!r}; choose another --output")

    for name, old in known.get("sampling", {}).items():
        if old != now["sampling"].get(name):
            refuse(name, old, now["sampling"].get(name))
    for label, model in now["models"].items():
        old = known.get("models", {}).get(label, model)
        if old["sha256"] != model["sha256"]:
            refuse(f"other files of model {label}:", old["path"], model["path"])
    for label, options in now["data"].items():
        old = known.get("data", {}).get(label, options)
        if old != options:
            refuse(f"options of {label}", old, options)
