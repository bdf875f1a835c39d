"""The machinery of the integrations, on a framework made of a few modules that exist for one test only."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from areal_core.errors import MissingPackageError, PatchError, UnsupportedVersionError
from areal_core.integrations._patch import Original, Patches, Seam, apply_seams, signature, source_hash

DEFINITIONS = """
def double(x, *, scale=2.0): return x * scale
def negate(x): return -x
REGISTRY = {"negate": negate, "double": double}
class Sealed(type):
    def __setattr__(cls, name, value): raise TypeError("sealed")
class Vault(metaclass=Sealed):
    def open(self): return "shut"
class Base:
    @classmethod
    def make(cls, x): return cls.__name__, x
class Trainer(Base):
    offset = 10
    def loss(self, x): return self.offset + x
    @staticmethod
    def scale(x): return 3 * x
"""
IMPORTERS = {
    "fakeframe.trainer": "from fakeframe.utils import double, negate as minus",
    "users_script": "from fakeframe.utils import double as mine",
    "fakeframe.late": "from fakeframe.utils import double, REGISTRY",
}


def define(name: str, text: str) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    exec(text, module.__dict__)
    return module


@pytest.fixture
def utils() -> Iterator[ModuleType]:
    package = define("fakeframe", "__path__ = []\n__version__ = '3.1'")
    package.utils = define("fakeframe.utils", DEFINITIONS)  # type: ignore[attr-defined]
    for name in ("fakeframe.trainer", "users_script"):
        define(name, IMPORTERS[name])
    yield package.utils
    for name in [name for name in sys.modules if name.split(".")[0] in ("fakeframe", "users_script")]:
        del sys.modules[name]


def seam(name: str, parameters: str | tuple[str, ...], adapter: Callable[..., Any], **options: Any) -> Seam:
    attribute = options.pop("attribute", name)
    return Seam(name, options.pop("module", "fakeframe.utils"), attribute, parameters, adapter, **options)


def double(x: Any, *, scale: float = 2.0, original: Original) -> Any:
    if scale == 0:
        return original.fall_through("scale = 0", x, scale=scale)
    return ("strict" if original.strict else "ours", x, scale)


def tagged(*args: Any, original: Original) -> Any:
    return ("ours", original(*args))


DOUBLE = seam("double", "x, *, scale=2.0", double)
NEGATE = seam("negate", "x", tagged)


def apply(*seams: Seam, **options: Any) -> Patches:
    return apply_seams("fakeframe", "3.0 to 3.2", seams or (DOUBLE, NEGATE), **options)


def holdings() -> dict[tuple[str, str], object]:
    """Every object that the fake modules hold, and what its registry does."""
    found = {}
    for name in ("fakeframe", "fakeframe.utils", "fakeframe.trainer", "users_script"):
        found |= {(name, key): value for key, value in vars(sys.modules[name]).items()}
    return found | {("registry", key): value for key, value in sys.modules["fakeframe.utils"].REGISTRY.items()}


def same(one: dict[Any, object], other: dict[Any, object]) -> bool:
    return one.keys() == other.keys() and all(one[key] is other[key] for key in one)


# -- replacing and restoring ------------------------------------------------------------------------------------------


def test_everyone_who_holds_the_function_gets_the_replacement_and_then_the_original(utils: ModuleType) -> None:
    before = holdings()
    with apply() as patches:
        assert patches.replaced == ("double", "negate")
        ours = ("ours", 4, 2.0)
        assert utils.double(4) == utils.REGISTRY["double"](4) == ours
        assert sys.modules["fakeframe.trainer"].double(4) == sys.modules["users_script"].mine(4) == ours
        assert sys.modules["fakeframe.trainer"].minus(4) == utils.REGISTRY["negate"](4) == ("ours", -4)
        assert utils.double.__name__ == "double", "looks like what it replaces"
        assert signature(utils.double) == "x, *, scale=2.0"
        assert not same(before, holdings())
    assert same(before, holdings())


def test_a_seam_can_stay_where_it_is_defined(utils: ModuleType) -> None:
    with apply(seam("double", "x, *, scale=2.0", double, everywhere=False)):
        assert utils.double(4) == ("ours", 4, 2.0)
        assert sys.modules["fakeframe.trainer"].double(4) == 8
        assert utils.REGISTRY["double"](4) == 8


def test_undo_reaches_modules_that_imported_the_replacement(utils: ModuleType) -> None:
    before = utils.double
    with apply():
        late = define("fakeframe.late", IMPORTERS["fakeframe.late"])
        assert late.double(1) == ("ours", 1, 2.0)
    assert late.double is before


def test_registries_of_others_are_left_alone(utils: ModuleType) -> None:
    foreign = sys.modules["users_script"].saved = {"double": utils.double}  # type: ignore[attr-defined]
    with apply():
        assert foreign["double"](4) == 8


def test_methods_of_every_kind(utils: ModuleType) -> None:
    trainer = utils.Trainer()
    before = dict(vars(utils.Trainer))
    seams = (
        seam("loss", "self, x", tagged, attribute="Trainer.loss"),
        seam("scale", "x", tagged, attribute="Trainer.scale"),
        seam("make", "cls, x", tagged, attribute="Trainer.make"),
    )
    with apply(*seams):
        assert trainer.loss(1) == ("ours", 11)
        assert trainer.scale(2) == utils.Trainer.scale(2) == ("ours", 6)
        assert utils.Trainer.make(5) == ("ours", ("Trainer", 5))
        assert utils.Base.make(5) == ("Base", 5), "what a class inherits is replaced in that class"
    assert same(before, dict(vars(utils.Trainer)))
    assert (trainer.loss(1), trainer.scale(2), utils.Trainer.make(5)) == (11, 6, ("Trainer", 5))


def test_an_autograd_function_is_recognised_by_its_forward() -> None:
    import torch

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * x

    module = define("fakeauto", "")
    module.Square = Square  # type: ignore[attr-defined]
    try:
        row = Seam("square", "fakeauto", "Square.apply", "ctx, x", tagged, signature_of="Square.forward")
        with apply_seams("fakeauto", "1", (row,)):
            assert Square.apply(torch.tensor(3.0)) == ("ours", 9)
        assert "apply" not in vars(Square)
        assert Square.apply(torch.tensor(3.0)) == 9
    finally:
        del sys.modules["fakeauto"]


def test_only_replaces_what_it_names(utils: ModuleType) -> None:
    with apply(only=["negate"]) as patches:
        assert patches.replaced == ("negate",)
        assert utils.double(4) == 8
    with apply(only=()) as patches:
        assert patches.replaced == ()
        assert utils.negate(4) == -4


def test_strict_reaches_the_adapter(utils: ModuleType) -> None:
    with apply(strict=True):
        assert utils.double(4) == ("strict", 4, 2.0)


def test_undo_happens_once_and_after_exceptions(utils: ModuleType) -> None:
    before = holdings()
    with pytest.raises(RuntimeError, match="boom"), apply():
        raise RuntimeError("boom")
    assert same(before, holdings())
    patches = apply()
    patches.undo()
    later = apply()
    patches.undo()
    assert utils.double(4) == ("ours", 4, 2.0), "a second undo leaves later replacements alone"
    later.undo()
    assert same(before, holdings())


# -- refusing ---------------------------------------------------------------------------------------------------------


def test_an_unknown_name_is_refused(utils: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"expected only in \['double', 'negate'\], got \['doubel'\]"):
        apply(only=["doubel", "negate"])
    with pytest.raises(ValueError, match="collection of names, got the string 'negate'"):
        apply(only="negate")
    assert utils.negate(4) == -4


def test_a_second_apply_is_refused_and_another_seam_is_not(utils: ModuleType) -> None:
    before = holdings()
    first = apply(only=["double"])
    with pytest.raises(PatchError, match=r"fakeframe.utils.double.*undo it first"):
        apply()
    assert utils.negate(4) == -4, "the seam that was free stays untouched"
    second = apply(only=["negate"])
    first.undo()
    assert utils.negate(4) == ("ours", -4)
    second.undo()
    assert same(before, holdings())


def test_undo_out_of_order_is_refused_until_the_other_is_gone(utils: ModuleType) -> None:
    before = holdings()
    patches = apply()
    ours = utils.negate
    utils.negate = lambda x: x  # another project's patch
    with pytest.raises(PatchError, match=r"fakeframe\.utils\.negate.*undo what was applied later"):
        patches.undo()
    assert utils.double(4) == ("ours", 4, 2.0), "nothing was restored"
    utils.negate = ours
    patches.undo()
    assert same(before, holdings())


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (seam("gone", "x", tagged), r"fakeframe 3\.1: expected fakeframe\.utils\.gone, as in 3\.0 to 3\.2, got none"),
        (seam("gone", "x", tagged, attribute="Gone.loss"), "got none"),
        (seam("gone", "x", tagged, module="fakeframe.gone"), r"expected a module fakeframe\.gone, .*got none"),
        (seam("negate", "x, y", tagged), r"expected fakeframe\.utils\.negate\(x, y\).*got \(x\)"),
        (seam("negate", ("y", "x=1"), tagged), r"negate\(y\) or \(x=1\).*got \(x\)"),
        (seam("negate", "x", tagged, sources=("0123",)), r"source of .*negate.*0123.*got"),
        (seam("table", "x", tagged, attribute="REGISTRY"), "got \\(an object without a signature\\)"),
    ],
)
def test_an_unrecognised_seam_leaves_everything_untouched(utils: ModuleType, wrong: Seam, text: str) -> None:
    before = holdings()
    with pytest.raises(UnsupportedVersionError, match=text):
        apply(DOUBLE, wrong)
    assert same(before, holdings())


def test_a_failure_half_way_restores_what_was_replaced(utils: ModuleType) -> None:
    before = holdings()
    with pytest.raises(TypeError, match="sealed"):
        apply(DOUBLE, seam("open", "self", tagged, attribute="Vault.open"))
    assert same(before, holdings())


def test_a_missing_framework_names_the_extra() -> None:
    with pytest.raises(MissingPackageError, match=r"pip install 'areal-core\[frames\]'.*No module named 'noframe'"):
        apply_seams("noframe", "1", (), extra="frames")
    assert issubclass(MissingPackageError, ImportError)


def test_what_the_framework_itself_lacks_is_named(utils: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any, target: Any = None) -> None:
            if name == "fakeframe.heavy":
                raise ModuleNotFoundError("No module named 'needed'", name="needed")

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    with pytest.raises(MissingPackageError, match=r"what fakeframe\.heavy imports, got: No module named 'needed'"):
        apply(seam("double", "x", double, module="fakeframe.heavy"))


def test_signatures_and_sources(utils: ModuleType) -> None:
    def annotated(x: int, /, y: str = "a", *rest: int, z: float | None = None, **more: Any) -> None: ...

    assert signature(annotated) == "x, /, y='a', *rest, z=None, **more"
    digest = source_hash(annotated)
    assert len(digest) == 16
    assert digest != source_hash(signature)
    utils.annotated = annotated  # type: ignore[attr-defined]
    parameters = ("nothing", signature(annotated))
    row = seam("annotated", parameters, lambda *_, original: "ours", sources=("0" * 16, digest))
    with apply(row):
        assert utils.annotated(1) == "ours"


# -- falling through --------------------------------------------------------------------------------------------------


def test_fallbacks_give_the_originals_result_and_are_counted(utils: ModuleType) -> None:
    with apply() as patches:
        assert patches.fallbacks == {}
        assert [utils.double(4, scale=0) for _ in range(3)] == [0, 0, 0]
        assert patches.fallbacks == {"double: scale = 0": 3}
    assert patches.fallbacks == {"double: scale = 0": 3}, "still to be read after undo"


def test_each_thing_is_said_once(utils: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "areal_core.integrations"), apply():
        for _ in range(3):
            utils.double(4, scale=0)
            utils.negate(1)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "fakeframe 3.1: replaced double, negate",
        "double: the framework's own function does this (scale = 0)",
    ]


def test_a_fallback_compiles_without_a_break(utils: ModuleType) -> None:
    import torch

    with apply() as patches:
        compiled = torch.compile(lambda x: utils.double(x, scale=0) + 1, fullgraph=True, backend="eager")
        assert compiled(torch.ones(2)).tolist() == [1, 1]
        assert patches.fallbacks == {}


def test_threads_apply_once_and_count_every_fallback(utils: ModuleType) -> None:
    before = holdings()
    applied: list[Patches] = []
    refused: list[PatchError] = []
    barrier = threading.Barrier(8)

    def compete() -> None:
        barrier.wait()
        try:
            applied.append(apply())
        except PatchError as error:
            refused.append(error)
        barrier.wait()
        for _ in range(200):
            utils.double(4, scale=0)

    threads = [threading.Thread(target=compete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(applied), len(refused)) == (1, 7)
    assert applied[0].fallbacks == {"double: scale = 0": 1600}
    applied[0].undo()
    assert same(before, holdings())


def test_a_call_in_flight_outlives_undo(utils: ModuleType) -> None:
    patches = apply()
    held = utils.double
    patches.undo()
    assert held(4) == ("ours", 4, 2.0)
    assert held(4, scale=0) == 0
