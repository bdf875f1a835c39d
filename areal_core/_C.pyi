"""The native module: attributes are defined in csrc/bind."""

from typing import Any

class Error(ValueError): ...

def __getattr__(name: str) -> Any: ...
def allocate_microbatches(
    lengths: list[int], max_tokens: int, min_bins: int, multiple_of: int, method: str, oversized: str
) -> list[list[int]]: ...
def partition_balanced(
    lengths: list[int],
    bins: int,
    linear_cost: float,
    quadratic_cost: float,
    equal_size: bool,
    max_tokens: int | None,
) -> list[list[int]]: ...

class DecodeSampling:
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int]
    seed: int
    def __init__(
        self, *, max_new_tokens: int, temperature: float, top_p: float, top_k: int, stop_token_ids: list[int], seed: int
    ) -> None: ...

class DecodeEngine:
    def __init__(self, **shape_and_options: float | bool) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
