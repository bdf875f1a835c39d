"""What the backend relies on of verl 0.9.1, for machines without verl: same names, signatures and order of calls."""

from __future__ import annotations

from typing import Any

import torch


class ShardSpec:
    def __init__(self, param: Any) -> None:
        self.full_shape = tuple(param.shape)
        self.mesh = getattr(param, "device_mesh", None)
        self.placements = getattr(param, "placements", None)
        self.place = self.to_hf_chunk = None


class CheckpointEngineRegistry:
    _registry: dict[str, Any] = {}  # noqa: RUF012

    @staticmethod
    def register(backend: str) -> Any:
        def wrapper(cls: Any) -> Any:
            CheckpointEngineRegistry._registry[backend] = cls
            return cls

        return wrapper

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        return cls._registry[backend](*args, **kwargs)


class CheckpointEngineWithCache:
    def prepare(self): ...

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata): ...

    def init_process_group(self, **kwargs): ...

    def finalize(self): ...

    async def send_weights(self, weights, global_steps=None): ...

    async def receive_weights(self, global_steps=None): ...

    async def get_weights(self): ...


class CheckpointEngineWorker:
    async def update_weights(self, global_steps=None):
        weights = self.checkpoint_engine.receive_weights(global_steps=global_steps)
        wire_format = self.checkpoint_engine.wire_format
        await self.server_adapter.update_weights(weights, global_steps=global_steps, wire_format=wire_format)

    def execute_checkpoint_engine(self, method, *args, **kwargs):
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class ActorRolloutRefWorker:
    async def update_weights(self, global_steps=None, mode="auto"):
        weights, _ = self.actor.engine.get_per_tensor_param()
        return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps) or {}

    def execute_checkpoint_engine(self, method, *args, **kwargs):
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class FSDPEngine:
    def get_per_tensor_param(self, **kwargs):
        named = self.module.state_dict().items()
        return ((n, p.full_tensor() if hasattr(p, "full_tensor") else p) for n, p in named), None

    def get_per_tensor_param_shard(self, **kwargs):
        def generate():
            for name, param in self.module.state_dict().items():
                cast = param.to(torch.bfloat16) if param.is_floating_point() else param
                local = cast.to_local() if hasattr(cast, "to_local") else cast
                yield name, local.reshape(-1), ShardSpec(param)

        return generate(), None


def fsdp_version(model):
    return 2
