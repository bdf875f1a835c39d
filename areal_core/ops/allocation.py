"""Assigning sequences to micro-batches: fewest bins under a token cap, or equal load over a number of bins."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from areal_core import _C


def allocate_microbatches(
    lengths: Sequence[int] | Tensor,
    max_tokens: int,
    *,
    min_bins: int = 1,
    multiple_of: int = 1,
    method: Literal["ffd", "mffd", "kk"] = "ffd",
    oversized: Literal["error", "alone"] = "error",
) -> list[list[int]]:
    """Assign every sequence to a micro-batch of at most `max_tokens` tokens.

    Args:
        lengths: int [S], tokens.
        max_tokens: int, tokens, the cap of every micro-batch; never broken, but see `oversized`.
        min_bins: int, the least number of micro-batches.
        multiple_of: int, the number of micro-batches is a multiple of this (one per data-parallel rank, say).
        method: "ffd", first fit decreasing, at most 11/9 OPT + 6/9 micro-batches; "mffd", modified first fit
            decreasing, at most 71/60 OPT + 1; "kk", the number that "ffd" finds with loads levelled by largest
            differencing (left as "ffd" has them where levelling would break the cap), O(S k log k) for k of them.
        oversized: what a sequence longer than `max_tokens` is: an "error", or "alone" in a micro-batch.

    Returns:
        Indices of sequences by micro-batch, ascending within each. Every index occurs once and no micro-batch is
        empty; more of them than needed (`min_bins`, `multiple_of`) come from halving those of most sequences. No
        sequences: an empty list. Deterministic. The interpreter lock is released meanwhile.

    Raises:
        ValueError: an oversized or negative length (with its index), fewer sequences than the micro-batches asked for.

    Source: Johnson, "Near-optimal bin packing algorithms", 1973; Johnson and Garey, "A 71/60 theorem for bin packing",
    1985; Karmarkar and Karp, "The differencing method of set partitioning", 1982.
    """
    return _C.allocate_microbatches(_as_list(lengths), max_tokens, min_bins, multiple_of, method, oversized)


def partition_balanced(
    lengths: Sequence[int] | Tensor,
    k: int,
    *,
    cost: Literal["tokens"] | tuple[float, float] = "tokens",
    equal_size: bool = False,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """Assign sequences to exactly k bins of nearly equal cost, by largest differencing.

    Args:
        lengths: int [S], tokens, S >= k.
        k: int, the number of bins.
        cost: "tokens", or (a, b) for a sequence of L tokens to cost a L + b L^2 (attention is quadratic).
        equal_size: whether the numbers of sequences must differ by at most one.
        max_tokens: int, tokens, a cap on every bin that is never broken.

    Returns:
        Indices of sequences by bin, ascending within each. Every index occurs once and no bin is empty.
        Deterministic; O(S k log k).

    Raises:
        ValueError: fewer sequences than bins, negative lengths or cost factors, a cap that can't be kept by
            differencing nor, with `equal_size` off, by first fit decreasing.

    Source: Karmarkar and Karp, "The differencing method of set partitioning", 1982.
    """
    if cost != "tokens" and not (isinstance(cost, tuple) and len(cost) == 2):
        raise ValueError(f'partition_balanced: expected cost "tokens" or (a, b), got {cost!r}')
    linear, quadratic = (1.0, 0.0) if cost == "tokens" else cost
    return _C.partition_balanced(_as_list(lengths), k, float(linear), float(quadratic), equal_size, max_tokens)


def _as_list(lengths: Sequence[int] | Tensor) -> list[int]:
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
