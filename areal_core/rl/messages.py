"""What the trainer process and its generator processes say to each other over a pipe.

Samples travel in batches of concatenated arrays, so that a message costs the same few microseconds however many tokens
it carries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from areal_core.generate.engine import GeneratedSample
from areal_core.tasks import Problem
from areal_core.telemetry import Span

__all__ = ["GeneratorReport", "PromptRequest", "SampleBatch", "Stop", "VersionLoad"]


@dataclass(frozen=True, eq=False)
class PromptRequest:
    """Sample `n` responses to one prompt; `greedy`: take the likeliest token each time instead of drawing it."""

    request_id: int
    problem: Problem
    prompt_ids: npt.NDArray[np.int32]
    n: int
    greedy: bool = False


@dataclass(frozen=True)
class Stop:
    """Leave the generator's loop; responses in flight are discarded."""


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """Finished responses, concatenated: response k owns the tokens [cu_tokens[k], cu_tokens[k+1])."""

    request_ids: list[int]
    sample_indices: list[int]
    finish_reasons: list[str]
    rewards: list[float]
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    cu_tokens: npt.NDArray[np.int64]

    @classmethod
    def of(cls, samples: Sequence[GeneratedSample], rewards: Sequence[float]) -> SampleBatch:
        """Concatenate samples and their rewards (NaN: the verifier failed)."""
        lengths = np.array([len(s.token_ids) for s in samples], dtype=np.int64)
        return cls(
            request_ids=[s.request_id for s in samples],
            sample_indices=[s.sample_index for s in samples],
            finish_reasons=[s.finish_reason for s in samples],
            rewards=list(rewards),
            token_ids=np.concatenate([s.token_ids for s in samples]),
            logprobs=np.concatenate([s.logprobs for s in samples]),
            versions=np.concatenate([s.versions for s in samples]),
            cu_tokens=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]),
        )

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[tuple[GeneratedSample, float]]:
        for k, reward in enumerate(self.rewards):
            tokens = slice(self.cu_tokens[k], self.cu_tokens[k + 1])
            sample = GeneratedSample(
                request_id=self.request_ids[k],
                sample_index=self.sample_indices[k],
                token_ids=self.token_ids[tokens],
                logprobs=self.logprobs[tokens],
                versions=self.versions[tokens],
                finish_reason=self.finish_reasons[k],  # type: ignore[arg-type]
            )
            yield sample, reward


class VersionLoad(NamedTuple):
    """A generator's change to a newer version."""

    version: int
    loaded_s: float  # when it was done: time.monotonic, a clock that all processes of a machine share
    pause_s: float  # how long generation stood still


@dataclass(frozen=True, eq=False)
class GeneratorReport:
    """One message of a generator: what finished since the last one, and how its time went.

    Attributes:
        version: version its engine has loaded.
        samples: finished responses, or None.
        counters: totals since the process started: generated_tokens, prefill_tokens, recomputed_tokens, interrupted,
            weight_updates, and the seconds generate_s (verify_s of them in verifiers), weight_update_s, idle_s.
        verifier_error: what the verifier last raised or returned instead of a number.
        error: what ends the process, in its last report.
        loads: versions loaded since the last report, the first one of the process left out: it replaces none.
        spans: trace spans (track, name, start_us, duration_us, args) that ended since the last report.
    """

    version: int
    samples: SampleBatch | None = None
    counters: dict[str, float] = field(default_factory=dict)
    loads: list[VersionLoad] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    verifier_error: str = ""
    error: str = ""
