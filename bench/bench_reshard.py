"""Resharding between processes, one thread each: the engine over its transports against what is done without one.

Every rank is a process; sources and targets hold real shapes (Qwen2.5-0.5B by default), each provider's result is
compared bit for bit before it is timed, and a round ends when the last rank is done. The bound is a non-temporal copy
of the bytes that must move, by as many threads as ranks send, or cores there are.

    python bench/bench_reshard.py --layers 6
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import reshard_baselines as baselines
import reshard_engine as engine
import torch
from bench_publish import NonTemporalCopy
from reshard_crashes import bench_crashes
from reshard_pack import bench_pack
from reshard_ranks import Ranks
from reshard_readers import bench_readers
from reshard_weights import CASES, Case, Shapes, shapes_of

from areal_core import _C
from areal_core.reshard import VersionStore

from harness import Bench, Work, argument_parser, print_table, refuse


def bound_ms(total_bytes: int, threads: int, repeats: int) -> float:
    """The best time of a non-temporal copy of that many bytes, in slices that leave the caches."""
    slice_bytes = min(total_bytes, 256 << 20)
    source = torch.randint(0, 255, (slice_bytes,), dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = NonTemporalCopy(threads)
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        copy(target, source)
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds) * total_bytes / slice_bytes


def time_rounds(ranks: Ranks, provider: type, repeats: int) -> tuple[list[tuple[float, float]], list[dict[str, float]]]:
    """Check one round, time the others: (elapsed, CPU of all ranks) seconds; and all ranks' figures of the last."""
    ranks.load(provider)
    ranks.round()
    ranks.check()
    seconds: list[tuple[float, float]] = []
    for _ in range(repeats):
        start = time.perf_counter()
        figures = ranks.round()
        seconds.append((time.perf_counter() - start, sum(f["cpu_s"] for f in figures)))
    return seconds, [dict(f) for f in figures]


def bench_case(bench: Bench, case: Case, shapes: Shapes, args: Any, folder: str) -> None:
    """All providers of one case."""
    made = engine.plan_of(case, shapes)
    moved = made.stats.wire_bytes + made.stats.local_bytes
    providers: dict[str, type] = {"gather, then slice (gloo)": baselines.GatherThenSlice}
    if case.source.ranks == case.target.ranks and "redistribute" in args.baselines:
        providers["DTensor.redistribute (gloo)"] = baselines.Redistribute
    if "checkpoint" in args.baselines:
        providers["distributed checkpoint, /dev/shm"] = baselines.Checkpoint
    providers |= {"executors, gloo": engine.GroupExecutors, "executors, tcp": engine.TcpExecutors}
    providers["executors, shm"] = engine.Executors
    if not set(case.source.ranks) & set(case.target.ranks):
        providers |= {"publish to visible, tcp": engine.TcpUpdates, "publish to visible, shm": engine.Updates}
    name = f"{case.name}, {args.model}, {moved / 1e6:.0f} MB"
    ranks = Ranks(case, shapes, folder, with_dtensor=bool(args.baselines))
    rows: dict[str, dict[str, Any]] = {}
    copying = min(os.cpu_count() or 1, len(case.source.ranks))
    bound = bound_ms(moved, copying, args.repeats)
    try:
        for provider, kind in providers.items():
            seconds, figures = time_rounds(ranks, kind, args.repeats)
            staging = max((int(f.get("staging_bytes", 0)) for f in figures), default=0)
            row = bench._row(name, provider, seconds, staging, Work(moved, moved))
            rows[provider] = row | {"bound_ms": bound, "bound_share": bound / row["best_ms"]}
            rows[provider] |= {k: v for f in figures for k, v in f.items() if k not in row}
    finally:
        ranks.close()
    baseline = next(iter(rows.values()))
    for row in rows.values():
        row["speedup"] = baseline["median_ms"] / row["median_ms"]
        row["best_speedup"] = baseline["best_ms"] / row["best_ms"]
        row["cpu_speedup"] = baseline["cpu_ms"] / row["cpu_ms"]
    bench.rows += rows.values()
    print_table(name, rows, Work(moved, moved), bench)
    print(f"  non-temporal copy of these bytes, {copying} threads: {bound:.3f} ms; extra MB is staging of one rank")
    for provider, row in rows.items():
        if "visible_p50_s" in row:
            visible = [1e3 * row[f"visible_{share}_s"] for share in ("p50", "p95")]
            print(
                f"  {provider}: {row['bytes'] / row['bound_bytes']:.3f} of the bound's bytes, visible p50 "
                f"{visible[0]:.1f} ms p95 {visible[1]:.1f} ms, pause {1e3 * row['pause_s']:.1f} ms, staging "
                f"{row['staging_share']:.1%} of a shard, senders max/mean {row['sender_max_over_mean']:.3f}"
            )
        else:
            print(f"  {provider}: {row['bound_share']:.0%} of the copy")


