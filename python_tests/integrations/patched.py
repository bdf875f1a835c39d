"""A framework patched against the same framework unpatched."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


def both(integration: ModuleType, run: Callable[[], Any], **options: Any) -> tuple[Any, Any, dict[str, int]]:
    """What `run` gives without and with the patch, and what fell through."""
    theirs = run()
    with integration.apply(**options) as patches:
        mine = run()
    return theirs, mine, patches.fallbacks


def close(mine: Any, theirs: Any, **tolerance: float) -> None:
    torch.testing.assert_close(mine, theirs, equal_nan=True, **{"rtol": 1e-5, "atol": 1e-5} | tolerance)
