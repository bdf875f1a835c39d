"""ppo_loss against recorded outputs of other libraries and the recorded textbook KL."""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from op_checks import assert_near, reference_data
from torch import Tensor

from areal_core import ops
from areal_core.ops import PPOLossConfig


class Peer(NamedTuple):
    """A function of another library under the settings it was recorded with, as a configuration of ours."""

    name: str
    options: dict[str, Any]
    weighted: bool = False  # with behavior weights
    departures: tuple[str, ...] = ()  # cases in which the peer departs from the definition
    normalizer: str = ""  # what it divides by, where that is not ours: "rows", "cells" or "live_cells" of the batch
    proximal: str = "prox"
    first_advantage: bool = False  # takes that of a row's first token for all of them
    own_gradient: bool = False  # its gradient is not that of its value; see the table


# Where departing: ratios or sequence means without a clamp overflow, or move by what ours cuts off at e^20.
UNCLAMPED = ("ratio_overflow_valid_neg",)
UNCLAMPED_MEAN = (*UNCLAMPED, "ratio_overflow_valid_pos", "ratio_overflow_adv0")
# A behavior logprob of -inf is an infinite weight, which ours drops or caps; these make it 1 or keep it out of means.
NO_WEIGHT = (*UNCLAMPED, "neginf_old_valid")

CAP = {"behavior_cap": 2.0}
BAND = {"behavior_cap": 2.0, "behavior_low": 0.5, "behavior_mode": "icepop"}
SEQUENCE_BAND = {"behavior_level": "geometric", "behavior_cap": 1.1, "behavior_low": 0.9, "behavior_mode": "icepop"}
DUAL = {"dual_clip": 3.0}
BY_SEQUENCE = {"aggregation": "sequence_mean_token_mean"}
GSPO = {"ratio_level": "sequence"}
SAPO = {"objective": "sapo"}
CISPO = {"objective": "cispo"}
GMPO = {"objective": "gmpo", **GSPO, **BY_SEQUENCE, "clip_low": 1 - math.exp(-0.2), "clip_high": math.exp(0.28) - 1}

