"""Processes that stand for verl's workers: trainers with a small model under FSDP2, rollout workers with a copy of it.

The driver calls them in the order of verl's CheckpointEngineManager. Where verl is installed the calls go through
verl's own classes; otherwise through modules with the same look.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
import traceback
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

CONTEXT = multiprocessing.get_context("forkserver")
REPLY_S = 300.0  # of which importing verl may take most
FSDP = "verl.workers.engine.fsdp.transformer_impl"


@dataclass(frozen=True)
class Setup:
    """What a test wants of its workers."""

    trainers: int = 2
    rollouts: int = 2
    real: bool = False  # verl's own classes
    hands_over: bool = True  # whether the seam is there
    dtype: str = "bfloat16"  # of the trained parameters
    bucket_bytes: int = 1 << 20
    options: dict[str, Any] = field(default_factory=dict)
    fake_nodes: bool = False  # every two ranks claim a machine of their own


class Model(nn.Module):
    """Sizes that divide by nothing, a tensor of one row, a tied weight, a buffer and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 11, bias=False), nn.Linear(11, 5), nn.Linear(5, 1)])
        self.head = nn.Linear(6, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.zeros(3))


def full_weights(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What every parameter and buffer is after a step, in the model's dtype: every bit counts."""
    made = {}
    for name, tensor in Model().state_dict().items():
        seed = zlib.crc32(f"{step} {name.replace('head', 'embed')}".encode())
        g = torch.Generator().manual_seed(seed)
        if not tensor.is_floating_point():
            made[name] = torch.full_like(tensor, step)
        else:
            made[name] = torch.randn(tensor.shape, generator=g).to(dtype if "scale" not in name else torch.float32)
    return made


class Worker:
    """The driver's end of a process."""

    def __init__(self, name: str, function: Any, *args: Any) -> None:
        self.name = name
        self.pipe, end = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(end, function, args), daemon=True)
        self.process.start()
        end.close()

    def start(self, method: str, *args: Any, **kwargs: Any) -> None:
        self.pipe.send((method, args, kwargs))

    def result(self) -> Any:
        """What it returned, or the exception it raised, as (type name, text)."""
        try:
            if not self.pipe.poll(REPLY_S):
                return "Timeout", f"{self.name} did not answer"
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            return "Dead", f"{self.name} died"


class Cluster:
    """All workers, and verl's manager: the order of its calls."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        preload = ["torch.distributed.fsdp", "areal_core.integrations.verl_weights"]
        CONTEXT.set_forkserver_preload([*preload, *(["verl.workers.engine_workers"] if setup.real else [])])
        self._folder = tempfile.TemporaryDirectory()
        self.trainers = [
            Worker(f"trainer {r}", Trainer, setup, r, f"{self._folder.name}/store") for r in range(setup.trainers)
        ]
        self.rollouts = [Worker(f"rollout {r}", Rollout, setup, r) for r in range(setup.rollouts)]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in (*self.trainers, *self.rollouts):
            worker.process.kill()
            worker.process.join()
        self._folder.cleanup()

    def call(self, workers: list[Worker], method: str, *args: Any, **kwargs: Any) -> list[Any]:
        for worker in workers:
            worker.start(method, *args, **kwargs)
        results = [worker.result() for worker in workers]
        failed = [f"{w.name}: {r}" for w, r in zip(workers, results, strict=True) if r[0] != "ok"]
        assert not failed, "\n".join(failed)
        return [value for _, value in results]

    def skip_without_verl(self) -> None:
        """Skips the test where a part of verl that workers need cannot be imported."""
        for worker in (*self.trainers, *self.rollouts):
            worker.start("ready")
        for worker in (*self.trainers, *self.rollouts):
            status, value = worker.result()
            if status in ("ModuleNotFoundError", "ImportError", "MissingPackageError"):
                pytest.skip(f"verl lacks what it needs: {value.splitlines()[0]}")
            assert status == "ok", value

    def connect(self) -> None:
        """prepare, build_topology, init_process_group."""
        from areal_core.integrations.verl_weights import WeightBackend

        everyone = [*self.trainers, *self.rollouts]
        metadata = self.call(everyone, "engine", "prepare")
        if self.setup.fake_nodes:
            metadata = [m | {"node": f"machine {i // 2}"} for i, m in enumerate(metadata)]
        sides = WeightBackend.build_topology(len(self.trainers), len(self.rollouts), metadata)
        for workers, kwargs in zip((self.trainers, self.rollouts), sides, strict=True):
            for i, worker in enumerate(workers):
                worker.start("engine", "init_process_group", **{k: v[i] for k, v in kwargs.items()})
        for worker in everyone:
            status, value = worker.result()
            assert status == "ok", f"{worker.name}: {status}: {value}"

    def start_sync(self, step: int | None, rollout_step: int | None = None) -> None:
        for worker in self.trainers:
            worker.start("update_weights", step)
        for worker in self.rollouts:
            worker.start("update_weights", step if rollout_step is None else rollout_step)

    def sync(self, step: int | None, rollout_step: int | None = None) -> list[Any]:
        """One update_weights of the manager, up to finalize; every worker's result."""
        self.connect()
        self.start_sync(step, rollout_step)
        results = [worker.result() for worker in (*self.trainers, *self.rollouts)]
        if all(status == "ok" for status, _ in results):
            self.call([*self.trainers, *self.rollouts], "engine", "finalize")
        return results

    def train(self, step: int) -> None:
        self.call(self.trainers, "train", step)

    def loaded(self) -> list[dict[str, Tensor]]:
        return [
            {n: torch.from_numpy(a).view(getattr(torch, d)).reshape(shape) for n, a, d, shape in rows}
            for rows in self.call(self.rollouts, "loaded")
        ]


