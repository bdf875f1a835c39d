from __future__ import annotations

import pytest

from areal_core.model import DecoderConfig

from .small_models import CONFIGS


@pytest.fixture(params=sorted(CONFIGS))
def config(request: pytest.FixtureRequest) -> DecoderConfig:
    return CONFIGS[request.param]
