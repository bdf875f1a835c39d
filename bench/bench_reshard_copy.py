"""Strided copies of the transfer engine against a copy that does nothing else, by length of run.

Storage is a matrix whose rows are eight runs long, of which one run a row is moved: what a row-parallel tensor leaves
to one of eight ranks. Packing gathers the runs into a chunk, unpacking scatters them, moving does both at once; each
with its checksum and without. The bound is a non-temporal copy of as many bytes from and to memory of the same size.
One thread.

    python bench/bench_reshard_copy.py --total-mib 32
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from areal_core import _C

from harness import argument_parser, refuse, save_results  # bench/ is on sys.path when a bench is run as a script

RUNS_PER_ROW = 8
CHUNK_BYTES = 8 << 20


def best_seconds(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The best time of each, called in turns so that a noisy minute hits all alike."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


class Rows:
    """One run of every row of two matrices, and a packed buffer, all past the caches."""

    def __init__(self, run_bytes: int, total_bytes: int) -> None:
        self.run_bytes = run_bytes
        self.count = max(total_bytes // run_bytes, 1)
        self.stride = RUNS_PER_ROW * run_bytes
        self.storage = torch.randint(0, 256, (self.count * self.stride,), dtype=torch.uint8)
        self.other = torch.zeros_like(self.storage)
        self.packed = torch.zeros(self.count * run_bytes, dtype=torch.uint8)

    def copy(self, kind: str, checksum: bool) -> int:
        """Copy all runs a chunk at a time; returns the sum of the checksums."""
        per_chunk = max(CHUNK_BYTES // self.run_bytes, 1)
        total = 0
        for first in range(0, self.count, per_chunk):
            count = min(per_chunk, self.count - first)
            dense = (self.packed.data_ptr() + first * self.run_bytes, self.run_bytes)
            strided = (self.storage.data_ptr() + first * self.stride, self.stride)
            other = (self.other.data_ptr() + first * self.stride, self.stride)
            target, source = {"pack": (dense, strided), "unpack": (other, dense), "move": (other, strided)}[kind]
            total += _C.copy_rows(target[0], source[0], self.run_bytes, count, target[1], source[1], checksum)
        return total

    def check(self) -> None:
        """All three kinds move what they should, and their checksums agree."""
        rows = self.storage.view(self.count, self.stride)[:, : self.run_bytes]
        others = self.other.view(self.count, self.stride)
        sums = {self.copy("pack", True)}
        assert torch.equal(self.packed.view(self.count, self.run_bytes), rows)
        for kind in ("unpack", "move"):
            self.other.zero_()
            sums.add(self.copy(kind, True))
            assert torch.equal(others[:, : self.run_bytes], rows)
            assert not others[:, self.run_bytes :].any()
        assert len(sums) == 1


def main() -> None:
    """Run the sweep."""
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[64 << i for i in range(11)], help="bytes of a run")
    parser.add_argument("--total-mib", type=int, default=32, help="MiB that are moved; the storage is eight times that")
    args = parser.parse_args()
    refuse(args, "bench_reshard_copy", "device", "cold")
    torch.manual_seed(args.seed)
    results = []
    kinds = ("pack", "unpack", "move")
    print("GB/s      copy" + "".join(f"{kind:>9}{'no sum':>9}{'tax':>7}" for kind in kinds))
    for run_bytes in args.runs:
        rows = Rows(run_bytes, args.total_mib << 20)
        rows.check()
        moved = rows.count * run_bytes
        whole = rows.storage.numel()
        calls: dict[str, Callable[[], object]] = {
            "copy": lambda r=rows, n=whole: _C.copy_rows(r.other.data_ptr(), r.storage.data_ptr(), n, 1, n, n, False)
        }
        for kind in kinds:
            calls[kind] = lambda r=rows, k=kind: r.copy(k, True)
            calls[f"{kind}_without_checksum"] = lambda r=rows, k=kind: r.copy(k, False)
        seconds = best_seconds(calls, args.repeats)
        rates = {name: (whole if name == "copy" else moved) / s / 1e9 for name, s in seconds.items()}
        taxes = {kind: seconds[kind] / seconds[f"{kind}_without_checksum"] - 1 for kind in kinds}
        results.append({"run_bytes": run_bytes, "gb_per_s": rates, "checksum_tax": taxes})
        line = "".join(f"{rates[k]:9.2f}{rates[k + '_without_checksum']:9.2f}{taxes[k]:7.0%}" for k in kinds)
        print(f"{run_bytes:6}{rates['copy']:8.2f}{line}")
    if not args.no_save:
        save_results("reshard_copy", {"rows": results}, args)


if __name__ == "__main__":
    main()
