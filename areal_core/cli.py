"""The command line: ``areal-core train | eval | report | simulate | estimators | reshard | info``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_core import __version__
from areal_core.errors import ArealError

__all__ = ["main"]

_OVERRIDES = "key=value overrides of the configuration, e.g. rollout.eta=1 train.steps=50 run_dir=runs/mine"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the command, and turn expected errors into one line on stderr and exit code 2."""
    args = _parse(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print(f"areal-core {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ArealError, FileExistsError, FileNotFoundError, ValueError) as error:
        print(f"areal-core {args.command}: {error}", file=sys.stderr)
        return 2


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse `argv`; overrides may stand on both sides of an option, which argparse alone does not allow."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "overrides") or any("=" not in text or text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="areal-core", description="Asynchronous RL on language models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run the asynchronous rollout/train loop")
    train.add_argument("config", nargs="?", help="YAML file; without one, the embedded default task")
    train.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES)
    which = train.add_mutually_exclusive_group()
    which.add_argument(
        "--resume",
        action="store_true",
        help="continue run_dir from its newest usable checkpoint, with the settings of its config.yaml and overrides",
    )
    which.add_argument("--fresh", action="store_true", help="delete the run that run_dir holds, if any")
    train.set_defaults(run=_train)

    _add_eval(commands)

    report = commands.add_parser("report", help="write report.html and summary.svg of a run, finished or not")
    report.add_argument("run_dir")
    report.set_defaults(run=_report)

    _add_simulate(commands)

    estimators = commands.add_parser(
        "estimators",
        help="bias and variance of every advantage estimator, exact, as a table, a page and a picture",
        description="Print what each advantage estimator does to the policy gradient on a small tree MDP whose groups "
        "of responses are all enumerated: direction, length, bias and noise. Write a page and a picture of it.",
    )
    estimators.add_argument(
        "--output", default="runs/estimators", metavar="DIR", help="folder of page and picture (default: %(default)s)"
    )
    estimators.add_argument(
        "--group-size", type=int, default=8, metavar="M", help="responses per prompt, 2 to 8 (default: %(default)s)"
    )
    estimators.set_defaults(run=_estimators)

    _add_reshard(commands)

    info = commands.add_parser("info", help="versions, instruction set, CUDA build, GPUs")
    info.set_defaults(run=_info)
    return parser


def _add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="pass@1, pass@k and maj@k of models on data sets; without --data, pass@1 on the task of a configuration",
        argument_default=argparse.SUPPRESS,
        description="With --data: sample responses of every model to every problem, print a table of the models side "
        "by side, and write it (text, Markdown, JSON, HTML) beside all responses. A rerun continues where it stopped. "
        "Without --data: greedy and sampled pass@1 of one model, as training evaluates; takes key=value overrides.",
        epilog="example: areal-core eval chain_policy trained=runs/chain/checkpoints/step_000150/policy "
        "--data chain_arithmetic aime24.jsonl:verifier=last_number --samples 32 --k 8 32 --output runs/table",
    )
    evaluate.add_argument(
        "models",
        nargs="+",
        metavar="[LABEL=]MODEL",
        help="Hugging Face directory, or the name of a bundled policy (chain_policy); without --data, one model and "
        + _OVERRIDES,
    )
    evaluate.add_argument(
        "--data",
        nargs="+",
        action="extend",
        metavar="[LABEL=]FILE|TASK[:key=value,...]",
        help="files of problems (JSON Lines), or tasks by name, with options",
    )
    evaluate.add_argument("--problems", type=int, metavar="N", help="first N of each (default: all, or 256 made up)")
    evaluate.add_argument("--samples", type=int, metavar="N", help="responses to each problem (default: 32)")
    evaluate.add_argument("--temperature", type=float, metavar="T", help="0: greedy, one sample (default: 0.6)")
    evaluate.add_argument("--top-p", type=float, metavar="P", help="(default: 1)")
    evaluate.add_argument("--top-k", type=int, metavar="K", help="0: all tokens (default: 0)")
    evaluate.add_argument("--max-new-tokens", type=int, metavar="N", help="(default: what the context leaves)")
    evaluate.add_argument("--seed", type=int, help="of the sampled tokens (default: 0)")
    evaluate.add_argument("--template", metavar="TEXT", help="what is put before the model, with {prompt} in it")
    evaluate.add_argument(
        "--k", type=int, nargs="+", action="extend", metavar="K", help="also pass@K and maj@K (default: 1)"
    )
    evaluate.add_argument("--output", metavar="DIR", help="folder of tables and responses (default: runs/eval)")
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    evaluate.add_argument("--slots", type=int, metavar="N", help="responses decoded at once (default: 256)")
    evaluate.add_argument("--threads", type=int, metavar="N", help="compute threads (default: 1)")
    evaluate.set_defaults(run=_evaluate, overrides=[])


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="how fast a cluster would train, and how many of its GPUs should generate",
        description="Simulate an asynchronous (or synchronous) run on a cluster: decoding, training, weight updates "
        "and the staleness gate. docs/simulator.md lists the settings.",
        epilog="example: areal-core simulate examples/simulate/cluster.yaml cluster.gpus=256 --sweep",
    )
    simulate.add_argument("config", nargs="?", help="YAML file; without one, the defaults")
    simulate.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. cluster.gpus=64 rollout.eta=1")
    which = simulate.add_mutually_exclusive_group()
    which.add_argument(
        "--sweep", action="store_true", help="try shares of generators and etas; write table and pictures"
    )
    which.add_argument(
        "--run", dest="run_dir", metavar="RUN_DIR", help="simulate a recorded run from its own step times"
    )
    which.add_argument("--published", action="store_true", help="compare with the numbers published for AReaL")
    simulate.add_argument("--shares", type=_numbers, metavar="A,B,..", help="shares of GPUs that generate, in a sweep")
    simulate.add_argument("--etas", type=_numbers, metavar="A,B,..", help="staleness bounds, in a sweep")
    simulate.add_argument(
        "--output",
        default="runs/simulate",
        metavar="DIR",
        help="folder of a sweep's page and pictures (default: %(default)s)",
    )
    simulate.add_argument("--json", action="store_true", help="print JSON")
    simulate.set_defaults(run=_simulate)


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _add_reshard(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    reshard = commands.add_parser("reshard", help="plan and time transfers of weights between two layouts")
    kinds = reshard.add_subparsers(dest="reshard_command", required=True, metavar="COMMAND")
    plan = kinds.add_parser(
        "plan",
        help="what a transfer costs, beside the bound that no plan can beat",
        description="Plan the transfer of a model's weights from one parallel layout to another, and print bytes, time "
        "and load of senders beside the lower bound. Nothing is allocated or sent: any size plans on a laptop.",
        epilog='example: areal-core reshard plan --model qwen3-235b --src "megatron:pp4,tp4,ep8,dp1" '
        '--dst "vllm:tp8,dp8" --nic 50GB/s',
    )
    plan.add_argument("--model", help="public name, config.json or Hugging Face directory")
    plan.add_argument("--src", metavar="SPEC", help="layout of the trainer, such as fsdp:dp4,tp2; see --list")
    plan.add_argument("--dst", metavar="SPEC", help="layout of the generator, such as sglang:tp8,ep2; see --list")
    plan.add_argument("--list", action="store_true", help="print what SPEC may say, and the models' names")
    plan.add_argument("--names", action="store_true", help="print the name maps of both sides, do not plan")
    plan.add_argument("--dtype", help="of the weights: bf16, fp32, fp8 (block-scaled), ... (default: the model's)")
    plan.add_argument("--lora-rank", type=int, metavar="R", help="an adapter of this rank in place of the model")
    plan.add_argument("--colocated", action="store_true", help="rank r of both sides is the same process")
    plan.add_argument("--multicast", action="store_true", help="send what ranks of a node share once to the node")
    plan.add_argument("--nic", default="50GB/s", metavar="RATE", help="of each rank, each way (default: %(default)s)")
    plan.add_argument("--intra-node", default="200GB/s", metavar="RATE", help="within a node (default: %(default)s)")
    plan.add_argument("--link", action="append", metavar="RANK=RATE", help="a slower NIC; 0: cannot be reached")
    plan.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="(default: %(default)s)")
    plan.add_argument("--chunk-mib", type=int, default=8, metavar="N", help="bytes sent at once (default: %(default)s)")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(run=_reshard_plan)
    bench = kinds.add_parser(
        "bench",
        help="publish versions between processes of this machine",
        description="Start a process for each rank of both layouts, publish versions of a model from one side to the "
        "other, check what arrives, and print times and loads. Needs memory for the source and twice the target.",
        epilog="example: areal-core reshard bench --model qwen2.5-0.5b --layers 4 --src fsdp:4 --dst vllm:tp2",
    )
    bench.add_argument("--model", default="qwen2.5-0.5b", help="as for plan (default: %(default)s)")
    bench.add_argument("--layers", type=int, metavar="N", help="of its layers only N")
    bench.add_argument("--src", default="fsdp:4", metavar="SPEC", help="(default: %(default)s)")
    bench.add_argument("--dst", default="vllm:tp2", metavar="SPEC", help="(default: %(default)s)")
    bench.add_argument("--transport", default="shm", choices=["shm", "tcp"], help="(default: %(default)s)")
    bench.add_argument("--rounds", type=int, default=10, metavar="N", help="versions timed (default: %(default)s)")
    bench.add_argument(
        "--chunk-mib", type=int, default=8, metavar="N", help="bytes sent at once (default: %(default)s)"
    )
    bench.set_defaults(run=_reshard_bench)


