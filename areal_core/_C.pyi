"""The native module; its torch ops are reached through `torch.ops.areal_core`.

Defined in csrc/bind, wrapped by the package, used by nobody else. Every broken contract raises `Error`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__version__: str
cuda_compiled: bool
cuda_archs: str
compiler: str

class Error(ValueError): ...

def best_isa() -> str: ...
def active_isa() -> str: ...
def set_active_isa(name: str, /) -> None: ...
def num_threads() -> int: ...
def has_loaded_symbol(soname: str, symbol: str) -> bool: ...

# -- packing.cpp -------------------------------------------------------------------------------------------------------

def allocate_microbatches(
    lengths: list[int], max_tokens: int, min_bins: int, multiple_of: int, method: str, oversized: str, too_few: str
) -> list[list[int]]: ...
def partition_balanced(
    lengths: list[int],
    bins: int,
    linear_cost: float,
    quadratic_cost: float,
    equal_size: bool,
    max_tokens: int | None,
) -> list[list[int]]: ...

# -- decode.cpp --------------------------------------------------------------------------------------------------------

class DecodeSampling:
    def __init__(
        self,
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        stop_token_ids: Sequence[int],
        seed: int,
    ) -> None: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def stop_token_ids(self) -> list[int]: ...
    @property
    def seed(self) -> int: ...

class DecodeEngine:
    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope_theta: float,
        rms_norm_eps: float,
        tie_word_embeddings: bool,
        qkv_bias: bool,
        max_slots: int,
        max_context: int,
        prefill_rows: int,
        threads: int,
    ) -> None: ...
    def submit(self, request_id: int, prompt_ids: ArrayLike, n: int, sampling: DecodeSampling, /) -> None: ...
    def resume(
        self,
        request_id: int,
        sample_index: int,
        prompt_ids: ArrayLike,
        sampling: DecodeSampling,
        token_ids: ArrayLike,
        logprobs: ArrayLike,
        versions: ArrayLike,
        /,
    ) -> None: ...
    def abort(self, request_id: int, /) -> int: ...
    # (request_id, sample_index, prompt_ids, sampling, token_ids, logprobs, versions) of each sample
    def unfinished(
        self,
    ) -> list[
        tuple[int, int, NDArray[np.int32], DecodeSampling, NDArray[np.int32], NDArray[np.float32], NDArray[np.int64]]
    ]: ...
    # (request_id, sample_index, reason, cu_lengths, token_ids, logprobs, versions) of the samples that finished
    def decode(
        self, max_steps: int, watch: NDArray[np.int64] | None, /
    ) -> tuple[
        NDArray[np.int64],
        NDArray[np.int32],
        NDArray[np.int32],
        NDArray[np.int64],
        NDArray[np.int32],
        NDArray[np.float32],
        NDArray[np.int64],
    ]: ...
    # tensors: (name, address, dtype, shape); returns (interrupted samples, recomputed tokens, seconds)
    def load_weights(
        self, tensors: list[tuple[str, int, str, tuple[int, ...]]], version: int, on_update: str, /
    ) -> tuple[int, int, float]: ...
    def stats(self) -> dict[str, Any]: ...  # keys: the fields of areal_core.generate.EngineStats
    @property
    def version(self) -> int: ...
    @property
    def num_active(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...

# -- reshard.cpp -------------------------------------------------------------------------------------------------------

class ArenaView:
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Pin:
    @property
    def version(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    def arena(self) -> ArenaView: ...
    @property
    def content_digest(self) -> int: ...
    def verify(self) -> None: ...
    def copy_to(self, addresses: Sequence[int]) -> None: ...
    def release(self) -> None: ...

class Publication:
    @property
    def epoch(self) -> int: ...
    def arena(self) -> ArenaView: ...
    def write(self, addresses: Sequence[int], first_chunk: int, end_chunk: int) -> None: ...
    def seal(self, tensors: Sequence[int]) -> None: ...
    def seal_rest(self) -> None: ...
    def content_digest(self) -> int: ...
    def commit(self, read_back: bool) -> None: ...
    def abort(self) -> None: ...

class VersionStore:
    # specs: (name, dtype, bytes of an element, shape)
    @staticmethod
    def create(specs: Sequence[tuple[str, str, int, Sequence[int]]], chunk_bytes: int) -> VersionStore: ...
    @staticmethod
    def attach(fd: int) -> VersionStore: ...
    @property
    def fd(self) -> int: ...
    @property
    def specs(self) -> list[tuple[str, str, int, list[int]]]: ...
    @property
    def offsets_bytes(self) -> list[int]: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def wire_bytes(self) -> int: ...
    @property
    def bound_bytes(self) -> int: ...
    @property
    def digest(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    def version(self) -> int: ...
    def epoch(self) -> int: ...
    def wait(self, version: int, timeout: float) -> int: ...
    def pin(self, timeout: float) -> Pin: ...
    def begin(self, version: int, allow_rollback: bool, timeout: float) -> Publication: ...

# -- reshard_layout.cpp ------------------------------------------------------------------------------------------------

_Box = tuple[Sequence[int], Sequence[int]]  # start, size

class Mesh:
    def __init__(self, ranks: Sequence[int], shape: Sequence[int], dim_names: Sequence[str]) -> None: ...

class Replicate:
    def __init__(self) -> None: ...

class Shard:
    def __init__(self, dim: int, chunk: int) -> None: ...

class StridedShard:
    def __init__(self, dim: int, split_factor: int, chunk: int) -> None: ...

class Flat:
    def __init__(self, chunk: int, offset: int) -> None: ...

class Ragged:
    def __init__(self, boxes: Sequence[Sequence[_Box]]) -> None: ...

class Storage:
    def __init__(
        self,
        buffer: str,
        buffer_shape: Sequence[int] | None,
        offset: int,
        strides: Sequence[int],
        group_rows: int,
        group_stride: int,
    ) -> None: ...

class TensorLayout:
    def __init__(
        self,
        name: str,
        dtype: str,
        item_bytes: int,
        shape: Sequence[int],
        mesh: int,
        placements: Sequence[Replicate | Shard | StridedShard | Flat | Ragged],
        storage: Storage,
    ) -> None: ...

class RankStorage:
    # (name, dtype, bytes of an element, shape)
    @property
    def buffers(self) -> list[tuple[str, str, int, list[int]]]: ...
    # (tensor, box, buffer, offset, strides)
    @property
    def regions(self) -> list[tuple[int, tuple[list[int], list[int]], int, int, list[int]]]: ...
    @property
    def fully_covered(self) -> list[bool]: ...

class Layout:
    def __init__(self, meshes: Sequence[Mesh], tensors: Sequence[TensorLayout]) -> None: ...
    @property
    def digest(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    def boxes(self, name: str, rank: int) -> list[tuple[list[int], list[int]]]: ...
    def storage(self, rank: int) -> RankStorage: ...
