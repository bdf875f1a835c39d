"""Every bench runs at a tiny size: its own checks pass, its options are read, its results can be kept and drawn."""

import importlib
import importlib.util
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
pytestmark = pytest.mark.skipif(not BENCH.is_dir(), reason="tests run without the repository's bench folder")

SMALL = {
    "generate": "--rows 2 --prompt-tokens 3 --new-tokens 2",
    "integrations": "--frameworks trl --tokens 3 --vocab 67 --sequences 4 --length 16 --lengths 40",
    "linear_logprob": "--tokens 21 --vocab 67 --hidden 8 --dtypes bfloat16 float32",
    "logprob": "--tokens 3 --vocab 67 --dtypes bfloat16",
    "loop": "rollout.batch_groups=2 rollout.group_size=2 generate.max_new_tokens=2 --steps 4 --skip 1 --modes sync",
    "loss": "--tokens 100",
    "packing": "--sequences 5 --width 17 --lengths 40",
    "peers": "--tokens 3 --vocab 67 --hidden 8 --sequences 4 --length 16 --lengths 40 --ranks 3",
    "publish": "--sizes 20KB --rounds 4",
    "reshard_copy": "--runs 64 4096 --total-mib 1",
    "reshard_plan": "--tensors 300 --ranks 8 --cases qwen2.5-0.5b-fsdp4-to-tp2",
    "reshard": "--layers 1 --width 112 --pack-mib 1 --flips 3 --crashes 1 --cases fsdp4-tp2 --baselines",
    "scan": "--sequences 16 --length 17",
    "train_step": "--tokens 8 --vocab 67 --hidden 64",
    "trainer": "--groups 4 --group-size 2",
}
# Scripts of their own kind, without the harness and its options.
SCRIPTS = {"rewards": "--responses 4 --verify-ms 1 --workers 1", "simulate": "12", "verl_weights": "1 1 1"}
NEEDS = {"generate": "transformers", "train_step": "transformers", "trainer": "transformers"}


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The harness, importable as the scripts import it, with bounds that take no time to measure."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("harness")
    monkeypatch.setattr(module, "measure_bandwidth", lambda device: (8.0, 10.0))
    monkeypatch.setattr(module, "measure_gemm_tflops", lambda device, dtype: 0.5)
    return module


def run(monkeypatch: pytest.MonkeyPatch, name: str, arguments: str) -> None:
    if package := NEEDS.get(name):
        pytest.importorskip(package)
    threads = torch.get_num_threads()
    common = [] if "--repeats" in arguments else ["--repeats", "1"]
    monkeypatch.setattr(sys, "argv", [f"bench_{name}.py", *common, "--threads", "1", *arguments.split()])
    try:
        importlib.import_module(f"bench_{name}").main()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", sorted(path.stem.removeprefix("bench_") for path in BENCH.glob("bench_*.py")))
