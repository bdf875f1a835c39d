"""How long responses are: lognormal, or like those of a run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from areal_core.errors import DataError
from areal_core.simulate.config import LengthConfig
from areal_core.telemetry.jsonl import read_json_lines
from areal_core.telemetry.metrics import SAMPLES_FILE

__all__ = ["Lengths", "run_lengths"]

Ints = npt.NDArray[np.int64]


class Lengths:
    """Draws the lengths of responses.

    Args:
        config: the distribution.
        longest: where responses are cut.
        seen: int64 [N], lengths to draw from instead of the lognormal distribution.

    Raises:
        FileNotFoundError, DataError: lengths.run has no samples.
    """

    def __init__(self, config: LengthConfig, longest: int, seen: Ints | None = None) -> None:
        self._config = config
        self._longest = longest
        self._seen = run_lengths(config.run) if seen is None and config.run is not None else seen

    def draw(self, groups: int, size: int, rng: np.random.Generator) -> Ints:
        """int64 [groups, size], at least 1 and at most `longest` tokens."""
        if self._seen is not None:
            return np.asarray(np.clip(rng.choice(self._seen, (groups, size)), 1, self._longest))
        config = self._config
        common, own = rng.standard_normal((groups, 1)), rng.standard_normal((groups, size))
        normal = math.sqrt(config.correlation) * common + math.sqrt(1 - config.correlation) * own
        drawn = np.exp(math.log(config.mean) - config.sigma**2 / 2 + config.sigma * normal)
        whole = np.rint(np.clip(drawn, 1.0, float(self._longest)))
        return np.asarray(whole, dtype=np.int64)


def run_lengths(run: str | Path) -> Ints:
    """Tokens of the responses in samples.jsonl of a run.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: it holds no responses.
    """
    path = Path(run) / SAMPLES_FILE
    if not path.is_file():
        raise FileNotFoundError(f"lengths.run: expected a run with samples, got {path}, which is not there")
    rows, _ = read_json_lines(path)
    found = [len(row["tokens"]) for row in rows if isinstance(row.get("tokens"), list) and row["tokens"]]
    if not found:
        raise DataError(f"lengths.run: expected responses in {path}, got none")
    return np.asarray(found, dtype=np.int64)
