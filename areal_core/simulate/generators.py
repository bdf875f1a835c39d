"""All generators at once, in closed form between two updates of the weights.

Every sequence that a generator decodes gains one token a step. On a clock of steps, counted for each generator, the
future is therefore simple: what is being decoded ends after as many steps as it lacks tokens, and what waits starts
when a slot frees. Between two such events the batch is constant and its context grows by its size each step, so that
seconds are a quadratic function of steps. One sort of all events and one cumulative sum give the time of each.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal_core.simulate.costs import DecodeCost

__all__ = ["Advance", "Forecast", "Work", "forecast"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_END, _LOAD, _START = 0, 1, 2  # in this order where they fall on the same step


@dataclass(frozen=True)
class Work:
    """The unfinished sequences, in the order in which they came.

    generator, context, left: int64 [N], which engine, tokens in its cache when it decodes on, tokens to come.
    started: bool [N], whether it occupies a slot.
    """

    generator: Ints
    context: Ints
    left: Ints
    started: Bools


@dataclass(frozen=True)
class Advance:
    """Where the generators stand at the first token boundary after a moment.

    tokens: int64 [N], tokens each sequence gained.
    started: bool [N], whether it occupies a slot, or has finished.
    boundary: float64 [G], the moment of the boundary.
    loaded: bool [G], whether a drained generator has begun to load the weights it waited for; the boundary is after.
    """

    tokens: Ints
    started: Bools
    boundary: Floats
    loaded: Bools


class Forecast:
    """What generators will do if nothing interrupts them.

    Attributes:
        finish: float64 [N], the moment at which each sequence ends.
        begin: int64 [N], steps until it is decoded.
        idle_from: float64 [G], the moment from which a generator has nothing to do.
    """

    def __init__(self, work: Work, begin: Ints, resume: Floats, cost: DecodeCost, load: tuple[Ints, float]) -> None:
        self._work, self._cost, self._resume = work, cost, resume
        self.begin = begin
        load_at, load_s = load
        generators = resume.size
        offset = work.context - begin
        waits = np.flatnonzero(begin > 0)
        loads = np.flatnonzero(load_at >= 0)
        generator = np.concatenate([work.generator, loads, work.generator[waits]])
        clock = np.concatenate([begin + work.left, load_at[loads], begin[waits]])
        kind = np.repeat([_END, _LOAD, _START], [work.left.size, loads.size, waits.size])
        order = np.argsort((generator << 40) | (clock << 2) | kind)
        change = np.where(kind == _END, -1, np.where(kind == _START, 1, 0))
        moved = np.concatenate([-offset, np.zeros(loads.size, dtype=np.int64), offset[waits]])
        self._generator, self._clock = generator[order], clock[order]
        begun = work.generator[begin == 0]
        first_size = np.bincount(begun, minlength=generators)
        first_offset = np.bincount(begun, offset[begin == 0].astype(np.float64), generators)
        counts = np.bincount(generator, minlength=generators)
        self._starts = np.cumsum(counts) - counts
        self._counts = counts
        # Batch and offset before each event: what the generator starts with, and the changes of its earlier events.
        self._size = first_size[self._generator] + self._before(change[order].astype(np.float64))
        self._offset = first_offset[self._generator] + self._before(moved[order].astype(np.float64))
        previous = np.concatenate([[0], self._clock[:-1]])
        previous[self._starts[counts > 0]] = 0
        self._previous = previous
        seconds = self._seconds(self._size, self._offset, previous, (self._clock - previous).astype(np.float64))
        pauses = np.where(kind[order] == _LOAD, load_s, 0.0)
        self._time = resume[self._generator] + self._before(seconds) + seconds + self._before(pauses)
        self._after = self._time + pauses
        self._load_begin, self._load_end = np.full((2, generators), np.inf)
        self._load_begin[loads] = self._time[kind[order] == _LOAD]
        self._load_end[loads] = self._after[kind[order] == _LOAD]
        finish = np.empty(order.size)
        finish[order] = self._time
        self.finish = finish[: work.left.size]
        self.idle_from = resume.copy()
        some = counts > 0
        self.idle_from[some] = self._after[(self._starts + counts - 1)[some]]

    def until(self, moment: float) -> Advance:
        """Advance every generator to its first token boundary at or after `moment`."""
        generators = self._resume.size
        passed = np.bincount(self._generator, self._after <= moment, generators).astype(np.int64)
        busy = (passed < self._counts) & (self._resume < moment)
        done = (passed == self._counts) & (self._counts > 0)
        steps = np.zeros(generators, dtype=np.int64)
        boundary = np.maximum(self._resume, moment)
        last = (self._starts + self._counts - 1)[done]
        steps[done] = self._clock[last]
        following = (self._starts + passed)[busy]
        base_time = np.where(passed[busy] > 0, self._after[np.maximum(following - 1, 0)], self._resume[busy])
        base = self._previous[following]
        size, offset = self._size[following], self._offset[following]
        extra = self._steps_in(size, offset, base, moment - base_time, self._clock[following] - base)
        steps[busy] = base + extra
        reached = base_time + self._seconds(size, offset, base, extra.astype(np.float64))
        boundary[busy] = np.maximum(moment, reached)
        here = steps[self._work.generator]
        tokens = np.clip(here - self.begin, 0, self._work.left)
        loaded = self._load_begin < moment
        boundary[loaded] = np.maximum(boundary, self._load_end)[loaded]
        return Advance(tokens, self._work.started | (tokens > 0), boundary, loaded)

    def _before(self, values: Floats) -> Floats:
        """Sum of `values` over the earlier events of the same generator."""
        total = np.cumsum(values) - values
        if not total.size:
            return total
        return np.asarray(total - total[self._starts[self._generator]])

    def _seconds(self, size: Floats, offset: Floats, base: Ints, steps: Floats) -> Floats:
        """Seconds of `steps` decode steps from step `base` on."""
        cost = self._cost
        linear = (size > 0) * cost.step_s + size * cost.sequence_s + (offset + size * base) * cost.context_s
        return np.asarray(steps * (linear + 0.5 * cost.context_s * size * steps))

    def _steps_in(self, size: Floats, offset: Floats, base: Ints, seconds: Floats, most: Ints) -> Ints:
        """Steps until `seconds` have passed, rounded up to a whole one, at most `most`."""
        cost = self._cost
        linear = cost.step_s + size * cost.sequence_s + (offset + size * base) * cost.context_s
        root = np.sqrt(linear**2 + 2 * cost.context_s * size * np.maximum(seconds, 0.0))
        with np.errstate(divide="ignore", invalid="ignore"):
            exact = np.where(linear + root > 0, 2 * np.maximum(seconds, 0.0) / (linear + root), np.inf)
        return np.minimum(np.ceil(exact - 1e-9), most).astype(np.int64)


def forecast(work: Work, resume: Floats, slots: int, cost: DecodeCost, draining: Bools, load_s: float) -> Forecast:
    """Say what the generators will do from `resume` (seconds, [G]) on.

    Args:
        slots: sequences that a generator decodes at once.
        draining: bool [G], generators that take nothing in before all they decode has ended and `load_s` has passed.
    """
    generators = resume.size
    load_at = np.full(generators, -1, dtype=np.int64)
    if draining.any():
        ends = np.zeros(generators, dtype=np.int64)
        np.maximum.at(ends, work.generator[work.started], work.left[work.started])
        load_at[draining] = ends[draining]
    begin = _begin(work, slots, load_at)
    return Forecast(work, begin, resume, cost, (load_at, load_s))


def _begin(work: Work, slots: int, load_at: Ints) -> Ints:
    """Steps until each sequence finds a slot: first come, first served."""
    begin = np.zeros(work.left.size, dtype=np.int64)
    gate = np.maximum(load_at, 0)
    begin[~work.started] = gate[work.generator[~work.started]]
    crowded = np.bincount(work.generator, minlength=load_at.size) > slots
    if not crowded.any():
        return begin
    for index in np.flatnonzero(crowded):
        mine = np.flatnonzero(work.generator == index)
        started = work.started[mine]
        first = int(gate[index])
        free = np.maximum(work.left[mine[started]], first).tolist()
        free += [first] * (slots - len(free))
        heapq.heapify(free)
        waiting = mine[~started]
        starts = []
        for left in work.left[waiting].tolist():
            start = free[0]
            heapq.heapreplace(free, start + left)
            starts.append(start)
        begin[waiting] = starts
    return begin
