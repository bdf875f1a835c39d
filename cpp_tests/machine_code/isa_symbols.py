"""Checks that objects compiled for one instruction set share no symbol with those of another.

An inline function that the compiler keeps out of line becomes a weak symbol; of the copies in the objects of several
instruction sets the linker keeps one, perhaps the AVX-512 one, for all callers. So objects may define local symbols,
and global ones inside `areal::<isa>` only.

Usage: isa_symbols.py ISA OBJECT...
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SKIPPED = 77
LOCAL_TYPES = set("trdbnNa")
GLOBAL_TYPES = set("TRDB")


def faults(isa: str, object_file: str) -> list[str]:
    """What the object defines and must not, in words."""
    if not Path(object_file).exists():
        return [f"expected the object to be built: {object_file}"]
    listing = subprocess.run(["nm", "-C", "--defined-only", object_file], capture_output=True, text=True, check=True)
    found = []
    for line in listing.stdout.splitlines():
        _, kind, name = line.split(" ", 2)
        if kind in LOCAL_TYPES:
            continue
        if kind not in GLOBAL_TYPES:
            found.append(f"weak symbol {name} (nm type {kind}) in {object_file}")
        elif f"areal::{isa}::" not in name:
            found.append(f"global symbol outside areal::{isa}: {name} in {object_file}")
    return found


def main(isa: str, object_files: list[str]) -> int:
    """Prints the faults of all objects; 0 when there are none."""
    if shutil.which("nm") is None:
        print("skipped: no nm")
        return SKIPPED
    if not object_files:
        print("expected at least one object file, got none")
        return 1
    found = [fault for object_file in object_files for fault in faults(isa, object_file)]
    for fault in found:
        print(fault)
    print(f"{isa}: {len(object_files)} objects, {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], [path for argument in sys.argv[2:] for path in argument.split(";")]))
