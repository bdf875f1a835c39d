"""Make the policy bundled as `chain_policy`: supervised warm-up on chains of arithmetic, under a minute on one core.

python examples/make_chain_policy.py --out runs/chain_policy --seed 0
python examples/make_chain_policy.py --out runs/chain_long_policy --min-terms 8 --max-terms 12 --skill-target 0.6
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from areal_core.tasks import ChainArithmetic
from areal_core.tasks.chain_warmup import WarmupConfig, WarmupReport, save_chain_policy, warm_up


def main() -> None:
    """Parse arguments, warm up under a progress bar, write a Hugging Face directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-terms", type=int, default=3)
    parser.add_argument("--max-terms", type=int, default=6)
    parser.add_argument("--skill-target", type=float, default=0.75, help="accuracy that ends the first stage")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    task = ChainArithmetic(arguments.min_terms, arguments.max_terms)
    config = WarmupConfig(seed=arguments.seed, skill_target=arguments.skill_target)
    columns = (TextColumn("{task.description:>6}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bars:
        stages = {stage: bars.add_task(stage, start=False) for stage in ("skill", "habit")}

        def show(stage: str, done: int, at_most: int) -> None:
            bars.start_task(stages[stage])
            bars.update(stages[stage], completed=done, total=at_most)

        model, report = warm_up(task, config, show)
    save_chain_policy(model, config, report, arguments.out)
    print(summary(report, arguments.out))


def summary(report: WarmupReport, out: Path) -> str:
    """Two lines on what was made."""
    skill, habit = report.after_skill, report.after_habit
    return (
        f"after {report.skill_steps} steps of skill: accuracy {skill.accuracy:.3f}, thinking {skill.thinking:.3f}\n"
        f"written to {out}: accuracy {habit.accuracy:.3f}, thinking {habit.thinking:.3f}"
    )


if __name__ == "__main__":
    main()
