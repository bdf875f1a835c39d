"""AReaL's seams: all of them replaced, and put back; another version left alone."""

from __future__ import annotations

from types import ModuleType

import pytest
from torch import Tensor

from areal_core.errors import UnsupportedVersionError
from areal_core.integrations import areal as ours

actor = pytest.importorskip("areal.trainer.ppo.actor", reason="areal is not installed", exc_type=ImportError)
data_utils = pytest.importorskip("areal.utils.data")
functional = pytest.importorskip("areal.utils.functional")
seqpack = pytest.importorskip("areal.utils.seqpack")

pytestmark = pytest.mark.usefixtures("eager")


def modules() -> list[ModuleType]:
    return [actor, data_utils, functional, functional.functional, functional.vocab_parallel, seqpack]


def test_apply_reaches_every_importer_and_undo_restores_identity() -> None:
    before = {module.__name__: dict(vars(module)) for module in modules()} | {"class": dict(vars(actor.PPOActor))}
    with ours.apply() as patches:
        assert len(patches.replaced) == len(ours.SEAMS)
        for module, name in ((functional, "gather_logprobs"), (actor, "ppo_actor_loss_fn"), (actor, "sapo_loss_fn")):
            assert getattr(module, name) is not before[module.__name__][name]
        assert seqpack.get_allocate_fn("ffd") is not before["areal.utils.seqpack"]["ffd_allocate"]
    for module in modules():
        assert all(vars(module)[key] is value for key, value in before[module.__name__].items()), module
    assert all(vars(actor.PPOActor)[key] is value for key, value in before["class"].items())


def test_another_version_is_refused_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def sapo_loss_fn(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, tau: float) -> Tensor:
        return logprobs

    monkeypatch.setattr(functional.functional, "sapo_loss_fn", sapo_loss_fn)
    before = {module.__name__: dict(vars(module)) for module in modules()}
    with pytest.raises(
        UnsupportedVersionError, match=r"areal 1.*sapo_loss_fn\(logprobs, old_logprobs, .*nothing was rep"
    ):
        ours.apply()
    assert all(vars(module)[key] is value for module in modules() for key, value in before[module.__name__].items())
    with ours.apply(only=["ffd_allocate"]) as patches:
        assert patches.replaced == ("ffd_allocate",)
