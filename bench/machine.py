"""What a bench ran on: hardware, versions, commit, and the measured bounds (bandwidth, matrix products)."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from areal_core import _C, __version__

ROOT = Path(__file__).parents[1]

# Peak of the device memory in GB/s, as the makers state it; the first name found in the GPU's name counts.
HBM_PEAK_GBPS = {
    "H200": 4800.0,
    "H800 PCIe": 2000.0,
    "H100 PCIe": 2000.0,
    "H800": 3350.0,
    "H100": 3350.0,
    "A100-SXM4-40GB": 1555.0,
    "A100-PCIE-40GB": 1555.0,
    "A100": 2000.0,
}


def hbm_peak_gbps(device: str) -> float | None:
    """GB/s of the GPU's memory by its data sheet; None for the CPU and for a GPU that the table lacks."""
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for model, peak in HBM_PEAK_GBPS.items() if model in name), None)


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def best_seconds(run: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Shortest wall time of a few runs, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def measure_bandwidth(device: str) -> tuple[float, float]:
    """(GB/s read by a dot product, GB/s read and written by a copy), best of five."""
    size_bytes = (1 << 30) if device == "cuda" else (256 << 20)
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    read = size_bytes / best_seconds(lambda: torch.dot(source, source), device) / 1e9
    copy = 2 * size_bytes / best_seconds(lambda: target.copy_(source), device) / 1e9
    return read, copy


def measure_gemm_tflops(device: str, dtype: torch.dtype) -> float:
    """TFLOP/s of a square matrix product in `dtype`, best of five: what arithmetic can be asked for here."""
    size = 8192 if device == "cuda" else 1024
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / best_seconds(lambda: torch.mm(a, b), device) / 1e12


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


def machine_slug() -> str:
    """The machine as a part of a file name."""
    machine = describe_machine()
    parts = f"{machine['gpu'] or machine['cpu']} {machine['cores']}c"
    return re.sub(r"[^a-z0-9]+", "-", parts.lower()).strip("-")


def describe_versions() -> dict[str, str]:
    """Of everything that was timed."""
    return {
        "areal_core": __version__,
        "compiler": _C.compiler,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
    }


def describe_commit() -> str:
    """Hash of the checked-out commit, with -dirty where the tree differs."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git here
        return "unknown"
    return result.stdout.strip() or "unknown"
