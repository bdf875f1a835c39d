"""Publication of weights to the generators of this machine, while they go on generating.

Trainer and generators hold the weights alike here, whole and under the same names, so that there is nothing to reshard:
one copy into memory that all generators map is all that moves, and no receiver has to copy it again. Layouts that
differ, and ranks that are processes of their own, go through areal_core.reshard.WeightSender and WeightReceiver.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from areal_core.reshard import PublishStats, VersionStore

__all__ = ["Publisher"]


class Publisher:
    """Owns the version store that generators read.

    Args:
        weights: Hugging Face name -> tensor; the live weights of the trainer, read again at each publication.
        timeout_s: how long a publication waits for a reader that holds the inactive arena.
    """

    def __init__(self, weights: Mapping[str, Tensor], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._weights = weights
        self.store = VersionStore.create(weights)

    def publish(self, version: int) -> PublishStats:
        """Copy the weights as they are now into the inactive arena and flip readers to it."""
        return self.store.publish(self._weights, version, timeout=self._timeout_s)

    def close(self) -> None:
        """Release the shared memory; readers that have attached keep theirs until they close."""
        self.store.close()
