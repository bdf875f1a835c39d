"""`areal-core reshard plan`: what a transfer of weights between two layouts costs, beside what no plan can beat."""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from areal_core.reshard.models import PUBLIC_MODELS, load_model
from areal_core.reshard.names import LoRA, NameMap
from areal_core.reshard.parallel import Parallel, spec_help
from areal_core.reshard.plan import Plan, plan
from areal_core.reshard.topology import Topology, parse_rate

__all__ = ["plan_command"]

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True)
class _Planning:
    """A plan and what making it took, layouts included."""

    plan: Plan
    layout_seconds: float
    plan_seconds: float
    memory_bytes: int  # by which the process's peak grew


def _print_lists() -> None:
    """Print what spec strings may say and which models are known by name."""
    print(spec_help())
    print(f"\nmodels:\n  {', '.join(PUBLIC_MODELS)}\n  or a config.json, or a Hugging Face directory")


def plan_command(args: argparse.Namespace) -> int:
    """Lay both sides out, plan, and print the summary; with --names, print the name maps instead.

    Raises:
        ValueError: a model, spec, dtype or rate that cannot be read or does not fit; the text says what would.
    """
    if args.list:
        _print_lists()
        return 0
    missing = [f"--{name}" for name in ("model", "src", "dst") if getattr(args, name) is None]
    if missing:
        raise ValueError(f"plan: expected --model, --src and --dst, got no {' and no '.join(missing)}")
    started = time.perf_counter()
    before = _peak_bytes()
    source, target = _name_maps(args)
    if args.names:
        print(f"source, {args.src}:\n{source}\n\ntarget, {args.dst}:\n{target}")
        return 0
    layouts, laid_out = (source.layout, target.layout), time.perf_counter()
    topology = _topology(args, {*source.layout.ranks, *target.layout.ranks})
    made = plan(*layouts, topology, chunk_bytes=args.chunk_mib << 20, multicast=args.multicast)
    spent = _Planning(made, laid_out - started, time.perf_counter() - laid_out, _peak_bytes() - before)
    facts = _describe(args, source, target, spent)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print_summary(facts)
    return 0


def _name_maps(args: argparse.Namespace) -> tuple[NameMap, NameMap]:
    """Both sides; the target's ranks follow the source's unless they are the same processes."""
    model = load_model(args.model)
    options: dict[str, Any] = {
        "dtype": _dtype(args.dtype),
        "lora": None if args.lora_rank is None else LoRA(args.lora_rank),
    }
    source = Parallel.parse(args.src).name_map(model, **options)
    first = 0 if args.colocated else max(source.layout.ranks) + 1
    return source, Parallel.parse(args.dst).name_map(model, first_rank=first, **options)


