"""Workflows turn a problem into a prompt and a response into a reward. Single turn: one prompt, one response."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np
import numpy.typing as npt

from areal_core.errors import DataError
from areal_core.generate.engine import GeneratedSample
from areal_core.model import Tokenizer
from areal_core.rl.config import RolloutConfig
from areal_core.tasks import Problem, Task

__all__ = ["SingleTurnWorkflow"]


class SingleTurnWorkflow:
    """Prompt in, one response out, verified by the task.

    Args:
        task: where problems come from and what verifies a response.
        tokenizer: of the policy.
        config: reward timeout and the rule for truncated responses.
        max_context: tokens the policy can attend to.
        max_new_tokens: tokens reserved for the response.
    """

    def __init__(
        self, task: Task, tokenizer: Tokenizer, config: RolloutConfig, *, max_context: int, max_new_tokens: int
    ) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.config = config
        self.max_prompt_tokens = max_context - max_new_tokens
        self.last_error = ""

    def prompt_ids(self, problem: Problem) -> npt.NDArray[np.int32]:
        """Token ids int32 [P] of the prompt, with the tokens the tokenizer adds around a text (usually <bos>).

        Raises:
            DataError: the prompt is empty, or too long to leave room for max_new_tokens; the text names the problem.
        """
        try:
            ids = self.tokenizer.encode(problem.prompt, special=problem.special_tokens) if problem.prompt else []
        except ValueError as error:
            raise DataError(f"problem {problem.problem_id}: {error}") from None
        if not ids:
            raise DataError(f"problem {problem.problem_id}: expected a prompt of at least 1 token, got none")
        if len(ids) > self.max_prompt_tokens:
            raise DataError(
                f"problem {problem.problem_id}: expected a prompt of at most {self.max_prompt_tokens} tokens "
                f"(context minus generate.max_new_tokens), got {len(ids)}"
            )
        return np.asarray(ids, dtype=np.int32)

    def is_penalised(self, sample: GeneratedSample) -> bool:
        """Whether a response is worth 0 because it was cut, whatever it says."""
        return sample.finish_reason == "length" and self.config.truncated == "penalise"

    def response_text(self, sample: GeneratedSample) -> str:
        """What the verifier sees: the text up to the stop token, never the stop token itself."""
        ids = sample.token_ids[:-1] if sample.finish_reason == "stop" else sample.token_ids
        return self.tokenizer.decode(ids.tolist())

    def reward(self, problem: Problem, sample: GeneratedSample) -> float:
        """The verified reward of a response; NaN when the verifier raises or takes too long (`last_error` says why)."""
        if self.is_penalised(sample):
            return 0.0
        try:
            with _deadline(self.config.reward_timeout_s):
                reward = float(self.task.verify(problem, self.response_text(sample)))
        except (Exception, _VerifierTimeoutError) as error:  # whatever it raises excludes this sample, and only it
            self.last_error = f"problem {problem.problem_id}: the verifier raised {type(error).__name__}: {error}"
            return math.nan
        if not math.isfinite(reward):
            self.last_error = f"problem {problem.problem_id}: expected a finite reward from the verifier, got {reward}"
            return math.nan
        return reward


class _VerifierTimeoutError(BaseException):
    """No Exception, which a verifier might catch and take for a wrong answer."""


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Interrupt the block after `seconds`. Only the main thread can be interrupted; elsewhere it runs unbounded."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise _VerifierTimeoutError(f"no result within {seconds:g} s (rollout.reward_timeout_s)")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
