"""`areal-core simulate`: one simulation, a sweep, a recorded run, or the published numbers."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from areal_core.errors import ConfigError, MissingPackageError
from areal_core.rl.config_file import load_settings
from areal_core.simulate import page
from areal_core.simulate.cluster import simulate
from areal_core.simulate.config import SimulateConfig
from areal_core.simulate.published import Comparison, compare_published
from areal_core.simulate.replay import Replay, replay
from areal_core.simulate.result import Simulation
from areal_core.simulate.sweep import ETAS, SHARES, Sweep, sweep
from areal_core.telemetry.format import compact, percent
from areal_core.telemetry.jsonl import json_value, replace_file

__all__ = ["simulate_command"]


def simulate_command(args: Namespace) -> int:
    """Run the command; see its --help.

    Raises:
        ConfigError: a bad setting, or settings beside --run or --published, which bring their own.
    """
    overrides, path = list(args.overrides), args.config
    if path is not None and "=" in path and not Path(path).exists():  # no file given, overrides only
        overrides.insert(0, path)
        path = None
    if args.run_dir is not None or args.published:
        if path is not None or overrides:
            raise ConfigError("simulate: expected no CONFIG and no key=value with --run or --published")
        if args.published:
            rows = compare_published()
            print(json.dumps([asdict(row) for row in rows]) if args.json else _published_text(rows))
        else:
            found = replay(args.run_dir)
            print(json.dumps(json_value(asdict(found))) if args.json else _replay_text(found))
        return 0
    config = load_settings(SimulateConfig, path, overrides)
    if args.sweep or args.shares or args.etas:
        _sweep(args, sweep(config, args.shares or SHARES, args.etas or ETAS))
    else:
        result = simulate(config)
        print(json.dumps(json_value(result.to_dict())) if args.json else _text(result))
    return 0


def _text(result: Simulation) -> str:
    config = result.config
    ages = ", ".join(f"{age}: {percent(share)}" for age, share in enumerate(result.ages.tolist()))
    sides = "all GPUs in turns" if config.cluster.colocated else f"{config.generator_gpus} + {config.train_gpus} GPUs"
    return "\n".join(
        (
            f"{config.model.name}, {sides}: {config.generators} generators, {config.replicas} trainer replicas",
            f"{'steps':22}{len(result.steps)} in {result.seconds / 3600:.2f} h",
            f"{'a step':22}{result.step_s:.2f} s, training {result.train_s:.2f} s",
            f"{'tokens trained':22}{compact(result.tokens_per_s)}/s",
            f"{'tokens generated':22}{compact(result.generated_per_s)}/s",
            f"{'generators idle':22}{percent(result.generator_idle)}",
            f"{'trainer idle':22}{percent(result.trainer_idle)}",
            f"{'version age':22}mean {result.mean_age:.2f}; {ages}",
        )
    )


def _sweep(args: Namespace, found: Sweep) -> None:
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "sweep.html", page.render_page(found).encode())
    replace_file(folder / "sweep.svg", page.draw_sweep(found).encode())
    written = ["sweep.html", "sweep.svg"]
    try:
        page.save_png(found, folder / "sweep.png")
        written.append("sweep.png")
    except MissingPackageError as error:
        missing = f"no sweep.png: {error}"
    else:
        missing = ""
    if args.json:
        cells = [
            {"generator_share": share, "eta": eta, **result.to_dict()} for (share, eta), result in found.results.items()
        ]
        share, eta = found.advice
        print(json.dumps(json_value({"advice": {"generator_share": share, "eta": eta}, "results": cells})))
        return
    print(f"{page.sweep_title(found)}\n{_table(page.HEAD, page.sweep_rows(found))}\n{page.advice(found)}")
    for name in written:
        print(f"written: {folder / name}")
    if missing:
        print(missing)


def _replay_text(found: Replay) -> str:
    measured, simulated = found.measured, found.simulated
    rows: list[tuple[str, ...]] = [
        ("a step", f"{1e3 * measured.step_s:.1f} ms", f"{1e3 * simulated.step_s:.1f} ms"),
        ("tokens generated", f"{compact(measured.generated_per_s)}/s", f"{compact(simulated.generated_per_s)}/s"),
        ("generators idle", percent(measured.generator_idle) or "", percent(simulated.generator_idle) or ""),
        ("trainer idle", percent(measured.trainer_idle) or "", percent(simulated.trainer_idle) or ""),
        ("mean version age", f"{measured.mean_age:.3f}", f"{simulated.mean_age:.3f}"),
    ]
    for age in range(max(len(measured.ages), len(simulated.ages))):
        shares = [seen.ages[age] if age < len(seen.ages) else 0.0 for seen in (measured, simulated)]
        rows.append((f"tokens of age {age}", *(percent(share) or "" for share in shares)))
    last = found.first_step + found.steps - 1
    head = (f"steps {found.first_step} to {last}", "measured", "simulated")
    error = simulated.step_s / measured.step_s - 1
    return (
        f"{_table(head, rows)}\nstep time {100 * error:+.1f} %; "
        f"{percent(found.age_distance)} of the tokens are of another age"
    )


def _published_text(rows: Sequence[Comparison]) -> str:
    cells = [
        (row.what, row.unit, f"{row.published:g}", f"{row.simulated:.4g}", f"{100 * row.error:+.0f} %", row.kind)
        for row in rows
    ]
    return _table(("AReaL paper", "", "published", "simulated", "error", ""), cells)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text; the first is aligned to the left, the others to the right."""
    widths = [max(len(row[index]) for row in (head, *rows)) for index in range(len(head))]
    lines = []
    for row in (head, *rows):
        first, *others = (
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join((first, *others)))
    return "\n".join(lines)
