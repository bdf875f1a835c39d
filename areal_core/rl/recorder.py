"""Everything a run writes and shows, gathered behind one object: metrics, samples, events, trace, progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from areal_core.model import Tokenizer
from areal_core.reshard import PublishStats
from areal_core.rl.config import Config
from areal_core.rl.data import Group, Trajectory
from areal_core.rl.messages import GeneratorReport
from areal_core.rl.update_metrics import UpdateMetrics
from areal_core.telemetry import EventLog, MetricsLog, Progress, SampleLog, Span, Tracer

__all__ = ["Recorder"]


class Recorder:
    """Owns the logs of a run. `on_report` and `on_event` may be called from any thread, the rest from the main one.

    Args:
        config: where to write, and what.
        tokenizer: shows token ids as text.
        resume_step: last step to keep of an existing history; None for a new run.
        elapsed_s: seconds the run has taken before a resume.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, *, resume_step: int | None, elapsed_s: float) -> None:
        run_dir = Path(config.run_dir)
        telemetry = config.telemetry
        self._config = config
        self._tokenizer = tokenizer
        self._metrics = MetricsLog(run_dir, tensorboard=telemetry.tensorboard, resume_step=resume_step)
        self._samples = SampleLog(run_dir, resume_step=resume_step)
        self._events = EventLog(run_dir)
        self._tracer = Tracer(run_dir / "trace.json", "trainer") if telemetry.trace else None
        plain = {"auto": None, "live": False, "plain": True, "none": True}[telemetry.progress]
        self._progress = None if telemetry.progress == "none" else Progress(config.train.steps, _title(config), plain)
        self._start = time.monotonic() - elapsed_s
        self._step = resume_step or 0
        self._lock = threading.Lock()
        self._totals: dict[int, _GeneratorTotals] = {}
        self._updates = UpdateMetrics()
        self._spans: list[tuple[int, Sequence[Span]]] = []
        self._last_totals: dict[str, float] = {}
        self._last_time = time.monotonic()

    def __enter__(self) -> Recorder:
        if self._progress is not None:
            self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._progress is not None:
            self._progress.__exit__(*error)
        self._write_spans()
        for log in (self._metrics, self._samples, self._events, self._tracer):
            if log is not None:
                log.close()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began, those before a resume included."""
        return time.monotonic() - self._start

    def span(self, name: str, track: str = "trainer", **args: Any) -> AbstractContextManager[None]:
        """A span of the trainer process in the trace."""
        return self._tracer.span(name, track, **args) if self._tracer is not None else _nothing()

    def instant(self, name: str) -> None:
        """A moment in the trace, such as a publication."""
        if self._tracer is not None:
            self._tracer.instant(name, "trainer")

    def published(self, stats: PublishStats, start_s: float) -> None:
        """A version has been published, from `start_s` on (time.monotonic)."""
        with self._lock:
            self._updates.published(stats, start_s)

    def on_report(self, index: int, report: GeneratorReport) -> None:
        """Add the counters, loads and spans of a generator."""
        with self._lock:
            self._totals.setdefault(index, _GeneratorTotals()).update(report.counters)
            self._updates.loaded(report.loads)
            if report.spans and self._tracer is not None:
                self._spans.append((index, report.spans))

    def on_event(self, kind: str, text: str) -> None:
        """Write an event, and show it."""
        with self._lock:
            self._events.log(kind, text, step=self._step, time_s=self.elapsed_s)
        if kind != "checkpoint":
            self.say(f"[{kind}] {text}")

    def say(self, text: str) -> None:
        """Show a line, without keeping it."""
        if self._progress is not None:
            self._progress.message(text)

    def step(
        self, metrics: Mapping[str, Any], groups: Sequence[Group], advantages: Mapping[tuple[int, int], float]
    ) -> dict[str, Any]:
        """Complete the metrics of a training step with rates and idle shares, write and show them.

        Args:
            metrics: `step`, `version`, times and what the trainer measured.
            groups: the batch, for sample trajectories.
            advantages: advantage of (group_id, sample_index), for the same.

        Returns:
            the complete metrics.
        """
        with self._lock:
            updates = self._updates.take()
        complete = {**metrics, "time_s": self.elapsed_s, **updates, **self._rates(metrics)}
        self._step = int(metrics["step"])
        self._metrics.log(complete)
        rows = self._write_samples(groups, advantages)
        self._write_spans()
        if self._progress is not None:
            self._progress.update(complete, rows[0] if rows else None)
        return complete

    def start(self, evaluation: Mapping[str, Any]) -> None:
        """Say that training begins; the evaluation of the starting policy, if any, is written as step 0."""
        self._last_time = time.monotonic()
        if not evaluation:
            return
        row = {"step": 0, "version": 0, "time_s": self.elapsed_s, **evaluation}
        self._metrics.log(row)
        if self._progress is not None:
            self._progress.update(row)

    def _rates(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        now = time.monotonic()
        with self._lock:
            totals: dict[str, float] = {}
            for generator in self._totals.values():
                for key, value in generator.total().items():
                    totals[key] = totals.get(key, 0.0) + value
        delta = {key: value - self._last_totals.get(key, 0.0) for key, value in totals.items()}
        seconds = max(now - self._last_time, 1e-9)
        self._last_totals, self._last_time = totals, now
        known = sum(delta.get(key, 0.0) for key in ("generate_s", "weight_update_s", "idle_s"))
        generated = delta.get("generated_tokens", 0.0)
        spent = sum(v for k, v in metrics.items() if k.startswith("time/"))
        return {
            "tokens/generated": generated,
            "rate/generated_tokens_per_s": generated / seconds,
            "rate/trained_tokens_per_s": metrics.get("tokens/trained", 0.0) / seconds,
            "idle/generator": delta.get("idle_s", 0.0) / known if known > 0 else 0.0,
            "idle/trainer": metrics.get("time/wait_s", 0.0) / seconds,
            "count/interrupted": delta.get("interrupted", 0.0),
            "time/other_s": max(seconds - spent, 0.0),
            "time/generate_s": delta.get("generate_s", 0.0),
            "time/verify_s": delta.get("verify_s", 0.0),
            "time/weight_update_s": delta.get("weight_update_s", 0.0),
        }

    def _write_samples(
        self, groups: Sequence[Group], advantages: Mapping[tuple[int, int], float]
    ) -> list[dict[str, Any]]:
        rows = []
        for group in groups[: self._config.telemetry.samples_per_step]:
            trajectory = max(group.trajectories, key=lambda t: len(set(t.versions.tolist())))
            row = self._sample_row(group, trajectory, advantages)
            self._samples.log(step=self._step, **row)
            rows.append(row)
        return rows

    def _sample_row(
        self, group: Group, trajectory: Trajectory, advantages: Mapping[tuple[int, int], float]
    ) -> dict[str, Any]:
        return {
            "group": group.group_id,
            "prompt": group.prompt,
            "tokens": [self._tokenizer.token_text(i) for i in trajectory.response_ids.tolist()],
            "versions": trajectory.versions.tolist(),
            "logprobs": trajectory.logprobs.tolist(),
            "reward": trajectory.reward,
            "advantage": advantages.get((group.group_id, trajectory.sample_index), 0.0),
            "finish_reason": trajectory.finish_reason,
        }

    def _write_spans(self) -> None:
        with self._lock:
            received, self._spans = self._spans, []
        if self._tracer is not None:
            for index, spans in received:
                self._tracer.add_spans(f"generator {index}", spans)


class _GeneratorTotals:
    """Counters of one generator over its restarts: a process that starts anew counts from zero."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._now: dict[str, float] = {}

    def update(self, counters: Mapping[str, float]) -> None:
        if counters.get("generated_tokens", 0.0) < self._now.get("generated_tokens", 0.0):
            self._before = self.total()
        self._now = dict(counters)

    def total(self) -> dict[str, float]:
        return {k: self._before.get(k, 0.0) + self._now.get(k, 0.0) for k in {*self._before, *self._now}}


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _title(config: Config) -> str:
    eta = config.rollout.eta
    mode = "synchronous" if eta == 0 else f"asynchronous, eta {eta:g}"
    return f"{config.task.name}: {mode}, {config.loss.title}, {config.generate.generators} generator(s)"
