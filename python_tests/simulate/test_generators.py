"""The closed form against a generator that decodes step by step."""

from collections import deque

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.simulate.cluster import _fewest_first
from areal_core.simulate.costs import DecodeCost
from areal_core.simulate.generators import Work, forecast

COST = DecodeCost(step_s=0.5, sequence_s=0.25, context_s=1 / 64, prompt_token_s=0.0)  # exact in binary
LOAD_S = 3.0


class StepByStep:
    """One generator, one decode step after the other."""

    def __init__(
        self, context: list[int], left: list[int], started: list[bool], slots: int, resume: float, drains: bool
    ):
        self.context, self.left, self.slots = list(context), list(left), slots
        self.active = [i for i, s in enumerate(started) if s]
        self.waiting = deque(i for i, s in enumerate(started) if not s)
        self.time, self.drains = resume, drains
        self.load_began: float | None = None
        self.gained = [0] * len(left)
        self.finish = [np.nan] * len(left)

    def load(self) -> None:
        if self.drains and not self.active:
            self.drains = False
            self.load_began = self.time
            self.time += LOAD_S

    def step(self) -> bool:
        self.load()
        while not self.drains and self.waiting and len(self.active) < self.slots:
            self.active.append(self.waiting.popleft())
        if not self.active:
            return False
        context = sum(self.context[i] + self.gained[i] for i in self.active)
        # The closed form integrates: during a step the context grows by half of what it gains.
        self.time += COST.step_s + COST.sequence_s * len(self.active)
        self.time += COST.context_s * (context + 0.5 * len(self.active))
        for i in list(self.active):
            self.gained[i] += 1
            if self.gained[i] == self.left[i]:
                self.active.remove(i)
                self.finish[i] = self.time
        return True

    def until(self, moment: float) -> None:
        while self.time < moment:
            if self.drains and not self.active:
                self.load()
            elif not self.step():
                break


@st.composite
def generators(draw: st.DrawFn) -> list[tuple[list[int], list[int], list[bool], int, bool, float]]:
    slots = draw(st.integers(1, 4))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, 9))
        active = draw(st.integers(0, min(slots, count)))
        context = draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
        left = draw(st.lists(st.integers(1, 12), min_size=count, max_size=count))
        resume = draw(st.sampled_from([0.0, 2.0, 5.5]))
        found.append((context, left, [i < active for i in range(count)], slots, draw(st.booleans()), resume))
    return found


def work_of(cases: list[tuple[list[int], list[int], list[bool], int, bool, float]]) -> Work:
    def column(index: int, kind: type) -> npt.NDArray[np.int64]:
        return np.asarray([value for case in cases for value in case[index]], dtype=kind)

    which = np.repeat(np.arange(len(cases)), [len(case[0]) for case in cases])
    return Work(which, column(0, np.int64), column(1, np.int64), column(2, np.bool_).astype(np.bool_))


@settings(max_examples=80, deadline=None)
@given(generators(), st.integers(0, 960).map(lambda sixteenths: sixteenths / 16))
def test_closed_form_is_what_happens_step_by_step(
    cases: list[tuple[list[int], list[int], list[bool], int, bool, float]], moment: float
) -> None:
    work = work_of(cases)
    resume = np.asarray([case[5] for case in cases])
    drains = np.asarray([case[4] for case in cases])
    ahead = forecast(work, resume, cases[0][3], COST, drains, LOAD_S)
    advance = ahead.until(moment)
    first = 0
    for index, (context, left, started, slots, drain, start) in enumerate(cases):
        rows = slice(first, first + len(left))
        first += len(left)
        slow = StepByStep(context, left, started, slots, start, drain)
        slow.until(moment)
        np.testing.assert_array_equal(advance.tokens[rows], slow.gained)
        expected = max(slow.time, moment)
        assert abs(advance.boundary[index] - expected) < 1e-9
        if moment > start:
            assert advance.loaded[index] == (slow.load_began is not None and slow.load_began <= expected)
        while slow.step():
            pass
        np.testing.assert_allclose(ahead.finish[rows], slow.finish, atol=1e-9)
        assert abs(ahead.idle_from[index] - slow.time) < 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 40))
def test_samples_go_where_the_load_is_lowest(load: list[int], units: int) -> None:
    slow, chosen = list(load), []
    for _ in range(units):
        index = slow.index(min(slow))
        slow[index] += 1
        chosen.append(index)
    assert _fewest_first(np.asarray(load), units).tolist() == chosen
