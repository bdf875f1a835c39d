"""What each weight update of a run cost: bytes, the generators' pause, and how soon they used the version."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_core.reshard import PublishStats
from areal_core.rl.messages import VersionLoad

__all__ = ["UpdateMetrics"]

_KEPT_VERSIONS = 256  # a load is reported within a fraction of a second of the publication, or of the stall's end


class UpdateMetrics:
    """Brings together what the trainer knows of a publication and what the generators report of their loads.

    A report may overtake the trainer's own record of the publication; they are matched in `take`, after both. Calls
    take turns: the owner has the lock.
    """

    def __init__(self) -> None:
        self._published: dict[int, float] = {}  # version -> monotonic time at which its publication began
        self._last: PublishStats | None = None
        self._loads: list[VersionLoad] = []

    def published(self, stats: PublishStats, start_s: float) -> None:
        """A version has been published, from `start_s` on (time.monotonic)."""
        self._published[stats.version] = start_s
        if len(self._published) > _KEPT_VERSIONS:
            del self._published[min(self._published)]
        self._last = stats

    def loaded(self, loads: Sequence[VersionLoad]) -> None:
        """A generator has loaded versions."""
        self._loads += loads

    def take(self) -> dict[str, float]:
        """Metrics of a step: its publication, and the loads reported since the step before.

        publish/bytes, publish/bytes_over_bound, publish/wait_s (for readers that held the arena): of the publication.
        publish/loads: how many loads were reported, mostly of the version before; without any the rest is left out.
        publish/pause_s, publish/pause_max_s: time that generation stood still in a load, mean and longest.
        publish/visible_p50_s, publish/visible_p95_s: from the start of a publication to the end of a generator's load.
        """
        loads, self._loads = self._loads, []
        metrics = {"publish/loads": float(len(loads))}
        if self._last is not None:
            metrics["publish/bytes"] = float(self._last.bytes)
            metrics["publish/bytes_over_bound"] = self._last.bytes / max(self._last.bound_bytes, 1)
            metrics["publish/wait_s"] = self._last.wait_seconds
            self._last = None
        if loads:
            pauses = [load.pause_s for load in loads]
            metrics["publish/pause_s"] = float(np.mean(pauses))
            metrics["publish/pause_max_s"] = max(pauses)
        starts = self._published
        visible = [load.loaded_s - starts[load.version] for load in loads if load.version in starts]
        if visible:
            p50, p95 = np.quantile(visible, [0.5, 0.95]).tolist()
            metrics |= {"publish/visible_p50_s": p50, "publish/visible_p95_s": p95}
        return metrics
