"""The runner of frameworks' own tests, on tests of a few lines."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"
pytestmark = pytest.mark.skipif(not BENCH.is_dir(), reason="tests run without the repository's bench folder")

TESTS = """
import pytest
def test_right(): pass
@pytest.mark.parametrize("x", [1, 2])
def test_sometimes(x): assert x == 1, f"x is {x}"
@pytest.mark.skip
def test_later(): pass
@pytest.fixture
def broken():
    yield
    raise RuntimeError("in the fixture")
def test_left_broken(broken): pass
"""


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("framework_tests")


def test_outcomes_of_a_run(runner: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TESTS)
    (tmp_path / "test_b.py").write_text("import nothing_of_that_name")
    found = runner.run("verl", tmp_path, ["test_a.py", "test_b.py"], "not right", "unpatched")
    assert found["outcomes"] == {
        "test_b.py": "not collected",
        "test_a.py::test_sometimes[1]": "passed",
        "test_a.py::test_sometimes[2]": "failed",
        "test_a.py::test_later": "skipped",
        "test_a.py::test_left_broken": "failed",
    }
    assert "x is 2" in found["reasons"]["test_a.py::test_sometimes[2]"]
    assert "nothing_of_that_name" in found["reasons"]["test_b.py"]
    assert found["fallbacks"] == {}


def test_regressions_and_table(runner: ModuleType) -> None:
    runs = {
        "unpatched": {"outcomes": {"t.py::a[1]": "passed", "t.py::a[2]": "failed", "t.py::b": "passed"}, "reasons": {}},
        "patched": {"outcomes": {"t.py::a[1]": "failed", "t.py::a[2]": "failed"}, "reasons": {"t.py::a[1]": "why"}},
    }
    assert runner.regressions(runs) == ["patched: t.py::a[1]: why", "patched: t.py::b: not run"]
    rows = [line.split("  ") for line in runner.table(runs)]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows] == [
        ["test", "unpatched", "patched"],
        ["t.py::a", "1 failed, 1 passed", "2 failed"],
        ["t.py::b", "1 passed"],
        ["all", "1 failed, 2 passed", "2 failed"],
    ]


def test_modules_loaded_by_path_are_the_installed_ones(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LOADED_BY_PATH", {"json": ("decoder", "scanner")})
    monkeypatch.setattr(runner, "COPIED", {"scanner"})
    runner.write_modules("json", tmp_path)
    spec = importlib.util.spec_from_file_location("another_name", tmp_path / "json" / "decoder.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.JSONDecoder is importlib.import_module("json.decoder").JSONDecoder
    assert "def py_make_scanner" in (tmp_path / "json" / "scanner.py").read_text()
