"""Packing, shifts and micro-batch allocation against plain Python.

The loops are what trainers write: one slice per sequence and key, lengths read once. Sequence lengths are log-normal.

    python bench/bench_packing.py --sequences 512 --threads 1
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from areal_core import ops
from areal_core.reference.packing import first_fit_decreasing

from harness import Bench, argument_parser, refuse, reuse_freed_memory

CAP_TOKENS = 32768
END = {"input_ids": -100, "versions": -1}  # what the last row of a sequence holds
TensorDict = dict[str, Tensor]


def lognormal_lengths(count: int, median: float, longest: int) -> list[int]:
    drawn = torch.empty(count).log_normal_(torch.tensor(median).log().item(), 0.8)
    return [int(n) for n in drawn.clamp(1, longest)]


def make_batch(sequences: int, width: int) -> TensorDict:
    """Eight keys of a rollout: 42 bytes a token."""
    shape = (sequences, width)
    batch = {"input_ids": torch.randint(150_000, shape), "versions": torch.randint(1000, shape)}
    batch |= {name: torch.randn(shape) for name in ("logprobs", "proximal", "reference", "advantages", "values")}
    return batch | {"loss_mask": torch.rand(shape) < 0.7}


def loop_pack(batch: TensorDict, mask: Tensor) -> TensorDict:
    lengths = mask.sum(1).tolist()
    return {k: torch.cat([v[s, :n] for s, n in enumerate(lengths)]) for k, v in batch.items()}


def loop_unpack(packed: TensorDict, lengths: list[int], width: int) -> TensorDict:
    return loop_unpack_into({k: v.new_empty(len(lengths), width) for k, v in packed.items()}, packed, lengths)


def loop_unpack_into(out: TensorDict, packed: TensorDict, lengths: list[int]) -> TensorDict:
    for key, value in packed.items():
        out[key].zero_()
        for s, piece in enumerate(torch.split(value, lengths)):
            out[key][s, : len(piece)] = piece
    return out


def loop_labels(ids: Tensor, lengths: list[int]) -> Tensor:
    end = ids.new_full((1,), -100)
    return torch.cat([part for piece in torch.split(ids, lengths) for part in (piece[1:], end)])


def check_equal(truth: Any) -> Callable[[str, Any], None]:
    """Whatever a provider returns must be the truth, bit for bit."""

    def check(name: str, result: Any) -> None:
        pairs = [(result[k], truth[k]) for k in truth] if isinstance(truth, dict) else [(result, truth)]
        if not all(torch.equal(got, want) for got, want in pairs):
            raise AssertionError(f"{name}: expected the truth bit for bit")

    return check


def layout_cases(bench: Bench, sequences: int, width: int) -> None:
    lengths = lognormal_lengths(sequences, width / 4, width)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    batch = {k: v * mask for k, v in make_batch(sequences, width).items()}
    truth = {k: v[mask] for k, v in batch.items()}
    packed = ops.pack(batch, mask)
    token_bytes = sum(v.element_size() for v in batch.values())
    tokens, cells = sum(lengths), sequences * width
    given = {k: torch.empty_like(v) for k, v in batch.items()}
    title = f"{sequences} sequences, {tokens:,} tokens of {cells:,}, {len(batch)} keys"
    bench.compare(
        f"pack: {title}",
        {
            "loop over sequences": lambda: loop_pack(batch, mask),
            "boolean mask": lambda: {k: v[mask] for k, v in batch.items()},
            "ops.pack, from a mask": lambda: ops.pack(batch, mask).data,
            "ops.pack, from lengths": lambda: ops.pack(batch, lengths).data,
        },
        check=check_equal(truth),
        read_bytes=tokens * token_bytes,
        written_bytes=tokens * token_bytes,
    )
    bench.compare(
        f"unpack: {title}",
        {
            "loop over sequences": lambda: loop_unpack(packed.data, lengths, width),
            "ops.unpack": lambda: ops.unpack(packed),
            "loop, into given tensors": lambda: loop_unpack_into(given, packed.data, lengths),
            "ops.unpack, into given tensors": lambda: ops.unpack(packed, out=given),
        },
        check=check_equal(batch),
        read_bytes=tokens * token_bytes,
        written_bytes=cells * token_bytes,
    )
    shift_cases(bench, packed, lengths, title)


def loop_shift(packed: TensorDict, lengths: list[int]) -> TensorDict:
    ends = {k: v.new_full((1,), END.get(k, 0)) for k, v in packed.items()}
    pieces = {k: torch.split(v, lengths) for k, v in packed.items()}
    return {k: torch.cat([part for piece in pieces[k] for part in (piece[1:], ends[k])]) for k in packed}


def shift_cases(bench: Bench, packed: ops.PackedBatch, lengths: list[int], title: str) -> None:
    cu, ids = packed.cu_seqlens, packed["input_ids"]
    bench.compare(
        f"next-token labels: {title}",
        {
            "loop over sequences": lambda: loop_labels(ids, lengths),
            "ops.next_token_labels": lambda: ops.next_token_labels(ids, cu),
        },
        check=check_equal(loop_labels(ids, lengths)),
        read_bytes=ids.nbytes,
        written_bytes=ids.nbytes,
    )
    rows = {k: packed[k] for k in ("input_ids", "loss_mask", "logprobs", "versions")}
    moved = sum(v.nbytes for v in rows.values())
    bench.compare(
        f"shift of labels, mask, logprobs, versions: {title}",
        {
            "loop over sequences": lambda: loop_shift(rows, lengths),
            "ops.to_prediction_aligned": lambda: ops.to_prediction_aligned(rows, cu, END),
        },
        check=check_equal(loop_shift(rows, lengths)),
        read_bytes=moved,
        written_bytes=moved,
    )


def allocation_case(bench: Bench, count: int) -> None:
    lengths = lognormal_lengths(count, 2000, CAP_TOKENS)
    bound = -(-sum(lengths) // CAP_TOKENS)
    plain = first_fit_decreasing(lengths, CAP_TOKENS)
    bins: dict[str, int] = {}

    def check(name: str, result: list[list[int]]) -> None:
        bins[name] = len(result)
        if sorted(i for b in result for i in b) != list(range(count)):
            raise AssertionError(f"{name}: expected every sequence once")
        if any(sum(lengths[i] for i in b) > CAP_TOKENS for b in result):
            raise AssertionError(f"{name}: expected at most {CAP_TOKENS} tokens a bin")
        if len(result) > len(plain):
            raise AssertionError(f"{name}: expected at most {len(plain)} bins, got {len(result)}")

    providers: dict[str, Callable[[], Any]] = {"ffd, plain Python": lambda: first_fit_decreasing(lengths, CAP_TOKENS)}
    methods: tuple[Literal["ffd", "mffd", "kk"], ...] = ("ffd", "mffd", "kk")
    for method in methods:
        providers[f"allocate_microbatches, {method}"] = partial(
            ops.allocate_microbatches, lengths, CAP_TOKENS, method=method
        )
    title = f"allocate {count} lengths into bins of {CAP_TOKENS}"
    rows = bench.compare(title, providers, check=check, read_bytes=8 * count, written_bytes=8 * count)
    for name, row in rows.items():
        row["bins"], row["bins_bound"] = bins[name], bound
    print(f"  bins {sorted(set(bins.values()))}, at least {bound} by tokens")


def partition_case(bench: Bench, count: int, ranks: int) -> None:
    lengths = lognormal_lengths(count, 2000, CAP_TOKENS)
    spread: dict[str, int] = {}

    def check(name: str, bins: list[list[int]]) -> None:
        loads = [sum(lengths[i] for i in b) for b in bins]
        if sorted(i for b in bins for i in b) != list(range(count)) or len(bins) != ranks:
            raise AssertionError(f"{name}: expected every sequence once in {ranks} bins")
        spread[name] = max(loads) - min(loads)

    providers: dict[str, Callable[[], Any]] = {
        "longest to the least loaded, Python": lambda: greedy_partition(lengths, ranks),
        "partition_balanced": lambda: ops.partition_balanced(lengths, ranks),
        "partition_balanced, equal sizes": lambda: ops.partition_balanced(lengths, ranks, equal_size=True),
    }
    title = f"spread {count} lengths over {ranks} ranks"
    rows = bench.compare(title, providers, check=check, read_bytes=8 * count, written_bytes=8 * count)
    for name, row in rows.items():
        row["spread_tokens"] = spread[name]
    print("  fullest less emptiest rank, tokens: " + ", ".join(f"{name} {n}" for name, n in spread.items()))


def greedy_partition(lengths: list[int], ranks: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, b) for b in range(ranks)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, b = heapq.heappop(heap)
        bins[b].append(i)
        heapq.heappush(heap, (load + lengths[i], b))
    return bins


def main() -> None:
    parser = argument_parser("Benchmark of packing, shifts and micro-batch allocation.")
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--width", type=int, default=1024, help="padded length, tokens")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192], help="lengths to allocate")
    parser.add_argument("--ranks", type=int, default=64, help="data-parallel ranks to spread the lengths over")
    args = parser.parse_args()
    reuse_freed_memory()
    refuse(args, "bench_packing", "device")
    bench = Bench("packing", args)
    for sequences in args.sequences:
        layout_cases(bench, sequences, args.width)
    for count in args.lengths:
        allocation_case(bench, count)
        partition_case(bench, count, min(args.ranks, count))
    bench.save()


if __name__ == "__main__":
    main()
