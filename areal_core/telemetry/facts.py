"""The few numbers that sum a run up, and the sentence that says them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from areal_core.telemetry.format import compact, duration, finite, percent
from areal_core.telemetry.run_data import RunData
from areal_core.telemetry.timeline import IDLE_NAMES, TimelineRow

TRAINER_PHASES = ("wait", "pack", "proximal", "critic", "forward_backward", "optimizer", "publish", "evaluate", "other")

_SETTINGS = (
    ("task", "task.name"),
    ("model", "model.path"),
    ("advantages", "advantage.name"),
    ("objective", "loss.objective"),
    ("proximal logprobs", "loss.proximal"),
    ("groups per batch", "rollout.batch_groups"),
    ("group size", "rollout.group_size"),
    ("η", "rollout.eta"),
    ("on update", "generate.on_update"),
    ("generators", "generate.generators"),
    ("learning rate", "train.learning_rate"),
    ("mini-batches", "train.minibatches"),
    ("seed", "seed"),
)
_SETTINGS_IF_CHANGED = (  # shown where they differ from what stands here
    ("discount", "advantage.gamma", 1),
    ("λ of GAE", "advantage.lam", 1),
    ("KL in the advantage", "advantage.beta", 0),
    ("KL in the reward", "reward.kl_coef", 0),
    ("KL in the loss", "loss.kl_coef", 0),
    ("reference", "reference.path", None),
    ("ratio", "loss.ratio_level", "token"),
    ("aggregation", "loss.aggregation", "token_mean"),
    ("entropy bonus", "loss.entropy_coef", 0),
    ("distillation", "loss.distill_coef", 0),
    ("teacher", "teacher.path", None),
)


_RUN_STATES = frozenset(
    ("interrupted", "failed", "resume", "finished")
)  # events that begin or end a stretch of the run


class Fact(NamedTuple):
    """One number of the header: what it is, its value, and how it was obtained."""

    label: str
    value: str
    note: str


class Change(NamedTuple):
    """Accuracy at the first and at the last measurement, and what was measured."""

    before: float
    after: float
    kind: str


def gather_facts(run: RunData) -> list[Fact]:
    """The header of the report; what a run did not record is left out."""
    facts = [
        _accuracy_fact(run),
        _steps_fact(run),
        _time_fact(run),
        _rate_fact(run, "Generation", "generated"),
        _rate_fact(run, "Training", "trained"),
        _idle_fact("Generators idle", generator_idle(run)),
        _idle_fact("Trainer idle", trainer_idle(run)),
        _staleness_fact(run),
        _update_fact(run),
    ]
    return [fact for fact in facts if fact is not None]


def gather_settings(run: RunData) -> list[tuple[str, str]]:
    """The settings a reader asks for first, as far as the configuration has them."""
    found = [(label, run.setting(key)) for label, key in _SETTINGS]
    for label, key, default in _SETTINGS_IF_CHANGED:
        value = run.setting(key)
        found += [(label, value)] if value != default else []
    if run.values("critic/loss"):
        found.append(("learning rate of the critic", run.setting("critic.learning_rate")))
    return [(label, _setting_text(value)) for label, value in found if value is not None]


def _setting_text(value: object) -> str:
    if isinstance(value, float):
        return "∞" if value == math.inf else f"{value:g}"
    return str(value)


def nonfinite_notes(run: RunData) -> list[str]:
    """For each metric that was NaN or infinite: in how many steps, and where first."""
    steps: dict[str, list[int]] = {}
    for row in run.metrics:
        names = row.get("nonfinite")
        for key in names if isinstance(names, dict) else ():
            steps.setdefault(key, []).append(row["step"])
    return [
        f"{key} was not finite in {len(where)} {'step' if len(where) == 1 else 'steps'}, first in step {where[0]}"
        for key, where in steps.items()
    ]


def accuracy_change(run: RunData) -> Change | None:
    """From the evaluations when there are two, otherwise from the first and the last tenth of the training steps."""
    for key, kind in (("eval/accuracy_greedy", "greedy evaluation"), ("eval/accuracy_sampled", "sampled evaluation")):
        values = run.values(key)
        if len(values) > 1:
            return Change(values[0], values[-1], kind)
    values = run.values("reward/accuracy")
    if len(values) < 2:
        return None
    tenth = math.ceil(len(values) / 10)
    return Change(sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth, "training samples")


def staleness_counts(run: RunData) -> list[float]:
    """Tokens trained on at version age 0, 1, 2, ... over the whole run."""
    totals: list[float] = []
    for row in run.metrics:
        counts = row.get("staleness/histogram")
        if not isinstance(counts, list):
            continue
        totals += [0.0] * (len(counts) - len(totals))
        for age, count in enumerate(counts):
            totals[age] += finite(count) or 0.0
    while totals and totals[-1] == 0:
        totals.pop()
    return totals


def trainer_seconds(run: RunData) -> dict[str, float]:
    """Trainer time by phase, from the metrics, or from the trace when the metrics do not have it."""
    seconds = {phase: sum(run.values(f"time/{phase}_s")) for phase in TRAINER_PHASES}
    if any(seconds.values()):
        return {phase: value for phase, value in seconds.items() if value > 0}
    row = run.timeline.busiest_row("trainer")
    return {} if row is None else _with_untraced([row])


def generator_seconds(run: RunData) -> dict[str, float]:
    """Time of all generators by what they did, from the trace."""
    return _with_untraced(run.timeline.generator_rows())


def trainer_idle(run: RunData) -> float | None:
    """Share of its time that the trainer waited."""
    share = _mean_over_time(run, "idle/trainer")
    return _idle_share(trainer_seconds(run)) if share is None else share


def generator_idle(run: RunData) -> float | None:
    """Share of their time that the generators waited."""
    share = _mean_over_time(run, "idle/generator")
    return _idle_share(generator_seconds(run)) if share is None else share


def token_rate(run: RunData, kind: str) -> float | None:
    """Tokens per second of the run, "generated" or "trained": all tokens over all time, or the mean of the rates."""
    tokens = sum(run.values(f"tokens/{kind}"))
    if tokens and run.wall_time_s:
        return tokens / run.wall_time_s
    rates = run.values(f"rate/{kind}_tokens_per_s")
    return sum(rates) / len(rates) if rates else None


def eta(run: RunData) -> float | None:
    """The staleness bound of the configuration; infinite when unbounded, None when unknown."""
    value = run.setting("rollout.eta")
    return float(value) if isinstance(value, (int, float)) else None


def summarize(run: RunData) -> str:
    """The run in a sentence or two."""
    if not run.last_step:
        return "No training step was recorded."
    time = duration(run.wall_time_s)
    sentence = f"In {run.last_step:,} {'step' if run.last_step == 1 else 'steps'}" + (f" and {time}" if time else "")
    change = accuracy_change(run)
    if change is None:
        sentence += " nothing but the figures below was recorded."
    else:
        verb = "rose" if change.after > change.before else "went"
        sentence += f", accuracy ({change.kind}) {verb} from {percent(change.before)} to {percent(change.after)}."
    idle = [
        (name, percent(share)) for name, share in (("generators", generator_idle(run)), ("trainer", trainer_idle(run)))
    ]
    known = [f"the {name} {share}" for name, share in idle if share is not None]
    if known:
        sentence += f" Idle: {' and '.join(known)} of the time."
    counts = staleness_counts(run)
    if counts:
        fresh = percent(sum(counts[:2]) / sum(counts))
        sentence += f" {fresh} of the tokens were at most one version old when they were trained on."
    return sentence


def _accuracy_fact(run: RunData) -> Fact | None:
    change = accuracy_change(run)
    if change is None:
        return None
    return Fact("Accuracy", f"{percent(change.before)} → {percent(change.after)}", change.kind)


def _steps_fact(run: RunData) -> Fact:
    planned = finite(run.setting("train.steps"))
    note = f"of {planned:,.0f} planned" if planned is not None else ""
    ends = [event.get("kind") for event in run.events if event.get("kind") in _RUN_STATES]
    if ends and ends[-1] in ("interrupted", "failed"):
        note = f"{note}, {ends[-1]}".lstrip(", ")
    return Fact("Steps", f"{run.last_step:,}", note)


def _time_fact(run: RunData) -> Fact | None:
    text = duration(run.wall_time_s)
    if text is None or run.wall_time_s is None:
        return None
    return Fact("Wall time", text, f"{compact(run.wall_time_s / max(run.last_step, 1))} s per step")


def _rate_fact(run: RunData, label: str, kind: str) -> Fact | None:
    rate = token_rate(run, kind)
    if rate is None:
        return None
    tokens = sum(run.values(f"tokens/{kind}"))
    return Fact(label, f"{compact(rate)} tokens/s", f"{compact(tokens)} tokens" if tokens else "mean over steps")


def _idle_fact(label: str, share: float | None) -> Fact | None:
    text = percent(share)
    return None if text is None else Fact(label, text, "of the time")


def _staleness_fact(run: RunData) -> Fact | None:
    counts = staleness_counts(run)
    if counts:
        mean = sum(age * count for age, count in enumerate(counts)) / sum(counts)
        oldest: float = len(counts) - 1
    else:
        means, largest = run.values("staleness/mean"), run.values("staleness/max")
        if not means:
            return None
        mean, oldest = sum(means) / len(means), max(largest, default=math.nan)
    bound = eta(run)
    shown = "" if bound is None else f", bound {'∞' if math.isinf(bound) else f'{bound:g}'}"
    return Fact("Token age", f"{mean:.2f}", f"versions, mean; oldest {compact(oldest) or 'unknown'}{shown}")


def _update_fact(run: RunData) -> Fact | None:
    visible, latest, pauses = (run.values(f"publish/{key}_s") for key in ("visible_p50", "visible_p95", "pause"))
    if not (visible and latest and pauses):
        return None
    visible_ms, latest_ms, pause_ms = (f"{compact(1e3 * median(v))} ms" for v in (visible, latest, pauses))
    note = f"until generators have a version (median step; p95 {latest_ms}), of which they stand still {pause_ms}"
    moved, share = run.values("publish/bytes"), run.values("publish/bytes_over_bound")
    if moved and share:
        note += f"; {compact(moved[-1])}B, {share[-1]:.2f} of the bound"
    return Fact("Weight update", visible_ms, note)


def _with_untraced(rows: Iterable[TimelineRow]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for row in rows:
        for name, value in (*row.seconds.items(), ("not traced", row.untraced_seconds)):
            totals[name] = totals.get(name, 0.0) + value
    return {name: value for name, value in totals.items() if value > 0}


def _idle_share(seconds: dict[str, float]) -> float | None:
    traced = {name: value for name, value in seconds.items() if name != "not traced"}
    if not traced:
        return None
    return sum(value for name, value in traced.items() if name in IDLE_NAMES) / sum(traced.values())


def _mean_over_time(run: RunData, key: str) -> float | None:
    """Mean of a share, each step weighted by its duration."""
    total = weight = before = 0.0
    for row in run.metrics:
        now = finite(row.get("time_s"))
        share = finite(row.get(key))
        duration_s = 1.0 if now is None else max(now - before, 0.0)
        before = before if now is None else now
        if share is not None:
            total += share * duration_s
            weight += duration_s
    return total / weight if weight > 0 else None
