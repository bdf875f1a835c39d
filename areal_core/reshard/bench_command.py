"""`areal-core reshard bench`: real updates between processes of this machine, one for each rank of both layouts."""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import statistics
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from areal_core.errors import ArealError
from areal_core.reshard.control import new_token
from areal_core.reshard.models import load_model
from areal_core.reshard.parallel import Parallel
from areal_core.reshard.plan import Plan, plan
from areal_core.reshard.publish import UpdateStats, WeightSender
from areal_core.reshard.receive import WeightReceiver

__all__ = ["bench_command"]

MAX_RANKS = 64
_BAR = 32


class _Job(NamedTuple):
    """What every process needs to know."""

    model: str
    layers: int | None
    src: str
    dst: str
    chunk_mib: int
    transport: str
    address: str
    token: bytes


def bench_command(args: argparse.Namespace) -> int:
    """Start the ranks, publish `--rounds` versions, check what arrived, print the statistics.

    Raises:
        ValueError: a model or spec that cannot be read or does not fit; more ranks than MAX_RANKS.
        RuntimeError: an update failed, or something else than what was published arrived.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/control"
        job = _Job(args.model, args.layers, args.src, args.dst, args.chunk_mib, args.transport, address, new_token())
        made = _plan(job)
        ranks = (*made.source.ranks, *made.target.ranks)
        if len(ranks) > MAX_RANKS:
            raise ValueError(f"bench: expected at most {MAX_RANKS} ranks, got {len(ranks)}: each is a process")
        print(f"{args.model}: {made.stats.wire_bytes / 1e9:.3f} GB from {args.src} to {args.dst} over {args.transport}")
        print(f"{len(made.source.ranks)} sending and {len(made.target.ranks)} receiving processes, one thread each")
        stats = _run(job, made, args.rounds)
    _print_stats(made, stats)
    return 0


def _plan(job: _Job) -> Plan:
    model = load_model(job.model)
    if job.layers is not None:
        model = dataclasses.replace(model, layers=job.layers)
    source = Parallel.parse(job.src).name_map(model).layout
    target = Parallel.parse(job.dst).name_map(model, first_rank=max(source.ranks) + 1).layout
    return plan(source, target, chunk_bytes=job.chunk_mib << 20)


def _run(job: _Job, made: Plan, rounds: int) -> list[UpdateStats]:
    """The statistics of every version but the first, which opens connections and touches memory."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[int, Connection] = {}
    processes = []
    try:
        for rank in (*made.source.ranks, *made.target.ranks):
            pipes[rank], theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, job, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
        for rank in pipes:
            _reply(rank, pipes[rank])
        stats = []
        for version in range(rounds + 1):
            _show_progress(version, rounds + 1)
            for rank in pipes:
                pipes[rank].send(version)
            replies = [_reply(rank, pipes[rank]) for rank in pipes]
            stats += [reply for reply in replies if isinstance(reply, UpdateStats)]
        _show_progress(rounds + 1, rounds + 1)
        return stats[1:]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _reply(rank: int, pipe: Connection) -> Any:
    try:
        reply = pipe.recv()
    except EOFError:
        raise RuntimeError(f"bench: expected rank {rank} alive, got the end of its process") from None
    if isinstance(reply, str):
        raise RuntimeError(f"bench: rank {rank}: {reply}")
    return reply


def _serve(rank: int, job: _Job, pipe: Connection) -> None:
    """The process of a rank: takes part in every version it is told of."""
    torch.set_num_threads(1)
    try:
        made = _plan(job)
        common = {"coordinator": job.address, "token": job.token, "transport": job.transport}
        if rank in made.source.ranks:
            _send(made, rank, common, pipe)
        else:
            _receive(made, rank, common, pipe)
    except (ArealError, ValueError) as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _send(made: Plan, rank: int, common: dict[str, Any], pipe: Connection) -> None:
    tensors = {n: torch.zeros(spec.shape, dtype=spec.dtype) for n, spec in made.source.buffers(rank).items()}
    with WeightSender(made, rank, tensors, **common) as sender:
        pipe.send(None)
        while True:
            version = pipe.recv()
            for tensor in tensors.values():
                tensor.reshape(-1).view(torch.uint8).fill_(_mark(version))
            pipe.send(sender.publish(version).wait())


def _receive(made: Plan, rank: int, common: dict[str, Any], pipe: Connection) -> None:
    with WeightReceiver(made, rank, **common) as receiver:
        pipe.send(None)
        while True:
            version = pipe.recv()
            receiver.store.wait(version, timeout=600.0)
            with receiver.store.pin() as snapshot:
                for name, tensor in snapshot.tensors.items():
                    data = tensor.reshape(-1).view(torch.uint8)
                    if not bool(((data == _mark(version)) | (data == 0)).all()):  # 0: padding
                        raise ValueError(f"expected version {version} in '{name}', got other bytes")
            pipe.send(None)


def _mark(version: int) -> int:
    """A byte that is not 0 and not that of the version before."""
    return 1 + version % 250


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        filled = _BAR * done // total
        end = "\n" if done == total else ""
        print(
            f"\r[{'#' * filled}{'.' * (_BAR - filled)}] {done}/{total} versions", end=end, file=sys.stderr, flush=True
        )


def _print_stats(made: Plan, stats: list[UpdateStats]) -> None:
    def median(field: str) -> float:
        return float(statistics.median(getattr(update, field) for update in stats))

    best = min(update.transfer_seconds for update in stats)
    rows = [
        ("bytes, plan / bound", f"{made.stats.wire_bytes / max(made.lower_bound.wire_bytes, 1):.3f}"),
        ("transfer", f"{1e3 * median('transfer_seconds'):.1f} ms, best {1e3 * best:.1f} ms"),
        ("rate of the best", f"{made.stats.wire_bytes / best / 1e9:.2f} GB/s between all ranks"),
        ("visible, p50 over receivers", f"{1e3 * median('visible_p50_s'):.1f} ms after publish"),
        ("visible, p95 over receivers", f"{1e3 * median('visible_p95_s'):.1f} ms after publish"),
        ("readers paused", f"{1e3 * median('pause_s'):.1f} ms"),
        (
            "staging memory of one rank",
            f"{median('staging_bytes') / 1e6:.1f} MB, {median('staging_share'):.1%} of its part",
        ),
        ("sender load, max / mean", f"{median('sender_max_over_mean'):.3f}"),
    ]
    print(f"{len(stats)} versions, medians:")
    for name, value in rows:
        print(f"  {name:30} {value}")
