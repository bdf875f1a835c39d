"""Checks the machine code of compiled kernels against kernel_table.py, without a GPU.

Usage: sass_check.py [LIBRARY]

LIBRARY is an object, archive or shared library with CUDA code. Needs cuobjdump and nvdisasm: of the CUDA toolkit, or of
the wheels nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm. Exits with 77 (skipped) without them, or without LIBRARY.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kernel_table import KERNELS, KernelRow

SKIPPED = 77


@dataclass
class Kernel:
    """One kernel as compiled for one architecture."""

    name: str
    arch: str
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    local_bytes: int = 0
    opcodes: Counter[str] = field(default_factory=Counter)

    def count(self, pattern: str) -> int:
        """Number of instructions whose opcode matches."""
        return sum(n for opcode, n in self.opcodes.items() if re.fullmatch(pattern, opcode))

    def __str__(self) -> str:
        return (
            f"{self.arch} {self.name}: {self.registers} registers, {self.shared_bytes} B shared, "
            f"{self.wide_loads} wide loads, {self.wide_stores} wide stores"
        )

    @property
    def wide_loads(self) -> int:
        """16-byte loads from global memory."""
        return self.count(r"LDG?\.(.*\.)?128(\..*)?")

    @property
    def wide_stores(self) -> int:
        """16-byte stores to global memory."""
        return self.count(r"STG?\.(.*\.)?128(\..*)?")

    @property
    def wide_shared_loads(self) -> int:
        """16-byte loads from shared memory."""
        return self.count(r"LDS\.(.*\.)?128(\..*)?")

    @property
    def bulk_loads(self) -> int:
        """Bulk copies from global to shared memory."""
        return self.count(r"UBLKCP\.S\.G(\..*)?")

    @property
    def local_accesses(self) -> int:
        """Loads and stores of local memory: spills, and arrays indexed at run time."""
        return self.count(r"(LDL|STL)(\..*)?")


def find_tools() -> bool:
    """Puts cuobjdump and nvdisasm on PATH; False when they are nowhere."""
    folders = [Path("/usr/local/cuda/bin")]
    wheels = importlib.util.find_spec("nvidia")
    for root in wheels.submodule_search_locations or () if wheels else ():
        folders += Path(root).glob("*/bin")
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *map(str, folders)])
    return all(shutil.which(tool) for tool in ("cuobjdump", "nvdisasm"))


def demangle(mangled: Iterable[str]) -> dict[str, str]:
    """Readable names without argument lists and anonymous namespaces; as they are where c++filt is missing."""
    names = list(mangled)
    if shutil.which("c++filt") is None:
        return dict(zip(names, names, strict=True))
    out = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return {
        m: re.sub(r"(_GLOBAL__N__\w+|\(anonymous namespace\))::", "", d)
        for m, d in zip(names, out.split("\n"), strict=False)
    }


def read_kernels(library: str) -> list[Kernel]:
    """Every kernel in the library, once for each architecture."""
    kernels: dict[tuple[str, str], Kernel] = {}

    def kernel(arch: str, name: str) -> Kernel:
        return kernels.setdefault((arch, name), Kernel(name, arch))

    arch = current = ""
    for line in run("cuobjdump", "--dump-resource-usage", library):
        if match := re.match(r"arch = (\S+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            current = match[1]
        elif match := re.match(r"\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line):
            k = kernel(arch, current)
            k.registers, k.stack_bytes, k.shared_bytes, k.local_bytes = map(int, match.groups())
    for line in run("cuobjdump", "-sass", library):
        if match := re.match(r"\s*code for (\S+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            current = match[1]
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            kernel(arch, current).opcodes[match[1]] += 1
    names = demangle({k.name for k in kernels.values()})
    for k in kernels.values():
        k.name = names[k.name]
    return sorted(kernels.values(), key=lambda k: (k.name, k.arch))


def run(*command: str) -> list[str]:
    """Lines that the command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def faults_of(kernel: Kernel, row: KernelRow) -> list[str]:
    """What the kernel has too much or too little of."""
    found = []
    for what, got in (
        ("bytes of stack", kernel.stack_bytes),
        ("bytes of local memory", kernel.local_bytes),
        ("accesses of local memory (spills, arrays not in registers)", kernel.local_accesses),
    ):
        if got != 0:
            found.append(f"expected 0 {what}, got {got}")
    for what, got, most in (
        ("registers", kernel.registers, row.registers),
        ("bytes of static shared memory", kernel.shared_bytes, row.shared_bytes),
    ):
        if got > most:
            found.append(f"expected at most {most} {what}, got {got}")
    for what, got, least in (
        ("16-byte loads", kernel.wide_loads, row.wide_loads),
        ("16-byte stores", kernel.wide_stores, row.wide_stores),
        ("16-byte loads from shared memory", kernel.wide_shared_loads, row.wide_shared_loads),
        ("bulk copies into shared memory", kernel.bulk_loads, row.bulk_loads),
    ):
        if got < least:
            found.append(f"expected at least {least} {what}, got {got}")
    if not kernel.opcodes:
        found.append("no machine code was read")
    return [f"{kernel.arch} {kernel.name}: {fault}" for fault in found]


def check(kernels: Sequence[Kernel], rows: Sequence[KernelRow]) -> list[str]:
    """All faults of the kernels, and of a table that misses some or has rows to spare."""
    found = [] if kernels else ["expected CUDA kernels in the library, got none"]
    matched = set()
    for kernel in kernels:
        matching = [row for row in rows if re.search(row.pattern, kernel.name)]
        matched.update(matching)
        if not matching and (fault := f"{kernel.name}: expected a row in kernel_table.py, got none") not in found:
            found.append(fault)
        for row in matching:
            found += faults_of(kernel, row)
    found += [f"kernel_table.py: no kernel matches '{row.pattern}'" for row in rows if row not in matched]
    return found


def main(library: str | None) -> int:
    """Prints every kernel and every fault; 0 when there are no faults."""
    if library is None:
        print("skipped: built without CUDA kernels")
        return SKIPPED
    if not find_tools():
        print("skipped: no cuobjdump and nvdisasm (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)")
        return SKIPPED
    kernels = read_kernels(library)
    print(*kernels, sep="\n")
    found = check(kernels, KERNELS)
    print(*(f"FAULT: {fault}" for fault in found), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
