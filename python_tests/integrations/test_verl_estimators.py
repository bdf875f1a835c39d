"""verl's advantage estimators with our kernels against verl without them, with every option."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from verl_cases import Config, rewards_batch, unpatched

from areal_core.integrations import verl as integration

pytest.importorskip("verl", reason="verl is not installed", exc_type=ImportError)
algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl lacks what it needs", exc_type=ImportError)

ESTIMATORS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("gae", "compute_gae_advantage_return", {"gamma": 0.97, "lam": 0.9}),
    ("gae", "compute_gae_advantage_return", {"gamma": 1.0, "lam": 1.0}),
    ("grpo", "compute_grpo_outcome_advantage", {}),
    ("grpo", "compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
    ("grpo", "compute_grpo_outcome_advantage", {"epsilon": 0.1}),
    ("grpo_vectorized", "compute_grpo_vectorized_outcome_advantage", {"epsilon": 0.1}),
    ("rloo", "compute_rloo_outcome_advantage", {}),
    ("rloo_vectorized", "compute_rloo_vectorized_outcome_advantage", {}),
    ("opo", "compute_opo_outcome_advantage", {}),
    ("gpg", "compute_gpg_outcome_advantage", {"f_norm": 0.5}),
    ("reinforce_plus_plus", "compute_reinforce_plus_plus_outcome_advantage", {"config": Config(gamma=0.9)}),
    ("reinforce_plus_plus_baseline", "compute_reinforce_plus_plus_baseline_outcome_advantage", {}),
    ("remax", "compute_remax_outcome_advantage", {}),
    ("gdpo", "compute_gdpo_outcome_advantage", {"norm_adv_by_std_in_grpo": True, "kinds": None}),
    ("gdpo", "compute_gdpo_outcome_advantage", {"kinds": None, "norm_adv_by_std_in_grpo": False}),
    ("gdpo", "compute_gdpo_outcome_advantage", {"epsilon": 0.1, "kinds": [0.3, 2.0]}),
    ("gdpo", "compute_gdpo_outcome_advantage", {}),
)


@pytest.mark.parametrize(("name", "function", "options"), ESTIMATORS)
def test_advantage_estimators_and_their_options(name: str, function: str, options: dict[str, Any]) -> None:
    x = rewards_batch(name, options)
    live = x["response_mask"].bool()
    for strict in (False, True):
        with integration.apply(strict=strict) as patches:
            ours = getattr(algos, function)
            found = ours(**{k: v.clone() if isinstance(v, Tensor) else v for k, v in x.items()})
            assert patches.fallbacks == {}
        expected = getattr(algos, function)(**{k: v.clone() if isinstance(v, Tensor) else v for k, v in x.items()})
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            chosen = torch.ones_like(live) if strict else live
            torch.testing.assert_close(a[chosen], b[chosen], rtol=2e-5, atol=2e-6)
            assert strict or not a[~live].any()


@pytest.mark.parametrize(("name", "function", "options"), [ESTIMATORS[i] for i in (2, 6, 8, 9)])
def test_groups_of_one_and_equal_rewards(name: str, function: str, options: dict[str, Any]) -> None:
    x = rewards_batch(name, options)
    x["token_level_rewards"] = torch.full_like(x["token_level_rewards"], 0.1)
    x["index"] = np.array([0, 0, 0, 0, 0, 0, 0, 0, 7])
    for strict in (False, True):
        with integration.apply(strict=strict):
            found, _ = getattr(algos, function)(**x)
            expected, _ = unpatched(getattr(algos, function))(**x)
            torch.testing.assert_close(found[8], expected[8])  # the group of one, as verl has it: not 0
            assert found[8].any()
            if name != "opo":
                assert not found[:8].any()  # exactly: nothing to prefer


def test_estimators_fall_through() -> None:
    x = rewards_batch("grpo", {})
    with integration.apply(only={"advantage.grpo", "advantage.gae", "advantage.gdpo"}) as patches:
        weighted = x | {"response_mask": x["response_mask"] * 0.5}
        expected = unpatched(algos.compute_grpo_outcome_advantage)(**weighted)[0]
        assert algos.compute_grpo_outcome_advantage(**weighted)[0].equal(expected)
        values = torch.zeros_like(x["response_mask"])
        algos.compute_gae_advantage_return(x["token_level_rewards"], values, x["response_mask"], 1.5, 1.0)
        missing = rewards_batch("gdpo", {"kinds": None})
        missing["config"].gdpo_reward_keys = None
        with pytest.raises(AssertionError, match="gdpo_reward_keys"):
            algos.compute_gdpo_outcome_advantage(**missing)
        assert sum(patches.fallbacks.values()) == 3
    with integration.apply(strict=True) as patches:
        x["response_mask"] *= 0
        with pytest.raises(ValueError, match="mask"):
            algos.compute_gae_advantage_return(x["token_level_rewards"], values, x["response_mask"], 1.0, 1.0)
