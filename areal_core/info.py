"""What this installation is and what it runs on: ``python -m areal_core.info`` or ``areal-core info``.

To build against the C library: ``--cflags`` and ``--libs`` print what a compiler needs, ``--cmake-dir`` the folder in
which CMake's ``find_package(areal_core)`` looks. These three load neither torch nor the native module.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from areal_core import __version__

__all__ = ["cmake_dir", "compile_flags", "describe", "link_flags", "main"]

_OPTIONAL = ("numpy", "safetensors", "tokenizers", "transformers", "tensorboard", "ray")


def compile_flags() -> str:
    """Compiler flags for ``#include <areal_core/areal_core.h>``.

    Raises:
        FileNotFoundError: the header is not there.
    """
    return f"-I{_installed('include', 'areal_core/areal_core.h')}"


def link_flags() -> str:
    """Linker flags for the C library, which the program then finds where it is now.

    Raises:
        FileNotFoundError: the library is not there.
    """
    folder = _installed("lib", "libareal_core_c.so")
    return f"-L{folder} -Wl,-rpath,{folder} -lareal_core_c"


def cmake_dir() -> str:
    """Folder of the CMake package, for ``-Dareal_core_DIR=``.

    Raises:
        FileNotFoundError: the package is not there.
    """
    return str(_installed("lib/cmake/areal_core", "areal_core-config.cmake"))


def _installed(folder: str, file: str) -> Path:
    """The folder, inside the package or, in a source tree built in place, beside it."""
    package = Path(__file__).resolve().parent
    candidates = (package / folder, package.parent / folder)
    for candidate in candidates:
        if (candidate / file).exists():
            return candidate
    raise FileNotFoundError(f"areal_core.info: expected {file} in {candidates[0]} (pip install .), got none")


def describe() -> dict[str, str]:
    """Facts as (name, text), in the order in which to print them."""
    import torch

    from areal_core import _C

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
    import torch

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


def main(argv: Sequence[str] = ()) -> int:
    """Print the facts, or what one flag asks for."""
    parser = argparse.ArgumentParser(prog="python -m areal_core.info", description=describe.__doc__)
    for name, function in (("cflags", compile_flags), ("libs", link_flags), ("cmake-dir", cmake_dir)):
        text = (function.__doc__ or "").split("\n", 1)[0]
        parser.add_argument(f"--{name}", dest="asked", action="append_const", const=function, help=text)
    asked = parser.parse_args(argv).asked
    if asked:
        try:
            print(" ".join(function() for function in asked))
        except FileNotFoundError as error:
            parser.exit(1, f"{error}\n")
        return 0
    for name, text in describe().items():
        print(f"{name:16} {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
