"""Frameworks with our kernels in them against the same frameworks without: time and memory, one process each.

Every framework runs in a process of its own, with the packages of `--environments DIR` before those of this
interpreter (bench/make_environments.sh makes them). What does not import is a row that says why. Patched and unpatched
results are compared before anything is timed.

    bench/make_environments.sh build/environments areal slime
    python bench/bench_integrations.py --environments build/environments --threads 1
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from framework_work import WORKS, Sizes, Work
from torch import Tensor

from harness import Bench, argument_parser, draw, refuse, save_results
from machine import ROOT, describe_commit, describe_machine

TIMEOUT_S = 900


# --- one framework, in its own process --------------------------------------------------------------------------------


def run_framework(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one framework: timed, or with the reason why not."""
    bench = Bench("integrations", args)
    rows: list[dict[str, Any]] = []
    for work in WORKS[name]:
        before = len(bench.rows)
        try:
            compare(bench, name, work)
        except Exception as problem:  # whatever a framework does here
            traceback.print_exc()
            rows.append(absent(name, work.name, f"{type(problem).__name__}: {str(problem).strip().splitlines()[0]}"))
        rows += [row | {"framework": name, "work": work.name} for row in bench.rows[before:]]
    return rows


def compare(bench: Bench, name: str, work: Work) -> None:
    integration = importlib.import_module(f"areal_core.integrations.{name}")
    run = work.make(Sizes(bench.args))
    applied: list[Any] = []

    def unpatch() -> None:
        while applied:
            applied.pop().undo()

    def patch() -> None:
        unpatch()
        applied.append(integration.apply(only=work.seams or None))

    results: dict[str, Any] = {}

    def check(provider: str, result: Any) -> None:
        results[provider] = result
        if provider == "patched":
            assert not applied[0].fallbacks, f"fell through: {applied[0].fallbacks}"
            compare_results(work, results["unpatched"], result)
            results.clear()

    version = "of unknown version"
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(name)
    try:
        title = f"{name} {version}: {work.name}"
        bench.compare(
            title, {"unpatched": run, "patched": run}, check=check, before={"unpatched": unpatch, "patched": patch}
        )
    finally:
        unpatch()


def compare_results(work: Work, theirs: Any, ours: Any) -> None:
    """Fail where the patched framework does not do the same work."""
    if work.kind == "bins":
        assert sorted(i for b in theirs for i in b) == sorted(i for b in ours for i in b), "other sequences"
        assert len(ours) <= len(theirs), f"expected at most {len(theirs)} bins, got {len(ours)}"
        return
    for expected, result in zip(tensors(theirs), tensors(ours), strict=True):
        assert result.shape == expected.shape, f"expected shape {list(expected.shape)}, got {list(result.shape)}"
        half = torch.bfloat16 in (expected.dtype, result.dtype)
        error = (result.double() - expected.double()).abs() - (0.06 if half else 1e-3) * expected.double().abs()
        assert bool((error <= (0.06 if half else 1e-3)).all()), f"off by {error.max().item():.3g}"


def tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, dict):
        yield from (x for value in result.values() for x in tensors(value))
    elif isinstance(result, list | tuple):
        yield from (x for value in result for x in tensors(value))


# --- all of them ------------------------------------------------------------------------------------------------------


def absent(framework: str, work: str, reason: str) -> dict[str, Any]:
    return {"framework": framework, "work": work, "reason": reason}


def in_its_environment(name: str, args: argparse.Namespace, options: list[str]) -> list[dict[str, Any]]:
    """Run a framework in a process that sees its packages."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        command = [sys.executable, str(Path(__file__).resolve()), *options, "--worker", name, "--rows", str(found)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(search_path(name, args.environments))}
        try:
            code = subprocess.run(command, env=environment, timeout=TIMEOUT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            return [absent(name, "all", f"took more than {TIMEOUT_S} s")]
        if code or not found.exists():
            return [absent(name, "all", f"its process ended with code {code}")]
        rows: list[dict[str, Any]] = json.loads(found.read_text())
        return rows


def search_path(name: str, environments: Path | None) -> list[str]:
    """This repository, what the environment lists in `paths` (else the environment itself), and what was there."""
    paths = [str(ROOT)]
    if environments is not None and (folder := environments / name).is_dir():
        listed = folder / "paths"
        paths += listed.read_text().split() if listed.exists() else [str(folder.resolve())]
    return paths + [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def markdown(rows: list[dict[str, Any]], args: argparse.Namespace) -> Iterator[str]:
    """A table to paste, below where and when it was made."""
    commit, _, dirty = describe_commit().partition("-")
    where = f"{describe_machine()['cpu']}, {args.threads} threads, torch {torch.__version__}"
    yield f"{datetime.date.today()}, {where}, commit {commit[:12]}{dirty and '-dirty'}"
    yield f"logits {args.dtype} {args.tokens} x {args.vocab:,}, losses"
    yield f"{args.sequences} x {args.length}, {args.lengths:,} lengths into bins of {args.cap:,} tokens; medians.\n"
    yield "| framework | work | unpatched | patched | | memory |"
    yield "|---|---|---|---|---|---|"
    timed = [row for row in rows if "median_ms" in row]
    for theirs, ours in zip(timed[::2], timed[1::2], strict=True):
        memory = " to ".join(f"{row['extra_bytes'] / 1e6:,.0f}" for row in (theirs, ours))
        times = " | ".join(f"{row['median_ms']:,.2f} ms" for row in (theirs, ours))
        yield f"| {theirs['framework']} | {theirs['work']} | {times} | {ours['speedup']:.1f}x | {memory} MB |"
    for row in rows:
        if "reason" in row:
            yield f"| {row['framework']} | {row['work']} | not here: {row['reason']} | | | |"


def main() -> None:
    parser = argument_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--frameworks", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--environments", type=Path, help="folder of packages of each framework")
    parser.add_argument("--tokens", type=int, default=256, help="rows of logits")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="of the logits")
    parser.add_argument("--sequences", type=int, default=512, help="of losses, advantages and packing")
    parser.add_argument("--length", type=int, default=1024, help="padded, of these")
    parser.add_argument("--lengths", type=int, default=2048, help="sequences to allocate")
    parser.add_argument("--cap", type=int, default=32_768, help="tokens of a bin")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    refuse(args, "bench_integrations", "device", "cold")
    if args.worker:
        args.rows.write_text(json.dumps(run_framework(args.worker, args)))
        return
    options = [
        x
        for name in ("repeats", "threads", "seed", "tokens", "vocab", "dtype", "sequences", "length", "lengths", "cap")
        for x in (f"--{name}", str(getattr(args, name)))
    ]
    rows = [row for name in args.frameworks for row in in_its_environment(name, args, options)]
    print("\n" + "\n".join(markdown(rows, args)))
    del args.worker, args.rows
    if not args.no_save:
        save_results("integrations", {"rows": rows}, args)
    draw("integrations", [row | {"case": f"{row['framework']} {row['work']}"} for row in rows], args)


if __name__ == "__main__":
    main()
