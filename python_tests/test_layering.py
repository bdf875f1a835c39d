"""The dependency rules of the code base, checked on the text of its includes and imports.

C++      base <- cuda <- ops/<op> <- c_api; base <- decode; base <- reshard; bind sees all. No op includes another op,
         but for ops/lm_head, which fuses logprob and loss.
         Torch and pybind11 appear in *_torch.cpp and bind/ only, the CUDA toolkit in cuda/port.cuh only.
         reshard: plan knows neither executor nor transports, executor knows transport.h only, a transport neither.
Python   ops and reshard import nothing above them; generate never imports rl; reference is for tests and benches;
         only rl/loop.py joins rollout, trainer, publish and evaluation; estimators knows ops and the look of telemetry;
         integrations knows ops and reshard, and nothing knows it; simulate knows of rl the staleness gate and the
         reading of settings, and only the command line knows it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CPP_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
TORCH_HELPERS = "bind/torch_tensor.h"
FUSED_OPS = {"lm_head": ("ops/logprob/", "ops/loss/")}
# Packages that `areal_core.<key>` may import from the project; packages without a row may import any but reference.
PROJECT_IMPORTS = {
    "ops": {"ops", "_C", "errors"},
    "reshard": {"reshard", "_C", "errors"},
    "reference": {"reference"},
    "estimators": {"estimators", "ops", "telemetry", "errors"},
    "integrations": {"integrations", "ops", "reshard", "errors"},
    "simulate": {"simulate", "rl", "reshard", "telemetry", "errors"},
    "errors": set(),
}
# At module level these import LIGHT_LIBRARIES and the standard library alone.
LIGHT_PACKAGES = {"estimators", "integrations", "ops", "reshard"}
LIGHT_LIBRARIES = {"torch", "numpy"}
RL_IN_SIMULATE = ("rl.staleness", "rl.config_file", "rl.config_checks")
JOINED_BY_THE_LOOP = {
    "rl.rollout": "rollout",
    "rl.trainer": "trainer",
    "rl.publish": "publish",
    "evaluate": "evaluation",
}
HEAVY = (
    "transformers",
    "safetensors",
    "tokenizers",
    "tensorboard",
    "rich",
    "yaml",
    "ray",
    "matplotlib",
    "trl",
    "verl",
    "areal",
    "accelerate",
    "areal_core.rl",
)


# -- C++ --------------------------------------------------------------------------------------------------------------


def allowed_prefixes(path: str) -> tuple[str, ...]:
    """What a file under csrc may include from the project, as prefixes; path is relative to csrc."""
    parts = path.split("/")
    if parts[0] == "bind":
        return ("",)
    if parts[0] == "ops":
        own = ("base/", "cuda/", f"ops/{parts[1]}/", *FUSED_OPS.get(parts[1], ()))
        return (*own, TORCH_HELPERS) if path.endswith("_torch.cpp") else own
    if path.startswith("reshard/transports/") and path.endswith(".cu"):
        return ("base/", "cuda/", "reshard/")
    return {"base": ("base/",), "cuda": ("base/", "cuda/"), "c_api": ("base/", "ops/", "c_api/")}.get(
        parts[0], ("base/", f"{parts[0]}/")
    )


def forbidden_prefixes(path: str) -> tuple[str, ...]:
    """Exceptions to allowed_prefixes inside reshard, and for host code, which sees no device header."""
    stem = path.rsplit(".", 1)[0]
    if stem in ("reshard/plan", "reshard/layout"):
        return ("reshard/executor", "reshard/transport", "reshard/version_store")
    if stem == "reshard/executor":
        return ("reshard/transports/",)
    if path.startswith("reshard/transports/"):
        return ("reshard/plan", "reshard/layout", "reshard/executor")
    return () if path.endswith((".cu", ".cuh")) else ("cuda/",)


def include_faults(path: str, text: str) -> Iterator[str]:
    """Broken rules of one file of csrc."""
    for quote, included in re.findall(r'^\s*#\s*include\s*(["<])([^">]+)[">]', text, flags=re.MULTILINE):
        if quote == "<":
            is_binding = path.endswith("_torch.cpp") or path.startswith("bind/")
            if re.match(r"(torch|ATen|c10|pybind11)/|Python\.h", included) and not is_binding:
                yield f"{path}: expected torch and Python in *_torch.cpp and bind/ only, got <{included}>"
            if re.match(r"cuda|cub/|thrust/|cooperative_groups", included) and path != "cuda/port.cuh":
                yield f"{path}: expected the CUDA toolkit in cuda/port.cuh only, got <{included}>"
        elif included == "cuda_shim.h":
            if path != "cuda/port.cuh":
                yield f"{path}: expected cuda_shim.h in cuda/port.cuh only"
        elif not included.startswith(allowed_prefixes(path)) or included.startswith(forbidden_prefixes(path)):
            yield f'{path}: expected no include of "{included}"'


def test_includes() -> None:
    files = [p for p in sorted((ROOT / "csrc").rglob("*")) if p.suffix in CPP_SUFFIXES]
    assert len(files) > 20
    found = [f for p in files for f in include_faults(p.relative_to(ROOT / "csrc").as_posix(), p.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("base/check.h", '#include "cuda/port.cuh"'),
        ("cuda/vec.cuh", '#include "ops/loss/loss.h"'),
        ("ops/loss/loss_cpu.cpp", '#include "ops/logprob/logprob_math.h"'),
        ("ops/loss/loss_cpu.cpp", '#include "cuda/vec.cuh"'),
        ("ops/loss/loss_cpu.cpp", "#include <torch/csrc/stable/tensor.h>"),
        ("ops/loss/loss_cpu.cpp", '  #  include "bind/torch_tensor.h"'),
        ("ops/loss/loss_kernels.cuh", "#include <cuda_runtime.h>"),
        ("ops/loss/loss_torch.cpp", '#include "bind/bind.h"'),
        ("c_api/loss.cpp", '#include "cuda/launch.cuh"'),
        ("c_api/loss.cpp", '#include "bind/torch_tensor.h"'),
        ("c_api/loss.cpp", "#include <torch/csrc/stable/tensor.h>"),
        ("decode/engine.h", '#include "reshard/plan.h"'),
        ("reshard/plan.cpp", '#include "reshard/executor.h"'),
        ("reshard/plan.h", '#include "reshard/transport.h"'),
        ("reshard/executor.cpp", '#include "reshard/transports/shm.h"'),
        ("reshard/transports/tcp.cpp", '#include "reshard/plan.h"'),
    ],
)
def test_a_forbidden_include_is_found(path: str, line: str) -> None:
    assert list(include_faults(path, f'#pragma once\n#include "base/check.h"\n{line}\n'))


# -- Python -----------------------------------------------------------------------------------------------------------


def imported_modules(tree: ast.AST, module: str, *, top_level_only: bool = False) -> Iterator[str]:
    """Absolute names of what the module imports: packages, modules and the names taken from them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif not (top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield from imported_modules(node, module, top_level_only=top_level_only)


def import_faults(module: str, text: str) -> Iterator[str]:
    """Broken rules of one module; `module` is its dotted name below areal_core."""
    tree, package = ast.parse(text), module.split(".")[0]
    imported = set(imported_modules(tree, f"areal_core.{module}"))
    own = {name.removeprefix("areal_core.") for name in imported if name.startswith("areal_core.")}
    packages = {name.split(".")[0] for name in own if not name.startswith("__")}
    if package in PROJECT_IMPORTS:
        yield from (f"{module}: expected no import of {p}" for p in sorted(packages - PROJECT_IMPORTS[package]))
    if package != "reference" and "reference" in packages:
        yield f"{module}: expected reference in tests and benches only"
    if package != "integrations" and "integrations" in packages:
        yield f"{module}: expected no import of integrations"
    if package == "simulate":
        others = sorted(o for o in own if o.startswith("rl.") and not o.startswith(RL_IN_SIMULATE))
        yield from (f"{module}: expected of rl only {', '.join(RL_IN_SIMULATE)}, got {other}" for other in others)
    elif "simulate" in packages and package != "cli":
        yield f"{module}: expected no import of simulate"
    if package == "generate" and "rl" in packages:
        yield f"{module}: expected generate to know nothing of rl"
    if package in LIGHT_PACKAGES:
        top = {n.split(".")[0] for n in imported_modules(tree, f"areal_core.{module}", top_level_only=True)}
        heavy = top - LIGHT_LIBRARIES - {"areal_core"} - set(sys.stdlib_module_names)
        yield from (f"{module}: expected no import of {name} at module level" for name in sorted(heavy))
    joined = {part for name, part in JOINED_BY_THE_LOOP.items() if any(f"{o}.".startswith(f"{name}.") for o in own)}
    if package == "rl" and module != "rl.loop" and len(joined) > 1:
        yield f"{module}: expected only rl/loop.py to join {', '.join(sorted(joined))}"


def test_imports() -> None:
    files = sorted((ROOT / "areal_core").rglob("*.py"))
    assert len(files) > 20
    found = []
    for path in files:
        module = ".".join(path.relative_to(ROOT / "areal_core").with_suffix("").parts).removesuffix(".__init__")
        found += import_faults(module, path.read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ops.loss", "from areal_core.rl.config import Config"),
        ("ops.loss", "from areal_core import reshard"),
        ("ops.loss", "from ..model import decoder"),
        ("ops.loss", "import transformers"),
        ("ops.loss", "import areal_core.reference.loss"),
        ("reshard.layouts", "def f():\n    from areal_core.ops import pack"),
        ("generate.engine", "from areal_core import rl"),
        ("estimators.exact", "from areal_core.rl.trpo import trpo_step"),
        ("estimators.figure", "import matplotlib.pyplot as plt"),
        ("integrations.trl", "import trl"),
        ("integrations.trl", "from areal_core.rl import trainer"),
        ("rl.trainer", "from areal_core.integrations import trl"),
        ("rl.trainer", "from areal_core.reference import loss"),
        ("rl.trainer", "from areal_core.simulate import simulate"),
        ("simulate.cluster", "from areal_core.rl.rollout import Rollout"),
        ("simulate.costs", "from areal_core import ops"),
        ("rl.trainer", "from areal_core.rl import publish\nfrom areal_core.rl.rollout import Rollout"),
        ("rl.rollout", "from areal_core.rl.trainer import Trainer\nfrom areal_core.evaluate import evaluate_policy"),
    ],
)
def test_a_forbidden_import_is_found(module: str, line: str) -> None:
    assert list(import_faults(module, line))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ops.loss", "import math\nimport torch\nfrom areal_core import _C\nfrom areal_core.ops._dispatch import call"),
        ("reshard.hf", "def f():\n    import safetensors"),
        ("estimators.figure", "from areal_core import ops\ndef f():\n    import matplotlib"),
        ("integrations.trl", "from areal_core import ops, reshard\ndef f():\n    import trl"),
        ("rl.loop", "from areal_core.rl import publish, rollout, trainer\nfrom areal_core.evaluate import x"),
        ("rl.trainer", "from areal_core import ops\nfrom areal_core.rl.publish import Publisher"),
        ("simulate.cluster", "from areal_core.rl.staleness import StalenessGate"),
    ],
)
def test_allowed_imports_pass(module: str, line: str) -> None:
    assert not list(import_faults(module, line))


@pytest.mark.parametrize("package", sorted(LIGHT_PACKAGES))
def test_importing_a_light_package_loads_nothing_heavy(package: str) -> None:
    code = f"import sys, areal_core.{package}; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
