"""The native module: its type stub says what it has, and it finds what torch has loaded."""

import ast
from pathlib import Path
from typing import Any

from areal_core.ops import _C

STUB = Path(__file__).parents[1] / "areal_core" / "_C.pyi"
Definition = ast.FunctionDef | ast.ClassDef


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def definitions(body: list[ast.stmt]) -> dict[str, Definition | None]:
    """Functions and classes by name; None for plain attributes."""
    found: dict[str, Definition | None] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = None
    return found


def arguments(function: ast.FunctionDef) -> list[str]:
    """Names of the arguments; positional-only ones, which pybind11 does not name, as their number."""
    args = function.args
    return [str(i) for i, _ in enumerate(args.posonlyargs)] + [a.arg for a in args.args + args.kwonlyargs]


def native_arguments(function: Any) -> list[str] | None:
    """The same of a pybind11 function, whose docstring starts with its signature; None for anything else."""
    signature = (function.__doc__ or "").split("\n", 1)[0]
    if " -> " not in signature:
        return None
    (parsed,) = ast.parse(f"def {signature}: ...").body
    assert isinstance(parsed, ast.FunctionDef)
    names = [a.arg for a in parsed.args.args + parsed.args.kwonlyargs]
    unnamed = sum(name.startswith("arg") for name in names)
    if unnamed == 0:
        return names
    return [str(i) for i in range(len(names))]  # self included: it is positional-only too


def mismatches(where: str, stub: dict[str, Definition | None], native: Any) -> list[str]:
    found = [f"{where}.{name}: not in the stub" for name in sorted(public(vars(native)) - stub.keys())]
    for name, definition in stub.items():
        if not hasattr(native, name):
            if not name.startswith("_"):
                found.append(f"{where}.{name}: only in the stub")
        elif isinstance(definition, ast.ClassDef):
            found += mismatches(f"{where}.{name}", definitions(definition.body), getattr(native, name))
        elif isinstance(definition, ast.FunctionDef) and not definition.decorator_list:
            got, want = arguments(definition), native_arguments(getattr(native, name))
            if want is not None and got != want:
                found.append(f"{where}.{name}: expected arguments {want}, the stub has {got}")
    return found


def test_the_stub_matches_the_module() -> None:
    assert mismatches("_C", definitions(ast.parse(STUB.read_text()).body), _C) == []


def test_mismatches_are_found() -> None:
    source = "def num_threads(n: int) -> int: ...\nclass DecodeEngine:\n    def nothing(self) -> None: ...\n"
    found = "\n".join(mismatches("_C", definitions(ast.parse(source).body), _C))
    assert "_C.best_isa: not in the stub" in found
    assert "_C.num_threads: expected arguments [], the stub has ['n']" in found
    assert "_C.DecodeEngine.nothing: only in the stub" in found


def test_a_symbol_is_found_in_a_library_that_python_loaded_for_itself_only() -> None:
    symbol = "THP_PyFrame_Clear"  # of the library of torch that no extension module links
    assert _C.has_loaded_symbol("libtorch_python.so", symbol)
    assert not _C.has_loaded_symbol("libnothing.so", symbol)  # the global scope does not have it
    assert not _C.has_loaded_symbol("libtorch_python.so", "no_such_symbol")
