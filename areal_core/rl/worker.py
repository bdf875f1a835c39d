"""The generator process: an engine, the weights it reads from the version store, and the verifier of its responses.

It holds no state that the trainer process could not rebuild: when it dies, its prompts are sampled again elsewhere.

    requests (pipe) -> engine -> reward (here, or in a pool) -> reports (pipe)
                        ^
                        +-- version store, looked at between decode steps
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

import torch

from areal_core.generate.embedded import EmbeddedEngine
from areal_core.generate.engine import Engine, GeneratedSample, GenerateRequest, SamplingParams
from areal_core.model import DecoderConfig, Tokenizer
from areal_core.reshard import VersionStore
from areal_core.rl.config import GenerateConfig, RolloutConfig, TaskConfig
from areal_core.rl.messages import GeneratorReport, PromptRequest, SampleBatch, Stop, VersionLoad
from areal_core.rl.reward_pool import RewardPool
from areal_core.rl.workflow import SingleTurnWorkflow
from areal_core.tasks import Problem, get_task
from areal_core.telemetry import SpanRecorder, now_us

__all__ = ["GeneratorSpec", "generator_main"]

_POOL_WAIT_S = 0.01  # between looks at the requests while there is nothing to do but to wait for rewards
_REPORT_INTERVAL_S = 0.25  # a report at least this often while alive, so that the trainer sees a stall


@dataclass(frozen=True)
class GeneratorSpec:
    """Everything a generator process needs to start, besides the weights."""

    index: int
    tokenizer: Tokenizer
    model_config: DecoderConfig
    task: TaskConfig
    generate: GenerateConfig
    rollout: RolloutConfig
    max_slots: int
    max_context: int
    seed: int


def generator_main(spec: GeneratorSpec, store: VersionStore, connection: Connection) -> None:
    """Entry point of the process: serve requests until told to stop or the trainer process is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole process group; the trainer decides
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(spec.generate.threads)
    try:
        with store, Generator(spec, store, connection) as generator:
            generator.run()
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(GeneratorReport(version=-1, error=f"{type(error).__name__}: {error}"))
        raise


