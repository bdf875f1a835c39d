"""A framework's own unit tests, with our kernels in it and without.

    git clone --branch v0.9.0 https://github.com/verl-project/verl ../verl
    python bench/framework_tests.py verl ../verl --strict
    python bench/framework_tests.py trl ../trl tests/test_utils.py -k entropy

The tests are copied out of the sources, so that they import the framework that is installed here. They run in
processes of their own: unpatched, with `areal_core.integrations.<framework>.apply()`, and with --strict also with
apply(strict=True). Exit code 1: a test that passes unpatched fails patched.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

# What tests the functions that are replaced, of each framework's repository; and what to leave out: what needs a GPU
# or a model from the network whether patched or not.
TESTS: dict[str, tuple[list[str], str]] = {
    "verl": (
        [
            "tests/trainer/ppo/test_core_algos_on_cpu.py",
            "tests/trainer/ppo/test_dynamic_policy_losses_on_cpu.py",
            "tests/trainer/ppo/test_loss_aggregation_on_cpu.py",
            "tests/trainer/ppo/test_value_loss_normalization_on_cpu.py",
            "tests/trainer/ppo/test_rollout_corr.py",
            "tests/utils/test_groupwise.py",
            "tests/utils/test_padding_on_cpu.py",
            "tests/utils/test_seqlen_balancing.py",
            "tests/utils/test_torch_functional.py",
        ],
        "not distributed",
    ),
    "trl": (["tests/test_utils.py"], "softmax or entropy or lm_head or grpo"),
    "areal": (
        [
            "tests/test_functional.py",
            "tests/test_seqpack.py",
            "tests/test_adv_norm_config.py",
            "tests/test_ppo_stats.py",
            "tests/test_rejection_sampling.py",
            "tests/test_prox_approx.py",
        ],
        "",
    ),
    "openrlhf": (
        [
            "tests/test_loss_aggregation.py",
            "tests/test_kl_estimator_gradient.py",
            "tests/test_actor_entropy_temperature.py",
        ],
        "",
    ),
}
# Modules that tests load by the path of their file, beside the tests. There they find a file that gives the installed
# module, whose functions are replaced, or (where that has the same name) a copy.
LOADED_BY_PATH: dict[str, tuple[str, ...]] = {
    "openrlhf": ("models.utils", "models.loss", "models.ring_attn_utils", "models.actor", "utils.loss_utils"),
}
COPIED = {"utils.loss_utils"}
_FORWARD = "import importlib\n\nglobals().update(vars(importlib.import_module({!r})))\n"
_FRAMEWORK, _MODE, _ONLY, _ABSENT, _RESULTS = (
    f"AREAL_TESTED_{name}" for name in ("FRAMEWORK", "MODE", "ONLY", "ABSENT", "RESULTS")
)


class Recorder:
    """The pytest plugin of a run: applies the patch before tests are collected, writes outcomes at the end."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        for name in os.environ[_ABSENT].split():
            module, _, attribute = name.rpartition(".")
            setattr(importlib.import_module(module), attribute, None)
        mode = os.environ[_MODE]
        self.patches: Any = None
        if mode != "unpatched":
            integration = importlib.import_module(f"areal_core.integrations.{os.environ[_FRAMEWORK]}")
            self.patches = integration.apply(only=os.environ[_ONLY].split() or None, strict=mode == "strict")

    def pytest_runtest_logreport(self, report: Any) -> None:
        before = self.outcomes.get(report.nodeid, "passed")
        if report.outcome != "passed" or before == "passed":
            self.outcomes[report.nodeid] = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        if report.outcome == "failed":
            self.reasons[report.nodeid] = _last_line(report.longrepr)

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self.outcomes[report.nodeid] = "not collected"
            self.reasons[report.nodeid] = _last_line(report.longrepr)

    def pytest_sessionfinish(self) -> None:
        fallbacks = {} if self.patches is None else self.patches.fallbacks
        results = {"outcomes": self.outcomes, "reasons": self.reasons, "fallbacks": fallbacks}
        Path(os.environ[_RESULTS]).write_text(json.dumps(results))


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Recorder())


def _last_line(failure: Any) -> str:
    crash = getattr(failure, "reprcrash", None)
    text = str(failure) if crash is None else crash.message
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if crash is not None else lines[-1])[:160] if lines else "no message"