PEERS = [
    Peer("areal.ppo_actor_loss_fn:ppo", {}, departures=UNCLAMPED),
    Peer("areal.ppo_actor_loss_fn:ppo_dual", DUAL),
    Peer("areal.ppo_actor_loss_fn:gspo", GSPO, departures=UNCLAMPED_MEAN),
    Peer("areal.ppo_actor_loss_fn:dec_none_clamp5", {"behavior_cap": 5.0}, True, NO_WEIGHT),
    Peer("areal.ppo_actor_loss_fn:dec_tokmask_0.5_2", BAND, True, NO_WEIGHT),
    # Its clamp has a lower end too, which the off-policy case reaches.
    Peer("areal.ppo_actor_loss_fn:dec_tokclamp_0.5_2", CAP, True, (*NO_WEIGHT, "offpolicy")),
    Peer("areal.ppo_actor_loss_fn:dec_tokmask_2_dual", {**DUAL, **CAP, "behavior_mode": "mask"}, True, NO_WEIGHT),
    Peer("areal.ppo_actor_loss_fn:dec_seqmask_0.9_1.1", SEQUENCE_BAND, True, NO_WEIGHT),
    Peer(
        "areal.ppo_actor_loss_fn:dec_seqclamp_0.9_1.1",
        {"behavior_level": "geometric", "behavior_cap": 1.1},
        True,
        NO_WEIGHT,
    ),
    Peer("areal.sapo_loss_fn", SAPO, departures=("neginf_old_valid", "behave_overflow_valid"), proximal="old"),
    Peer("verl.compute_policy_loss_vanilla:token-mean", DUAL),
    Peer("verl.compute_policy_loss_vanilla:seq-mean-token-mean", {**DUAL, **BY_SEQUENCE}),
    Peer("verl.compute_policy_loss_vanilla:seq-mean-token-sum", {**DUAL, "aggregation": "sequence_mean_token_sum"}),
    Peer(
        "verl.compute_policy_loss_vanilla:seq-mean-token-sum-norm",
        {**DUAL, "aggregation": "constant"},
        normalizer="live_cells",
    ),
    Peer("verl.vanilla+rollout_is:tis2", {**DUAL, **CAP}, True),
    Peer("verl.vanilla+rollout_is:tis5", {**DUAL, "behavior_cap": 5.0}, True),
    Peer("verl.vanilla+rollout_is:icepop_0.5_2", {**DUAL, **BAND}, True),
    # GSPO's token variant: a token's gradient has its own advantage, ours the mean of its sequence.
    Peer("verl.gspo", {**GSPO, **BY_SEQUENCE}, departures=UNCLAMPED_MEAN, own_gradient=True),
    Peer("verl.geo_mean", GMPO, departures=UNCLAMPED_MEAN, normalizer="rows"),
    Peer("verl.cispo", CISPO),
    Peer("verl.sapo", {**SAPO, **BY_SEQUENCE}),
    Peer("verl.gpg", {"objective": "reinforce", "ratio_level": "off"}),
    Peer("openrlhf.PolicyLoss:ppo", {}),
    Peer("openrlhf.PolicyLoss:ppo_dual", DUAL),
    Peer("openrlhf.PolicyLoss:seqloss", BY_SEQUENCE),
    Peer("openrlhf.PolicyLoss:gspo", {**GSPO, **BY_SEQUENCE}, departures=UNCLAMPED_MEAN),
    Peer("openrlhf.PolicyLoss:tis2_clip", CAP, True),
    Peer("openrlhf.PolicyLoss:tokmask_0.5_2", BAND, True),
    Peer("slime.compute_policy_loss:ppo", {}, departures=UNCLAMPED),
    Peer("slime.compute_policy_loss:ppo_dual", DUAL),
    Peer("slime.gspo[token-mean]", GSPO, departures=UNCLAMPED_MEAN),
    Peer("slime.cispo", CISPO),
    Peer("slime.compute_policy_loss+tis2", CAP, True, UNCLAMPED),
    Peer("slime.compute_policy_loss+icepop_0.5_2", BAND, True, UNCLAMPED),
    Peer("nemo.ClippedPGLossFn:ppo", {}, departures=UNCLAMPED),
    Peer("nemo.ClippedPGLossFn:ppo_dual", DUAL),
    # The value of k3 with the gradient of k2.
    Peer("nemo.ClippedPGLossFn:ppo_kl0.1", {"kl_coef": 0.1}, departures=UNCLAMPED, own_gradient=True),
    Peer("nemo.ClippedPGLossFn:seqloss", BY_SEQUENCE, departures=UNCLAMPED),
    Peer("nemo.ClippedPGLossFn:gspo", {**GSPO, **BY_SEQUENCE}, departures=UNCLAMPED_MEAN),
    Peer("nemo.ClippedPGLossFn:cispo", CISPO),
    Peer("nemo.ClippedPGLossFn:tis2", CAP, True, (*NO_WEIGHT, "behave_overflow_valid")),  # fp32: exp(200) becomes 0
    Peer("nemo.ClippedPGLossFn:icepop_0.5_2", BAND, True, UNCLAMPED),
    Peer("trl.GRPOTrainer._compute_loss:bnpo", {}, departures=UNCLAMPED),
    Peer("trl.GRPOTrainer._compute_loss:bnpo_delta3", DUAL),
    Peer("trl.GRPOTrainer._compute_loss:bnpo_kl0.1", {"kl_coef": 0.1}, departures=UNCLAMPED),
    Peer("trl.GRPOTrainer._compute_loss:bnpo+vllm_is_tis2", CAP, True, UNCLAMPED),
    Peer("trl.GRPOTrainer._compute_loss:dapo", {}, departures=UNCLAMPED),
    Peer("trl.GRPOTrainer._compute_loss:dapo_seqadv", {}, departures=UNCLAMPED, first_advantage=True),
    Peer("trl.GRPOTrainer._compute_loss:dr_grpo", {"aggregation": "constant"}, False, UNCLAMPED, "cells"),
    Peer("trl.GRPOTrainer._compute_loss:grpo", BY_SEQUENCE, departures=UNCLAMPED, normalizer="rows"),
    Peer("trl.GRPOTrainer._compute_loss:gspo", {**GSPO, **BY_SEQUENCE}, False, UNCLAMPED_MEAN, "rows"),
    Peer("trl.GRPOTrainer._compute_loss:cispo", {**CISPO, "clip_low": 1.0}),
    Peer("trl.GRPOTrainer._compute_loss:sapo", {**SAPO, **BY_SEQUENCE}, normalizer="rows"),
    Peer("liger.LigerFusedLinearGRPOFunction.ppo_loss_fn:dapo", {}, departures=UNCLAMPED, first_advantage=True),
    Peer(
        "liger.LigerFusedLinearGRPOFunction.ppo_loss_fn:grpo",
        BY_SEQUENCE,
        departures=UNCLAMPED,
        normalizer="rows",
        first_advantage=True,
    ),
    Peer("liger.LigerFusedLinearGRPOFunction.ppo_loss_fn:bnpo_delta3", DUAL, first_advantage=True),
    Peer("skyrl.policy_loss:ppo", {}),
    Peer("skyrl.policy_loss:ppo_dual", DUAL),
    Peer("skyrl.policy_loss:tis2", CAP, True),
    Peer("skyrl.policy_loss:gspo", {**GSPO, **BY_SEQUENCE}, False, UNCLAMPED_MEAN, "rows", own_gradient=True),
    Peer("skyrl.policy_loss:sapo", {**SAPO, **BY_SEQUENCE}, normalizer="rows"),
]