class Generator:
    """The loop of a generator process."""

    def __init__(self, spec: GeneratorSpec, store: VersionStore, connection: Connection) -> None:
        self.spec = spec
        self.store = store
        self.connection = connection
        self.engine: Engine = EmbeddedEngine(
            spec.model_config, max_slots=spec.max_slots, max_context=spec.max_context, threads=spec.generate.threads
        )
        self.workflow = SingleTurnWorkflow(
            get_task(spec.task.name, **spec.task.options),
            spec.tokenizer,
            spec.rollout,
            max_context=spec.max_context,
            max_new_tokens=spec.generate.max_new_tokens,
        )
        self.sampling = SamplingParams(
            max_new_tokens=spec.generate.max_new_tokens,
            temperature=spec.generate.temperature,
            top_p=spec.generate.top_p,
            top_k=spec.generate.top_k,
            stop_token_ids=spec.model_config.eos_token_ids,
            seed=spec.seed,
        )
        self.greedy = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0)
        self.pool: RewardPool | None = None
        if spec.rollout.reward_workers:
            self.pool = RewardPool(
                partial(get_task, spec.task.name, **spec.task.options),
                workers=spec.rollout.reward_workers,
                timeout_s=spec.rollout.reward_timeout_s,
            )
        self._judging: dict[int, tuple[Problem, GeneratedSample]] = {}  # by ticket of the pool
        self._next_ticket = 0
        self.problems: dict[int, tuple[Problem, int]] = {}  # request -> its problem, samples still to come
        self.activity = _Activity()
        self.counters = dict.fromkeys(("interrupted", "recomputed_tokens", "weight_updates", "verify_s"), 0.0)
        self._loads: list[VersionLoad] = []  # since the last report
        self._last_report = 0.0
        # A thread empties the pipe: the trainer's sends can then never wait for a generator that is itself sending.
        self._inbox: queue.SimpleQueue[list[PromptRequest] | Stop] = queue.SimpleQueue()
        threading.Thread(target=self._read_pipe, name="requests", daemon=True).start()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.close()

    def run(self) -> None:
        """Receive, update weights, decode, report; returns on `Stop` or when the trainer's end of the pipe closes."""
        try:
            self.store.wait(0, timeout=60.0)
            while self._receive():
                self._update_weights()
                finished, rewards = self._reward(self._decode())
                if finished or time.monotonic() - self._last_report > _REPORT_INTERVAL_S:
                    self._send(SampleBatch.of(finished, rewards) if finished else None)
        except (BrokenPipeError, ConnectionResetError):
            return  # the trainer process is gone

    def _read_pipe(self) -> None:
        try:
            while True:
                self._inbox.put(self.connection.recv())
        except (EOFError, OSError):
            self._inbox.put(Stop())  # the trainer process is gone

    def _receive(self) -> bool:
        """Take the requests that have come, waiting a moment when there is nothing to decode; False to stop."""
        while not self._inbox.empty() or not (self._busy or self._judging):
            if self._inbox.empty():
                self.activity.enter("idle")
            try:
                message = self._inbox.get(timeout=_REPORT_INTERVAL_S)
            except queue.Empty:
                return True
            if isinstance(message, Stop):
                return False
            for request in message:
                self.problems[request.request_id] = (request.problem, request.n)
                sampling = self.greedy if request.greedy else self.sampling
                self.engine.submit(GenerateRequest(request.request_id, request.prompt_ids, request.n, sampling))
        return True

    @property
    def _busy(self) -> bool:
        return self.engine.num_active + self.engine.num_waiting > 0

    def _update_weights(self) -> None:
        """Load a newer version at this token boundary.

        The look comes after the requests were received and before they are decoded, and the trainer publishes before
        it opens the gate: so the first token of a request is never older than the version at its admission.
        """
        if self.store.version() == self.engine.version:
            return
        first = self.engine.version < 0
        self.activity.enter("weight_update")
        with self.store.pin() as snapshot:
            stats = self.engine.load_weights(snapshot.tensors, snapshot.version, on_update=self.spec.generate.on_update)
        if not first:
            self._loads.append(VersionLoad(snapshot.version, time.monotonic(), stats.seconds))
        self.counters["weight_updates"] += 1
        self.counters["interrupted"] += stats.interrupted_samples
        self.counters["recomputed_tokens"] += stats.recomputed_tokens

    def _decode(self) -> list[GeneratedSample]:
        if not self._busy:
            return []
        self.activity.enter("generate")
        return self.engine.decode(self.spec.generate.steps_per_poll)

    def _reward(self, finished: list[GeneratedSample]) -> tuple[list[GeneratedSample], list[float]]:
        """Responses that have their rewards: these, or with a pool those that it has judged meanwhile."""
        if self.pool is not None:
            return self._reward_in(self.pool, finished)
        rewards = []
        for sample in finished:
            start = time.monotonic()
            rewards.append(self.workflow.reward(self._problem_of(sample), sample))
            self.counters["verify_s"] += time.monotonic() - start
            self._stay_alive()
        return finished, rewards

    def _reward_in(
        self, pool: RewardPool, finished: list[GeneratedSample]
    ) -> tuple[list[GeneratedSample], list[float]]:
        samples, rewards = [], []

        def collect(wait_s: float) -> None:
            for ticket, reward, error in pool.poll(wait_s):
                problem, sample = self._judging.pop(ticket)
                samples.append(sample)
                rewards.append(reward)
                if error:
                    self.workflow.last_error = f"problem {problem.problem_id}: {error}"

        for sample in finished:
            problem = self._problem_of(sample)
            if self.workflow.is_penalised(sample):
                samples.append(sample)
                rewards.append(0.0)
                continue
            while pool.full:  # decoding waits for verifiers that cannot keep up at all
                collect(_POOL_WAIT_S)
                self._stay_alive()
            self._judging[self._next_ticket] = (problem, sample)
            pool.submit(self._next_ticket, problem, self.workflow.response_text(sample))
            self._next_ticket += 1
        if not self._busy:
            self.activity.enter("idle")
        collect(0.0 if self._busy else _POOL_WAIT_S)
        self.counters["verify_s"] = pool.counters["verify_s"]
        return samples, rewards

    def _stay_alive(self) -> None:
        """Slow verifiers are no stall."""
        if time.monotonic() - self._last_report > _REPORT_INTERVAL_S:
            self._send(None)

    def _send(self, samples: SampleBatch | None) -> None:
        stats = self.engine.stats()
        loads, self._loads = self._loads, []
        self.connection.send(
            GeneratorReport(
                version=self.engine.version,
                samples=samples,
                counters={
                    **self.counters,
                    "generated_tokens": stats.generated_tokens,
                    "prefill_tokens": stats.prefill_tokens,
                    **self.activity.seconds(),
                },
                loads=loads,
                spans=self.activity.spans.drain(),
                verifier_error=self.workflow.last_error,
            )
        )
        self._last_report = time.monotonic()

    def _problem_of(self, sample: GeneratedSample) -> Problem:
        problem, left = self.problems.pop(sample.request_id)
        if left > 1:
            self.problems[sample.request_id] = (problem, left - 1)
        return problem


class _Activity:
    """What the process is doing, as spans for the trace and as seconds by kind."""

    def __init__(self) -> None:
        self._kind = "start"
        self._since_us = now_us()
        self.spans = SpanRecorder()
        self._us: dict[str, int] = {"generate": 0, "weight_update": 0, "idle": 0}

    def enter(self, kind: str) -> None:
        if kind != self._kind and not (self._kind == "start" and kind == "idle"):  # idle counts from the first request
            self._close(kind)

    def seconds(self) -> dict[str, float]:
        now = now_us()
        running = {self._kind: now - self._since_us}
        return {f"{kind}_s": (us + running.get(kind, 0)) / 1e6 for kind, us in self._us.items()}

    def _close(self, next_kind: str) -> None:
        now = now_us()
        if self._kind in self._us:
            self._us[self._kind] += now - self._since_us
            self.spans.add("engine", self._kind, self._since_us, now - self._since_us)
        self._kind, self._since_us = next_kind, now
