"""Benchmarks that check before they time.

A bench names providers, callables without arguments that do the same work, a check of what they return, and the bytes
and FLOPs that the work cannot do without. `Bench.compare` runs every provider once and checks its result, then times
them in turns (so that a noisy minute hits all alike), measures the memory each needs beyond its inputs and prints a
table. `Bench.save` adds the rows to results/<date>-<machine>.json, with the hardware, the versions and the commit, and
draws them beside it. A bench that times something else than callables keeps its numbers with `save_results`.

On a GPU the times are those of CUDA events around the call, with the L2 cache overwritten before each; on a CPU, wall
time.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_core import _C

from machine import (
    ROOT,
    describe_commit,
    describe_machine,
    describe_versions,
    hbm_peak_gbps,
    machine_slug,
    measure_bandwidth,
    measure_gemm_tflops,
    synchronize,
)
from plot import draw_rows, missing_matplotlib

Provider = Callable[[], Any]
RESULTS = ROOT / "bench" / "results"


def argument_parser(description: str) -> argparse.ArgumentParser:
    """The options every bench has; its own are the sizes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each provider")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of all providers")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--cold", action="store_true", help="sweep the CPU caches before every timed run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-save", action="store_true", help="print only; write no JSON, and no plot but --plot's")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file and the plot")
    parser.add_argument("--plot", type=Path, help="where to draw the results (.svg, .png); default: beside the JSON")
    return parser


def refuse(args: argparse.Namespace, bench: str, *options: str) -> None:
    """End with a message where an option is set that this bench has no use for ("device", "cold")."""
    for option in options:
        if getattr(args, option) not in (False, None, "cpu"):
            raise SystemExit(f"{bench}: --{option} has no meaning here")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"{bench}: --device cuda: no GPU, or a torch built without CUDA")


@dataclass(frozen=True)
class Work:
    """What a case cannot do without; the lower bounds of its time follow from it."""

    read_bytes: int = 0
    written_bytes: int = 0
    flops: int = 0
    flops_dtype: torch.dtype = torch.float32

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes


