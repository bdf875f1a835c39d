"""Packing, shifts and micro-batch allocation against plain Python.

The loops are what trainers write: one slice per sequence and key, lengths read once. Sequence lengths are log-normal.

    python bench/bench_packing.py --sequences 512 --threads 1
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from areal_core import ops
from areal_core.reference.packing import first_fit_decreasing

from harness import Bench, argument_parser, refuse

CAP_TOKENS = 32768
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
    out = {k: v.new_zeros(len(lengths), width) for k, v in packed.items()}
    for key, value in packed.items():
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
        },
        check=check_equal(batch),
        read_bytes=tokens * token_bytes,
        written_bytes=cells * token_bytes,
    )
    bench.compare(
        f"next-token labels: {title}",
        {
            "loop over sequences": lambda: loop_labels(packed["input_ids"], lengths),
            "ops.next_token_labels": lambda: ops.next_token_labels(packed["input_ids"], packed.cu_seqlens),
        },
        check=check_equal(loop_labels(packed["input_ids"], lengths)),
        read_bytes=tokens * 8,
        written_bytes=tokens * 8,
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


def main() -> None:
    parser = argument_parser("Benchmark of packing, shifts and micro-batch allocation.")
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--width", type=int, default=1024, help="padded length, tokens")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192], help="lengths to allocate")
    args = parser.parse_args()
    refuse(args, "bench_packing", "device")
    bench = Bench("packing", args)
    for sequences in args.sequences:
        layout_cases(bench, sequences, args.width)
    for count in args.lengths:
        allocation_case(bench, count)
    bench.save()


if __name__ == "__main__":
    main()
