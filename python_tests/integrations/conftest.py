"""How the frameworks under test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def eager() -> Iterator[None]:
    """AReaL compiles its log-probabilities; eager they give the same numbers in less time."""
    with torch.compiler.set_stance("force_eager"):
        yield
