"""The records of a run: metrics of each training step, sample trajectories, events.

`MetricsLog` writes `metrics.jsonl` and, if asked to, TensorBoard files; `SampleLog` writes `samples.jsonl`; `EventLog`
writes `events.jsonl`. All lie in the folder of the run, and `areal_core.telemetry.write_report` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from areal_core.telemetry.jsonl import JsonLinesWriter, Row, json_value, keep_rows, read_json_lines

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
EVENTS_FILE = "events.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


def read_metrics(run_dir: str | Path) -> list[Row]:
    """Read the metrics of a run, one dict per training step, in the order of the steps.

    A torn last line (the process died while writing it) is left out; a missing file reads as no steps. Values that were
    NaN or infinite are None, and named in the entry `nonfinite` of their step.

    Raises:
        ValueError: a line other than the last is not a JSON object.
    """
    path = Path(run_dir) / METRICS_FILE
    rows, broken = read_json_lines(path)
    damaged = [number for number in broken if number <= len(rows)]
    if damaged:
        raise ValueError(f"read_metrics: expected one JSON object per line in {path}, got broken line {damaged[0]}")
    return rows


class MetricsLog:
    """Writes the metrics of each training step to `metrics.jsonl`, and to TensorBoard.

    Args:
        run_dir: folder of the run, created when missing.
        tensorboard: also write scalars and histograms to `run_dir/tensorboard`.
        resume_step: last step of the history to keep; later lines are removed atomically, so that the history goes on
            without duplicates. None: a new run.

    Raises:
        FileExistsError: `resume_step` is None and the folder already holds metrics.
        ImportError: `tensorboard` is True and the tensorboard package is missing.
    """

    def __init__(self, run_dir: str | Path, tensorboard: bool = True, resume_step: int | None = None) -> None:
        path = Path(run_dir) / METRICS_FILE
        if resume_step is None:
            if path.exists() and path.stat().st_size > 0:
                raise FileExistsError(
                    f"MetricsLog: expected a new run_dir, got {run_dir} which holds {METRICS_FILE}; "
                    "pass resume_step to continue it, or choose another run_dir"
                )
        else:
            keep_rows(path, lambda row: row.get("step", math.inf) <= resume_step)
        self._last_step = max((row["step"] for row in read_metrics(run_dir)), default=None)
        purge_step = None if resume_step is None else resume_step + 1
        self._tensorboard = _summary_writer(Path(run_dir) / TENSORBOARD_FOLDER, purge_step) if tensorboard else None
        self._lines = JsonLinesWriter(path)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Write one step.

        Args:
            metrics: `step` (int, larger than every step before; 0 for what was measured before the first) and any of
                numbers, 0-d tensors, lists and strings. `version` is the one that the step published.
                NaN and infinities become null and are listed in an extra entry `nonfinite`. A list under a key that
                ends in `/histogram` counts the values 0, 1, 2, ...; other lists are taken as samples of a histogram.

        Raises:
            ValueError: `step` is missing or does not grow.
            TypeError: a value is of a type that JSON cannot carry.
        """
        step = metrics.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise ValueError(f"MetricsLog.log: expected an integer step, got {step!r}")
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"MetricsLog.log: expected step > {self._last_step}, got {step}")
        row = {key: json_value(value) for key, value in metrics.items()}
        nonfinite = {key: name for key, value in metrics.items() if (name := _nonfinite_name(value)) is not None}
        self._lines.write(row | {"nonfinite": nonfinite} if nonfinite else row)
        self._last_step = step
        if self._tensorboard is not None:
            _write_tensorboard(self._tensorboard, row, step)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> MetricsLog:
        """Return the log itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close the files."""
        self.close()


class SampleLog:
    """Writes sample trajectories to `samples.jsonl`; on resume, those of removed steps go too."""

    def __init__(self, run_dir: str | Path, resume_step: int | None = None) -> None:
        path = Path(run_dir) / SAMPLES_FILE
        if resume_step is not None:
            keep_rows(path, lambda row: row.get("step", math.inf) <= resume_step)
        self._lines = JsonLinesWriter(path)

    def log(
        self,
        *,
        step: int,
        group: int,
        prompt: str,
        tokens: Sequence[str],
        versions: Sequence[int],
        logprobs: Sequence[float],
        reward: float,
        advantage: float,
        finish_reason: str,
    ) -> None:
        """Write one trajectory: the text of its tokens, and for each the version that produced it and its logprob.

        Raises:
            ValueError: tokens, versions and logprobs differ in length.
        """
        if not len(tokens) == len(versions) == len(logprobs):
            raise ValueError(
                f"SampleLog.log: expected one version and one logprob for each of {len(tokens)} tokens, "
                f"got {len(versions)} and {len(logprobs)}"
            )
        self._lines.write(
            {
                "step": step,
                "group": group,
                "prompt": prompt,
                "tokens": list(tokens),
                "versions": list(versions),
                "logprobs": list(logprobs),
                "reward": reward,
                "advantage": advantage,
                "finish_reason": finish_reason,
            }
        )

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._lines.close()


class EventLog:
    """Writes what happened to the run to `events.jsonl`. A resumed run keeps all of it: an interruption is history."""

    def __init__(self, run_dir: str | Path) -> None:
        self._lines = JsonLinesWriter(Path(run_dir) / EVENTS_FILE)

    def log(self, kind: str, text: str, *, step: int, time_s: float) -> None:
        """Write one event, `time_s` seconds of wall time after the run began, before or in training step `step`."""
        self._lines.write({"time_s": time_s, "step": step, "kind": kind, "text": text})

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._lines.close()


def _nonfinite_name(value: Any) -> str | None:
    """ "nan", "inf" or "-inf" for a number that JSON cannot carry; None for any other value."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else None


def _summary_writer(folder: Path, purge_step: int | None) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "MetricsLog: expected the tensorboard package for tensorboard=True, got none; "
            "pip install tensorboard, or pass tensorboard=False"
        ) from error
    return SummaryWriter(str(folder), purge_step=purge_step)


def _write_tensorboard(writer: SummaryWriter, row: Row, step: int) -> None:
    for key, value in row.items():
        if key == "step":
            continue
        if isinstance(value, (int, float)):
            writer.add_scalar(key, value, step)
        elif isinstance(value, list):
            numbers = [item for item in value if isinstance(item, (int, float))]
            if numbers and key.endswith("/histogram"):
                _write_counts(writer, key, numbers, step)
            elif numbers:
                import numpy as np

                writer.add_histogram(key, np.asarray(numbers), step)


def _write_counts(writer: SummaryWriter, key: str, counts: Sequence[float], step: int) -> None:
    """Write counts of the values 0, 1, 2, ... as a histogram with one bucket around each value."""
    total = sum(counts)
    if total <= 0:
        return
    writer.add_histogram_raw(
        key,
        min=next(value for value, count in enumerate(counts) if count),
        max=max(value for value, count in enumerate(counts) if count),
        num=total,
        sum=sum(value * count for value, count in enumerate(counts)),
        sum_squares=sum(value * value * count for value, count in enumerate(counts)),
        bucket_limits=[value + 0.5 for value in range(len(counts))],
        bucket_counts=list(counts),
        global_step=step,
    )
