"""The simulated loop: gate, generators, trainer, publication.

Generators influence each other only through the gate, and the gate opens only when a version is published. So the
simulation goes from publication to publication: forecast what every generator does, find the moment at which the gate
gives the trainer its batch, train, publish, and advance all generators to the token boundary at which they take the
new weights. The gate is `areal_core.rl.staleness.StalenessGate`, the one of real runs.
"""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from areal_core.rl.staleness import StalenessGate
from areal_core.simulate.config import SimulateConfig
from areal_core.simulate.costs import Costs
from areal_core.simulate.generators import Advance, Forecast, Work, forecast
from areal_core.simulate.lengths import Lengths
from areal_core.simulate.result import Simulation, Step

__all__ = ["Simulation", "simulate"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def simulate(config: SimulateConfig, costs: Costs | None = None, lengths: Lengths | None = None) -> Simulation:
    """Simulate a run; equal arguments give equal results.

    Args:
        config: cluster, model and run.
        costs: measured ones; None computes them by formula.
        lengths: of responses; None takes the distribution of the configuration.

    Raises:
        ValueError: an unknown model.
        FileNotFoundError, DataError: lengths.run has no samples.
    """
    lengths = lengths or Lengths(config.lengths, config.generate.max_new_tokens)
    return _Cluster(config, costs or Costs.of(config), lengths).run()


@dataclass
class _Groups:
    """The groups from admission to consumption, oldest first; [n] or, one entry for each sample, [n, group_size].

    by_age[:, a] counts the tokens that version `admitted` + a produced.
    """

    admitted: Ints
    generator: Ints
    length: Ints
    done: Ints
    started: Bools
    version: Ints  # the one each sample started with
    finish: Floats
    by_age: Ints

    @property
    def unfinished(self) -> Bools:
        return self.done < self.length

    def keep(self, rows: Bools) -> _Groups:
        return _Groups(**{name: value[rows] for name, value in vars(self).items()})

    def add(self, other: _Groups) -> _Groups:
        width = max(self.by_age.shape[1], other.by_age.shape[1])
        for groups in (self, other):
            missing = width - groups.by_age.shape[1]
            groups.by_age = np.pad(groups.by_age, ((0, 0), (0, missing)))
        mine, others = vars(self), vars(other)
        return _Groups(**{name: np.concatenate([mine[name], others[name]]) for name in mine})


@dataclass
class _Cluster:
    config: SimulateConfig
    costs: Costs
    lengths: Lengths
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.config
        rollout = config.rollout
        self.rng = np.random.default_rng(config.seed)
        self.gate = StalenessGate(rollout.batch_groups, rollout.eta, rollout.batches_ahead)
        self.interrupts = config.generate.on_update in ("recompute", "keep")
        self.resume: Floats = np.zeros(config.generators)
        self.draining: Bools = np.zeros(config.generators, dtype=np.bool_)
        self.version = 0
        self.now = 0.0
        self.groups = self._new_groups(0)
        self.interrupted = 0

    def run(self) -> Simulation:
        self._admit()
        for _ in range(self.config.steps):
            self._step()
        return Simulation(
            config=self.config,
            steps=self.steps,
            submitted_groups=self.gate.submitted,
            finished_groups=int((~self.groups.unfinished).all(1).sum()),
            pending_groups=len(self.groups.admitted),
        )

    def _step(self) -> None:
        ahead = self._forecast()
        batch_at, taken = self._wait(self.groups.finish.max(1))
        batch = self.groups.keep(taken)
        lengths = (batch.length + self.config.lengths.prompt).ravel()
        train_s = self.costs.train_s(lengths, self.rng)
        published = batch_at + train_s + self.costs.publish_s
        advance = ahead.until(published)
        idle = self._idle_share(ahead, published)
        produced = self._advance(advance)
        batch = self.groups.keep(taken)
        self.groups = self.groups.keep(~taken)
        self.steps.append(
            Step(
                began=self.now,
                waited=max(batch_at - self.now - (self.costs.other_s if self.version else 0.0), 0.0),
                batch_at=batch_at,
                trained_at=batch_at + train_s,
                published_at=published,
                tokens=int(lengths.sum()),
                generated_tokens=produced,
                generator_idle=idle,
                interrupted=self.interrupted,
                ages=self._ages(batch),
            )
        )
        self.now = published
        self.version += 1
        self._update(advance)
        self._admit()

    def _forecast(self) -> Forecast:
        groups, left = self.groups, self.groups.unfinished
        work = Work(
            generator=groups.generator[left],
            context=(groups.done + self.config.lengths.prompt)[left],
            left=(groups.length - groups.done)[left],
            started=groups.started[left],
        )
        slots, decode = self.config.generate.max_slots, self.costs.decode
        ahead = forecast(work, self.resume, slots, decode, self.draining, self.costs.pause_s)
        groups.finish[left] = ahead.finish
        return ahead

    def _wait(self, ready_at: Floats) -> tuple[float, Bools]:
        """When the gate gives the trainer its batch, and which groups: the oldest of those that are ready."""
        free_at = self.now + (self.costs.other_s if self.version else 0.0)
        order = np.argsort(ready_at, kind="stable")
        size = self.config.rollout.batch_groups
        count = max(int(np.searchsorted(ready_at[order], free_at, side="right")), size)
        oldest = int(self.groups.admitted.min())
        admitted = self.groups.admitted[order] - oldest

        def by_version(admitted: Ints) -> dict[int, int]:
            return dict(enumerate(np.bincount(admitted).tolist(), start=oldest))

        def makes_batch(count: int) -> bool:
            ready, in_flight = by_version(admitted[:count]), by_version(admitted[count:])
            return self.gate.counts_make_batch(ready, in_flight, self.version)

        # Once the gate says yes it stays yes as further groups finish: deadlines only get easier to keep.
        count = bisect.bisect_left(range(len(order)), True, lo=count, key=makes_batch)
        taken = np.zeros(len(order), dtype=np.bool_)
        taken[np.sort(order[:count])[:size]] = True
        return max(free_at, float(ready_at[order[count - 1]])), taken

    def _advance(self, advance: Advance) -> int:
        """Bring the groups to the boundary; the number of tokens produced."""
        groups, left = self.groups, self.groups.unfinished
        begins = left & ~groups.started
        groups.started[left] = advance.started
        groups.version[begins & groups.started] = self.version
        tokens = np.zeros_like(groups.done)
        tokens[left] = advance.tokens
        groups.done += tokens
        oldest = self.version - int(groups.admitted.min())
        groups.by_age = np.pad(groups.by_age, ((0, 0), (0, max(0, oldest + 1 - groups.by_age.shape[1]))))
        if self.interrupts:  # all generators have had the same version
            groups.by_age[np.arange(len(tokens)), self.version - groups.admitted] += tokens.sum(1)
        else:
            rows, columns = np.nonzero(tokens)
            ages = groups.version[rows, columns] - groups.admitted[rows]
            np.add.at(groups.by_age, (rows, ages), tokens[rows, columns])
        return int(advance.tokens.sum())

    def _update(self, advance: Advance) -> None:
        """Give the generators the version just published."""
        groups, config = self.groups, self.config
        active = groups.started & groups.unfinished
        where = groups.generator[active]
        self.resume = advance.boundary.copy()
        if config.generate.on_update == "drain":
            busy = np.bincount(where, minlength=config.generators) > 0
            self.draining = busy
            self.resume[~busy] += self.costs.pause_s
            self.interrupted = 0
            return
        self.resume += self.costs.pause_s
        self.interrupted = int(active.sum()) if self.interrupts else 0
        if config.generate.on_update == "recompute":
            context = (groups.done + config.lengths.prompt)[active].astype(np.float64)
            self.resume += self.costs.decode.prompt_token_s * np.bincount(where, context, config.generators)

    def _admit(self) -> None:
        count = 0
        while self.gate.can_submit(self.version):
            self.gate.submit()
            count += 1
        if not count:
            return
        new = self._new_groups(count)
        new.generator[:] = self._dispatch(count)
        self.groups = self.groups.add(new)
        # The engines compute a prompt once for all samples of a group that they hold.
        ordered = np.sort(new.generator, axis=1)
        first = np.diff(ordered, axis=1, prepend=-1) > 0
        prompts = np.bincount(ordered[first], minlength=self.config.generators)
        self.resume += prompts * (self.config.lengths.prompt * self.costs.decode.prompt_token_s)

    def _new_groups(self, count: int) -> _Groups:
        shape = (count, self.config.rollout.group_size)
        length = self.lengths.draw(*shape, self.rng) if count else np.zeros(shape, dtype=np.int64)
        return _Groups(
            admitted=np.full(count, self.version, dtype=np.int64),
            generator=np.zeros(shape, dtype=np.int64),
            length=length,
            done=np.zeros(shape, dtype=np.int64),
            started=np.zeros(shape, dtype=np.bool_),
            version=np.zeros(shape, dtype=np.int64),
            finish=np.full(shape, np.inf),
            by_age=np.zeros((count, 1), dtype=np.int64),
        )

    def _dispatch(self, count: int) -> Ints:
        """The engine of each sample [count, group_size]: the one with the fewest samples to come."""
        size = self.config.rollout.group_size
        load = np.bincount(self.groups.generator[self.groups.unfinished], minlength=self.config.generators)
        if self.config.generate.dispatch == "group":
            heap = [(samples, index) for index, samples in enumerate(load.tolist())]
            heapq.heapify(heap)
            chosen = []
            for _ in range(count):
                samples, index = heap[0]
                heapq.heapreplace(heap, (samples + size, index))
                chosen.append(index)
            return np.repeat(np.asarray(chosen, dtype=np.int64), size).reshape(count, size)
        return _fewest_first(load, count * size).reshape(count, size)

    def _idle_share(self, ahead: Forecast, published: float) -> float:
        """Share of the time since the last publication in which generators neither decoded nor loaded weights."""
        span = published - self.now
        idle = np.maximum(published - np.maximum(ahead.idle_from, self.now), 0.0)
        return float(idle.mean() / span) if span > 0 else 0.0

    def _ages(self, batch: _Groups) -> Ints:
        """Trained tokens by version age, counted from the version in training."""
        oldest = self.version - int(batch.admitted.min())
        ages = np.zeros(oldest + 1, dtype=np.int64)
        for column, counts in enumerate(batch.by_age.T):
            age = self.version - batch.admitted - column
            ages += np.bincount(age[counts > 0], counts[counts > 0], oldest + 1).astype(np.int64)
        return ages


def _fewest_first(load: Ints, units: int) -> Ints:
    """int64 [units]: place each unit where the load is lowest, the lower index where it is equal."""
    ordered = np.sort(load)
    filled = np.arange(1, load.size + 1) * np.append(ordered[1:], np.iinfo(np.int32).max) - np.cumsum(ordered)
    lowest = int(np.searchsorted(filled, units))  # how many of the emptiest take part
    level = -(-(units + int(ordered[: lowest + 1].sum())) // (lowest + 1))
    room = np.maximum(level - load, 0)
    places = np.repeat(np.arange(load.size), room)
    heights = np.arange(places.size) - np.repeat(np.cumsum(room) - room, room) + load[places]
    return places[np.lexsort((places, heights))][:units]