class Trainer:
    """A rank that trains."""

    def __init__(self, setup: Setup, rank: int, store: str) -> None:
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=setup.trainers)
        worker, engine_class = load_verl(setup)
        self.dtype = getattr(torch, setup.dtype)
        model = Model().to(self.dtype)
        model.scale = torch.zeros(3)
        mesh = dist.init_device_mesh("cpu", (setup.trainers,), mesh_dim_names=("fsdp",))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        self.hands_over = setup.hands_over
        engine = engine_class.__new__(engine_class)
        vars(engine).update(
            module=self.model,
            _uses_fsdp2_cpu_offload_policy=False,
            _is_offload_param=False,
            _qat_enabled=False,
            model_config=SimpleNamespace(lora={}, hf_config=SimpleNamespace(model_type="tiny")),
        )
        self.worker_class = worker
        self.verl = SimpleNamespace(
            actor=SimpleNamespace(engine=engine),
            checkpoint_engine=new_backend(setup, is_master=rank == 0),
            config=SimpleNamespace(rollout=SimpleNamespace(checkpoint_engine=SimpleNamespace(backend="areal_core"))),
        )

    def train(self, step: int) -> None:
        """Take the weights of a step."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        state = self.model.state_dict()
        for name, value in full_weights(step, self.dtype).items():
            held = state[name]
            with torch.no_grad():
                if isinstance(held, DTensor):
                    held.copy_(distribute_tensor(value, held.device_mesh, held.placements))
                else:
                    held.copy_(value)

    def grow(self) -> None:
        """A buffer is of another size from now on."""
        self.model.scale = torch.ones(5)

    def engine(self, method: str, **kwargs: Any) -> Any:
        return self.worker_class.execute_checkpoint_engine(self.verl, method, **kwargs)

    def update_weights(self, step: int | None) -> Any:
        return asyncio.run(self.worker_class.update_weights(self.verl, global_steps=step, mode="areal_core"))

    def ready(self) -> None:
        """Answers once the process has begun."""

    def fail_next(self) -> None:
        """The next export raises on its second tensor."""
        engine = self.verl.actor.engine
        exports = {name: getattr(engine, name) for name in ("get_per_tensor_param", "get_per_tensor_param_shard")}

        def failing(export: Any) -> Any:
            def generate(items: Any) -> Iterator[Any]:
                yield next(items)
                for name in exports:
                    delattr(engine, name)
                raise RuntimeError("the export failed")

            def call(**kwargs: Any) -> Any:
                items, config = export(**kwargs)
                return generate(iter(items)), config

            return call

        for name, export in exports.items():
            setattr(engine, name, failing(export))

    def die_next(self) -> None:
        """The process is gone in the middle of its next transfer's preparations."""
        engine = self.verl.checkpoint_engine
        engine._sync._transfer = lambda *_: os._exit(9)


