"""Assigning sequences to micro-batches: fewest bins under a token cap, or equal load over a number of bins."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
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
    too_few: Literal["error", "empty"] = "error",
    group: Any = None,
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
        too_few: what fewer sequences than the micro-batches asked for are: an "error", or a reason to end with "empty"
            micro-batches (a data-parallel rank must still take part in the collectives of a step).
        group: torch.distributed process group over the ranks that must run the same number of micro-batches: the most
            that one of them needs. Every rank calls this with its own lengths and otherwise the same arguments; one
            all-gather of 16 bytes a rank. A failure on one rank raises on all of them.

    Returns:
        Indices of sequences by micro-batch, ascending within each. Every index occurs once and no micro-batch is
        empty, unless `too_few` allows it; more of them than needed (`min_bins`, `multiple_of`, `group`) come from
        halving those of most sequences. No sequences and no `min_bins`: an empty list. Deterministic. The interpreter
        lock is released meanwhile.

    Raises:
        ValueError: an oversized or negative length (with its index), fewer sequences than the micro-batches asked for,
            either on another rank of the group (naming it).

    Source: Johnson, "Near-optimal bin packing algorithms", 1973; Johnson and Garey, "A 71/60 theorem for bin packing",
    1985; Karmarkar and Karp, "The differencing method of set partitioning", 1982.
    """
    listed = _as_list(lengths)

    def allocate(bins: int) -> list[list[int]]:
        return _C.allocate_microbatches(listed, max_tokens, bins, multiple_of, method, oversized, too_few)

    if group is None:
        return allocate(min_bins)
    found: list[list[int]] = []
    failure: Exception | None = None
    try:
        found = allocate(min_bins)
    except Exception as error:  # the other ranks wait in the all-gather below: they must hear of it
        failure = error
    states = _gather(_FAILED if failure else len(found), len(listed), group)
    if failure is not None:
        raise failure
    for rank, (bins, _) in enumerate(states):
        if bins == _FAILED:
            raise ValueError(f"allocate_microbatches: expected success on every rank, got an error on rank {rank}")
    agreed = max(bins for bins, _ in states)
    for rank, (_, sequences) in enumerate(states):
        if too_few == "error" and sequences < agreed:
            raise ValueError(
                f"allocate_microbatches: expected at least {agreed} sequences on every rank (what one of them needs), "
                f'got {sequences} on rank {rank} (too_few="empty" lets it run empty micro-batches)'
            )
    if len(found) < agreed:
        found = allocate(agreed)
    return found + [[]] * (agreed - len(found))  # a rank without any sequence found none


def partition_balanced(
    lengths: Sequence[int] | Tensor,
    k: int,
    *,
    cost: Literal["tokens"] | tuple[float, float] = "tokens",
    equal_size: bool = False,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """Assign sequences to exactly k bins of nearly equal cost, by largest differencing.

    Sequences of the fullest and the emptiest bin then change places while that helps.

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


_FAILED = -1


def _gather(bins: int, sequences: int, group: Any) -> list[tuple[int, int]]:
    """Return (micro-batches needed, sequences) of every rank of the group."""
    device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    mine = torch.tensor([bins, sequences], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [(int(b), int(s)) for b, s in torch.stack(everyone).tolist()]


def _as_list(lengths: Sequence[int] | Tensor) -> list[int]:
    if isinstance(lengths, list):
        return lengths
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
