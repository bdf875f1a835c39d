"""Weights of verl's trainer to its rollout workers through the resharding engine: a backend for verl's configuration.

    actor_rollout_ref.rollout.checkpoint_engine.backend=areal_core
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=areal_core.integrations.verl_weights_plugin

verl imports the plugin in trainers, rollout workers and the manager, and the plugin calls `register`. Where verl trains
with FSDP2, every trainer rank sends its own shards, and no rank gathers the model; otherwise the first one sends what
verl has gathered. A sync fails as a whole: rollout workers hand nothing to their engine before all of them have every
byte.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from areal_core.errors import MissingPackageError, PatchError, UnsupportedVersionError
from areal_core.integrations._patch import Original, Patches, Seam, apply_seams, signature
from areal_core.integrations._verl_shards import exports_shards, shard_layout
from areal_core.integrations._weight_group import Endpoint, Group, group_of, node_name
from areal_core.integrations._weight_sync import Description, Sync, describe
from areal_core.reshard import Mesh, Replicate, Spec, TensorLayout

__all__ = ["BACKEND", "register"]

logger = logging.getLogger("areal_core.integrations")

BACKEND = "areal_core"
DEFAULT_TIMEOUT_S = 600.0
T = TypeVar("T")

# How verl calls a checkpoint engine: methods of the base class, without annotations.
_CONTRACT = {
    "prepare": "self",
    "build_topology": "actor_wg_world_size, rollout_world_size, metadata",
    "init_process_group": "self, **kwargs",
    "finalize": "self",
    "send_weights": "self, weights, global_steps=None",
    "receive_weights": "self, global_steps=None",
    "get_weights": "self",
}


def hand_over_engine(self: Any, method: str, *args: Any, original: Original, **kwargs: Any) -> Any:
    """Let our backend see the training engine, whose shards it then sends; then what verl does."""
    if isinstance(self.checkpoint_engine, WeightBackend):
        self.checkpoint_engine.training_engine = self.actor.engine
    return original(self, method, *args, **kwargs)


SEAMS = (
    Seam(
        "training_engine",
        "verl.workers.engine_workers",
        "ActorRolloutRefWorker.execute_checkpoint_engine",
        "self, method, *args, **kwargs",
        hand_over_engine,
    ),
)


class WeightBackend:
    """What verl calls; `register` makes it a CheckpointEngineWithCache of verl's.

    Args (engine_kwargs.areal_core of verl's configuration):
        bucket_size: bytes, from update_weights_bucket_megabytes: a rank stages at most two of them.
        is_master: whether this is the first trainer rank; given by verl.
        transport: "auto" (shared memory if all ranks are on one machine), "shm" (only so), or "tcp".
        timeout_s: seconds for each sync, gathering included.
        host: numeric address that the other ranks reach; None: Ray's of this node.
        shards: whether trainers may send their shards; False: always what verl gathers.
        rollout_dtype: what floating tensors are cast to, such as "bfloat16"; None: as verl exports them, which is
            bfloat16 for shards and the parameters' own dtype for gathered tensors. Another dtype than bfloat16 is
            sent from gathered tensors.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        transport: str = "auto",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        host: str | None = None,
        shards: bool = True,
        rollout_dtype: str | torch.dtype | None = None,
    ) -> None:
        if transport not in ("auto", "shm", "tcp"):
            raise ValueError(f"{BACKEND}: expected transport auto, shm or tcp, got {transport!r}")
        if not timeout_s > 0.0:
            raise ValueError(f"{BACKEND}: expected timeout_s > 0, got {timeout_s}")
        self.bucket_size, self.is_master = int(bucket_size), bool(is_master)
        self._transport, self._timeout, self._host = transport, float(timeout_s), host
        self._dtype = _dtype(rollout_dtype)
        self._may_shard = bool(shards) and self._dtype in (None, torch.bfloat16)
        self._sync = Sync()
        self._endpoint: Endpoint | None = None
        self._group: Group | None = None
        self._staging: dict[str, Tensor] = {}
        self._described: tuple[object, Description] | None = None
        self.training_engine: Any = None  # of a trainer, where the seam hands it over

    def prepare(self) -> dict[str, Any]:
        """What the others need to know of this rank. Whatever an earlier sync has left is over."""
        self.finalize()
        self._endpoint = Endpoint(self._host or _ray_host())
        dist = torch.distributed
        return {
            "backend": BACKEND,
            "node": node_name(),
            "address": self._endpoint.address,
            "bucket_bytes": self.bucket_size,
            "known": self._sync.description.digest if self._sync.description is not None else "",
            "rank": dist.get_rank() if dist.is_available() and dist.is_initialized() else None,
            "shards": self._may_shard and self.training_engine is not None and exports_shards(self.training_engine),
            "transport": self._transport,
        }

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Number the ranks by node, and say whether shards are sent, which all trainers must be able to."""
        trainer_count, rollout_count = actor_wg_world_size, rollout_world_size
        if min(trainer_count, rollout_count) < 1 or len(metadata) != trainer_count + rollout_count:
            raise ValueError(
                f"{BACKEND}: expected metadata of {trainer_count} trainers and {rollout_count} rollout ranks, both at "
                f"least one, got {len(metadata)}"
            )
        if any(not isinstance(member, Mapping) or member.get("backend") != BACKEND for member in metadata):
            raise ValueError(f"{BACKEND}: expected all ranks to use this backend, got others")
        trainers, receivers = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        shards = all(member["shards"] for member in trainers)
        if shards and [member["rank"] for member in trainers] != list(range(len(trainers))):
            raise ValueError(f"{BACKEND}: expected trainers in the order of their torch.distributed ranks, got another")
        asked = {member["transport"] for member in metadata}
        if len(asked) > 1:
            raise ValueError(f"{BACKEND}: expected the same transport on all ranks, got {sorted(asked)}")
        group = group_of(trainers, receivers, shards=shards, share_memory=asked != {"tcp"})
        if asked == {"shm"} and not group.one_machine:
            raise ValueError(f"{BACKEND}: expected all ranks on one machine for transport shm, got several")

        def kwargs(ranks: tuple[int, ...]) -> dict[str, list[Any]]:
            return {"rank": list(ranks), "group": [group] * len(ranks)}

        return kwargs(group.trainers), kwargs(group.receivers)

    def init_process_group(self, rank: int, group: Group) -> None:
        """Connect to the other members; a trainer that sends nothing has none."""
        if self._endpoint is None:
            raise ValueError(f"{BACKEND}: expected prepare() before init_process_group(), got none")
        endpoint, self._endpoint, self._group = self._endpoint, None, group
        if rank in group.members:
            self._sync.connect(group, rank, endpoint, self._timeout)
        endpoint.close()

    def finalize(self) -> None:
        """End the connections. A rollout worker keeps the version for `get_weights`, and its memory for the next."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._endpoint = self._group = None
        self._sync.close()

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float] | None:
        """Send this version; returns when every rollout rank has all of it. Metrics on the first trainer rank.

        Raises: DeadlineError, PeerError, CorruptedError, ValueError (another step or other tensors on the other side):
        then no rollout rank hands any of it to its engine.
        """
        group = self._group
        if group is None:
            raise ValueError(f"{BACKEND}: expected init_process_group() before send_weights(), got none")
        try:
            if group.shards:
                _close(weights)  # nothing was gathered yet
                source, described = self._stage_shards(group)
            elif self.is_master:
                source, described = self._stage_gathered(weights, group)
            else:  # each item is a collective call
                for _ in weights:
                    pass
                return None
            stats, made = await _in_thread(
                lambda: self._sync.run(global_steps, self._timeout, source=source, description=described), self._sync
            )
        except BaseException:
            self._sync.close()
            raise
        if not self.is_master:
            return None
        return {
            "areal_core/sync_seconds": stats.seconds,
            "areal_core/wire_bytes": float(made.stats.wire_bytes),
            "areal_core/nic_bytes": float(made.stats.nic_bytes),  # of these, between machines
            "areal_core/sender_max_over_mean": made.stats.sender_max_over_mean,
            "areal_core/staging_bytes": float(stats.peak_staging_bytes),
            "areal_core/shards": float(group.shards),
        }

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Tensor], None]:
        """Every tensor by name, once all of them have arrived on all rollout ranks; on the device of the rollout.

        Raises: as `send_weights`, before the first tensor.
        """
        await _in_thread(lambda: self._sync.run(global_steps, self._timeout), self._sync)
        async for item in self.get_weights():
            yield item

    async def get_weights(self) -> AsyncGenerator[tuple[str, Tensor], None]:
        """The version that was received last, again.

        Raises: ClosedError when there was none, or a sync has failed since.
        """
        device = _rollout_device()
        for name, tensor in self._sync.tensors():
            yield name, tensor.to(device, copy=True)

    def _stage_shards(self, group: Group) -> tuple[dict[str, Tensor], Description]:
        shards, _ = self.training_engine.get_per_tensor_param_shard()
        held: dict[str, Tensor] = {}
        key: list[object] = [group.trainers]
        layouts: dict[str, Callable[[], TensorLayout]] = {}
        for name, local, spec in shards:
            if spec.place is not None or spec.to_hf_chunk is not None:
                raise ValueError(f"{BACKEND}: tensor '{name}': expected a DTensor or a whole tensor, got {spec}")
            if name in held:
                raise ValueError(f"{BACKEND}: tensor '{name}': expected once, got twice")
            held[name] = self._on_host(name, local.detach(), copies=False)
            key.append((name, local.dtype, spec.full_shape, id(spec.mesh), spec.placements))
            layouts[name] = shard_layout(name, local.dtype, spec, group.trainers)
        described = self._describe(key, layouts)
        rank = group.trainers[torch.distributed.get_rank()]
        buffers = described.layout.buffers(rank)
        return {name: held[name].view(buffer.shape) for name, buffer in buffers.items()}, described

    def _stage_gathered(
        self, weights: Iterable[tuple[str, Tensor]], group: Group
    ) -> tuple[dict[str, Tensor], Description]:
        held: dict[str, Tensor] = {}
        mesh = Mesh([group.lead], (1,), ("rank",))
        for name, tensor in weights:
            if name in held:
                raise ValueError(f"{BACKEND}: tensor '{name}': expected once, got twice")
            held[name] = self._on_host(name, tensor.detach(), copies=True)
        specs = {name: Spec.of(tensor) for name, tensor in held.items()}
        layouts = {n: (lambda s=s: TensorLayout(s, mesh, (Replicate(),))) for n, s in specs.items()}
        return held, self._describe([group.trainers, *specs.items()], layouts)

    def _describe(self, key: list[object], layouts: Mapping[str, Callable[[], TensorLayout]]) -> Description:
        """The description of the last sync, if nothing has changed."""
        if self._described is None or self._described[0] != key:
            made: dict[str, TensorLayout] = {name: make() for name, make in layouts.items()}
            meshes: dict[Mesh, Mesh] = {}
            shared = {n: TensorLayout(x.spec, meshes.setdefault(x.mesh, x.mesh), x.placements) for n, x in made.items()}
            self._described = key, describe(shared)
        return self._described[1]

    def _on_host(self, name: str, tensor: Tensor, *, copies: bool) -> Tensor:
        """The tensor in plain host memory, cast; what is there already stays where it is unless `copies`."""
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        if not copies and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype == dtype:
            return tensor
        kept = self._staging.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != dtype:
            kept = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
            self._staging[name] = kept
        return kept.copy_(tensor)


