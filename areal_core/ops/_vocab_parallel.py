"""What ops on vocab-parallel logits share: which columns a rank holds, and the exchange of the ranks' parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# The shards' lengths in rank order, as the group's first call found them: asked for once, with one collective.
_known_sizes: WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]] = WeakKeyDictionary()


class VocabShard(NamedTuple):
    """Columns [start, start + size) of a vocabulary of `total` tokens."""

    start: int
    size: int
    total: int


def find_shard(
    op: str, group: dist.ProcessGroup, size: int, device: torch.device, sizes: Sequence[int] | None
) -> VocabShard:
    """The shard of this rank, which holds `size` columns.

    Without `sizes` the first call for a group is a collective that waits for the host; later ones use its answer.

    Raises:
        TypeError: no process group.
        ValueError: `sizes`, or what the group's first call found, disagrees with the number of ranks or with `size`.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{op}: expected group to be a torch.distributed.ProcessGroup, got {type(group).__name__}")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    known = _sizes_of(group, size, ranks, device) if sizes is None else tuple(sizes)
    if len(known) != ranks or known[rank] != size:
        raise ValueError(
            f"{op}: expected vocab_sizes with {ranks} entries and {size} = V of this rank at {rank}, got {list(known)}"
            + (" (from the group's first call; give vocab_sizes where they change)" if sizes is None else "")
        )
    return VocabShard(sum(known[:rank]), size, sum(known))


def _sizes_of(group: dist.ProcessGroup, size: int, ranks: int, device: torch.device) -> tuple[int, ...]:
    known = _known_sizes.get(group)
    if known is None:
        everyone = torch.empty(ranks, dtype=torch.int64, device=device)
        _all_gather(everyone, torch.tensor([size], device=device), group)
        known = _known_sizes[group] = tuple(everyone.tolist())
    return known


def gather_parts(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, 4] of every rank, as [ranks, T, 4]: the one collective of a vocab-parallel op. Not differentiable."""
    gathered = parts.new_empty(dist.get_world_size(group), *parts.shape)
    if parts.numel() > 0:  # all ranks have the same rows
        _all_gather(gathered.view(-1, parts.shape[-1]), parts, group)
    return gathered


def _all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Every rank's part, end to end in rank order."""
    if hasattr(dist, "all_gather_single"):  # torch 2.13 renamed it
        dist.all_gather_single(output, part, group=group)
    else:
        dist.all_gather_into_tensor(output, part, group=group)
