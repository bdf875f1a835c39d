"""The planner of the weight transfer: how it grows with tensors and ranks, and what its plans cost on large clusters.

Scaling: layouts of a mixture-of-experts model of the given number of tensors, from pipeline and expert parallel to
tensor parallel, over the given number of ranks on each side. Timed: the plan, and the slowest of some ranks' parts.

Cases: public models between public layouts. Their times are simulated (cluster.py: 50 GB/s for each NIC, 200 GB/s
within nodes, links shared fairly) and stand beside the lower bound of the plan. The published times were measured on
other hardware, by others: the ratio to the bound compares, seconds don't.

    python bench/bench_reshard_plan.py
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from areal_core.reshard import Layout, Mesh, Plan, Replicate, Shard, Spec, TensorLayout, Topology
from areal_core.reshard.parallel import Parallel
from areal_core.reshard.plan import DEFAULT_CHUNK_BYTES

from cluster import simulated_seconds
from harness import argument_parser, extra_memory, refuse, save_results  # bench/ is on sys.path when run as a script

SAMPLED_RANKS = 6  # of each side: the first, the last and some between
MIXTURE_TENSORS = 10  # a layer without its experts
PROJECTIONS = {"gate": ((2048, 7168), 0), "up": ((2048, 7168), 0), "down": ((7168, 2048), 1)}  # shape, TP's dimension


@dataclass(frozen=True)
class Case:
    """A transfer between two frameworks."""

    model: str
    source: str
    target: str
    links: dict[int, float] = field(default_factory=dict)
    multicast: bool = False
    published: str = ""


CASES = {
    "qwen2.5-0.5b-fsdp4-to-tp2": Case("qwen2.5-0.5b", "fsdp:4", "vllm:tp2"),
    "qwen3-235b-128-to-64": Case(
        "qwen3-235b",
        "megatron:pp4,tp4,ep8,dp1",
        "vllm:tp8,replicas8",
        published="checkpoint-engine 6.2 s to 8 H800",
    ),
    "dsv3-256-to-tp32": Case(
        "deepseek-v3",
        "megatron:pp16,first1,ep16,dp1",
        "vllm:tp32,replicas8",
        published="NeMo-RL NCCL 2.4-2.8 s, NIXL 9.25 s, bound 0.88 s",
    ),
    "dsv3-256-to-ep32": Case("deepseek-v3", "megatron:pp16,first1,ep16,dp1", "sglang:tp32,ep32,adp32,replicas8"),
    "dsv3-256-to-ep32-multicast": Case(
        "deepseek-v3", "megatron:pp16,first1,ep16,dp1", "sglang:tp32,ep32,adp32,replicas8", multicast=True
    ),
    "qwen3-235b-fsdp1024-to-512": Case("qwen3-235b", "fsdp:1024", "fsdp:512"),
    "kv4-to-tp8": Case("qwen3-30b-a3b", "megatron:tp4,ep1,dp1", "vllm:tp8"),
    "kv4-to-tp8-multicast": Case("qwen3-30b-a3b", "megatron:tp4,ep1,dp1", "vllm:tp8", multicast=True),
    "replicas4": Case("qwen3-30b-a3b", "fsdp:dp16,replicas4", "vllm:tp8,replicas8"),
    "replicas4-one-slow-nic": Case("qwen3-30b-a3b", "fsdp:dp16,replicas4", "vllm:tp8,replicas8", {3: 5e9}),
    "replicas4-one-dead": Case("qwen3-30b-a3b", "fsdp:dp16,replicas4", "vllm:tp8,replicas8", {3: 0.0}),
}


@functools.lru_cache
def layout(model: str, spec: str, first_rank: int) -> Layout:
    return Parallel.parse(spec).name_map(model, first_rank=first_rank).layout


def best_seconds(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def check(made: Plan) -> None:
    """No byte too many, no chunk too large, and both sides of a message agree."""
    assert made.stats.wire_bytes == made.lower_bound.wire_bytes
    assert made.stats.seconds >= made.lower_bound.seconds * (1 - 1e-9)
    assert sum(sender.bytes for sender in made.stats.senders) <= made.stats.wire_bytes
    for rank in (made.target.ranks[0], made.target.ranks[-1]):
        for message in made.rank(rank).receives[:4]:
            (sent,) = [m for m in made.rank(message.source).sends if (m.target, m.phase) == (rank, message.phase)]
            assert sent.atoms == message.atoms
            assert max(chunk.bytes for chunk in sent.chunks) <= made.chunk_bytes


def sample(ranks: tuple[int, ...]) -> set[int]:
    return {ranks[i * (len(ranks) - 1) // (SAMPLED_RANKS - 1)] for i in range(SAMPLED_RANKS)}


def timed_plan(
    source: Layout, target: Layout, repeats: int, topology: Topology | None = None, multicast: bool = False
) -> tuple[Plan, dict[str, Any]]:
    options = {"chunk_bytes": DEFAULT_CHUNK_BYTES, "multicast": multicast}
    make = functools.partial(Plan, source, target, topology or Topology(), **options)  # type: ignore[arg-type]
    made = make()
    check(made)
    ranks = sorted(sample(source.ranks) | sample(target.ranks))
    rank_seconds = [best_seconds(functools.partial(made.native.rank, rank), repeats) for rank in ranks]
    return made, {
        "tensors": len(target.tensors),
        "ranks": [len(source.ranks), len(target.ranks)],
        "plan_seconds": best_seconds(make, repeats),
        "rank_seconds": max(rank_seconds),
        "rank_seconds_median": statistics.median(rank_seconds),
        "peak_bytes": extra_memory(make, "cpu"),
        "sender_max_over_mean": made.stats.sender_max_over_mean,
    }


# -- scaling ----------------------------------------------------------------------------------------------------------


def mixture(tensors: int) -> dict[str, tuple[Spec, int, int, int]]:
    """name -> (spec, layer, expert or -1, dimension that tensor parallelism divides or -1)."""
    specs: dict[str, tuple[Spec, int, int, int]] = {}
    experts = max(8, min(256, tensors // 60))
    for layer in range(math.ceil(tensors / (MIXTURE_TENSORS + 3 * experts))):
        for i in range(MIXTURE_TENSORS):
            shape, dim = ((7168,), -1) if i < 4 else ((4096, 7168), i % 2)
            specs[f"layers.{layer}.dense.{i}"] = Spec(torch.bfloat16, shape), layer, -1, dim
        for expert in range(experts):
            for name, (shape, dim) in PROJECTIONS.items():
                specs[f"layers.{layer}.experts.{expert}.{name}"] = Spec(torch.bfloat16, shape), layer, expert, dim
    return dict(list(specs.items())[:tensors])


def pipelined(specs: dict[str, tuple[Spec, int, int, int]], ranks: int) -> Layout:
    """Stages of up to 16 ranks; experts over the stage, everything else on all of it."""
    per_stage = min(16, ranks)
    stages = ranks // per_stage
    layers = 1 + max(layer for _, layer, _, _ in specs.values())
    experts = 1 + max(expert for _, _, expert, _ in specs.values())
    whole = [Mesh(range(s * per_stage, (s + 1) * per_stage), (per_stage,), ("dp",)) for s in range(stages)]
    alone = [Mesh([rank], (1,), ("ep",)) for rank in range(ranks)]
    placed = {}
    for name, (spec, layer, expert, _) in specs.items():
        stage = layer * stages // layers
        mesh = whole[stage] if expert < 0 else alone[stage * per_stage + expert * per_stage // experts]
        placed[name] = TensorLayout(spec, mesh, (Replicate(),))
    return Layout(placed)


def tensor_parallel(specs: dict[str, tuple[Spec, int, int, int]], ranks: int, first: int) -> Layout:
    tp = min(32, ranks)
    mesh = Mesh(range(first, first + ranks), (ranks // tp, tp), ("dp", "tp"))
    return Layout(
        {
            name: TensorLayout(spec, mesh, (Replicate(), Replicate() if dim < 0 else Shard(dim)))
            for name, (spec, _, _, dim) in specs.items()
        }
    )


def print_row(first: str, row: dict[str, Any], *more: str) -> None:
    ranks = f"{row['ranks'][0]}+{row['ranks'][1]}"
    times = f"{1e3 * row['plan_seconds']:8.1f} {1e3 * row['rank_seconds']:8.2f} {row['peak_bytes'] / 1e6:8.1f}"
    print(f"{first:32} {row['tensors']:7} {ranks:>9} {times} {row['sender_max_over_mean']:8.3f}", *more, flush=True)


def print_header(*more: str) -> None:
    print(f"{'':32} {'tensors':>7} {'ranks':>9} {'plan ms':>8} {'rank ms':>8} {'peak MB':>8} {'balance':>8}", *more)


def scaling(tensors: list[int], ranks: list[int], repeats: int) -> list[dict[str, Any]]:
    print_header()
    rows = []
    for count in tensors:
        specs = mixture(count)
        for size in ranks:
            _, row = timed_plan(pipelined(specs, size), tensor_parallel(specs, size, size), repeats)
            row["case"] = f"{count} tensors x {size} ranks"
            print_row("scaling", row)
            rows.append(row)
    return rows


# -- cases ------------------------------------------------------------------------------------------------------------


def run_case(name: str, case: Case, repeats: int) -> dict[str, Any]:
    source = layout(case.model, case.source, 0)
    target = layout(case.model, case.target, len(source.ranks))
    made, row = timed_plan(source, target, repeats, Topology(links=case.links), case.multicast)
    stats, bound, simulated = made.stats, made.lower_bound.seconds, simulated_seconds(made)
    row |= {
        "case": name,
        "source": case.source,
        "target": case.target,
        "wire_bytes": stats.wire_bytes,
        "nic_bytes": stats.nic_bytes,
        "messages": stats.messages,
        "bound_seconds": bound,
        "ideal_seconds": stats.seconds,
        "simulated_seconds": simulated,
        "published": case.published,
    }
    sizes = f"{stats.wire_bytes / 1e9:9.1f} {stats.nic_bytes / 1e9:9.1f}"
    times = f"{bound:8.3f} {stats.seconds:8.3f} {simulated:9.3f} {simulated / bound:6.2f}x"
    print_row(name, row, sizes, times, f" {case.published}")
    return row


def cases(names: list[str], repeats: int) -> list[dict[str, Any]]:
    print("\nsimulated, other hardware: 50 GB/s NICs, 200 GB/s within nodes of 8. Published: by others, elsewhere.")
    times = f"{'bound s':>8} {'ideal s':>8} {'simul. s':>9} {'/bound':>7}"
    print_header(f"{'wire GB':>9} {'NIC GB':>9}", times, " published")
    return [run_case(name, CASES[name], repeats) for name in names]


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--tensors", type=int, nargs="*", default=[1000, 10_000, 45_395])
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256, 1024], help="of each side")
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="; ".join(CASES))
    args = parser.parse_args()
    refuse(args, "bench_reshard_plan", "device", "cold", "plot")
    if unknown := sorted(set(args.cases) - set(CASES)):
        raise SystemExit(f"bench_reshard_plan: expected cases of {', '.join(CASES)}, got {unknown[0]}")
    rows = scaling(args.tensors, args.ranks, args.repeats) + cases(args.cases, args.repeats)
    if not args.no_save:
        save_results("reshard_plan", {"rows": rows}, args)


if __name__ == "__main__":
    main()
