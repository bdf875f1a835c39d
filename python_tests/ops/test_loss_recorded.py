"""ppo_loss against recorded outputs of other libraries and the recorded textbook KL."""

from typing import Any

import numpy as np
import pytest
import torch
from op_checks import assert_near, reference_data

from areal_core import ops
from areal_core.ops import PPOLossConfig

# Peers' outputs on recorded inputs: the peer's name, our config, whether the behavior weight is on, and the cases where
# the peer departs from the definition (unclamped ratios that overflow; NaN for logprobs that are all -inf).
CAP = {"behavior_cap": 2.0}
BAND = {"behavior_cap": 2.0, "behavior_low": 0.5, "behavior_mode": "icepop"}
UNCLAMPED = ("ratio_overflow_valid_neg",)
PEERS: list[tuple[str, dict[str, Any], bool, tuple[str, ...]]] = [
    ("areal.ppo_actor_loss_fn:ppo", {}, False, UNCLAMPED),
    ("areal.ppo_actor_loss_fn:ppo_dual", {"dual_clip": 3.0}, False, ()),
    ("verl.compute_policy_loss_vanilla:token-mean", {"dual_clip": 3.0}, False, ()),
    ("verl.vanilla+rollout_is:tis2", {"dual_clip": 3.0, **CAP}, True, ()),
    ("verl.vanilla+rollout_is:icepop_0.5_2", {"dual_clip": 3.0, **BAND}, True, ()),
    ("openrlhf.PolicyLoss:ppo", {}, False, ()),
    ("openrlhf.PolicyLoss:tis2_clip", CAP, True, ()),
    ("openrlhf.PolicyLoss:tokmask_0.5_2", BAND, True, ()),
    ("slime.compute_policy_loss:ppo", {}, False, UNCLAMPED),
    ("slime.compute_policy_loss:ppo_dual", {"dual_clip": 3.0}, False, ()),
    ("slime.compute_policy_loss+tis2", CAP, True, UNCLAMPED),
    ("slime.compute_policy_loss+icepop_0.5_2", BAND, True, UNCLAMPED),
    ("nemo.ClippedPGLossFn:ppo", {}, False, UNCLAMPED),
    ("nemo.ClippedPGLossFn:icepop_0.5_2", BAND, True, UNCLAMPED),
    ("trl.GRPOTrainer._compute_loss:bnpo", {}, False, UNCLAMPED),
    ("trl.GRPOTrainer._compute_loss:bnpo_kl0.1", {"kl_coef": 0.1}, False, UNCLAMPED),
    ("trl.GRPOTrainer._compute_loss:bnpo+vllm_is_tis2", CAP, True, UNCLAMPED),
    ("skyrl.policy_loss:ppo", {}, False, ()),
]


@pytest.mark.parametrize(("peer", "options", "weighted", "departures"), PEERS, ids=[p[0] for p in PEERS])
@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_agrees_with_recorded_peers(
    peer: str, options: dict[str, Any], weighted: bool, departures: tuple[str, ...], precision: str
) -> None:
    recorded = reference_data("ppo")
    config = PPOLossConfig(clip_high=0.28, **options)
    compared = 0
    for kind, case, dtype in recorded:
        outputs = recorded.get(("out", case, dtype), {})
        if kind != "in" or dtype != precision or case in departures or f"{peer}/loss" not in outputs:
            continue
        x = {name: torch.from_numpy(array).flatten() for name, array in recorded["in", case, dtype].items()}
        logprobs = x["logp"].requires_grad_()
        out = ops.ppo_loss(
            logprobs,
            x["prox"],
            x["adv"],
            x["mask"],
            behavior_logprobs=x["old"] if weighted else None,
            ref_logprobs=x["ref"],
            config=config,
        )
        out.loss.backward()
        for ours, name in ((out.loss.detach(), "loss"), (logprobs.grad, "grad")):
            theirs = torch.from_numpy(np.asarray(outputs.get(f"{peer}/{name}", np.nan), dtype=np.float64)).flatten()
            if not theirs.isfinite().all():  # ours is finite all the same
                assert ours.isfinite().all()
                continue
            bound = 1e-6 * (float(theirs.abs().max()) + 1e-12)
            assert_near(ours.flatten(), theirs, absolute=bound, relative=0)
            compared += 1
    assert compared >= 12


@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_agrees_with_the_textbook(precision: str, estimator: str) -> None:
    recorded = reference_data("kl")
    inputs, truth = recorded["in", "grid", precision], recorded["truth", "grid", precision][estimator]
    config = PPOLossConfig(kl_coef=1.0, kl_estimator=estimator)
    tolerance = 1e-6 if precision == "f32" else 1e-11  # the recorded truth cancels a little
    compared = 0
    for t in range(len(truth)):
        logprob, ref = (torch.from_numpy(inputs[name][t : t + 1]) for name in ("logp", "ref"))
        if abs(float(logprob - ref)) > 20:
            continue
        out = ops.ppo_loss(logprob, logprob, 0 * logprob, torch.ones(1), ref_logprobs=ref, config=config)
        assert out.loss.item() == pytest.approx(float(truth[t]), rel=tolerance, abs=0)
        compared += 1
    assert compared >= 14