def write_modules(framework: str, folder: Path) -> None:
    """Write the files of LOADED_BY_PATH."""
    for name in LOADED_BY_PATH.get(framework, ()):
        file = folder / framework / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        if name in COPIED:
            spec = importlib.util.find_spec(framework)
            assert spec is not None
            (installed,) = spec.submodule_search_locations or [""]
            shutil.copy(Path(installed) / file.relative_to(folder / framework), file)
        else:
            file.write_text(_FORWARD.format(f"{framework}.{name}"))


def run(
    framework: str,
    folder: Path,
    tests: list[str],
    keyword: str,
    mode: str,
    only: Collection[str] = (),
    absent: Collection[str] = (),
) -> dict[str, Any]:
    """Outcomes, reasons of failures and fallbacks of the tests in one mode."""
    results = folder / f"{mode}.json"
    here = Path(__file__).resolve().parent
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = os.pathsep.join([*(os.path.abspath(entry) for entry in entries), str(here)])
    environment = {_FRAMEWORK: framework, _MODE: mode, _ONLY: " ".join(only), _ABSENT: " ".join(absent)}
    environment |= {_RESULTS: str(results), "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", *tests]
    if keyword:
        command += ["-k", keyword]
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    if not results.exists():
        raise SystemExit(f"{framework}, {mode}: pytest gave no results\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(results.read_text())
    return found


def table(runs: dict[str, dict[str, Any]]) -> list[str]:
    """A row for each test function, with the outcomes of its parameters in every mode."""
    counts: dict[str, dict[str, Counter[str]]] = {}
    for mode, result in runs.items():
        for test, outcome in result["outcomes"].items():
            row = counts.setdefault(test.split("[")[0], {})
            row.setdefault(mode, Counter())[outcome] += 1
    width = max(map(len, counts), default=4)
    lines = ["  ".join(["test".ljust(width), *(mode.ljust(24) for mode in runs)]).rstrip()]
    for test, by_mode in counts.items():
        cells = [", ".join(f"{n} {outcome}" for outcome, n in sorted(by_mode.get(mode, {}).items())) for mode in runs]
        lines.append("  ".join([test.ljust(width), *(cell.ljust(24) for cell in cells)]).rstrip())
    totals = [Counter(result["outcomes"].values()) for result in runs.values()]
    cells = [", ".join(f"{n} {outcome}" for outcome, n in sorted(total.items())) for total in totals]
    lines.append("  ".join(["all".ljust(width), *(cell.ljust(24) for cell in cells)]).rstrip())
    return lines


def regressions(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Tests that pass unpatched and do not in another mode."""
    passed = [test for test, outcome in runs["unpatched"]["outcomes"].items() if outcome == "passed"]
    return [
        f"{mode}: {test}: {result['reasons'].get(test, result['outcomes'].get(test, 'not run'))}"
        for mode, result in runs.items()
        for test in passed
        if result["outcomes"].get(test) != "passed"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=sorted(TESTS))
    parser.add_argument("sources", type=Path, help="a checkout of the framework's repository, for its tests alone")
    parser.add_argument("tests", nargs="*", help="test files in it; default: those of the functions that are replaced")
    parser.add_argument("-k", dest="keyword", help="pytest's -k")
    parser.add_argument("--only", nargs="+", default=[], metavar="SEAM", help="replace these alone")
    parser.add_argument(
        "--absent", nargs="+", default=[], metavar="MODULE.NAME", help="what the tests import and this version lacks"
    )
    parser.add_argument("--strict", action="store_true", help="a third run, with apply(strict=True)")
    args = parser.parse_args()
    tests, keyword = TESTS[args.framework]
    tests = args.tests or [test for test in tests if (args.sources / test).exists()]
    keyword = keyword if args.keyword is None else args.keyword
    modes = ["unpatched", "patched", *(["strict"] if args.strict else [])]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(args.sources / "tests", folder / "tests")
        write_modules(args.framework, folder)
        runs = {mode: run(args.framework, folder, tests, keyword, mode, args.only, args.absent) for mode in modes}
    print(f"{args.framework} {importlib.metadata.version(args.framework)}, tests of {args.sources}")
    print("\n".join(table(runs)))
    for mode in modes[1:]:
        for reason, count in sorted(runs[mode]["fallbacks"].items()):
            print(f"{mode}: fell through {count} times: {reason}")
    for test, reason in sorted(runs["unpatched"]["reasons"].items()):
        print(f"fails unpatched: {test}: {reason}")
    worse = regressions(runs)
    print("\n".join(f"DIFFERS {line}" for line in worse))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
