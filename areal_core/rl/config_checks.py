"""The check that every configuration section makes of its fields."""

from __future__ import annotations

from areal_core.errors import ConfigError

__all__ = ["require"]


def require(condition: bool, key: str, expected: str, value: object) -> None:
    """Raise ConfigError with the key as the user wrote it, what was expected and what came."""
    if not condition:
        raise ConfigError(f"{key}: expected {expected}, got {value!r}")
