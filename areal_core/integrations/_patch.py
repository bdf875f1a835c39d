"""Replacing functions of another framework: recognise all of them first, replace, count what falls through, undo.

A framework's file is a table of seams, each with the adapter function that takes the original's arguments:

    def entropy_from_logits(logits, chunk_size=128, *, original):
        if logits.device.type == "mps":
            return original.fall_through("on mps", logits, chunk_size)
        return ...

    SEAMS = (
        Seam("entropy", "trl.trainer.utils", "entropy_from_logits", "logits, chunk_size=128", entropy_from_logits),
    )

    def apply(*, only=None, strict=False):
        return apply_seams("trl", "1.16", SEAMS, only, strict)
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any

import torch

from areal_core.errors import MissingPackageError, PatchError, UnsupportedVersionError

logger = logging.getLogger("areal_core.integrations")

_lock = threading.RLock()
_ABSENT: Any = object()  # what an attribute is that a class inherits


@dataclass(frozen=True)
class Seam:
    """One function of a framework, how it is recognised, and what takes its place.

    Args:
        name: what `only` and `Patches.replaced` call it.
        module: where the framework defines it.
        attribute: "function" or "Class.method".
        parameters: of its signature without annotations, as written: "logits, index, *, temperature=1.0". A method's
            begin with self. A tuple: any of these, for versions that differ in what the adapter honours.
        adapter: called with the arguments of the original (of a class method: the class first) and with `original`, an
            Original.
        sources: hashes (`source_hash`) of the sources that were looked at. Empty: the signature is enough. For
            adapters that rely on what the original does inside.
        signature_of: attribute whose signature is compared instead, where the seam has none of its own
            ("Function.forward" for "Function.apply").
        everywhere: whether modules that imported it by name get the replacement too; False: where it is defined only.
    """

    name: str
    module: str
    attribute: str
    parameters: str | tuple[str, ...]
    adapter: Callable[..., Any]
    sources: Collection[str] = ()
    signature_of: str | None = None
    everywhere: bool = True


class Original:
    """The framework's function behind a seam: call it for what it did, `fall_through` to say why."""

    def __init__(self, function: Callable[..., Any], name: str, strict: bool, fallbacks: Counter[str]) -> None:
        self.strict = strict
        self._function, self._name, self._fallbacks = function, name, fallbacks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the framework's function."""
        return self._function(*args, **kwargs)

    def fall_through(self, reason: str, *args: Any, **kwargs: Any) -> Any:
        """Call the framework's function because of `reason`: counted, and logged the first time."""
        if not torch.compiler.is_compiling():  # a compiled graph neither logs nor counts
            key = f"{self._name}: {reason}"
            with _lock:
                self._fallbacks[key] += 1
                is_first = self._fallbacks[key] == 1
            if is_first:
                logger.info("%s: the framework's own function does this (%s)", self._name, reason)
        return self._function(*args, **kwargs)


@dataclass(frozen=True)
class _Target:
    """A seam that was found: what holds the function (a module or a class), under which name, and what is there."""

    seam: Seam
    owner: Any
    key: str
    held: Any  # the object in the owner's dictionary, or _ABSENT
    function: Callable[..., Any]
    kind: type | None  # staticmethod, classmethod or None

    def is_replaced(self) -> bool:
        return getattr(self.function, "__areal_core__", False)


@dataclass
class Patches:
    """What was replaced; a context manager that restores it.

    `replaced` names the seams; `fallbacks` says how often a replacement called the framework's own function, by
    "seam: reason".
    """

    framework: str
    replaced: tuple[str, ...]
    _fallbacks: Counter[str]
    _restores: list[tuple[_Target, Any]] = field(repr=False)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls that fell through so far, by "seam: reason"."""
        with _lock:
            return dict(self._fallbacks)

    def undo(self) -> None:
        """Put back exactly what was there, also in modules that imported a replacement meanwhile; once.

        Raises:
            PatchError: something else has been put in a seam since; nothing is restored. Undo that first.
        """
        with _lock:
            for target, installed in self._restores:
                if vars(target.owner).get(target.key, _ABSENT) is not installed:
                    raise PatchError(
                        f"{self.framework}: expected {target.seam.module}.{target.seam.attribute} as areal_core left "
                        "it, got another object: undo what was applied later first"
                    )
            _exchange([(target, installed, target.held) for target, installed in self._restores])
            self._restores = []

    def __enter__(self) -> Patches:
        """Give itself: the functions are replaced already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo, also after an exception."""
        self.undo()


def apply_seams(
    framework: str,
    versions: str,
    seams: Sequence[Seam],
    only: Collection[str] | None = None,
    strict: bool = False,
    *,
    extra: str | None = None,
    source: str | None = None,
) -> Patches:
    """Replace the framework's functions at `seams`, or at those that `only` names; all or none.

    Args:
        framework: the package, as it is imported and installed.
        versions: which were looked at; for error messages. What counts is that every seam is recognised.
        seams: the table.
        only: names of seams; None: all.
        strict: given to the adapters: the framework's own convention where ours differs on purpose.
        extra: which extra of areal-core installs the framework. None: it has the framework's name.
        source: where the framework comes from, if no extra installs it.

    Raises:
        ValueError: `only` names no seam of the table, or is a string.
        MissingPackageError: the framework, or what it needs to be imported, is not installed.
        UnsupportedVersionError: a seam is not there, or has another signature or source.
        PatchError: a seam is replaced already.
    """
    chosen = [seam for seam in seams if only is None or seam.name in only]
    names = [seam.name for seam in seams]
    if isinstance(only, str):
        raise ValueError(f"{framework}.apply: expected only to be a collection of names, got the string {only!r}")
    if unknown := sorted(set(only or ()) - set(names)):
        raise ValueError(f"{framework}.apply: expected only in {names}, got {unknown}")
    version = _installed_version(framework, source or f"pip install 'areal-core[{extra or framework}]'")
    fallbacks: Counter[str] = Counter()
    with _lock:
        targets = [_find(framework, version, versions, seam) for seam in chosen]
        originals = [Original(target.function, target.seam.name, strict, fallbacks) for target in targets]
        restores = [
            (target, _replacement(target, original)) for target, original in zip(targets, originals, strict=True)
        ]
        _exchange([(target, target.held, installed) for target, installed in restores])
    replaced = tuple(seam.name for seam in chosen)
    logger.info("%s %s: replaced %s", framework, version, ", ".join(replaced) or "nothing")
    return Patches(framework, replaced, fallbacks, restores)


def signature(function: Callable[..., Any]) -> str:
    """Parameters of a function without annotations, as a Seam states them."""
    bare = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    return str(inspect.Signature(bare))[1:-1]


def source_hash(function: Callable[..., Any]) -> str:
    """Hash of a function's source, as Seam.sources holds them."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def _installed_version(framework: str, source: str) -> str:
    try:
        importlib.import_module(framework)
    except ImportError as error:
        raise MissingPackageError(f"{framework}: expected it to be importable ({source}), got: {error}") from error
    try:
        return importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules[framework], "__version__", "of unknown version"))


