"""The generator processes: started, watched, and started again when they die."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from areal_core.errors import GeneratorError
from areal_core.reshard import VersionStore
from areal_core.rl.messages import GeneratorReport, PromptRequest, Stop
from areal_core.rl.worker import GeneratorSpec, generator_main

__all__ = ["Fleet"]

_LONGEST_POLL_S = 5.0  # between two polls of a process that runs
_IMPORT_FACTOR = 4  # a process that has not reported yet is importing: it may be silent longer


@dataclass(eq=False)
class _Generator:
    """One process, the pipe to it, and the requests it has not finished."""

    spec: GeneratorSpec
    process: BaseProcess
    connection: Connection
    last_sign_s: float
    reported: bool = False
    error: str = ""  # what it said before it died
    assigned: dict[int, int] = field(default_factory=dict)  # request id -> samples still to come
    # A thread sends: a generator that does not read must not hold up the one who notices that it hangs.
    outbox: queue.SimpleQueue[list[PromptRequest] | Stop] = field(default_factory=queue.SimpleQueue)

    def send_outbox(self) -> None:
        """Send until `Stop` has gone out or the process is gone."""
        message: list[PromptRequest] | Stop = []
        with contextlib.suppress(OSError):
            while not isinstance(message, Stop):
                message = self.outbox.get()
                self.connection.send(message)


class Fleet:
    """Owns the generator processes. One thread uses it.

    Args:
        specs: one per process.
        store: where they read the weights; each process attaches to it.
        max_restarts: deaths tolerated over the run.
        stall_timeout_s: silence after which a process counts as dead and is killed; four times that before its first
            report.
    """

    def __init__(
        self, specs: Sequence[GeneratorSpec], store: VersionStore, *, max_restarts: int, stall_timeout_s: float
    ) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._store = store
        self._max_restarts = max_restarts
        self._stall_timeout_s = stall_timeout_s
        self.restarts = 0
        self._last_poll_s = time.monotonic()
        self._generators = [self._start(spec) for spec in specs]

    @property
    def pids(self) -> list[int]:
        """Process ids, in order of index."""
        return [g.process.pid or -1 for g in self._generators]

    def submit(self, requests: Sequence[PromptRequest]) -> None:
        """Spread requests over the generators, each to the one with the fewest samples to come; one message each."""
        parcels: dict[int, list[PromptRequest]] = {}
        load = [sum(g.assigned.values()) for g in self._generators]
        for request in requests:
            index = load.index(min(load))
            load[index] += request.n
            self._generators[index].assigned[request.request_id] = request.n
            parcels.setdefault(index, []).append(request)
        for index, parcel in parcels.items():
            self._generators[index].outbox.put(parcel)

    def poll(
        self, timeout_s: float, wake: Connection, on_report: Callable[[int, GeneratorReport], None]
    ) -> list[tuple[int, str, list[int]]]:
        """Wait for messages, a death, or a byte on `wake`; hand over reports as they come.

        Returns:
            the deaths: (index, how, request ids it left unfinished). Each dead process has been replaced.

        Raises:
            GeneratorError: more than max_restarts deaths.
        """
        self._forgive_a_pause()
        by_handle = {handle: g for g in self._generators for handle in (g.connection, g.process.sentinel)}
        for handle in wait([*by_handle, wake], timeout_s):
            if handle is wake:
                wake.recv_bytes()
            elif handle in by_handle and isinstance(handle, Connection):
                self._receive(by_handle[handle], on_report)
        deaths = []
        for index, generator in enumerate(self._generators):
            how = self._cause_of_death(generator)
            if how is not None:
                self._receive(generator, on_report)  # what it sent before it died
                how += f" ({generator.error})" if generator.error else ""
                deaths.append((index, how, list(generator.assigned)))
                self._generators[index] = self._replace(index, generator, how)
        return deaths

    def stop(self) -> None:
        """Ask all to leave, and kill those that do not within a few seconds."""
        for generator in self._generators:
            generator.outbox.put(Stop())
        deadline = time.monotonic() + 5.0
        for generator in self._generators:
            generator.process.join(max(0.0, deadline - time.monotonic()))
            if generator.process.is_alive():
                generator.process.kill()
                generator.process.join()
            generator.connection.close()

    def _start(self, spec: GeneratorSpec) -> _Generator:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=generator_main,
            args=(spec, self._store, theirs),
            name=f"generator-{spec.index}",
            daemon=True,
        )
        process.start()
        theirs.close()
        generator = _Generator(spec, process, ours, time.monotonic())
        threading.Thread(target=generator.send_outbox, name=f"requests-{spec.index}", daemon=True).start()
        return generator

    def _receive(self, generator: _Generator, on_report: Callable[[int, GeneratorReport], None]) -> None:
        while True:
            try:
                if not generator.connection.poll(0):
                    return
                report: GeneratorReport = generator.connection.recv()
            except (EOFError, OSError):
                return  # closed, perhaps in the middle of a message: the sentinel says the rest
            generator.last_sign_s, generator.reported = time.monotonic(), True
            generator.error = report.error
            for request_id in report.samples.request_ids if report.samples is not None else ():
                generator.assigned[request_id] -= 1
                if generator.assigned[request_id] == 0:
                    del generator.assigned[request_id]
            on_report(generator.spec.index, report)

    def _forgive_a_pause(self) -> None:
        """When this process itself stood still (Ctrl-Z), silence meanwhile is no sign of a stall."""
        now = time.monotonic()
        pause = now - self._last_poll_s
        if pause > _LONGEST_POLL_S:
            for generator in self._generators:
                generator.last_sign_s += pause
        self._last_poll_s = now

    def _cause_of_death(self, generator: _Generator) -> str | None:
        if not generator.process.is_alive():
            return f"exited with code {generator.process.exitcode}"
        silence = time.monotonic() - generator.last_sign_s
        if silence > self._stall_timeout_s * (1 if generator.reported else _IMPORT_FACTOR):
            generator.process.kill()
            return f"gave no sign of life for {silence:.0f} s"
        return None

    def _replace(self, index: int, dead: _Generator, how: str) -> _Generator:
        dead.process.join()
        dead.outbox.put(Stop())  # ends its thread
        dead.connection.close()
        self.restarts += 1
        if self.restarts > self._max_restarts:
            raise GeneratorError(
                f"generator {index} {how}; {self.restarts} deaths exceed generate.max_restarts = {self._max_restarts}"
            )
        return self._start(dead.spec)
