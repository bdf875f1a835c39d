"""The engine as a provider of bench_reshard: executors over each transport, and whole updates with their versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from reshard_ranks import RankContext
from reshard_weights import Case, Shapes, Side
from torch import Tensor

from areal_core.reshard.executor import Executor
from areal_core.reshard.layout import Layout, TensorLayout
from areal_core.reshard.placements import Mesh, Replicate, Shard
from areal_core.reshard.plan import Plan, plan
from areal_core.reshard.process_group import ProcessGroupTransport
from areal_core.reshard.publish import WeightSender
from areal_core.reshard.receive import WeightReceiver
from areal_core.reshard.spec import Spec
from areal_core.reshard.transports import ShmTransport, SocketTransport, TcpTransport
from areal_core.reshard.version_store import VersionStore

TOKEN = b"bench_reshard, on one machine"
CHUNK_BYTES = 8 << 20
TIMEOUT_S = 300.0


def layout_of(side: Side, shapes: Shapes) -> Layout:
    """The side as a layout of the engine."""
    replicas = len(side.ranks) // side.shards
    mesh = Mesh(side.ranks, (replicas, side.shards), ("dp", "shard"))
    tensors = {}
    for name, shape in shapes.items():
        dim = side.dim(name)
        placement = Replicate() if dim is None else Shard(dim)
        tensors[name] = TensorLayout(Spec(torch.bfloat16, shape), mesh, (Replicate(), placement))
    return Layout(tensors)


def plan_of(case: Case, shapes: Shapes) -> Plan:
    """The plan of a case."""
    return plan(layout_of(case.source, shapes), layout_of(case.target, shapes), chunk_bytes=CHUNK_BYTES)


class Executors:
    """Executors over shm or tcp. Targets lie in a version store's arena: shared memory, as a generator's do."""

    transport = "shm"

    def __init__(self, context: RankContext) -> None:
        self.context = context
        made = plan_of(context.case, context.shapes)
        self.store = VersionStore.create(context.targets) if context.targets else None
        self.draft = self.store.draft(0) if self.store is not None else None
        self.endpoint = self._endpoint()
        if isinstance(self.endpoint, SocketTransport):
            addresses: list[tuple[int, str]] = [(0, "")] * len(context.case.ranks)
            dist.all_gather_object(addresses, (context.rank, self.endpoint.address))
            self.endpoint.connect(dict(addresses), TIMEOUT_S)
        targets = self.draft.tensors if self.draft is not None else {}
        first = self.draft.arena * len(targets) if self.draft is not None else 0
        self.executor = Executor(
            made, context.rank, self.endpoint, source=context.sources, target=targets, first_exposed=first
        )
        self.epoch = 0

    def _endpoint(self) -> SocketTransport | ProcessGroupTransport:
        if self.transport == "tcp":
            return TcpTransport(self.context.rank, TOKEN)
        return ShmTransport(self.context.rank, TOKEN, exposed=self.store.exposed() if self.store is not None else ())

    def run(self) -> Mapping[str, float]:
        """One transfer."""
        self.epoch += 1
        stats = self.executor.run(self.epoch, TIMEOUT_S)
        return {"sent_bytes": stats.sent_bytes, "staging_bytes": stats.peak_staging_bytes}

    def targets(self) -> Mapping[str, Tensor]:
        """What this rank has received."""
        return self.draft.tensors if self.draft is not None else {}

    def close(self) -> None:
        """End the connections."""
        dist.barrier()
        self.endpoint.cancel()


class TcpExecutors(Executors):
    """The same over loopback TCP."""

    transport = "tcp"


class GroupExecutors(Executors):
    """The same over the process group of torch.distributed."""

    def _endpoint(self) -> SocketTransport | ProcessGroupTransport:
        return ProcessGroupTransport()


class Updates:
    """Whole updates: WeightSender.publish to the moment that every receiver's readers see the version."""

    transport = "shm"

    def __init__(self, context: RankContext) -> None:
        self.context = context
        made = plan_of(context.case, context.shapes)
        address = f"unix:{Path(context.folder) / 'update'}"
        rank, transport = context.rank, self.transport
        self.sender = self.receiver = None
        if context.sources:
            self.sender = WeightSender(
                made, rank, context.sources, coordinator=address, token=TOKEN, transport=transport
            )
        if context.targets:
            self.receiver = WeightReceiver(made, rank, coordinator=address, token=TOKEN, transport=transport)
        self.version = 0
        dist.barrier()

    def run(self) -> Mapping[str, float]:
        """One update."""
        self.version += 1
        if self.sender is None:
            assert self.receiver is not None
            self.receiver.store.wait(self.version, TIMEOUT_S)
            return {}
        stats = self.sender.publish(self.version, timeout=TIMEOUT_S).wait(TIMEOUT_S)
        return {} if stats is None else {k: float(v) for k, v in stats._asdict().items() if k != "digests"}

    def targets(self) -> Mapping[str, Tensor]:
        """The active version."""
        if self.receiver is None:
            return {}
        with self.receiver.store.pin() as snapshot:
            return {name: tensor.clone() for name, tensor in snapshot.tensors.items()}

    def close(self) -> None:
        """Leave."""
        dist.barrier()
        for end in (self.receiver, self.sender):
            if end is not None:
                end.close()


class TcpUpdates(Updates):
    """The same over loopback TCP."""

    transport = "tcp"
