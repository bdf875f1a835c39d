"""Tests of sass_check.py on the kernels of sass_fixture.cu.

Usage: sass_check_test.py LIBRARY
"""

from __future__ import annotations

import re
import sys
import unittest

import sass_check
from kernel_table import KernelRow

LOOSE = KernelRow("", registers=255)


class SassCheckTest(unittest.TestCase):
    library = ""
    kernels: dict[str, sass_check.Kernel]

    @classmethod
    def setUpClass(cls) -> None:
        cls.kernels = {kernel.name: kernel for kernel in sass_check.read_kernels(cls.library)}

    def faults(self, kernel: str, row: KernelRow) -> str:
        return "\n".join(sass_check.faults_of(self.kernels[kernel], row))

    def test_a_good_kernel_has_no_fault(self) -> None:
        assert self.faults("wide_kernel", KernelRow("", registers=16, wide_loads=1, wide_stores=1)) == ""

    def test_narrow_accesses_are_found(self) -> None:
        faults = self.faults("narrow_kernel", KernelRow("", registers=16, wide_loads=1, wide_stores=1))
        assert "expected at least 1 16-byte loads, got 0" in faults
        assert "expected at least 1 16-byte stores, got 0" in faults

    def test_missing_bulk_copies_and_shared_vectors_are_found(self) -> None:
        faults = self.faults("wide_kernel", KernelRow("", registers=16, wide_shared_loads=1, bulk_loads=1))
        assert "expected at least 1 16-byte loads from shared memory, got 0" in faults
        assert "expected at least 1 bulk copies into shared memory, got 0" in faults

    def test_spills_are_found(self) -> None:
        faults = self.faults("spilling_kernel", LOOSE)
        assert re.search(r"expected 0 bytes of stack, got \d+", faults)
        assert re.search(r"expected 0 accesses of local memory .*, got \d+", faults)

    def test_arrays_in_local_memory_are_found(self) -> None:
        assert re.search(r"expected 0 bytes of stack, got 256", self.faults("local_array_kernel", LOOSE))

    def test_too_many_registers_and_shared_bytes_are_found(self) -> None:
        faults = self.faults("shared_kernel", KernelRow("", registers=2, shared_bytes=1024))
        assert re.search(r"expected at most 2 registers, got \d+", faults)
        assert "expected at most 1024 bytes of static shared memory, got 16384" in faults

    def test_kernels_without_a_row_and_rows_without_a_kernel_are_found(self) -> None:
        faults = "\n".join(sass_check.check([self.kernels["wide_kernel"]], [KernelRow("absent_kernel", registers=1)]))
        assert re.search("wide_kernel.*: expected a row in kernel_table.py, got none", faults)
        assert "no kernel matches 'absent_kernel'" in faults
        assert sass_check.check([], []) == ["expected CUDA kernels in the library, got none"]


if __name__ == "__main__":
    if not sass_check.find_tools():
        print("skipped: no cuobjdump and nvdisasm")
        sys.exit(sass_check.SKIPPED)
    SassCheckTest.library = sys.argv.pop()
    unittest.main()
