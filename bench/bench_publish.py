"""Publication through shared memory against its bound and its peers.

In one process, in turns: writing a set of weights (VersionStore.publish, torch.save to /dev/shm) and reading it back
into tensors of one's own (pin and copy, torch.load), each beside a copy of the same bytes with non-temporal stores and
as many threads: the speed-up column of these tables is the share of that bound.

Between two processes: the time from the start of a publication until a reader sees the version (or, for peers that
have no such moment, has it), and until it has the weights in tensors of its own; and for how long it had to stop for
them. The peers are torch.save and torch.load through /dev/shm, and a torch.multiprocessing queue of tensors.

    python bench/bench_publish.py --threads 1
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from areal_core.reshard import VersionStore

from harness import Bench, argument_parser, refuse  # bench/ is on sys.path when a bench is run as a script

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
Weights = dict[str, Tensor]

NON_TEMPORAL_COPY = r"""
#include <immintrin.h>
#include <stddef.h>
#include <string.h>
void copy(char* target, const char* source, size_t bytes) {  // target: 64-byte aligned
  size_t at = 0;
#if defined(__AVX512F__)
  for (; at + 64 <= bytes; at += 64) _mm512_stream_si512((void*)(target + at), _mm512_loadu_si512(source + at));
#else
  for (; at + 16 <= bytes; at += 16)
    _mm_stream_si128((__m128i*)(target + at), _mm_loadu_si128((const __m128i*)(source + at)));
#endif
  memcpy(target + at, source + at, bytes - at);
  _mm_sfence();
}
"""


class NonTemporalCopy:
    """The bound: moves the bytes past the cache with `threads` threads, and does nothing else."""

    def __init__(self, threads: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "copy.c", Path(folder) / "copy.so"
            source.write_text(NON_TEMPORAL_COPY)
            compiler = os.environ.get("CC", "cc")
            subprocess.run([compiler, "-O2", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
            self._copy = ctypes.CDLL(str(library)).copy
        self._copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._copy.restype = None
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def __call__(self, target: Tensor, source: Tensor) -> Tensor:
        total = source.nbytes
        part = -(-total // self._threads // 64) * 64  # rounded up to whole cache lines
        jobs = [(target.data_ptr() + at, source.data_ptr() + at, min(part, total - at)) for at in range(0, total, part)]
        if len(jobs) == 1:
            self._copy(*jobs[0])
        else:
            list(self._pool.map(lambda job: self._copy(*job), jobs))
        return target


def parse_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]?i?B)", text)
    if match is None or match[2] not in UNITS:
        raise SystemExit(f"--sizes: expected a number and one of {', '.join(UNITS)}, got {text!r}")
    return int(match[1]) * UNITS[match[2]]


def model_weights(total_bytes: int, seed: int = 0) -> Weights:
    """bf16 tensors in a decoder's proportions: an embedding, and layers of matrices and norms."""
    hidden = max(64, int((total_bytes / 2 / 60) ** 0.5) // 64 * 64)
    shapes: dict[str, tuple[int, ...]] = {}
    left = total_bytes // 2
    for layer in range(10**6):
        block: list[tuple[str, tuple[int, ...]]] = [
            ("input_layernorm", (hidden,)),
            ("qkv_proj", (3 * hidden, hidden)),
            ("o_proj", (hidden, hidden)),
            ("gate_proj", (3 * hidden, hidden)),
            ("down_proj", (hidden, 3 * hidden)),
        ]
        for name, shape in block:
            if (size := torch.Size(shape).numel()) > left:
                shapes["model.embed_tokens.weight"] = (left,)
                generator = torch.Generator().manual_seed(seed)
                return {n: torch.rand(s, generator=generator).bfloat16() for n, s in shapes.items()}
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            left -= size
    raise AssertionError("unreachable")


def copy_into(targets: Weights, sources: Weights) -> Weights:
    """What load_state_dict does."""
    for name, target in targets.items():
        target.copy_(sources[name])
    return targets


def expect_equal(truth: Weights, flat: Tensor) -> Callable[[str, Any], None]:
    def check(name: str, got: Any) -> None:
        if isinstance(got, VersionStore):
            with got.pin() as snapshot:
                check(name, snapshot.tensors)
        elif isinstance(got, Path):
            check(name, torch.load(got))
        elif isinstance(got, Tensor):
            assert torch.equal(got, flat), f"{name}: bytes differ"
        elif isinstance(got, dict):
            for key, tensor in truth.items():
                assert torch.equal(got[key].view(torch.int16), tensor.view(torch.int16)), f"{name}: {key} differs"

    return check


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def bench_one_process(bench: Bench, case: str, weights: Weights, bound: NonTemporalCopy) -> None:
    total = sum(t.nbytes for t in weights.values())
    flat = torch.randint(0, 255, (total,), dtype=torch.uint8)
    private = torch.zeros_like(flat)
    shared = torch.zeros_like(flat).share_memory_()  # type: ignore[no-untyped-call]
    own = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    check = expect_equal(weights, flat)
    with folder_in_memory() as folder, VersionStore.create(weights) as store:
        file = folder / "weights.pt"

        def publish(verify: bool = False) -> VersionStore:
            store.publish(weights, store.version() + 1, verify=verify)
            return store

        def save() -> Path:
            torch.save(weights, file)
            return file

        def read() -> Weights:
            with store.pin() as snapshot:
                snapshot.copy_into(own)
            return own

        def read_with_torch() -> Weights:
            with store.pin() as snapshot:
                return copy_into(own, snapshot.tensors)

        def look() -> Weights:
            with store.pin() as snapshot:
                return snapshot.tensors

        def verify_only() -> int:
            with store.pin() as snapshot:
                return snapshot.checksum()

        writers: dict[str, Callable[[], Any]] = {
            "non-temporal copy (the bound)": lambda: bound(shared, flat),
            "VersionStore.publish": publish,
            "VersionStore.publish(verify=True)": lambda: publish(verify=True),
            "torch.save to /dev/shm": save,
        }
        bench.compare(f"write {case}", writers, check=check, read_bytes=total, written_bytes=total)
        readers: dict[str, Callable[[], Any]] = {
            "non-temporal copy (the bound)": lambda: bound(private, shared),
            "pin, copy_into (verifies)": read,
            "pin, torch copy_": read_with_torch,
            "pin, checksum": verify_only,
            "pin, use in place": look,
            "torch.load, copy": lambda: copy_into(own, torch.load(file)),
            "torch.load(mmap=True), copy": lambda: copy_into(own, torch.load(file, mmap=True)),
        }
        bench.compare(f"read {case}", readers, check=check, read_bytes=total, written_bytes=total)


def now() -> float:
    """Seconds on a clock that all processes of the machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


# A reader process runs one of these: for each round it says "ready", gets the weights, and reports when it saw the
# version, how long it then took to have the weights in tensors of its own (the pause), and when that was.


def read_store(pipe: Connection, own: Weights, rounds: int, store: VersionStore) -> None:
    torch.set_num_threads(1)
    for version in range(1, rounds + 1):
        pipe.send("ready")
        store.wait(version)
        seen = now()
        with store.pin() as snapshot:
            snapshot.copy_into(own)
        done = now()
        pipe.send((seen, done - seen, done))
    pipe.send(int(own["model.embed_tokens.weight"].view(torch.int16)[0]))


def read_file(pipe: Connection, own: Weights, rounds: int, file: str) -> None:
    torch.set_num_threads(1)
    for _ in range(rounds):
        pipe.send("ready")
        pipe.recv()  # a file has no way to say that it is complete
        seen = now()
        copy_into(own, torch.load(file))
        done = now()
        pipe.send((seen, done - seen, done))
    pipe.send(int(own["model.embed_tokens.weight"].view(torch.int16)[0]))


def read_queue(pipe: Connection, own: Weights, rounds: int, queue: Any) -> None:
    torch.set_num_threads(1)
    for _ in range(rounds):
        pipe.send("ready")
        received = queue.get()
        seen = now()
        copy_into(own, received)
        done = now()
        pipe.send((seen, done - seen, done))
    pipe.send(int(own["model.embed_tokens.weight"].view(torch.int16)[0]))


def exchange(
    reader: Callable[..., None], handle: Any, weights: Weights, rounds: int, send: Callable[[int, Connection], None]
) -> dict[str, float]:
    """Runs the rounds against a reader process; times in ms, the first two rounds (start-up) left out."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    own = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}  # Process shares them with the child
    process = context.Process(target=reader, args=(theirs, own, rounds, handle), daemon=True)
    process.start()
    visible, pause, placed = [], [], []
    for version in range(1, rounds + 1):
        weights["model.embed_tokens.weight"].fill_(version)
        assert mine.recv() == "ready"
        start = now()
        send(version, mine)
        seen, stopped, done = mine.recv()
        visible.append(1e3 * (seen - start))
        pause.append(1e3 * stopped)
        placed.append(1e3 * (done - start))
    last = int(weights["model.embed_tokens.weight"].view(torch.int16)[0])
    assert mine.recv() == last, "the reader did not get the last version"
    process.join()
    figures: dict[str, float] = {}
    for name, values in (("visible", visible[2:]), ("pause", pause[2:]), ("placed", placed[2:])):
        cuts = statistics.quantiles(values, n=20, method="inclusive")
        figures |= {f"{name}_p50_ms": cuts[9], f"{name}_p95_ms": cuts[18]}
    return figures


def bench_two_processes(bench: Bench, case: str, weights: Weights, rounds: int) -> None:
    queue = multiprocessing.get_context("spawn").Queue()
    with folder_in_memory() as folder, VersionStore.create(weights) as store:
        file = folder / "weights.pt"

        def save(_: int, pipe: Connection) -> None:
            torch.save(weights, folder / "next.pt")
            os.replace(folder / "next.pt", file)
            pipe.send("complete")

        providers: dict[str, tuple[Callable[..., None], Any, Callable[[int, Connection], None]]] = {
            "VersionStore": (read_store, store, lambda version, _: void(store.publish(weights, version))),
            "torch.save, torch.load": (read_file, str(file), save),
            "torch.multiprocessing queue": (
                read_queue,
                queue,
                lambda _, __: queue.put({name: tensor.clone() for name, tensor in weights.items()}),
            ),
        }
        print(f"\ntwo processes, {case}, {rounds - 2} rounds: ms, p50 and p95")
        print(f"  {'provider':30} {'visible':>19} {'reader stops':>19} {'in its own tensors':>19}")
        for name, (reader, handle, send) in providers.items():
            row = exchange(reader, handle, weights, rounds, send)
            bench.rows.append({"case": f"two processes {case}", "provider": name, **row})
            columns = [f"{row[f'{k}_p50_ms']:9.3f} {row[f'{k}_p95_ms']:9.3f}" for k in ("visible", "pause", "placed")]
            print(f"  {name:30} " + " ".join(columns), flush=True)


def void(_: object) -> None:
    return None


def main() -> None:
    parser = argument_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["350KB", "64MiB", "512MiB"], help="bytes of the weights")
    parser.add_argument("--rounds", type=int, default=22, help="versions sent between two processes, 2 of them untimed")
    args = parser.parse_args()
    refuse(args, "bench_publish", "device")
    bench = Bench("publish", args)
    bound = NonTemporalCopy(args.threads)
    for case in args.sizes:
        weights = model_weights(parse_bytes(case))
        bench_one_process(bench, case, weights, bound)
        bench_two_processes(bench, case, weights, args.rounds)
    bench.save()


if __name__ == "__main__":
    main()
