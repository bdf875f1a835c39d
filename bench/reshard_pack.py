"""Packing and in-process transfers by the length of their contiguous runs, against a non-temporal copy.

A column shard of a row-major tensor is runs of one length: 128 bytes are 64 bf16 columns, what a row-parallel matrix
of width 2,048 leaves each of 32 ranks.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from bench_publish import NonTemporalCopy
from torch import Tensor

from areal_core import _C
from areal_core.reshard.layout import Layout, TensorLayout
from areal_core.reshard.placements import Mesh, Replicate, Shard
from areal_core.reshard.plan import Plan, plan
from areal_core.reshard.spec import Spec

if TYPE_CHECKING:
    from harness import Bench

RUN_BYTES = (64, 128, 256, 1024, 4096, 16_384, 65_536)
SHARDS = 4


def columns_plan(rows: int, run_bytes: int) -> Plan:
    """A whole tensor on rank 0; four ranks take a quarter of its columns each."""
    spec = Spec(torch.uint8, (rows, SHARDS * run_bytes))
    source = Layout({"w": TensorLayout(spec, Mesh((0,), (1,), ("x",)), (Replicate(),))})
    ranks = Mesh(range(1, 1 + SHARDS), (SHARDS,), ("tp",))
    return plan(source, Layout({"w": TensorLayout(spec, ranks, (Shard(1),))}))


class Inproc:
    """Rank 0 sends a column shard to each of four ranks, all threads of this process; one thread copies."""

    def __init__(self, rows: int, run_bytes: int, direct: bool) -> None:
        made = columns_plan(rows, run_bytes)
        self.source = torch.randint(0, 255, (rows, SHARDS * run_bytes), dtype=torch.uint8)
        self.targets = [torch.zeros(rows, run_bytes, dtype=torch.uint8) for _ in range(SHARDS)]
        group = _C.InprocGroup(list(range(1 + SHARDS)))
        empty: list[tuple[int, int]] = []
        self.runs = []
        for rank in range(1 + SHARDS):
            own = [(t.data_ptr(), t.nbytes) for t in self.targets[rank - 1 : rank]] if rank else empty
            source = [(self.source.data_ptr(), self.source.nbytes)] if rank == 0 else empty
            endpoint = group.endpoint(rank, own if direct else empty)
            executor = _C.Executor(made.native, rank, endpoint, 1, False, direct)
            self.runs.append((executor, _C.BoundBuffers(source, own, 0)))
        self.epoch = 0

    def __call__(self) -> list[Tensor]:
        """One transfer of the whole tensor."""
        self.epoch += 1
        threads = [threading.Thread(target=e.run, args=(self.epoch, b, 60.0)) for e, b in self.runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.targets


def bench_pack(bench: Bench, total_bytes: int) -> None:
    """One table for each run length."""
    if total_bytes <= 0:
        return
    copy = NonTemporalCopy(1)
    flat, flat_target = (torch.zeros(total_bytes, dtype=torch.uint8) for _ in range(2))
    for run_bytes in RUN_BYTES:
        rows = max(1, total_bytes // (SHARDS * run_bytes))
        direct, staged = Inproc(rows, run_bytes, True), Inproc(rows, run_bytes, False)
        moved = rows * SHARDS * run_bytes

        def by_torch(staged: Inproc = staged) -> list[Tensor]:
            for target, part in zip(staged.targets, staged.source.chunk(SHARDS, 1), strict=True):
                target.copy_(part)
            return staged.targets

        def check(name: str, got: object, direct: Inproc = direct, staged: Inproc = staged) -> None:
            if isinstance(got, list):
                source = (direct if got is direct.targets else staged).source
                for target, part in zip(got, source.chunk(SHARDS, 1), strict=True):
                    assert torch.equal(target, part), f"{name}: bytes differ"
                    target.zero_()

        bench.compare(
            f"inproc, runs of {run_bytes} B, {moved / 1e6:.0f} MB",
            {
                "non-temporal copy (the bound)": lambda moved=moved: copy(flat_target[:moved], flat[:moved]),
                "torch, column by column shard": by_torch,
                "engine, direct": direct,
                "engine, packed and unpacked": staged,
            },
            check=check,
            read_bytes=moved,
            written_bytes=moved,
        )