def _find(framework: str, version: str, versions: str, seam: Seam) -> _Target:
    where = f"{seam.module}.{seam.attribute}"

    def unsupported(expected: str, got: str) -> UnsupportedVersionError:
        return UnsupportedVersionError(
            f"{framework} {version}: expected {expected}, as in {versions}, got {got}; nothing was replaced"
        )

    try:
        module = importlib.import_module(seam.module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{seam.module}.".startswith(f"{error.name}."):
            raise unsupported(f"a module {seam.module}", "none") from error
        raise MissingPackageError(
            f"{framework} {version}: expected what {seam.module} imports, got: {error}"
        ) from error
    try:
        target = _target(module, seam)
        compared = target.function if seam.signature_of is None else _target(module, seam, seam.signature_of).function
    except AttributeError as error:
        raise unsupported(where, f"none ({error})") from error
    if target.is_replaced():
        raise PatchError(f"{framework}: expected {where} as the framework defines it, got a replacement: undo it first")
    try:
        parameters = signature(compared)
    except (TypeError, ValueError):
        parameters = "an object without a signature"
    expected = (seam.parameters,) if isinstance(seam.parameters, str) else seam.parameters
    if parameters not in expected:
        raise unsupported(f"{where}({') or ('.join(expected)})", f"({parameters})")
    if seam.sources:
        try:
            found = source_hash(compared)
        except (OSError, TypeError):
            found = "no source"
        if found not in seam.sources:
            raise unsupported(f"the source of {where} to be one of {sorted(seam.sources)}", found)
    return target


def _target(module: ModuleType, seam: Seam, attribute: str | None = None) -> _Target:
    *path, key = (attribute or seam.attribute).split(".")
    owner: Any = module
    for name in path:
        owner = getattr(owner, name)
    function = getattr(owner, key)  # of a lazy module: loads it
    found = inspect.getattr_static(owner, key)
    kind = type(found) if path and isinstance(found, staticmethod | classmethod) else None
    if kind is classmethod:
        function = found.__func__
    return _Target(seam, owner, key, vars(owner).get(key, _ABSENT), function, kind)


def _replacement(target: _Target, original: Original) -> Any:
    """Give the object to install: the adapter with the looks of the original."""
    adapter = target.seam.adapter

    @functools.wraps(target.function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return adapter(*args, original=original, **kwargs)

    replacement.__areal_core__ = True  # type: ignore[attr-defined]
    return replacement if target.kind is None else target.kind(replacement)


def _exchange(changes: Sequence[tuple[_Target, Any, Any]]) -> None:
    """Put the last of each triple where the middle one is: at the seam, and in all that got hold of it; all or none."""
    done: list[tuple[_Target, Any]] = []
    try:
        for target, before, after in changes:
            _put(target, after)
            done.append((target, before))
    except BaseException:
        for target, before in reversed(done):
            _put(target, before)
        raise
    shared = [x for x in changes if isinstance(x[0].owner, ModuleType) and x[0].seam.everywhere]
    replacements = {id(before): after for _, before, after in shared}
    packages = {target.seam.module.split(".")[0] for target, _, _ in shared}
    if shared:
        for namespace, key in _holders(replacements, packages):
            held = namespace[key]  # of a registry that two modules hold: replaced already
            namespace[key] = replacements.get(id(held), held)


def _put(target: _Target, value: Any) -> None:
    if value is _ABSENT:
        delattr(target.owner, target.key)
    else:
        setattr(target.owner, target.key, value)


def _holders(functions: Collection[int], packages: Collection[str]) -> list[tuple[dict[Any, Any], Any]]:
    """Where modules hold objects of these ids: by a name, or, modules of the packages, in a registry (a dictionary)."""
    found: list[tuple[dict[Any, Any], Any]] = []
    for name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        if not isinstance(namespace, dict):
            continue
        has_registries = name.split(".")[0] in packages
        for key, value in list(namespace.items()):
            if id(value) in functions:
                found.append((namespace, key))
            elif has_registries and type(value) is dict:
                found += [(value, inner) for inner, held in list(value.items()) if id(held) in functions]
    return found
