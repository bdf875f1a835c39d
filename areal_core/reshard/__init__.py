"""Weight transfer: new versions of a model's tensors, from the trainer to the processes that generate."""

from areal_core.reshard.version_store import PublishStats, Snapshot, TensorSpec, VersionStore

__all__ = ["PublishStats", "Snapshot", "TensorSpec", "VersionStore"]
