"""verl's seams, registries and plugin: all of them replaced, and put back; other sources refused."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import torch
from verl_cases import Config, actor_config, assert_same, batch, rewards_batch, run_loss

from areal_core.errors import PatchError, UnsupportedVersionError
from areal_core.integrations import verl as integration

pytest.importorskip("verl", reason="verl is not installed", exc_type=ImportError)
algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl lacks what it needs", exc_type=ImportError)


def held() -> dict[str, Any]:
    """What verl's modules and registries hold at the seams."""
    found = {seam.name: getattr(import_module(seam.module), seam.attribute) for seam in integration.SEAMS}
    found |= {f"loss {k}": v for k, v in algos.POLICY_LOSS_REGISTRY.items() if not k.startswith("areal_core")}
    found |= {f"advantage {k}": v for k, v in algos.ADV_ESTIMATOR_REGISTRY.items() if not k.startswith("areal_core")}
    return found


def test_registries_are_replaced_and_restored() -> None:
    before = held()
    with integration.apply() as patches:
        assert patches.replaced == tuple(seam.name for seam in integration.SEAMS)
        assert algos.get_policy_loss_fn("gspo") is algos.compute_policy_loss_gspo is not before["policy_loss.gspo"]
        assert algos.get_adv_estimator_fn("grpo") is algos.compute_grpo_outcome_advantage
        assert algos.get_policy_loss_fn("kl_cov") is before["loss kl_cov"]
        with pytest.raises(PatchError):
            integration.apply()
    after = held()
    assert all(after[name] is before[name] for name in before)


def test_a_source_that_was_not_looked_at_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode="token-mean",
        config=None,
        rollout_is_weights=None,
    ):  # type: ignore[no-untyped-def]
        return 0.0, {}

    monkeypatch.setattr(algos, "compute_policy_loss_vanilla", other)
    before = held()
    with pytest.raises(UnsupportedVersionError, match="compute_policy_loss_vanilla"):
        integration.apply()
    assert all(value is before[name] for name, value in held().items())
    with integration.apply(only={"logprobs"}) as patches:
        assert patches.replaced == ("logprobs",)


def test_registered_beside_verl_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in ("POLICY_LOSS_REGISTRY", "ADV_ESTIMATOR_REGISTRY"):
        monkeypatch.setattr(algos, registry, dict(getattr(algos, registry)))
    before = held()
    names = integration.register()
    assert {"areal_core_ppo", "areal_core_gspo", "areal_core_rloo", "areal_core_grpo"} <= set(names)
    assert all(value is before[name] for name, value in held().items())
    options = {"config": actor_config(clip_ratio_high=0.4)}
    ours = run_loss(algos.get_policy_loss_fn("areal_core_ppo"), batch(), **options)
    assert_same(ours, run_loss(algos.compute_policy_loss_vanilla, batch(), **options), 5e-6)
    x = rewards_batch("grpo", {"config": Config(norm_adv_by_std_in_grpo=False)})
    found, _ = algos.get_adv_estimator_fn("areal_core_grpo")(**x)
    expected, _ = algos.compute_grpo_outcome_advantage(**x, norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(found, expected)
    with pytest.raises(PatchError, match="register"):
        integration.register()


def test_plugin_in_a_process_of_verl() -> None:
    code = (
        "import verl, sys; m = sys.modules['areal_core.integrations.verl_plugin']\n"
        "from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as r, compute_policy_loss_vanilla as f\n"
        "assert r['vanilla'] is f and f.__areal_core__ and set(m.NAMES) >= {'areal_core_ppo'} and m.PATCHES.replaced"
    )
    plugin = {"VERL_USE_EXTERNAL_MODULES": "areal_core.integrations.verl_plugin"}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | plugin, timeout=300)
