"""The loop against itself: asynchronous and synchronous, on the same cores with the same settings.

Each mode trains in a process of its own, one after the other, round by round so that the noise of a shared machine
falls on all. Reported per mode: seconds per step, tokens per second, idle shares of both sides, wall time to an
accuracy, and where the trainer's time goes. Evaluation is switched off in the timed runs.

    python bench/bench_loop.py --config examples/chain.yaml --steps 60 --rounds 2
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from areal_core.telemetry import read_metrics

from harness import argument_parser, draw, refuse, save_results  # bench/ is on sys.path when run as a script

MODES = {
    "sync": ["rollout.eta=0"],
    "async eta=1": ["rollout.eta=1"],
    "async eta=4": ["rollout.eta=4"],
    "async eta=inf": ["rollout.eta=inf"],
}
TIMES = ("wait", "pack", "proximal", "forward_backward", "optimizer", "publish", "other")


def run(config: str | None, overrides: list[str], steps: int, seed: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "areal_core.cli", "train", *([config] if config else [])]
        command += [f"run_dir={folder}/run", f"train.steps={steps}", f"seed={seed}", "evaluate.every=0"]
        command += ["telemetry.report=false", "telemetry.tensorboard=false", "telemetry.progress=none", *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return [row for row in read_metrics(Path(folder) / "run") if row["step"] > 0]


def summarize(rows: list[dict[str, Any]], skip: int, accuracy: float) -> dict[str, float]:
    """The first `skip` steps (start-up, empty pipeline) do not count, but for the time to accuracy."""
    timed = rows[skip:]
    seconds = timed[-1]["time_s"] - rows[skip - 1]["time_s"]
    total = {
        key: sum(row.get(key) or 0 for row in timed)
        for key in (
            *(f"time/{t}_s" for t in TIMES),
            "tokens/generated",
            "tokens/trained",
            "time/generate_s",
            "count/interrupted",
        )
    }
    half = timed[len(timed) // 2 :]  # late in a run few groups carry signal: training costs less, generation does not
    return {
        "s/step": seconds / len(timed),
        "s/step, second half": (half[-1]["time_s"] - half[0]["time_s"]) / (len(half) - 1),
        "generated tok/s": total["tokens/generated"] / seconds,
        "trained tok/s": total["tokens/trained"] / seconds,
        "generator idle": statistics.fmean(row["idle/generator"] for row in timed),
        "trainer idle": total["time/wait_s"] / seconds,
        f"s to {accuracy:g}": time_to(rows, accuracy),
        "interrupted": total["count/interrupted"],
        "staleness mean": statistics.fmean(row["staleness/mean"] for row in timed),
        "staleness max": max(row["staleness/max"] for row in timed),
        **{f"share {t}": total[f"time/{t}_s"] / seconds for t in TIMES},
    }


def time_to(rows: list[dict[str, Any]], accuracy: float, window: int = 5) -> float:
    """Seconds from the first step until `window` batches average `accuracy` (inf: never)."""
    for end in range(window, len(rows) + 1):
        if statistics.fmean(row["reward/accuracy"] for row in rows[end - window : end]) >= accuracy:
            return float(rows[end - 1]["time_s"] - rows[0]["time_s"])
    return float("inf")


def main() -> None:
    parser = argument_parser((__doc__ or "").splitlines()[0])
    parser.set_defaults(repeats=2, threads=1)  # repeats: rounds over all modes, each with another seed
    parser.add_argument("--config", help="YAML file (default: the embedded default)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--skip", type=int, default=5, help="steps not timed at the start")
    parser.add_argument("--accuracy", type=float, default=0.8)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    refuse(args, "bench_loop", "device", "cold")

    threads = [f"generate.threads={args.threads}", f"train.threads={args.threads}"]
    results: dict[str, list[dict[str, float]]] = {mode: [] for mode in args.modes}
    for seed in range(args.seed, args.seed + args.repeats):
        for mode in args.modes:
            rows = run(args.config, [*threads, *MODES[mode], *args.overrides], args.steps, seed)
            results[mode].append(summarize(rows, args.skip, args.accuracy))
            print(
                f"round {seed} {mode}: {json.dumps({k: round(v, 4) for k, v in results[mode][-1].items()})}", flush=True
            )
    medians = {mode: {k: statistics.median(r[k] for r in runs) for k in runs[0]} for mode, runs in results.items()}
    print(table(medians))
    drawn = step_rows(results)
    if not args.no_save:
        save_results("loop", {"medians": medians, "rounds": results, "rows": drawn}, args)
    draw("loop", drawn, args)


def step_rows(results: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Time of a step by mode, as the rows of other benches have it."""
    rows = []
    for mode, runs in results.items():
        times = [1e3 * r["s/step"] for r in runs]
        row = {"case": "a step of the loop", "provider": mode, "copy_share": None}
        rows.append(row | {"median_ms": statistics.median(times), "best_ms": min(times), "worst_ms": max(times)})
    return [row | {"speedup": rows[0]["median_ms"] / row["median_ms"]} for row in rows]


def table(medians: dict[str, dict[str, float]]) -> str:
    modes = list(medians)
    lines = ["".join([f"{'':24}", *(f"{mode:>16}" for mode in modes)])]
    for key in medians[modes[0]]:
        lines.append("".join([f"{key:24}", *(f"{medians[mode][key]:16.4g}" for mode in modes)]))
    for key, name in (("s/step", "speed-up over sync"), ("s/step, second half", "  in the second half")):
        if "sync" in medians:
            ratios = (medians["sync"][key] / medians[mode][key] for mode in modes)
            lines.append("".join([f"{name:24}", *(f"{ratio:16.2f}" for ratio in ratios)]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
