"""What a generator is to the rest of the core: requests in, samples with per-token logprobs and versions out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

OnUpdate = Literal["recompute", "keep", "finish"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    max_new_tokens: tokens a response may have, the stop token included.
    temperature: softmax temperature; 0 is greedy.
    top_p, top_k: restrict the distribution to its k likeliest tokens (0: all), then to the fewest of those whose share
        reaches p. Ties go to the lower token id.
    stop_token_ids: a response ends with the first of these it draws.
    seed: with the request id, the sample index and the position it fixes every draw.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a parameter out of range."""
        if self.max_new_tokens < 1:
            raise ValueError(f"SamplingParams: expected max_new_tokens >= 1, got {self.max_new_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"SamplingParams: expected a finite temperature >= 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"SamplingParams: expected top_p in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"SamplingParams: expected top_k >= 0, got {self.top_k}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"SamplingParams: expected seed in [0, 2^64), got {self.seed}")


@dataclass(frozen=True, eq=False)
class GenerateRequest:
    """A prompt and how many samples of its continuation are wanted.

    request_id: chosen by the caller, unique among the requests in an engine.
    prompt_ids: int32 [P], P >= 1.
    n: samples; they share one computation of the prompt.
    """

    request_id: int
    prompt_ids: npt.NDArray[np.int32]
    n: int
    sampling: SamplingParams


@dataclass(frozen=True, eq=False)
class GeneratedSample:
    """A finished response of R tokens.

    token_ids: int32 [R], the stop token included.
    logprobs: float32 [R], ln of the probability each token was drawn with: softmax at the temperature, restricted to
        top_k and top_p and renormalised. For greedy tokens, of the softmax at temperature 1.
    versions: int64 [R], the version of the weights that produced each token.
    finish_reason: "stop" after a stop token, "length" at max_new_tokens or at the end of the context.
    """

    request_id: int
    sample_index: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    finish_reason: FinishReason


@dataclass(frozen=True, eq=False)
class UnfinishedSample:
    """A sample in flight or waiting, with its response so far; `resume` continues it, in this engine or another."""

    request_id: int
    sample_index: int
    prompt_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]


@dataclass(frozen=True)
class UpdateStats:
    """What a weight update did to the samples in flight, and how long generation stood still."""

    interrupted_samples: int
    recomputed_tokens: int
    seconds: float


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was made; busy_seconds is time spent in `decode`, kv_pages_used a count of now."""

    generated_tokens: int
    prefill_tokens: int
    recomputed_tokens: int
    finished_samples: int
    aborted_samples: int
    steps: int
    kv_pages_used: int
    busy_seconds: float


class Engine(Protocol):
    """A generator with interruptible samples.

    Methods may be called from several threads; they take turns, and a call waits for a `decode` in progress.
    """

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request. Raises ValueError for a prompt that is empty or too long, or a request_id in use."""

    def abort(self, request_id: int) -> int:
        """Forget a request; returns the number of its samples that had not finished (0 for an unknown id)."""

    def decode(self, max_steps: int, watch: npt.NDArray[np.int64] | None = None) -> list[GeneratedSample]:
        """Run up to max_steps batched steps, each a token for every sample in flight; returns those that finished.

        watch: int64 [1], a version counter that another thread or process may write: decode returns at the next
            token boundary once it exceeds `version`.
        """

    def load_weights(
        self, weights: Mapping[str, torch.Tensor], version: int, on_update: OnUpdate = "recompute"
    ) -> UpdateStats:
        """Switch to new weights at a token boundary.

        weights: tensors by Hugging Face name.
        on_update: for the samples in flight, "recompute" their KV cache under the new weights, "keep" it and go on
            with the new weights, or "finish" on the old ones.
        """

    @property
    def version(self) -> int:
        """The version of the loaded weights, -1 before the first."""

    @property
    def num_active(self) -> int:
        """Samples in flight."""

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a slot."""

    def stats(self) -> EngineStats:
        """Totals since the engine was made."""
