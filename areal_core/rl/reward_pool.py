"""Verifiers in processes of their own: what hangs, crashes or raises there costs one sample, and decoding goes on.

    submit(ticket, problem, text) -> queue -> worker processes -> poll() -> (ticket, reward or NaN, why)

A worker is one verifier behind a pipe. The kernel ends it at the deadline (SIGALRM, not handled), wherever it is: in C
code that holds the interpreter. It dies with the thread that made it; an idle one also leaves when its pipe closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from areal_core.errors import ArealError
from areal_core.tasks import Problem, Task

__all__ = ["Reward", "RewardPool", "serve"]

_START_S = 120.0  # to import and build the task, before a worker counts as dead
_GRACE_S = 2.0  # past the deadline, for a verifier that took the timer away
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
_MAX_FAILED_STARTS = 3
_PREFETCH_BYTES = 32_768  # a second job is sent ahead only if it fits the pipe: sending must not wait for a verifier


class Reward(NamedTuple):
    """What became of a ticket: its reward, NaN when the verifier failed, and why it did."""

    ticket: int
    value: float
    error: str = ""


class _Job(NamedTuple):
    ticket: int
    data: bytes


class _Worker:
    """A process and the jobs it has, at most two; it works on the first."""

    def __init__(self, hello: bytes) -> None:
        ours, theirs = socket.socketpair()
        fd = theirs.fileno()
        code = f"import sys; sys.path[:] = {sys.path!r}; from areal_core.rl.reward_pool import serve; "
        code += f"serve({fd}, {os.getpid()})"
        with theirs:
            self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[fd])
        self.connection = Connection(ours.detach())
        self.jobs: deque[_Job] = deque()
        self.ready = False
        self.error = ""  # why it could not start
        self.since_s = time.monotonic()  # start of the first job, as far as this side knows
        with contextlib.suppress(OSError):
            self.connection.send_bytes(hello)

    def takes(self, job: _Job) -> bool:
        return self.ready and (not self.jobs or (len(self.jobs) == 1 and len(job.data) <= _PREFETCH_BYTES))

    def give(self, job: _Job) -> None:
        if not self.jobs:
            self.since_s = time.monotonic()
        self.jobs.append(job)
        with contextlib.suppress(OSError):  # dead: the next look finds out
            self.connection.send_bytes(job.data)

    def end(self) -> int:
        """Make sure that it is gone; its exit code, negative for a signal."""
        self.connection.close()
        self.process.kill()  # no effect on one that has ended
        return self.process.wait()


class RewardPool:
    """A fixed number of worker processes. One thread makes and uses it; only `poll` waits for a verifier, when told to.

    Args:
        make_task: builds the task whose `verify` judges, in each worker; a function that pickles.
        workers: number of processes.
        timeout_s: seconds a verifier may take; then its process ends and another takes its place.
        capacity: tickets outstanding at most.

    Attributes:
        counters: totals: verified, raised, not_finite, timed_out, crashed, restarts, and verify_s, the seconds spent in
            verifiers that returned or raised.
    """

    def __init__(self, make_task: Callable[[], Task], *, workers: int, timeout_s: float, capacity: int = 4096) -> None:
        if workers < 1 or capacity < 1:
            raise ValueError(f"RewardPool: expected workers and capacity >= 1, got {workers} and {capacity}")
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"RewardPool: expected a finite timeout_s > 0, got {timeout_s}")
        self._hello = bytes(ForkingPickler.dumps((make_task, timeout_s)))
        self._timeout_s = timeout_s
        self._capacity = capacity
        self._waiting: deque[_Job] = deque()
        self._done: list[Reward] = []
        self._failed_starts = 0
        self.counters = dict.fromkeys(("verified", "raised", "not_finite", "timed_out", "crashed", "restarts"), 0.0)
        self.counters["verify_s"] = 0.0
        self._workers = [_Worker(self._hello) for _ in range(workers)]

    @property
    def outstanding(self) -> int:
        """Tickets submitted and not yet returned by `poll`."""
        return len(self._waiting) + len(self._done) + sum(len(w.jobs) for w in self._workers)

    @property
    def full(self) -> bool:
        """Whether `submit` would refuse."""
        return self.outstanding >= self._capacity

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def submit(self, ticket: int, problem: Problem, text: str) -> None:
        """Queue a response. Raises ValueError when the pool is full."""
        if self.full:
            raise ValueError(f"RewardPool: expected at most {self._capacity} tickets outstanding, got one more")
        self._waiting.append(_Job(ticket, bytes(ForkingPickler.dumps((problem, text)))))
        self._dispatch()

    def poll(self, timeout_s: float = 0.0) -> list[Reward]:
        """What has been judged since the last call, in no order; waits up to `timeout_s` for the first.

        Raises:
            ArealError: no worker can start; the text says why.
        """
        if not self._done and self.outstanding:
            ready = wait([worker.connection for worker in self._workers], timeout_s)
            for index, worker in enumerate(self._workers):
                gone = worker.connection in ready and not self._receive(worker)
                if gone or worker.process.poll() is not None or self._late(worker):
                    self._workers[index] = self._replace(worker)
            self._dispatch()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """End the workers at once; what is outstanding is forgotten. Idempotent."""
        for worker in self._workers:
            worker.end()
        self._workers = []
        self._waiting.clear()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _dispatch(self) -> None:
        for worker in sorted(self._workers, key=lambda w: len(w.jobs)):  # idle ones first
            while self._waiting and worker.takes(self._waiting[0]):
                worker.give(self._waiting.popleft())

    def _receive(self, worker: _Worker) -> bool:
        """Take what a worker has sent; False when its pipe has closed."""
        try:
            while worker.connection.poll(0):
                kind, value, seconds = worker.connection.recv()
                worker.since_s = time.monotonic()
                if kind == "failed":
                    worker.error = value
                elif kind == "ready":
                    worker.ready, self._failed_starts = True, 0
                else:
                    self.counters["verify_s"] += seconds
                    self._finish(worker.jobs.popleft().ticket, kind, value)
        except (EOFError, OSError):
            return False
        return True

    def _finish(self, ticket: int, kind: str, value: Any) -> None:
        if kind == "verified" and not math.isfinite(value):
            kind, value = "not_finite", f"expected a finite reward from the verifier, got {value}"
        self.counters[kind] += 1
        self._done.append(Reward(ticket, value) if kind == "verified" else Reward(ticket, math.nan, value))

    def _late(self, worker: _Worker) -> bool:
        allowed = self._timeout_s + _GRACE_S if worker.ready else _START_S
        return (bool(worker.jobs) or not worker.ready) and time.monotonic() - worker.since_s > allowed

    def _replace(self, worker: _Worker) -> _Worker:
        """Another one for a worker that is dead or late; the job it was at has failed, the next one is still to do."""
        self._receive(worker)  # what it sent before it died
        late = self._late(worker)
        code = worker.end()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise ArealError(f"reward worker: {worker.error or f'ended with code {code} before it was ready'}")
        elif worker.jobs:
            timed_out = late or code == -signal.SIGALRM
            took = f"the verifier gave no result within {self._timeout_s:g} s (rollout.reward_timeout_s)"
            ended = f"the verifier ended its process (exit code {code})"
            self._finish(worker.jobs.popleft().ticket, *(("timed_out", took) if timed_out else ("crashed", ended)))
        self._waiting.extendleft(reversed(worker.jobs))
        self.counters["restarts"] += 1
        return _Worker(self._hello)


def serve(fd: int, parent: int) -> None:
    """The life of a worker: build the task, then judge what comes, until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole process group; the pipe decides
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # for a verifier that takes the timer away
    if os.getppid() != parent:  # it was gone before
        return
    os.set_inheritable(fd, False)  # a verifier's own child processes must not keep the pipe open
    with contextlib.suppress(EOFError, OSError), Connection(fd) as connection:
        try:
            make_task, timeout_s = connection.recv()
            task = make_task()
        except Exception as error:
            connection.send(("failed", f"{type(error).__name__}: {error}", 0.0))
            return
        connection.send(("ready", None, 0.0))
        while True:
            problem, text = connection.recv()
            start = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            kind, value = _judge(task, problem, text)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send((kind, value, time.monotonic() - start))


def _judge(task: Task, problem: Problem, text: str) -> tuple[str, float | str]:
    try:
        return "verified", float(task.verify(problem, text))
    except BaseException as error:  # whatever it raises, SystemExit too, excludes this sample, and only it
        return "raised", f"the verifier raised {type(error).__name__}: {error}"[:1000]
