"""Generation: the engine interface and the embedded CPU engine."""

from areal_core.generate.embedded import EmbeddedEngine
from areal_core.generate.engine import (
    Engine,
    EngineStats,
    GeneratedSample,
    GenerateRequest,
    SamplingParams,
    UnfinishedSample,
    UpdateStats,
)

__all__ = [
    "EmbeddedEngine",
    "Engine",
    "EngineStats",
    "GenerateRequest",
    "GeneratedSample",
    "SamplingParams",
    "UnfinishedSample",
    "UpdateStats",
]