recorded_data = functools.cache(reference_data)


def evaluate(peer: Peer, inputs: dict[str, np.ndarray]) -> tuple[Tensor, Tensor]:
    """Our loss and gradient under the peer's settings."""
    x = {name: torch.from_numpy(array) for name, array in inputs.items()}
    rows, columns = x["mask"].shape
    if peer.first_advantage:
        x["adv"] = x["adv"][:, :1].expand(rows, columns)
    live_rows = float((x["mask"] > 0).any(1).sum())
    normalizers = {"rows": rows, "cells": rows * columns, "live_cells": max(live_rows, 1) * columns}
    x = {name: tensor.flatten() for name, tensor in x.items()}
    logprobs = x["logp"].requires_grad_()
    clip = {"clip_high": 0.28} if peer.options.get("objective") not in ("sapo", "reinforce") else {}
    out = ops.ppo_loss(
        logprobs,
        x[peer.proximal],
        x["adv"],
        x["mask"],
        behavior_logprobs=x["old"] if peer.weighted else None,
        ref_logprobs=x["ref"],
        cu_seqlens=torch.arange(0, rows * columns + 1, columns),
        normalizer=normalizers.get(peer.normalizer),
        config=PPOLossConfig(**(clip | peer.options)),
    )
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    return out.loss.detach(), grad


@pytest.mark.parametrize("peer", PEERS, ids=[peer.name for peer in PEERS])
def test_agrees_with_recorded_peers(peer: Peer) -> None:
    recorded, compared = recorded_data("ppo"), 0
    for kind, case, dtype in recorded:
        outputs = recorded.get(("out", case, dtype), {})
        if kind != "in" or dtype == "bf16" or case in peer.departures or f"{peer.name}/loss" not in outputs:
            continue
        loss, grad = evaluate(peer, recorded["in", case, dtype])
        for ours, name in ((loss, "loss"), (grad, "grad")):
            theirs = torch.from_numpy(np.asarray(outputs.get(f"{peer.name}/{name}", np.nan), dtype=np.float64))
            if not theirs.isfinite().all():  # ours is finite all the same, unless a live token has no likelihood at all
                assert ours.isfinite().all() or case == "neginf_valid_all3"
                continue
            if name == "grad" and peer.own_gradient:
                continue
            bound = 2e-6 * (float(theirs.abs().max()) + (0.05 if name == "loss" else 1e-12))  # losses cancel
            assert_near(ours.flatten(), theirs.flatten(), absolute=bound, relative=0)
            compared += 1
    assert compared >= (6 if peer.own_gradient else 10)


