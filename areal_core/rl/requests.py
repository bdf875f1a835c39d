"""Which request to a generator brings which samples of which group.

A request id is never used twice in a run, resumes included: it also seeds the sampling of its responses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from areal_core.rl.data import PendingGroup
from areal_core.rl.messages import PromptRequest

__all__ = ["OpenRequest", "RequestBook"]


@dataclass(eq=False)
class OpenRequest:
    """Sample k of the request is sample_indices[k] of the group, or its greedy one; `left` are still to come."""

    group_id: int
    sample_indices: list[int]
    left: int
    greedy: bool


class RequestBook:
    """The open requests by id."""

    def __init__(self) -> None:
        self.next_id = 0
        self._open: dict[int, OpenRequest] = {}

    def for_groups(self, groups: Iterable[PendingGroup]) -> list[PromptRequest]:
        """Open requests for everything that `groups` lack; none of it may be asked for already."""
        requests = []
        for group in groups:
            if group.missing:
                requests.append(self._ask(group, group.missing, greedy=False))
            if group.lacks_greedy:
                requests.append(self._ask(group, [0], greedy=True))
        return requests

    def again(self, lost: Sequence[int], groups: Mapping[int, PendingGroup]) -> list[PromptRequest]:
        """Replace lost requests by new ones for what they had not brought yet; `groups`: the pending ones by id."""
        requests = []
        for request_id in lost:
            old = self._open.pop(request_id)
            group = groups[old.group_id]
            missing = [0] if old.greedy else [k for k in old.sample_indices if k not in group.samples]
            requests.append(self._ask(group, missing, greedy=old.greedy))
        return requests

    def received(self, request_id: int) -> OpenRequest:
        """Count one response; the request it belongs to."""
        request = self._open[request_id]
        request.left -= 1
        if request.left == 0:
            del self._open[request_id]
        return request

    def _ask(self, group: PendingGroup, indices: list[int], *, greedy: bool) -> PromptRequest:
        request_id = self.next_id
        self.next_id += 1
        self._open[request_id] = OpenRequest(group.group_id, indices, len(indices), greedy)
        return PromptRequest(request_id, group.problem, group.prompt_ids, len(indices), greedy)