class Bench:
    """One run of a bench script: settings, measured bounds, results so far."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        refuse(args, f"bench_{name}")
        self.name, self.args = name, args
        self.rows: list[dict[str, Any]] = []
        torch.set_num_threads(args.threads)
        torch.manual_seed(args.seed)
        self.read_gbps, self.copy_gbps = measure_bandwidth(args.device)
        self.hbm_gbps = hbm_peak_gbps(args.device)
        self._gemm_tflops: dict[torch.dtype, float] = {}
        self._flush = torch.empty(_flush_bytes(args.device), dtype=torch.uint8, device=args.device)
        machine = describe_machine()
        where = machine["gpu"] if args.device == "cuda" else f"{machine['cpu']}, {_C.active_isa()}"
        print(f"{name}: {where}, {args.threads} threads; ", end="")
        print(f"read {self.read_gbps:.1f} GB/s, copy {self.copy_gbps:.1f} GB/s", end="")
        print(f", memory peak {self.hbm_gbps:.0f} GB/s" if self.hbm_gbps else "", flush=True)

    def gemm_tflops(self, dtype: torch.dtype) -> float:
        """Measured peak of matrix products in `dtype`; the first call measures."""
        if dtype not in self._gemm_tflops:
            self._gemm_tflops[dtype] = measure_gemm_tflops(self.args.device, dtype)
        return self._gemm_tflops[dtype]

    def compare(
        self,
        case: str,
        providers: Mapping[str, Provider],
        *,
        check: Callable[[str, Any], None],
        read_bytes: int = 0,
        written_bytes: int = 0,
        flops: int = 0,
        flops_dtype: torch.dtype = torch.float32,
        before: Mapping[str, Callable[[], Any]] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Check, then time. The first provider is the baseline of the speed-ups.

        read_bytes, written_bytes and flops are what the work cannot do without; they give the shares of the measured
        copy bandwidth and of the measured peak of matrix products in flops_dtype. Inputs that stay in a cache can
        exceed the first. before[name]() runs untimed before every run of that provider.
        """
        before = before or {}
        work = Work(read_bytes, written_bytes, flops, flops_dtype)
        memory: dict[str, int] = {}
        for name, provider in providers.items():
            before.get(name, lambda: None)()
            check(name, provider())
        for name, provider in providers.items():
            before.get(name, lambda: None)()
            memory[name] = extra_memory(provider, self.args.device)
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in providers}
        for turn in range(self.args.repeats):
            names = list(providers)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                before.get(name, lambda: None)()
                seconds[name].append(self._time(providers[name]))
        rows = {name: self._row(case, name, seconds[name], memory[name], work) for name in providers}
        baseline = next(iter(rows.values()))
        for row in rows.values():
            row["speedup"] = baseline["median_ms"] / row["median_ms"]
            row["best_speedup"] = baseline["best_ms"] / row["best_ms"]
            row["cpu_speedup"] = baseline["cpu_ms"] / row["cpu_ms"] if row["cpu_ms"] else None
        self.rows += rows.values()
        print_table(case, rows, work, self)
        return rows

    def _time(self, provider: Provider) -> tuple[float, float]:
        """(elapsed, CPU) seconds; on a busy machine the CPU time of all threads tells what the wall clock can't."""
        if self.args.device == "cuda":
            return self._time_on_gpu(provider)
        if self.args.cold:
            self._flush.fill_(1)
        start, cpu_start = time.perf_counter(), time.process_time()
        result = provider()
        elapsed = time.perf_counter() - start, time.process_time() - cpu_start
        del result  # freed outside the timed part
        return elapsed

    def _time_on_gpu(self, provider: Provider) -> tuple[float, float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        self._flush.zero_()  # no input is left in L2; and the launches below are queued while this runs
        cpu_start = time.process_time()
        begin.record()
        result = provider()
        end.record()
        cpu = time.process_time() - cpu_start
        torch.cuda.synchronize()
        del result
        return begin.elapsed_time(end) / 1e3, cpu

    def _row(
        self, case: str, provider: str, seconds: Sequence[tuple[float, float]], memory: int, work: Work
    ) -> dict[str, Any]:
        times = [pair[0] for pair in seconds]
        median = statistics.median(times)
        gbps = work.moved_bytes / median / 1e9
        tflops = work.flops / median / 1e12
        return {
            "case": case,
            "provider": provider,
            "median_ms": 1e3 * median,
            "spread": (max(times) - min(times)) / median,
            "best_ms": 1e3 * min(times),
            "worst_ms": 1e3 * max(times),
            "cpu_ms": 1e3 * statistics.median(pair[1] for pair in seconds),
            "extra_bytes": memory,
            "read_bytes": work.read_bytes,
            "written_bytes": work.written_bytes,
            "flops": work.flops,
            "copy_share": gbps / self.copy_gbps if work.moved_bytes else None,
            "hbm_share": gbps / self.hbm_gbps if work.moved_bytes and self.hbm_gbps else None,
            "gemm_share": tflops / self.gemm_tflops(work.flops_dtype) if work.flops else None,
        }

    def save(self) -> None:
        """Keep the rows and draw them, unless --no-save."""
        if not self.args.no_save:
            bounds = {"read_gbps": self.read_gbps, "copy_gbps": self.copy_gbps, "hbm_peak_gbps": self.hbm_gbps}
            bounds |= {f"gemm_tflops_{str(d).split('.')[1]}": t for d, t in self._gemm_tflops.items()}
            save_results(self.name, {"bounds": bounds, "rows": self.rows}, self.args)
        draw(self.name, self.rows, self.args)


def save_results(name: str, results: Mapping[str, Any], args: argparse.Namespace) -> Path:
    """Append one run to this machine's file of the day: name, hardware, versions, commit, options, results."""
    path: Path = args.out / f"{datetime.date.today().isoformat()}-{machine_slug()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(path.read_text()) if path.exists() else []
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    options = {k: v for k, v in options.items() if k not in ("no_save", "out", "plot")}
    head = {"bench": name, "machine": describe_machine(), "versions": describe_versions(), "commit": describe_commit()}
    runs.append(head | {"options": options} | dict(results))
    path.write_text(json.dumps(runs, indent=1) + "\n")
    print(f"saved to {path}")
    return path


def draw(name: str, rows: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> None:
    """Draw the timed rows into --plot, or beside the JSON file where one is written."""
    timed = [row for row in rows if "median_ms" in row]
    if not timed or (args.no_save and args.plot is None):
        return
    if reason := missing_matplotlib():
        print(f"no plot: {reason}")
        return
    path = args.plot or args.out / f"{datetime.date.today().isoformat()}-{machine_slug()}-{name}.svg"
    draw_rows(path, name, timed)
    print(f"drawn to {path}")


def print_table(case: str, rows: Mapping[str, Mapping[str, Any]], work: Work, bench: Bench) -> None:
    """What the work needs, then one line for each provider."""
    print(f"\n{case}")
    floors = [f"reads {work.read_bytes / 1e6:.3f} MB, writes {work.written_bytes / 1e6:.3f} MB"]
    if work.moved_bytes:
        floors.append(f"{work.moved_bytes / bench.copy_gbps / 1e6:.3f} ms at copy bandwidth")
        if bench.hbm_gbps:
            floors.append(f"{work.moved_bytes / bench.hbm_gbps / 1e6:.3f} ms at the memory's peak")
    if work.flops:
        peak = bench.gemm_tflops(work.flops_dtype)
        floors.append(f"{work.flops / 1e9:.3f} GFLOP, {work.flops / peak / 1e9:.3f} ms at GEMM peak {peak:.2f} TFLOP/s")
    print("  " + "; ".join(floors))
    print(
        f"  {'provider':34} {'median ms':>11} {'spread':>7} {'speed-up':>9} {'best ms':>11} {'speed-up':>9} "
        f"{'CPU ms':>11} {'speed-up':>9} {'extra MB':>10} {'copy':>6} {'GEMM':>6} {'peak':>6}"
    )
    for name, row in rows.items():
        shares = [row[key] for key in ("copy_share", "gemm_share", "hbm_share")]
        percents = " ".join(f"{'-':>6}" if share is None else f"{share:6.0%}" for share in shares)
        print(
            f"  {name:34} {row['median_ms']:11.3f} {row['spread']:7.0%} {row['speedup']:8.2f}x {row['best_ms']:11.3f} "
            f"{row['best_speedup']:8.2f}x {row['cpu_ms']:11.3f} {row['cpu_speedup'] or 0.0:8.2f}x "
            f"{row['extra_bytes'] / 1e6:10.3f} {percents}",
            flush=True,
        )


def assert_close(what: str, value: Tensor, truth: Tensor, absolute: float, relative: float = 0.0) -> None:
    """Fail where |value - truth| > absolute + relative |truth|, or where it is NaN."""
    error = (value.double() - truth.double()).abs()
    if not bool((error <= absolute + relative * truth.double().abs()).all()):
        raise AssertionError(f"{what}: expected the truth within {absolute} + {relative} |x|, got {error.max().item()}")


def reuse_freed_memory() -> None:
    """Make glibc keep freed blocks of up to 32 MB, as it does in a process that has run for a while.

    It starts by mapping every larger block afresh, and zeroing a page costs more than most ops spend on it; it stops
    once it has seen a larger one freed.
    """
    torch.empty((32 << 20) - 4096, dtype=torch.uint8)


def extra_memory(provider: Provider, device: str) -> int:
    """Peak bytes in use during the call beyond those in use before it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        used = torch.cuda.memory_allocated()
        provider()
        synchronize(device)
        return torch.cuda.max_memory_allocated() - used
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # or the call would reuse what earlier ones left
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the present size
    used = _status_kilobytes("VmRSS")
    provider()
    return max(0, _status_kilobytes("VmHWM") - used) * 1024


def _status_kilobytes(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if match is None:
        raise RuntimeError(f"extra_memory: expected {field} in /proc/self/status, got none")
    return int(match[1])


def _flush_bytes(device: str) -> int:
    """Enough to push inputs out of the GPU's L2, or of a core's own caches (a large shared one may keep some)."""
    if device == "cpu":
        return 64 << 20
    l2: int = torch.cuda.get_device_properties("cuda").L2_cache_size
    return max(4 * l2, 256 << 20)