def _reshard_bench(args: argparse.Namespace) -> int:
    from areal_core.reshard.bench_command import bench_command

    return bench_command(args)


def _reshard_plan(args: argparse.Namespace) -> int:
    from areal_core.reshard.command import plan_command

    return plan_command(args)


def _train(args: argparse.Namespace) -> int:
    from areal_core.rl.config_file import load_config
    from areal_core.rl.loop import train

    overrides = list(args.overrides)
    path = args.config
    if path is not None and "=" in path and not Path(path).exists():  # no file given, overrides only
        overrides.insert(0, path)
        path = None
    config = load_config(path, overrides)
    run_dir = Path(config.run_dir)
    if args.resume and path is None and (run_dir / "config.yaml").exists():
        config = load_config(run_dir / "config.yaml", overrides)  # the run's own settings, not the defaults
    metrics = run_dir / "metrics.jsonl"
    if args.fresh:
        _remove_run(run_dir)
    elif not args.resume and metrics.exists() and metrics.stat().st_size > 0:
        resume = "--resume continues it, " if any((run_dir / "checkpoints").glob("step_*")) else ""
        raise FileExistsError(f"{run_dir} holds a run: {resume}--fresh deletes it, run_dir=... goes elsewhere")
    result = train(config, resume=args.resume)
    if result.before and result.after:
        before, after = result.before["eval/accuracy_sampled"], result.after["eval/accuracy_sampled"]
        print(f"sampled accuracy {before:.3f} -> {after:.3f} in {result.steps} steps, {result.elapsed_s:.1f} s")
    if config.telemetry.report:
        from areal_core.telemetry import report_command

        report_command(result.run_dir)
    if result.interrupted:
        print(f"interrupted after step {result.steps}; continue with: areal-core train {run_dir}/config.yaml --resume")
        return 130
    return 0