class Rollout:
    """A rank that generates: its engine loads tensors one by one, in place."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self.worker_class = load_verl(setup, rollout=True)
        self.weights: dict[str, Tensor] = {}
        self.order: list[str] = []
        self.verl = SimpleNamespace(checkpoint_engine=new_backend(setup), server_adapter=self)

    def ready(self) -> None:
        """Answers once the process has begun."""

    def engine(self, method: str, **kwargs: Any) -> Any:
        return self.worker_class.execute_checkpoint_engine(self.verl, method, **kwargs)

    def update_weights(self, step: int | None) -> Any:
        adapter = SimpleNamespace(update_weights=self.load)
        self.verl.server_adapter = adapter
        return asyncio.run(self.worker_class.update_weights(self.verl, global_steps=step))

    async def load(self, weights: Any, global_steps: int | None, wire_format: str) -> None:
        """What verl's server adapters do."""
        assert wire_format == "named_tensors"
        self.order = []
        async for name, tensor in weights:
            self.order.append(name)
            self.weights[name] = tensor

    def cached(self) -> list[str]:
        """The names of `get_weights`, after comparing its tensors with those loaded."""

        async def collect() -> list[str]:
            names = []
            async for name, tensor in self.verl.checkpoint_engine.get_weights():
                assert torch.equal(tensor, self.weights[name])
                names.append(name)
            return names

        return asyncio.run(collect())

    def loaded(self) -> list[Any]:
        return [
            (n, t.contiguous().reshape(-1).view(torch.uint8).numpy(), str(t.dtype).split(".")[1], tuple(t.shape))
            for n, t in self.weights.items()
        ]

    def names(self) -> list[str]:
        return self.order

    def memory(self) -> int:
        """Address of what it receives into."""
        held: int = self.verl.checkpoint_engine._sync._memory.tensors["embed.weight"].data_ptr()
        return held

    def die_before_commit(self) -> None:
        """The process is gone when it has received everything and would say so."""
        link = self.verl.checkpoint_engine._sync._link
        exchange = link.exchange
        link.exchange = lambda row: os._exit(9) if row == b"complete" else exchange(row)


def new_backend(setup: Setup, **more: Any) -> Any:
    registry = sys.modules["verl.checkpoint_engine.base"].CheckpointEngineRegistry
    options = {"timeout_s": 60.0} | setup.options
    return registry.new("areal_core", bucket_size=setup.bucket_bytes, **more, **options)


def load_verl(setup: Setup, rollout: bool = False) -> Any:
    """verl's classes, with our backend registered: the rollout's worker, or the trainer's and its engine."""
    from areal_core.integrations import _verl_shards, verl_weights
    from areal_core.integrations._patch import source_hash

    torch.set_num_threads(1)
    if not setup.real:
        install_fake_verl()
        export = sys.modules[FSDP].FSDPEngine.get_per_tensor_param_shard
        _verl_shards.SHARD_EXPORTS.add(source_hash(export))
    patches = verl_weights.register()
    assert patches is not None
    if not setup.hands_over:
        patches.undo()  # as with a worker class of one's own
    if rollout:
        return sys.modules["verl.checkpoint_engine.base"].CheckpointEngineWorker
    import importlib

    module = importlib.import_module(FSDP)
    module.get_device_id = lambda: "cpu"  # verl knows no CPU
    module.log_gpu_memory_usage = lambda *_, **__: None
    return sys.modules["verl.workers.engine_workers"].ActorRolloutRefWorker, module.FSDPEngine


def install_fake_verl() -> None:
    """Modules with the names, signatures and behaviour of verl's that the backend relies on."""
    import fake_verl

    parts = ("", ".checkpoint_engine", ".checkpoint_engine.base", ".workers", ".workers.engine_workers")
    for name in (*parts, ".workers.engine", ".workers.engine.fsdp", ".workers.engine.fsdp.transformer_impl"):
        module = ModuleType(f"verl{name}")
        module.__path__ = []  # type: ignore[attr-defined]
        vars(module).update({k: v for k, v in vars(fake_verl).items() if not k.startswith("__")})
        sys.modules[f"verl{name}"] = module
    sys.modules["verl.checkpoint_engine"].base = sys.modules["verl.checkpoint_engine.base"]  # type: ignore[attr-defined]


def _serve(pipe: Connection, function: Any, args: tuple[Any, ...]) -> None:
    target: Any = None
    while True:
        try:
            method, given, kwargs = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            target = target or function(*args)
            reply = "ok", getattr(target, method)(*given, **kwargs)
        except Exception as error:
            reply = type(error).__name__, f"{error}\n{traceback.format_exc()}"
        with suppress(OSError):
            pipe.send(reply)