def register() -> Patches | None:
    """Add the backend "areal_core" to verl's checkpoint engines, and let it see the training engine.

    Returns:
        The patch of the seam; None where this process has no trainer's classes: then gathered tensors are sent.

    Raises:
        MissingPackageError: verl is not installed.
        UnsupportedVersionError: verl calls a checkpoint engine in another way; nothing was registered.
        PatchError: it is registered already.
    """
    try:
        from verl.checkpoint_engine import base
    except ImportError as error:
        raise MissingPackageError(
            f"verl: expected it to be importable (pip install 'areal-core[verl]'), got: {error}"
        ) from error
    registry = base.CheckpointEngineRegistry
    for method, expected in _CONTRACT.items():
        found = getattr(getattr(base, "CheckpointEngineWithCache", None), method, None)
        got = signature(found) if found is not None else "none"
        if got != expected:
            raise UnsupportedVersionError(
                f"verl: expected CheckpointEngineWithCache.{method}({expected}), as in 0.9.1, got ({got}); nothing was "
                "registered"
            )
    if BACKEND in registry._registry:
        raise PatchError(f"verl: expected no checkpoint engine {BACKEND}, got one: register() was called before")
    registry.register(BACKEND)(type("ArealCoreCheckpointEngine", (WeightBackend, base.CheckpointEngineWithCache), {}))
    logger.info("verl: registered the checkpoint engine %s", BACKEND)
    try:
        return apply_seams("verl", "0.9.1", SEAMS)
    except (MissingPackageError, UnsupportedVersionError) as error:
        logger.warning("verl: the checkpoint engine %s sends gathered tensors: %s", BACKEND, error)
        return None


async def _in_thread(call: Callable[[], T], sync: Sync) -> T:
    """The result of a call that blocks, without blocking the event loop; the call ends when the task is cancelled."""
    ended = threading.Event()

    def run() -> T:
        try:
            return call()
        finally:
            ended.set()

    try:
        return await asyncio.get_running_loop().run_in_executor(None, run)
    except asyncio.CancelledError:
        sync.cancel()
        ended.wait()
        raise


def _close(weights: Iterable[Any]) -> None:
    close = getattr(weights, "close", None)
    if close is not None:
        close()


def _dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if found is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"{BACKEND}: expected rollout_dtype a floating dtype, got {given!r}")
    if given is not None and found is None:
        raise ValueError(f"{BACKEND}: expected rollout_dtype a floating dtype, got {given!r}")
    return found


def _ray_host() -> str:
    """The address of this node by which Ray knows it, or loopback without Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address()).strip("[]")


def _rollout_device() -> torch.device:
    """The accelerator of verl's platform in this process, or the CPU without one: verl then still says cuda."""
    device = sys.modules.get("verl.utils.device")
    if device is None or not (device.is_cuda_available or device.is_npu_available):
        return torch.device("cpu")
    return torch.device(device.get_device_name(), device.get_device_id())