def test_bench_runs(
    name: str, harness: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in SCRIPTS:
        command = [sys.executable, BENCH / f"bench_{name}.py", *SCRIPTS[name].split()]
        assert subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120).stdout
        return
    assert name in SMALL, f"bench_{name}: give it a tiny size here"
    run(monkeypatch, name, f"{SMALL[name]} --no-save --out {tmp_path}")
    assert capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_results_are_kept_and_drawn(harness: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for _ in range(2):
        run(monkeypatch, "loss", f"{SMALL['loss']} --cold --repeats 3 --out {tmp_path}")
    (kept,) = tmp_path.glob("*.json")
    runs = json.loads(kept.read_text())
    assert [r["bench"] for r in runs] == ["loss", "loss"]
    assert runs[0]["options"]["cold"] is True
    row = runs[0]["rows"][0]
    assert row["best_ms"] <= row["median_ms"] <= row["worst_ms"]
    moved = row["read_bytes"] + row["written_bytes"]
    assert row["copy_share"] == pytest.approx(moved / 10e9 / (row["median_ms"] / 1e3))
    assert row["gemm_share"] == pytest.approx(row["flops"] / 0.5e12 / (row["median_ms"] / 1e3))
    drawn = list(tmp_path.glob("*-loss.svg"))
    assert len(drawn) == (1 if importlib.util.find_spec("matplotlib") else 0)


def test_without_matplotlib_the_bench_says_so(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "missing_matplotlib", lambda: "matplotlib is not installed")
    run(monkeypatch, "loss", f"{SMALL['loss']} --no-save --plot {tmp_path / 'loss.png'}")
    assert "no plot: matplotlib is not installed" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_floors_of_a_gpu_run(tmp_path: Path, harness: ModuleType) -> None:
    floors = importlib.import_module("floors")
    rows = [
        {"case": "forward", "provider": "ours", "median_ms": 1.0, "hbm_share": 0.75},
        {"case": "forward", "provider": "on a CPU", "median_ms": 1.0, "hbm_share": None},
    ]
    (tmp_path / "run.json").write_text(json.dumps([{"bench": "x", "rows": rows}, {"bench": "without rows"}]))
    (line,) = floors.lines(tmp_path)
    assert line == "  75% of the memory's peak: 1.000 ms, floor 0.750 ms, ours, forward"


def test_a_wrong_provider_is_never_timed(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = harness.argument_parser("").parse_args(["--no-save", "--threads", str(torch.get_num_threads())])
    bench = harness.Bench("loss", arguments)

    def check(name: str, result: torch.Tensor) -> None:
        harness.assert_close(name, result, torch.ones(2), 1e-6)

    for wrong in (torch.tensor([1.0, 1.1]), torch.tensor([1.0, torch.nan])):
        with pytest.raises(AssertionError, match="wrong: expected the truth"):
            bench.compare("case", {"right": partial(torch.ones, 2), "wrong": partial(torch.clone, wrong)}, check=check)
    assert bench.rows == []


@pytest.mark.parametrize("name", ["packing", "trainer", "generate", "publish", "reshard", "loop"])
def test_options_without_a_meaning_are_refused(
    name: str, harness: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="--device has no meaning here"):
        run(monkeypatch, name, f"{SMALL[name]} --device cuda --out {tmp_path}")


def test_a_gpu_is_asked_for_in_vain(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="--device cuda: no GPU"):
        run(monkeypatch, "loss", f"{SMALL['loss']} --device cuda")


# -- peers ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def peers(harness: ModuleType) -> ModuleType:
    return importlib.import_module("peers")


def test_every_peer_loads_or_says_why(peers: ModuleType) -> None:
    for task in {peer.task for peer in peers.PEERS}:
        functions, reasons = peers.available(task, "cpu")
        assert all(callable(function) for function in functions.values())
        assert all(reasons.values())
        names = [peer.name for peer in peers.PEERS if peer.task == task]
        assert len(functions) + len(reasons) == len(names)


def test_a_module_loads_without_its_package(peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "half_a_framework"
    (folder / "utils").mkdir(parents=True)
    (folder / "__init__.py").write_text("import a_cuda_library_that_is_not_here")
    (folder / "utils" / "__init__.py").write_text("raise RuntimeError('needs a GPU')")
    (folder / "utils" / "numbers.py").write_text("from half_a_framework.utils.other import ANSWER")
    (folder / "utils" / "other.py").write_text("ANSWER = 42")
    broken = tmp_path / "broken_framework"
    broken.mkdir()
    (broken / "__init__.py").write_text("import a_cuda_library_that_is_not_here")
    (broken / "ops.py").write_text("raise OSError('no driver')")
    monkeypatch.syspath_prepend(str(tmp_path))
    module, how = peers.load_module("half_a_framework.utils.numbers")
    assert (module.ANSWER, how) == (42, " (module alone)")
    with pytest.raises(peers.UnavailableError, match=r"a_cuda_library_that_is_not_here.*; alone: OSError: no driver"):
        peers.load_module("broken_framework.ops")
    with pytest.raises(peers.UnavailableError, match="no_such_package"):
        peers.load_module("no_such_package.module")
