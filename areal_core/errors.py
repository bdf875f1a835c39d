"""Typed errors of areal_core.

Broken contracts of functions raise ValueError or TypeError. The classes here are failures that a running system
expects and handles (a peer gone, a deadline passed) and mistakes in files that people write (configuration, data,
checkpoints).
"""

from __future__ import annotations

__all__ = [
    "ArealError",
    "CancelledError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "CorruptedError",
    "DataError",
    "DeadlineError",
    "GeneratorError",
    "MissingPackageError",
    "PatchError",
    "PeerError",
    "UnsupportedVersionError",
]


class ArealError(Exception):
    """Base class of the errors below."""


class ConfigError(ArealError, ValueError):
    """A configuration key is unknown or its value is not allowed; the text names the key."""


class DataError(ArealError, ValueError):
    """A line of a dataset cannot be used; the text names file and line."""


class CheckpointError(ArealError):
    """A checkpoint is missing, incomplete or corrupt; the text names it."""


class GeneratorError(ArealError):
    """A generator process failed more often than the run tolerates; the text says which and how."""


class DeadlineError(ArealError, TimeoutError):
    """A deadline passed; the text says what was awaited and from which process."""


class ClosedError(ArealError):
    """The object was closed or released before this use; the text names it."""


class CorruptedError(ArealError):
    """Bytes differ from their checksum; the text says which."""


class PeerError(ArealError, ConnectionError):
    """A peer is gone or is not who it should be; the text names its rank."""


class CancelledError(ArealError):
    """The call was cancelled from another thread; the text says what was under way."""


class MissingPackageError(ArealError, ImportError):
    """An optional package is not installed; the text says what needs it and how to install it."""


class PatchError(ArealError):
    """A function of a framework is replaced already, or no longer as it was left; the text names it."""


class UnsupportedVersionError(ArealError):
    """A framework is not as expected; the text names its version, what differs and what was expected."""
