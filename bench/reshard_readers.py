"""How long readers wait for a pin while versions flip: a process that pins without rest, another that publishes."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from areal_core.reshard import VersionStore

if TYPE_CHECKING:
    from harness import Bench


def read(store: VersionStore, pipe: Connection) -> None:
    """Pin and release until told to stop; report the times of pins, the versions seen, and what was torn."""
    waits: list[float] = []
    computed: list[float] = []
    versions: set[int] = set()
    torn = 0
    store.pin().release()  # what a process pays once
    pipe.send(None)
    while not (waits and pipe.poll()):  # at least once, however few versions flip
        for _ in range(64):
            cpu, start = time.thread_time(), time.perf_counter()
            snapshot = store.pin()
            waits.append(time.perf_counter() - start)
            computed.append(time.thread_time() - cpu)
            with snapshot:
                ends = snapshot.tensors["w"][[0, -1]].tolist()
                torn += ends != [snapshot.version] * 2
            versions.add(snapshot.version)
    pipe.recv()
    shares = {"pins": len(waits), "versions": len(versions), "torn": torn}
    shares["stall_p50_us"], shares["stall_p999_us"] = (1e6 * np.quantile(waits, [0.5, 0.999])).tolist()
    pipe.send(shares | {"stall_worst_us": 1e6 * max(waits), "stall_worst_cpu_us": 1e6 * max(computed)})


def bench_readers(bench: Bench, total_bytes: int, flips: int) -> None:
    """Publish `flips` versions while a reader pins; the worst wall time of a pin includes being scheduled out."""
    weights = {"w": torch.zeros(total_bytes // 8, dtype=torch.int64)}
    ours, theirs = multiprocessing.Pipe()
    with VersionStore.create(weights) as store:
        store.publish(weights, 0)
        reader = multiprocessing.get_context("fork").Process(target=read, args=(store, theirs), daemon=True)
        reader.start()
        theirs.close()
        ours.recv()
        for version in range(1, flips + 1):
            weights["w"].fill_(version)
            store.publish(weights, version, timeout=60.0)
        ours.send(None)
        figures: dict[str, Any] = ours.recv()
        reader.join()
    case = f"reader stall, {total_bytes / 1e6:.0f} MB"
    bench.rows.append({"case": case, "provider": "VersionStore", "flips": flips} | figures)
    print(
        f"\n{case}: {figures['pins']} pins by another process while {flips} versions flip ({figures['versions']} seen, "
        f"{figures['torn']} torn): p50 {figures['stall_p50_us']:.1f} us, p99.9 {figures['stall_p999_us']:.1f} us, "
        f"longest {figures['stall_worst_us']:.0f} us, of CPU {figures['stall_worst_cpu_us']:.0f} us"
    )
