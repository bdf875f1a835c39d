"""Rollout: keeps the generators busy, assembles groups, and hands the trainer its batches.

    problems -> gate -> fleet of generators -> groups in assembly -> ready groups -> next_batch()

A thread of the trainer process pumps this; it does per-response work only (a dictionary entry, array views), the
per-token work being done in the generators.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_core.errors import ArealError, DataError
from areal_core.generate.engine import GeneratedSample
from areal_core.rl.config import RolloutConfig
from areal_core.rl.data import Group, PendingGroup, RolloutCounters, Trajectory
from areal_core.rl.fleet import Fleet
from areal_core.rl.messages import GeneratorReport
from areal_core.rl.requests import RequestBook
from areal_core.rl.staleness import StalenessGate
from areal_core.rl.workflow import SingleTurnWorkflow
from areal_core.tasks import Problem

__all__ = ["Rollout"]

_MAX_BAD_PROBLEMS_IN_A_ROW = 1000
_MAX_DROPPED_GROUPS_IN_A_ROW = 100


class Rollout:
    """Samples ahead of the trainer, as far as the staleness gate allows.

    Args:
        config: group and batch size, staleness bounds.
        workflow: makes prompts of problems.
        problem: the problem of an index; a function of the index alone, so that a resumed run repeats it.
        fleet: the generator processes; the rollout thread is their only user from `start` on.
        greedy: whether every group needs a greedy response too, as a baseline.
        on_report: called (in the rollout thread) with index and report of a generator, for counters and traces.
        on_event: called (in the rollout thread) with kind and text of what a person should see.
    """

    def __init__(
        self,
        config: RolloutConfig,
        workflow: SingleTurnWorkflow,
        problem: Callable[[int], Problem],
        fleet: Fleet,
        *,
        on_report: Callable[[int, GeneratorReport], None],
        on_event: Callable[[str, str], None],
        greedy: bool = False,
    ) -> None:
        self.config = config
        self._greedy = greedy
        self.counters = RolloutCounters()
        self._workflow = workflow
        self._problem = problem
        self._fleet = fleet
        self._on_report = on_report
        self._on_event = on_event
        self._gate = StalenessGate(config.batch_groups, config.eta, config.batches_ahead)
        self._version = 0
        self._next_problem = 0
        self._next_group = 0
        self._resample: list[int] = []  # problems to sample again before new ones
        self._in_flight: dict[int, PendingGroup] = {}
        self._ready: dict[int, PendingGroup] = {}
        self._requests = RequestBook()
        self._condition = threading.Condition()
        self._wake_receiver, self._wake_sender = Pipe(duplex=False)
        self._verifier_error = ""
        self._dropped_in_a_row = 0
        self._known_bad: set[str] = set()
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._pump, name="rollout", daemon=True)

    def start(self, version: int) -> None:
        """Begin to sample; `version` is the one published to the generators."""
        self._version = version
        self._fleet.submit(self._requests.for_groups(self._in_flight.values()))  # of a resumed run
        self._thread.start()

    def stop(self) -> None:
        """Stop the generators and the thread; idempotent."""
        if not self._stopping:
            self._stopping = True
            self._wake()
            if self._thread.is_alive():
                self._thread.join()
            self._fleet.stop()

    def set_version(self, version: int) -> None:
        """Say that `version` has been published: the gate opens further."""
        with self._condition:
            self._version = version
        self._wake()

    def next_batch(self, version: int, interrupted: Callable[[], bool] = lambda: False) -> list[Group] | None:
        """The oldest B ready groups, when they make a batch that keeps every deadline.

        Returns:
            the groups in order of admission; None when `interrupted()` turned true while waiting.

        Raises:
            ArealError: the rollout thread failed; the cause is chained.
        """
        with self._condition:
            while not self._makes_batch(version):
                if interrupted():
                    return None
                if self._failure is not None:
                    raise ArealError(f"rollout failed: {self._failure}") from self._failure
                self._condition.wait(timeout=0.2)
            taken = sorted(self._ready)[: self.config.batch_groups]
            groups = [self._ready.pop(group_id).finished() for group_id in taken]
        self._wake()
        return groups

    def resample(self, group: Group) -> None:
        """Sample the prompt of a dropped group again (on_stale: resubmit); call before the next `set_version`."""
        with self._condition:
            self._resample.append(group.problem_index)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs so that no sample is lost or used twice: cursor, gate, and every pending group."""
        with self._condition:
            return {
                "next_problem": self._next_problem,
                "next_group": self._next_group,
                "next_request": self._requests.next_id,
                "resample": list(self._resample),
                "counters": vars(self.counters).copy(),
                "pending": [group.state_dict() for group in (*self._ready.values(), *self._in_flight.values())],
            }

    def load_state_dict(self, state: dict[str, Any], version: int) -> None:
        """Continue from `state_dict` at `version`; call before `start`.

        Missing samples of pending groups are requested again, under new request ids: an id also seeds its sampling, and
        an old one would draw the siblings that are there already.
        """
        # Of every version so far B groups were consumed; with another B than before, the gate must not count the old.
        self._gate.submitted = self.config.batch_groups * version + len(state["pending"])
        self._next_problem = state["next_problem"]
        self._next_group = state["next_group"]
        self._requests.next_id = state["next_request"]
        self._resample = list(state["resample"])
        self.counters = RolloutCounters(**state["counters"])
        for row in state["pending"]:
            index = row["problem_index"]
            problem = self._problem(index)
            group = self._group(row["group_id"], index, problem, self._workflow.prompt_ids(problem), row["admitted_at"])
            group.load_samples(row)
            (self._ready if group.complete else self._in_flight)[group.group_id] = group

    def _makes_batch(self, version: int) -> bool:
        ready = [group.admitted_at for group in self._ready.values()]
        return self._gate.makes_batch(ready, [group.admitted_at for group in self._in_flight.values()], version)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_sender.send_bytes(b"\0")

    # ---- the rollout thread ----

    def _pump(self) -> None:
        try:
            while not self._stopping:
                with self._condition:
                    self._admit()
                for index, how, lost in self._fleet.poll(0.2, self._wake_receiver, self._receive):
                    self._requeue(index, how, lost)
        except BaseException as error:  # handed to the trainer, which is waiting for a batch
            with self._condition:
                self._failure = error
                self._condition.notify_all()

    def _admit(self) -> None:
        admitted = []
        while self._gate.can_submit(self._version):
            index, problem, prompt_ids = self._next_usable_problem()
            group = self._group(self._next_group, index, problem, prompt_ids, self._version)
            self._next_group += 1
            self._in_flight[group.group_id] = group
            self._gate.submit()
            admitted.append(group)
        self._fleet.submit(self._requests.for_groups(admitted))

    def _group(
        self, group_id: int, index: int, problem: Problem, prompt_ids: npt.NDArray[np.int32], admitted_at: int
    ) -> PendingGroup:
        size = self.config.group_size
        return PendingGroup(group_id, problem, index, prompt_ids, admitted_at, size, wants_greedy=self._greedy)

    def _next_usable_problem(self) -> tuple[int, Problem, npt.NDArray[np.int32]]:
        for _ in range(_MAX_BAD_PROBLEMS_IN_A_ROW):
            if self._resample:
                index = self._resample.pop(0)
            else:
                index = self._next_problem
                self._next_problem += 1
            problem = self._problem(index)
            try:
                return index, problem, self._workflow.prompt_ids(problem)
            except DataError as error:
                self.counters.bad_problems += 1
                if problem.problem_id not in self._known_bad:  # a file is read over and over
                    self._known_bad.add(problem.problem_id)
                    self._on_event("excluded_problem", str(error))
        raise DataError(f"task: {_MAX_BAD_PROBLEMS_IN_A_ROW} unusable problems in a row")

    def _receive(self, index: int, report: GeneratorReport) -> None:
        if report.verifier_error and not self._verifier_error:
            self._on_event("verifier_failed", f"{report.verifier_error} (later failures are counted, not shown)")
        self._verifier_error = report.verifier_error or self._verifier_error
        if report.samples is not None:
            with self._condition:
                for sample, reward in report.samples:
                    self._accept(sample, reward)
                self._condition.notify_all()
        self._on_report(index, report)

    def _accept(self, sample: GeneratedSample, reward: float) -> None:
        request = self._requests.received(sample.request_id)
        group = self._in_flight[request.group_id]
        index = request.sample_indices[sample.sample_index]
        trajectory = Trajectory(
            prompt_ids=group.prompt_ids,
            response_ids=sample.token_ids,
            logprobs=sample.logprobs,
            versions=sample.versions,
            finish_reason=sample.finish_reason,
            reward=reward,
            group_id=request.group_id,
            sample_index=index,
        )
        if request.greedy:
            group.greedy = trajectory
        else:
            group.samples[index] = trajectory
        self._finish(group)

    def _finish(self, group: PendingGroup) -> None:
        if not group.complete:
            return
        del self._in_flight[group.group_id]
        failed = sum(t.failed for t in group.samples.values())
        self.counters.failed_samples += failed
        no_baseline = group.greedy is not None and group.greedy.failed
        if failed == group.size or no_baseline:  # nothing to learn from: another prompt takes its place
            self.counters.dropped_groups += 1
            self._dropped_in_a_row += 1
            self._gate.withdraw()
            what = "the greedy response" if no_baseline else "every sample"
            self._on_event("dropped_group", f"problem {group.problem.problem_id}: {what} failed its verifier")
            if self._dropped_in_a_row >= _MAX_DROPPED_GROUPS_IN_A_ROW:
                raise ArealError(f"{what} of {self._dropped_in_a_row} groups in a row failed: {self._verifier_error}")
        else:
            self._dropped_in_a_row = 0
            self._ready[group.group_id] = group

    def _requeue(self, index: int, how: str, lost: list[int]) -> None:
        with self._condition:
            requests = self._requests.again(lost, self._in_flight)
            missing = sum(request.n for request in requests)
            self.counters.requeued_samples += missing
            self.counters.generator_restarts += 1
            self._fleet.submit(requests)
        self._on_event("generator_restart", f"generator {index} {how}; {missing} responses sampled again")
