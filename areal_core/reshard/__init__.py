"""Weight transfer: new versions of a model's tensors, from the trainer to the processes that generate."""

from areal_core.reshard.draft import Draft
from areal_core.reshard.spec import Spec
from areal_core.reshard.version_store import PublishStats, Snapshot, VersionStore

__all__ = ["Draft", "PublishStats", "Snapshot", "Spec", "VersionStore"]