def _topology(args: argparse.Namespace, ranks: set[int]) -> Topology:
    """Nodes and links as the options say, of the ranks of both sides."""
    links: dict[int, float] = {}
    for text in args.link or ():
        rank, _, rate = text.partition("=")
        if not rank.isdecimal() or not rate:
            raise ValueError(f"plan: expected --link RANK=RATE, got {text!r}")
        if int(rank) in links:
            raise ValueError(f"plan: expected one --link a rank, got two of rank {int(rank)}")
        if int(rank) not in ranks:
            raise ValueError(f"plan: expected --link of a rank that takes part, 0 to {max(ranks)}, got {text!r}")
        links[int(rank)] = 0.0 if rate == "0" else parse_rate(rate)
    return Topology(
        ranks_per_node=args.ranks_per_node,
        nic_bytes_per_s=parse_rate(args.nic),
        intra_node_bytes_per_s=parse_rate(args.intra_node),
        links=links,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, _DTYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        known = ", ".join([*_DTYPES, *_DTYPES.values()])
        raise ValueError(f"plan: expected --dtype of {known}, got {name!r}")
    return dtype


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _describe(args: argparse.Namespace, source: NameMap, target: NameMap, made: _Planning) -> dict[str, Any]:
    """All that the summary shows, as JSON holds it."""
    stats, bound = made.plan.stats, made.plan.lower_bound
    causes = {"ingress": bound.ingress_seconds, "node": bound.node_seconds, "egress": bound.egress_seconds}
    return {
        "model": str(args.model),
        "tensors": len(target.tensors),
        "bytes": sum(spec.dtype.itemsize * torch.Size(spec.shape).numel() for spec in target.specs.values()),
        "source": {"spec": args.src, "ranks": len(source.layout.ranks)},
        "target": {"spec": args.dst, "ranks": len(target.layout.ranks), "colocated": bool(args.colocated)},
        "multicast": bool(args.multicast),
        "wire_bytes": stats.wire_bytes,
        "nic_bytes": stats.nic_bytes,
        "local_bytes": stats.local_bytes,
        "messages": stats.messages,
        "max_received_bytes": stats.max_received_bytes,
        "sender_max_over_mean": stats.sender_max_over_mean,
        "seconds": stats.seconds,
        "unused_source_tensors": stats.unused_source_tensors,
        "bound": {
            "wire_bytes": bound.wire_bytes,
            "nic_bytes": bound.nic_bytes,
            "seconds": bound.seconds,
            "cause": max(causes, key=lambda cause: causes[cause]),
            **{f"{cause}_seconds": seconds for cause, seconds in causes.items()},
        },
        "planning": {
            "layout_seconds": made.layout_seconds,
            "plan_seconds": made.plan_seconds,
            "memory_bytes": made.memory_bytes,
        },
        "digest": f"{made.plan.digest:016x}",
    }


def _print_summary(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, soft_wrap=True)
    source, target = facts["source"], facts["target"]
    console.print(f"{facts['model']}: {facts['tensors']:,} tensors, {_bytes(facts['bytes'])}", style="bold")
    same = ", the same processes" if target["colocated"] else ""
    console.print(
        f"from {source['spec']} ({source['ranks']:,} ranks) to {target['spec']} ({target['ranks']:,} ranks{same})"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for heading in ("plan", "bound", "plan / bound"):
        table.add_column(heading, justify="right")
    for row in _rows(facts):
        table.add_row(*row)
    console.print(table)
    planning = facts["planning"]
    console.print(
        f"laid out in {_seconds(planning['layout_seconds'])}, planned in {_seconds(planning['plan_seconds'])}, "
        f"{_bytes(planning['memory_bytes'])} of memory; digest {facts['digest']}",
        style="dim",
    )


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    bound = facts["bound"]
    for name, key, text in (
        ("bytes between ranks", "wire_bytes", _bytes),
        ("  of these between nodes", "nic_bytes", _bytes),
        ("estimated time", "seconds", _seconds),
    ):
        yield name, text(facts[key]), text(bound[key]), _ratio(facts[key], bound[key])
    for cause, about in (
        ("ingress", "into the busiest target rank"),
        ("node", "into the busiest node"),
        ("egress", "out of the tightest set of holders"),
    ):
        is_bound = bound["cause"] == cause and bound["seconds"] > 0
        yield f"  {about}", "", _seconds(bound[f"{cause}_seconds"]), "<- the bound" if is_bound else ""
    yield "bytes copied locally", _bytes(facts["local_bytes"]), "", ""
    yield "messages", f"{facts['messages']:,}", "", ""
    yield "received by the busiest rank", _bytes(facts["max_received_bytes"]), "", ""
    yield "sender load, max / mean", f"{facts['sender_max_over_mean']:.3f}", "1.000", ""
    yield "source tensors not needed", f"{facts['unused_source_tensors']:,}", "", ""


def _bytes(count: float) -> str:
    """1.34 TB, 850 kB, 12 B."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count:.0f} B"


def _seconds(value: float) -> str:
    """1.42 s, 35.1 ms, 8.2 us."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def _ratio(value: float, least: float) -> str:
    return f"{value / least:.3f}" if least > 0 else ""