@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_agrees_with_the_textbook(precision: str, estimator: str) -> None:
    recorded = recorded_data("kl")
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


# Peers' estimators as (value, gradient) of ours. Many clamp values to +-10: only what lies below is compared.
KL_PEERS = {
    **{f"areal.KLEstimator:{k},clamp={clamp}": (k, k) for k in ("k1", "k2", "k3") for clamp in (True, False)},
    **{f"nemo.calculate_kl:{k}{suffix}": (k, k) for k in ("k1", "k2", "k3") for suffix in ("", ",noclamp")},
    **{f"openrlhf.compute_approx_kl:{k},unbiased=False": (k, k) for k in ("k1", "k2", "k3")},
    **{f"openrlhf.compute_approx_kl:{k},unbiased=True": (k, "k2") for k in ("k1", "k2", "k3")},
    **{f"skyrl.compute_approx_kl:{k}": (k, k) for k in ("k1", "k2", "k3")},
    **{f"slime.compute_approx_kl:{k}": (k, k) for k in ("k1", "k2", "k3")},
    "slime.compute_approx_kl:low_var_kl": ("k3", "k3"),
    "trl[inline expr]:k3": ("k3", "k3"),
    "verl.kl_penalty:kl": ("k1", "k1"),
    "verl.kl_penalty:mse": ("k2", "k2"),
    "verl.kl_penalty:low_var_kl": ("k3", "k3"),
    "verl.kl_penalty:k1+": ("k1", "k2"),
    "verl.kl_penalty:k3+": ("k3", "k2"),
}


def evaluate_kl(logprobs: Tensor, ref: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """Value and gradient of the penalty, token by token."""
    config = PPOLossConfig(kl_coef=1.0, kl_estimator=estimator)
    zeros, values = torch.zeros_like(logprobs), []
    for t in range(len(logprobs)):
        token = slice(t, t + 1)
        out = ops.ppo_loss(
            logprobs[token], logprobs[token], zeros[token], zeros[token] + 1, ref_logprobs=ref[token], config=config
        )
        values.append(out.loss)
    leaf = logprobs.clone().requires_grad_()
    out = ops.ppo_loss(leaf, logprobs, zeros, zeros + 1, ref_logprobs=ref, normalizer=1.0, config=config)
    return torch.stack(values), torch.autograd.grad(out.loss, leaf)[0]


@pytest.mark.parametrize("peer", KL_PEERS)
def test_kl_agrees_with_recorded_peers(peer: str) -> None:
    recorded, compared = recorded_data("kl"), 0
    for precision in ("f32", "f64"):
        outputs = recorded["out", "grid", precision]
        if f"{peer}/kl" not in outputs:
            continue
        x = {name: torch.from_numpy(array) for name, array in recorded["in", "grid", precision].items()}
        theirs = torch.from_numpy(outputs[f"{peer}/kl"]).flatten().double()
        near = ((x["ref"] - x["logp"]).abs() < 9.9) & (theirs.abs() < 9.9)
        for index, estimator in enumerate(KL_PEERS[peer]):
            ours = evaluate_kl(x["logp"][near], x["ref"][near], estimator)[index]
            expected = theirs if index == 0 else torch.from_numpy(outputs[f"{peer}/grad"]).flatten()
            assert_near(ours, expected[near], absolute=2e-5, relative=3e-6)  # some compute in fp32 always
            compared += int(near.sum())
    assert compared >= 20
