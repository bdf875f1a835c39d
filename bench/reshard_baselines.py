"""How weights are moved without an engine: gather and slice, DTensor.redistribute, a distributed checkpoint."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from reshard_ranks import RankContext
from reshard_weights import Side
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

NOTHING: Mapping[str, float] = {}


class GatherThenSlice:
    """Every tensor is gathered whole on the trainer's ranks, broadcast to the generator's, and sliced there.

    What a loop over `full_tensor()` and a broadcast does, tensor by tensor.
    """

    def __init__(self, context: RankContext) -> None:
        self.context = context
        case = context.case
        self.source_group = dist.new_group(list(case.source.ranks))
        self.is_apart = not set(case.source.ranks) & set(case.target.ranks)
        self.bridge = dist.new_group([case.source.ranks[0], *case.target.ranks]) if self.is_apart else None

    def run(self) -> Mapping[str, float]:
        """One transfer."""
        case, rank = self.context.case, self.context.rank
        for name, shape in self.context.shapes.items():
            full = self._gather(name, shape) if rank in case.source.ranks else torch.empty(shape, dtype=torch.bfloat16)
            if self.is_apart and (rank in case.target.ranks or rank == case.source.ranks[0]):
                dist.broadcast(full, src=case.source.ranks[0], group=self.bridge)
            if rank in case.target.ranks:
                self.context.targets[name].copy_(case.target.part(name, full, rank))
        return NOTHING

    def targets(self) -> Mapping[str, Tensor]:
        """What this rank has received."""
        return self.context.targets

    def close(self) -> None:
        """The groups go with the process."""

    def _gather(self, name: str, shape: tuple[int, ...]) -> Tensor:
        side, own = self.context.case.source, self.context.sources[name]
        dim = side.dim(name)
        if dim is None:
            return own
        lengths = [side.interval(shape[dim], rank)[1] for rank in side.ranks]
        padded = own if len(set(lengths)) == 1 else _pad(own, dim, max(lengths))
        parts = [torch.empty_like(padded) for _ in side.ranks]
        dist.all_gather(parts, padded, group=self.source_group)
        return torch.cat([part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)], dim)


def _pad(tensor: Tensor, dim: int, length: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = length
    padded = tensor.new_zeros(shape)
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded


class Redistribute:
    """DTensor.redistribute on one mesh of all ranks: both sides must be the same ranks."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        case = context.case
        assert case.source.ranks == case.target.ranks, "DTensor.redistribute keeps its mesh"
        shards = case.target.shards
        self.mesh = init_device_mesh("cpu", (len(case.ranks) // shards, shards))
        self.tensors = {
            name: DTensor.from_local(
                local,
                self.mesh,
                [Shard(0), Shard(0)],
                run_check=False,
                shape=torch.Size(context.shapes[name]),
                stride=torch.empty(context.shapes[name], device="meta").stride(),
            )
            for name, local in context.sources.items()
        }
        self.received: dict[str, Tensor] = {}

    def run(self) -> Mapping[str, float]:
        """One transfer."""
        for name, tensor in self.tensors.items():
            dim = self.context.case.target.dim(name)
            placement = Replicate() if dim is None else Shard(dim)
            self.received[name] = tensor.redistribute(placements=[Replicate(), placement]).to_local()
        return NOTHING

    def targets(self) -> Mapping[str, Tensor]:
        """What this rank has received."""
        return self.received

    def close(self) -> None:
        """The mesh goes with the process."""


class Checkpoint:
    """torch.distributed.checkpoint: the trainer's ranks save DTensors to /dev/shm, the generator's load theirs."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.folder = Path(context.folder) / "checkpoint"
        case = context.case
        self.saving = dist.new_group(list(case.source.ranks))
        self.loading = dist.new_group(list(case.target.ranks))
        meshes = {side: self._mesh(side) for side in (case.source, case.target)}
        self.save_state = self._state(case.source, meshes[case.source], context.sources)
        self.load_state = self._state(case.target, meshes[case.target], context.targets)

    def run(self) -> Mapping[str, float]:
        """One transfer."""
        import torch.distributed.checkpoint as checkpoint  # takes seconds

        if self.save_state:
            checkpoint.save(self.save_state, checkpoint_id=self.folder, process_group=self.saving)
        dist.barrier()
        if self.load_state:
            checkpoint.load(self.load_state, checkpoint_id=self.folder, process_group=self.loading)
        dist.barrier()
        return NOTHING

    def targets(self) -> Mapping[str, Tensor]:
        """What this rank has received."""
        return self.context.targets

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def _mesh(side: Side) -> object:
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh("cpu", torch.tensor(side.ranks).view(-1, side.shards))

    def _state(self, side: Side, mesh: object, parts: Mapping[str, Tensor]) -> dict[str, DTensor]:
        state = {}
        for name, local in parts.items():
            dim, shape = side.dim(name), self.context.shapes[name]
            placement = Replicate() if dim is None else Shard(dim)
            state[name] = DTensor.from_local(
                local,
                mesh,  # type: ignore[arg-type]
                [Replicate(), placement],
                run_check=False,
                shape=torch.Size(shape),
                stride=torch.empty(shape, device="meta").stride(),
            )
        return state


def peer_reasons() -> dict[str, str]:
    """Why the engines of other projects do not run here; nothing for those that would."""
    reasons = {}
    for name, probe in {"checkpoint-engine": _checkpoint_engine, "torchstore": _torchstore}.items():
        try:
            probe()
        except Exception as error:
            reasons[name] = f"{type(error).__name__}: {error}"
    return reasons


def _checkpoint_engine() -> None:
    importlib.import_module("checkpoint_engine.device_utils").DeviceManager()  # raises without a CUDA or NPU device


def _torchstore() -> None:
    importlib.import_module("torchstore")  # needs torchmonarch, which links the CUDA driver