def bench_flip(bench: Bench, total_bytes: int, rounds: int) -> None:
    """How long commit takes to show a version, what a pin costs a reader, and what checksums add to a fill."""
    weights = {"w": torch.zeros(total_bytes, dtype=torch.uint8)}
    flips: list[float] = []
    pins: list[float] = []
    seals: list[float] = []
    fills: list[float] = []
    hashed: list[float] = []  # fills that take a chunk's checksum on the way
    with VersionStore.create(weights) as store:
        store.publish(weights, 0)
        for version in range(1, rounds + 1):
            with store.draft(version) as draft:
                into, size = draft.tensors["w"].data_ptr(), total_bytes
                for times, checksum in ((hashed, True), (fills, False)):
                    copy = (into, weights["w"].data_ptr(), size, 1, size, size, checksum)
                    times.append(_seconds(lambda copy=copy: _C.copy_rows(*copy)))  # type: ignore[misc]
                seals.append(_seconds(draft.seal))
                flips.append(_seconds(draft.commit))
            pins.append(_seconds(lambda: store.pin().release()))
    row = {
        "case": f"versions, {total_bytes / 1e6:.0f} MB",
        "provider": "VersionStore",
        "flip_p50_us": 1e6 * statistics.median(flips),
        "flip_worst_us": 1e6 * max(flips),
        "pin_p50_us": 1e6 * statistics.median(pins),
        "pin_worst_us": 1e6 * max(pins),
        "chunk_checksum_tax": min(hashed) / min(fills) - 1,
        "seal_share_of_fill": min(seals) / min(fills),
    }
    bench.rows.append(row)
    print(
        f"\n{row['case']}: flip {row['flip_p50_us']:.1f} us (worst {row['flip_worst_us']:.1f}), pin and release "
        f"{row['pin_p50_us']:.1f} us (worst {row['pin_worst_us']:.1f}); checksums of "
        f"chunks on the way add {row['chunk_checksum_tax']:.0%} to a fill, sealing it {row['seal_share_of_fill']:.0%}"
    )


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def report_peers(bench: Bench) -> None:
    """Engines of other projects, or why they do not run here."""
    for name, reason in baselines.peer_reasons().items():
        print(f"{name}: not measured, {reason}")
        bench.rows.append({"case": "peers", "provider": name, "reason": reason})


def cases_of(names: Sequence[str]) -> list[Case]:
    """The cases of these names; an unknown one ends the run."""
    known = {case.name: case for case in CASES}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--cases: expected some of {', '.join(map(repr, known))}, got {unknown[0]!r}")
    return [known[name] for name in names]


def main() -> None:
    parser = argument_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-0.5b", help="a public model's name")
    parser.add_argument("--layers", type=int, help="number of its layers; default: all")
    parser.add_argument("--width", type=int, help="another hidden size, which shrinks everything (smoke tests)")
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    parser.add_argument(
        "--baselines", nargs="*", default=["redistribute", "checkpoint"], help="beside gather, then slice"
    )
    parser.add_argument("--pack-mib", type=int, default=64, help="bytes of each run length that is packed; 0: none")
    parser.add_argument("--flips", type=int, default=200, help="versions to commit for the flip's latency")
    parser.add_argument("--crashes", type=int, default=4, help="kills at chunks, and as many at other moments; 0: none")
    args = parser.parse_args()
    refuse(args, "bench_reshard", "device", "cold")
    bench = Bench("reshard", args)
    shapes = shapes_of(args.model, args.layers, args.width)
    bench_crashes(bench, args.crashes)
    bench_pack(bench, args.pack_mib << 20)
    bench_flip(bench, 1 << 20, args.flips)
    bench_readers(bench, 1 << 20, args.flips)
    if args.pack_mib:
        bench_flip(bench, args.pack_mib << 20, min(args.flips, 9))
    folder = tempfile.mkdtemp(dir="/dev/shm")
    try:
        for case in cases_of(args.cases):
            bench_case(bench, case, shapes, args, folder)
    finally:
        shutil.rmtree(folder)
    report_peers(bench)
    bench.save()


if __name__ == "__main__":
    main()
