"""Everything a run left in its folder, read as far as it can be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from areal_core.telemetry.format import finite
from areal_core.telemetry.jsonl import Row, read_json_lines
from areal_core.telemetry.metrics import EVENTS_FILE, METRICS_FILE, SAMPLES_FILE
from areal_core.telemetry.timeline import Timeline, build_timeline
from areal_core.telemetry.trace import TRACE_FILE, read_trace

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True)
class RunData:
    """A run as its folder tells it.

    Attributes:
        name: name of the folder.
        config_text, config: `config.yaml` as text and as a mapping; empty when missing or no YAML.
        metrics, events, samples: rows of the JSONL files; every metrics row has an integer `step`, in rising order.
        timeline: rows of segments from `trace.json`.
        problems: what could not be read, in words for the reader of the report.
    """

    name: str
    config_text: str
    config: Mapping[str, Any]
    metrics: list[Row]
    events: list[Row]
    samples: list[Row]
    timeline: Timeline
    problems: list[str]

    def setting(self, key: str) -> Any:
        """The value of a dotted configuration key such as "rollout.eta"; None when it is not there."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
        return value

    def values(self, key: str) -> list[float]:
        """The finite values of a metric over the steps that have it."""
        return [number for row in self.metrics if (number := finite(row.get(key))) is not None]

    @property
    def last_step(self) -> int:
        """The last training step; 0 when there was none (an evaluation before the first step counts as step 0)."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def wall_time_s(self) -> float | None:
        """Seconds from the start to the last step, or to the end of the trace when the metrics do not say."""
        return max(self.values("time_s"), default=self.timeline.duration_us / 1e6 or None)


def read_run(run_dir: str | Path) -> RunData:
    """Read a run, finished or not. Missing files read as empty; damaged lines are skipped and reported in `problems`.

    Raises:
        FileNotFoundError: `run_dir` is no folder.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"read_run: expected the folder of a run, got {run_dir}")
    problems: list[str] = []
    config_text, config = _read_config(run_dir / CONFIG_FILE, problems)
    rows = {name: _read_rows(run_dir / name, problems) for name in (METRICS_FILE, EVENTS_FILE, SAMPLES_FILE)}
    return RunData(
        name=run_dir.resolve().name,
        config_text=config_text,
        config=config,
        metrics=_ordered_steps(rows[METRICS_FILE]),
        events=rows[EVENTS_FILE],
        samples=[sample for sample in rows[SAMPLES_FILE] if isinstance(sample.get("tokens"), list)],
        timeline=build_timeline(read_trace(run_dir / TRACE_FILE)),
        problems=problems,
    )


def _read_config(path: Path, problems: list[str]) -> tuple[str, Mapping[str, Any]]:
    if not path.exists():
        return "", {}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        problems.append(f"{path.name} is not valid YAML")
        return text, {}
    return text, config if isinstance(config, Mapping) else {}


def _read_rows(path: Path, problems: list[str]) -> list[Row]:
    rows, broken = read_json_lines(path)
    if broken:
        problems.append(f"{len(broken)} of {len(rows) + len(broken)} lines of {path.name} are damaged and left out")
    return rows


def _ordered_steps(rows: list[Row]) -> list[Row]:
    """Rows that have a step, by step; of a step that is there twice the later row counts."""
    by_step: dict[int, Row] = {}
    for row in rows:
        step = finite(row.get("step"))
        if step is not None:
            by_step[int(step)] = row | {"step": int(step)}
    return [by_step[step] for step in sorted(by_step)]
