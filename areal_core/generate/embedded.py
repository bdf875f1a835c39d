"""The embedded engine: a CPU decode engine in C++, in the process that calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from areal_core import _C
from areal_core.generate.engine import (
    EngineStats,
    FinishReason,
    GeneratedSample,
    GenerateRequest,
    OnUpdate,
    SamplingParams,
    UnfinishedSample,
    UpdateStats,
)

if TYPE_CHECKING:
    from areal_core.model import DecoderConfig

_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class EmbeddedEngine:
    """Continuous batching with a paged KV cache on the CPU, in fp32; implements `Engine`.

    A sample's tokens and logprobs are a function of the weights, its prompt, its sampling parameters and its request
    id, bit for bit: what else is in the batch, the number of slots and threads, and whether the sample was resumed make
    no difference. (Another instruction set rounds differently.) Arithmetic and cache are fp32; weights given in
    bfloat16 stay in bfloat16, which is exact.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        max_slots: int = 256,
        max_context: int | None = None,
        prefill_tokens: int = 256,
        threads: int = 1,
    ) -> None:
        """Allocate an engine; `load_weights` must follow before `decode`.

        max_slots: samples in flight.
        max_context: tokens of prompt and response together; None: the model's max_position_embeddings.
        prefill_tokens: prompt tokens that one step takes on beside the samples in flight.
        threads: threads of torch's pool to use, for models of millions of parameters on cores of their own: on cores
            that others use too, OpenMP's barriers wait for the slowest (OMP_WAIT_POLICY=passive softens it).
        Raises: ValueError for a shape the engine can't hold.
        """
        limit = config.max_position_embeddings
        context = limit if max_context is None else max_context
        if context > limit:
            raise ValueError(f"EmbeddedEngine: expected max_context <= {limit} of the model, got {context}")
        self._engine = _C.DecodeEngine(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            qkv_bias=config.qkv_bias,
            max_slots=max_slots,
            max_context=context,
            prefill_rows=prefill_tokens,
            threads=threads,
        )

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises: ValueError for a prompt that is empty or does not fit the context, a token outside the vocabulary,
            n < 1, or a request_id in use.
        """
        sampling = _to_native(request.sampling)
        self._engine.submit(request.request_id, _token_ids("prompt_ids", request.prompt_ids), request.n, sampling)

    def resume(self, sample: UnfinishedSample) -> None:
        """Queue a sample that was begun earlier; it goes on from its last token.

        Several samples of one request can be resumed, with the same prompt and sampling parameters.
        Raises: ValueError as `submit` does, and for a response that is finished already or a sample_index in use.
        """
        self._engine.resume(
            sample.request_id,
            sample.sample_index,
            _token_ids("prompt_ids", sample.prompt_ids),
            _to_native(sample.sampling),
            _token_ids("token_ids", sample.token_ids),
            np.asarray(sample.logprobs, np.float32),
            np.asarray(sample.versions, np.int64),
        )

    def abort(self, request_id: int) -> int:
        """Forget a request; returns the number of its samples that had not finished (0 for an unknown id)."""
        return int(self._engine.abort(request_id))

    def unfinished(self) -> list[UnfinishedSample]:
        """Return a copy of every sample in flight or waiting. They go on; what is returned can be resumed elsewhere."""
        return [
            UnfinishedSample(request_id, index, prompt, _from_native(sampling), tokens, logprobs, versions)
            for request_id, index, prompt, sampling, tokens, logprobs, versions in self._engine.unfinished()
        ]

    def decode(self, max_steps: int, watch: npt.NDArray[np.int64] | None = None) -> list[GeneratedSample]:
        """Run up to max_steps batched steps without the GIL; returns the samples that finished.

        Returns early when nothing is left to do, or at a token boundary once watch (int64 [1], see `Engine`) exceeds
        `version`. The arrays of the samples are views of one allocation per call.
        Raises: ValueError before `load_weights`, and when the model's logits are not finite (no sample is changed).
        """
        request_id, sample_index, reason, cu_lengths, tokens, logprobs, versions = self._engine.decode(max_steps, watch)
        bounds = cu_lengths.tolist()
        return [
            GeneratedSample(
                request, index, tokens[begin:end], logprobs[begin:end], versions[begin:end], _FINISH_REASONS[why]
            )
            for request, index, why, begin, end in zip(
                request_id.tolist(), sample_index.tolist(), reason.tolist(), bounds[:-1], bounds[1:], strict=True
            )
        ]

    def load_weights(
        self, weights: Mapping[str, torch.Tensor], version: int, on_update: OnUpdate = "recompute"
    ) -> UpdateStats:
        """Switch to new weights at a token boundary; the tensors are copied.

        weights: float32 or bfloat16 CPU tensors by Hugging Face name; rotary_emb.inv_freq, and lm_head.weight beside
            tied embeddings, may be there and are unused.
        version: stamped on the tokens these weights produce.
        on_update: for the samples in flight, "recompute" their KV cache under the new weights in one pass (what follows
            is what a fresh engine would generate from there), "keep" it and go on with the new weights, or "finish" on
            the old ones, which are kept until then; samples that start later use the new weights in any case.
        Raises: ValueError naming a tensor that is missing, unknown, misshapen or of another dtype; nothing has changed
            then.
        """
        tensors = [(name, _cpu_contiguous(name, tensor)) for name, tensor in weights.items()]
        described = [(name, t.data_ptr(), _DTYPES.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in tensors]
        return UpdateStats(*self._engine.load_weights(described, version, on_update))

    @property
    def version(self) -> int:
        """The version of the loaded weights, -1 before the first."""
        return int(self._engine.version)

    @property
    def num_active(self) -> int:
        """Samples in flight."""
        return int(self._engine.num_active)

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a slot."""
        return int(self._engine.num_waiting)

    def stats(self) -> EngineStats:
        """Totals since the engine was made."""
        return EngineStats(**self._engine.stats())


def _cpu_contiguous(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        raise ValueError(f"load_weights: expected {name} on the CPU, got {tensor.device}")
    return tensor.detach().contiguous()


def _token_ids(name: str, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size > 0 and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"submit: expected {name} as int32 [P], got {array.dtype} {list(array.shape)}")
    if array.size > 0 and (array.min() < -(2**31) or array.max() >= 2**31):
        raise ValueError(f"submit: expected {name} that fit int32, got up to {array.max()}")
    return array.astype(np.int32, copy=False)


def _to_native(sampling: SamplingParams) -> _C.DecodeSampling:
    return _C.DecodeSampling(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed,
    )


def _from_native(sampling: _C.DecodeSampling) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=tuple(sampling.stop_token_ids),
        seed=sampling.seed,
    )
