"""Benchmarks that check before they time.

A bench names providers, callables without arguments that do the same work, and a check of what they return.
`Bench.compare` runs every provider once and checks its result, then times them in turns (so that a noisy minute hits
all alike), measures the memory each needs beyond its inputs and prints a table. `Bench.save` adds the rows to
bench/results/<date>-<machine>.json, with the hardware, the versions and the commit. A bench that times something else
than callables keeps its numbers with `save_results`.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_core import _C, __version__

ROOT = Path(__file__).parents[1]
Provider = Callable[[], Any]


def argument_parser(description: str) -> argparse.ArgumentParser:
    """The options every bench has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each provider")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of all providers")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--cold", action="store_true", help="sweep the CPU caches before every timed run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-save", action="store_true", help="print only; leave bench/results alone")
    return parser


class Bench:
    """One run of a bench script: settings, measured bandwidth, results so far."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        self.rows: list[dict[str, Any]] = []
        torch.set_num_threads(args.threads)
        torch.manual_seed(args.seed)
        self.read_gbps, self.copy_gbps = measure_bandwidth(args.device)
        print(
            f"{name}: {describe_machine()['cpu']}, {args.threads} threads, {args.device}, {_C.active_isa()}; ", end=""
        )
        print(f"read {self.read_gbps:.1f} GB/s, copy {self.copy_gbps:.1f} GB/s", flush=True)

    def compare(
        self,
        case: str,
        providers: Mapping[str, Provider],
        *,
        check: Callable[[str, Any], None],
        read_bytes: int = 0,
        written_bytes: int = 0,
        before: Mapping[str, Callable[[], None]] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Check, then time. The first provider is the baseline of the speed-ups.

        read_bytes and written_bytes are what the work cannot do without; they give the share of the measured
        bandwidth of memory, which inputs that stay in a cache can exceed. before[name]() runs untimed before every run
        of that provider.
        """
        before = before or {}
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
        rows = {
            name: self._row(case, name, seconds[name], memory[name], read_bytes, written_bytes) for name in providers
        }
        baseline = next(iter(rows.values()))
        for row in rows.values():
            row["speedup"] = baseline["median_ms"] / row["median_ms"]
            row["cpu_speedup"] = baseline["cpu_ms"] / row["cpu_ms"] if row["cpu_ms"] else None
        self.rows += rows.values()
        print_table(case, rows)
        return rows

    def _time(self, provider: Provider) -> tuple[float, float]:
        """(wall, CPU) seconds; on a busy machine the CPU time of all threads tells what the wall clock can't."""
        if self.args.cold:
            sweep_caches()
        synchronize(self.args.device)
        start, cpu_start = time.perf_counter(), time.process_time()
        result = provider()
        synchronize(self.args.device)
        elapsed = time.perf_counter() - start, time.process_time() - cpu_start
        del result  # freed outside the timed part
        return elapsed

    def _row(
        self,
        case: str,
        provider: str,
        seconds: Sequence[tuple[float, float]],
        memory: int,
        read_bytes: int,
        written_bytes: int,
    ) -> dict[str, Any]:
        wall = [pair[0] for pair in seconds]
        median = statistics.median(wall)
        # A written byte costs what the copy's second half costs.
        floor = read_bytes / self.read_gbps + written_bytes * max(2 / self.copy_gbps - 1 / self.read_gbps, 0.0)
        return {
            "case": case,
            "provider": provider,
            "median_ms": 1e3 * median,
            "spread": (max(wall) - min(wall)) / median,
            "best_ms": 1e3 * min(wall),
            "cpu_ms": 1e3 * statistics.median(pair[1] for pair in seconds),
            "extra_bytes": memory,
            "bandwidth_share": floor / 1e9 / median if floor else None,
        }

    def save(self) -> None:
        """Keep the rows, unless --no-save."""
        if self.args.no_save:
            return
        options = {k: v for k, v in vars(self.args).items() if k != "no_save"}
        bandwidth = {"read_gbps": self.read_gbps, "copy_gbps": self.copy_gbps}
        save_results(self.name, {"options": options, "bandwidth": bandwidth, "rows": self.rows})


def save_results(name: str, results: Mapping[str, Any]) -> Path:
    """Append one run to this machine's file of the day: name, hardware, versions, commit, results (as JSON allows)."""
    machine = describe_machine()
    slug = re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine['cores']}c".lower()).strip("-")
    path = ROOT / "bench" / "results" / f"{datetime.date.today().isoformat()}-{slug}.json"
    path.parent.mkdir(exist_ok=True)
    runs = json.loads(path.read_text()) if path.exists() else []
    head = {"bench": name, "machine": machine, "versions": describe_versions(), "commit": describe_commit()}
    runs.append(head | dict(results))
    path.write_text(json.dumps(runs, indent=1) + "\n")
    print(f"saved to {path.relative_to(ROOT)}")
    return path


def print_table(case: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """One line for each provider."""
    print(f"\n{case}")
    print(
        f"  {'provider':34} {'median ms':>11} {'spread':>7} {'speed-up':>9} {'CPU ms':>11} {'speed-up':>9} "
        f"{'extra MB':>10} {'bandwidth':>10}"
    )
    for name, row in rows.items():
        share = f"{row['bandwidth_share']:10.0%}" if row["bandwidth_share"] else f"{'-':>10}"
        print(
            f"  {name:34} {row['median_ms']:11.3f} {row['spread']:7.0%} {row['speedup']:8.2f}x {row['cpu_ms']:11.3f} "
            f"{row['cpu_speedup'] or 0.0:8.2f}x {row['extra_bytes'] / 1e6:10.3f} {share}",
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


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def extra_memory(provider: Provider, device: str) -> int:
    """Peak bytes in use during the call beyond those in use before it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        used = torch.cuda.memory_allocated()
        provider()
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


_SWEEP_BYTES = 64 << 20


def sweep_caches() -> None:
    """Push the inputs out of the core's own caches (a large shared cache may keep some)."""
    torch.ones(_SWEEP_BYTES // 4).sum()


def measure_bandwidth(device: str, size_bytes: int = 256 << 20) -> tuple[float, float]:
    """(GB/s read by a dot product, GB/s read and written by a copy), best of five."""
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)

    def best(run: Provider) -> float:
        times = []
        for _ in range(5):
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    read = size_bytes / best(lambda: torch.dot(source, source)) / 1e9
    copy = 2 * size_bytes / best(lambda: target.copy_(source)) / 1e9
    return read, copy


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, GPU."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*:\s*(.+)", info)
    return {
        "cpu": name[1].strip() if name else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "isa": _C.active_isa(),
    }


def describe_versions() -> dict[str, str]:
    """Of everything that was timed."""
    return {
        "areal_core": __version__,
        "compiler": _C.compiler,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def describe_commit() -> str:
    """Hash of the checked-out commit, with -dirty where the tree differs."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