def _remove_run(run_dir: Path) -> None:
    """Remove what a run writes, and nothing else that may lie in its folder."""
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for name in (
        "config.yaml",
        "events.jsonl",
        "metrics.jsonl",
        "report.html",
        "samples.jsonl",
        "summary.svg",
        "trace.json",
    ):
        (run_dir / name).unlink(missing_ok=True)


def _evaluate(args: argparse.Namespace) -> int:
    if hasattr(args, "data"):
        from areal_core.evaluate.command import compare_command

        return compare_command(args)
    from areal_core.rl.config_file import load_config
    from areal_core.rl.evaluator import evaluate_model

    model, *overrides = args.models
    overrides += args.overrides
    for name in sorted(set(vars(args)) - {"command", "run", "models", "overrides"}):
        raise ValueError(f"--{name.replace('_', '-')}: expected --data beside it, which names what to evaluate on")
    for word in overrides:
        if "=" not in word:
            raise ValueError(f"expected one model and key=value overrides without --data, got {word!r}")
    config = load_config(None, [f"model.path={model}", *overrides])
    for name, value in evaluate_model(config).items():
        if name == "eval/version":  # of a run; a directory has none
            continue
        print(f"{name.removeprefix('eval/'):34} {value:.4f}")
    return 0


def _report(args: argparse.Namespace) -> int:
    from areal_core.telemetry import report_command

    return report_command(args.run_dir)


def _simulate(args: argparse.Namespace) -> int:
    from areal_core.simulate.command import simulate_command

    return simulate_command(args)


def _estimators(args: argparse.Namespace) -> int:
    from areal_core.estimators.command import estimators_command

    return estimators_command(args.output, args.group_size)


def _info(_args: argparse.Namespace) -> int:
    from areal_core.info import main as info

    return info()


if __name__ == "__main__":
    sys.exit(main())
