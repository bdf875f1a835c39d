"""What this installation is and what it runs on: ``python -m areal_core.info`` or ``areal-core info``."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

import torch

from areal_core import _C, __version__

__all__ = ["describe", "main"]

_OPTIONAL = ("numpy", "safetensors", "tokenizers", "transformers", "tensorboard", "ray")


def describe() -> dict[str, str]:
    """Facts as (name, text), in the order in which to print them."""
    facts = {
        "areal-core": f"{__version__} (native module {_C.__version__}, {_C.compiler})",
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__} (built for CUDA {torch.version.cuda})"
        if torch.version.cuda
        else f"{torch.__version__} (CPU build)",
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores",
        "instruction set": f"{_C.active_isa()} (best of this machine: {_C.best_isa()})",
        "threads": str(_C.num_threads()),
        "cuda kernels": f"built for sm {_C.cuda_archs}"
        if _C.cuda_compiled
        else "not built (AREAL_CUDA=OFF or no nvcc)",
        "gpu": _gpus(),
    }
    for package in _OPTIONAL:
        facts[package] = _version(package)
    return facts


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown CPU"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none seen"
    return ", ".join(
        f"{torch.cuda.get_device_name(i)} (sm_{''.join(map(str, torch.cuda.get_device_capability(i)))})"
        for i in range(torch.cuda.device_count())
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def main() -> int:
    """Print the facts."""
    for name, text in describe().items():
        print(f"{name:16} {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
