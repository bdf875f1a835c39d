"""A fleet without processes: the test decides what finishes, what dies, and when."""

from __future__ import annotations

import queue

import numpy as np

from areal_core.generate.engine import GeneratedSample
from areal_core.rl.config import RolloutConfig
from areal_core.rl.messages import GeneratorReport, PromptRequest, SampleBatch
from areal_core.rl.rollout import Rollout
from areal_core.tasks import Problem


class FakeFleet:
    def __init__(self) -> None:
        self.requests: queue.Queue[PromptRequest] = queue.Queue()
        self.actions: queue.Queue = queue.Queue()
        self.stopped = False

    def submit(self, requests: list[PromptRequest]) -> None:
        for request in requests:
            self.requests.put(request)

    def poll(self, timeout_s, wake, on_report):
        while wake.poll(0):
            wake.recv_bytes()
        try:
            action = self.actions.get(timeout=0.01)
        except queue.Empty:
            return []
        return action(on_report) or []

    def stop(self) -> None:
        self.stopped = True

    # ---- what the test says ----

    def next_request(self) -> PromptRequest:
        return self.requests.get(timeout=10)

    def finish(self, request, indices=None, *, version=0, rewards=None, tokens=3, verifier_error="") -> None:
        indices = range(request.n) if indices is None else indices
        samples = [sample_of(request.request_id, k, version, tokens) for k in indices]
        rewards = [float(k % 2) for k in indices] if rewards is None else rewards
        report = GeneratorReport(version, SampleBatch.of(samples, rewards), verifier_error=verifier_error)
        self.actions.put(lambda on_report: on_report(0, report))

    def die(self, lost: list[int]) -> None:
        self.actions.put(lambda on_report: [(0, "exited with code -9", lost)])

    def fail(self, error: BaseException) -> None:
        def raise_it(on_report):
            raise error

        self.actions.put(raise_it)


def sample_of(request_id: int, index: int, version: int, tokens: int = 3) -> GeneratedSample:
    return GeneratedSample(
        request_id=request_id,
        sample_index=index,
        token_ids=np.full(tokens, 10 + index, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, dtype=np.float32),
        versions=np.full(tokens, version, dtype=np.int64),
        finish_reason="stop",
    )


class FakeWorkflow:
    """Prompts are their text's characters; problems listed in `bad` cannot be used."""

    def __init__(self, bad=()) -> None:
        self.bad = set(bad)

    def prompt_ids(self, problem: Problem):
        from areal_core.errors import DataError

        if problem.problem_id in self.bad:
            raise DataError(f"problem {problem.problem_id}: empty")
        return np.frombuffer(problem.prompt.encode(), dtype=np.uint8).astype(np.int32)


def problem_of(index: int) -> Problem:
    return Problem(prompt=f"p{index}", answer=str(index), problem_id=str(index))


def make_rollout(fleet, *, batch=2, group=2, eta=0.0, depth=1.0, bad=(), events=None, greedy=False) -> Rollout:
    config = RolloutConfig(batch_groups=batch, group_size=group, eta=eta, pipeline_depth=depth)
    events = [] if events is None else events
    return Rollout(
        config,
        FakeWorkflow(bad),
        problem_of,
        fleet,
        on_report=lambda index, report: None,
        on_event=lambda kind, text: events.append((kind, text)),
        greedy=greedy,
    )
