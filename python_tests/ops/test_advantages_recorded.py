"""gae and compute_advantages against what other libraries returned for recorded inputs, function by function.

Every recorded function has a row: with what of ours it agrees, or why it does not.
"""

import functools
from typing import Any, NamedTuple

import op_checks
import pytest
import torch
from op_checks import assert_near
from torch import Tensor

from areal_core import ops

reference_data = functools.cache(op_checks.reference_data)


class Peer(NamedTuple):
    """What of ours a function agrees with, how closely (peers compute some of it in float32), and where it departs."""

    name: str
    options: dict[str, Any]
    tolerance: float
    departures: tuple[str, ...] = ()


SINGLES = ("ragged+single", "all_single")  # groups of one
FAR = ("big_offset",)  # rewards near 1,000, which cost the peer's float32 its digits
BATCH = {"mean_level": "batch", "std_level": "batch"}
PEERS = {
    "areal.Normalization:adv_batch_masked": Peer("reinforce_pp", {"eps": 1e-5, "eps_in_root": False}, 2e-7),
    "areal.Normalization:batch": Peer("grpo_r1", {**BATCH, "eps": 1e-5}, 1e-7),
    # The standard deviation is that of the residuals, from which leaving one out cancels again.
    "areal.Normalization:batch_loo": Peer("grpo_r1", {**BATCH, "eps": 1e-5}, 2e-5, SINGLES),
    "areal.Normalization:group_loo": Peer("rloo", {"singleton": "raw"}, 1e-6),
    "areal.Normalization:group_mean_only": Peer("dr_grpo", {}, 1e-12),
    "areal.Normalization:group_mean_std": Peer("grpo_r1", {"eps": 1e-5}, 1e-7),
    "areal.Normalization:group_mean_std_biased": Peer("grpo_r1", {"eps": 1e-5, "ddof": 0}, 1e-7),
    "nemo.GRPOAdvantageEstimator:loo=False": Peer("grpo_r1", {}, 5e-6, FAR),
    "nemo.GRPOAdvantageEstimator:loo=True": Peer("rloo", {"std_level": "group", "leave_one_out_std": True}, 5e-6, FAR),
    "nemo.ReinforcePlusPlus:minus_baseline=False": Peer("reinforce_pp", {"ddof": 0}, 5e-7),
    "nemo.ReinforcePlusPlus:minus_baseline=True": Peer("reinforce_pp_baseline", {"ddof": 0}, 5e-7),
    "openrlhf.dr_grpo": Peer("dr_grpo", {}, 1e-12),
    "openrlhf.group_norm": Peer("grpo_r1", {"eps": 1e-9}, 1e-6),
    "openrlhf.reinforce": Peer("reinforce_pp", {"ddof": 0}, 1e-6),
    "openrlhf.reinforce_baseline": Peer("reinforce_pp_baseline", {"ddof": 0}, 1e-6),
    "openrlhf.rloo": Peer("rloo", {}, 1e-9),
    "skyrl.grpo": Peer("grpo_r1", {"singleton": "raw"}, 5e-6),
    "skyrl.maxrl": Peer("maxrl", {"singleton": "raw"}, 5e-6),
    "skyrl.reinforce++": Peer("reinforce_pp", {}, 1e-14),
    "skyrl.rloo": Peer("rloo", {}, 1e-12),
    "skyrl_train.grpo": Peer("grpo_r1", {"singleton": "raw"}, 5e-6),
    "skyrl_train.reinforce++": Peer("reinforce_pp", {}, 1e-14),
    "skyrl_train.rloo": Peer("rloo", {}, 1e-12),
    "slime._post_process_rewards:std=False": Peer("dr_grpo", {}, 1e-12),
    "slime._post_process_rewards:std=True": Peer("grpo_r1", {}, 1e-6),
    "trl[transcribed]:group": Peer("grpo_r1", {"eps": 1e-4}, 1e-7),
    "verl.gdpo": Peer("gdpo", {"whiten": True, "singleton": "raw"}, 1e-5),
    "verl.grpo": Peer("grpo_r1", {"singleton": "raw"}, 5e-6),
    "verl.grpo[norm_std=False] (dr_grpo)": Peer("dr_grpo", {"singleton": "raw"}, 1e-12),
    # It gives a group of equal rewards +-rounding / eps.
    "verl.grpo_vectorized": Peer("grpo_r1", {"singleton": "raw"}, 5e-6, ("identical_0.1", *SINGLES)),
    "verl.opo": Peer("opo", {"singleton": "raw"}, 1e-12),
    "verl.reinforce_plus_plus": Peer("reinforce_pp", {}, 5e-9, FAR),
    "verl.reinforce_plus_plus[gamma=.9]": Peer("reinforce_pp", {"gamma": 0.9}, 5e-9),
    "verl.reinforce_plus_plus_baseline": Peer("reinforce_pp_baseline", {"singleton": "raw"}, 5e-9),
    "verl.remax": Peer("remax", {}, 1e-14),
    "verl.rloo": Peer("rloo", {"singleton": "raw"}, 1e-9),
    "verl.rloo_vectorized": Peer("rloo", {}, 1e-12),
}
DIFFERENT = {
    "areal.Normalization:mean_group_std_batch": "its batch std is that of the residuals from the group means",
    "slime.get_reinforce_plus_plus_returns": "returns alone: test_returns_of_slime",
    "verl.gpg": "its factor counts the rewards that are not 0, ours the sequences whose group has unequal rewards",
    "verl.grpo_passk": "best minus second best, for the best alone: not the mean over subsets of the paper",
    "verl.optimal_token_baseline": "needs the sum of squared probabilities of each token; not offered",
    "verl.tir_optimal_token_baseline": "the same",
}


def test_every_recorded_function_has_a_row() -> None:
    recorded = {
        key.rsplit("/", 1)[0]
        for (kind, _, _), arrays in reference_data("group").items()
        if kind == "out"
        for key in arrays
    }
    assert recorded == PEERS.keys() | DIFFERENT.keys()


@pytest.mark.parametrize("peer", PEERS)
def test_group_estimators(peer: str) -> None:
    row = PEERS[peer]
    # NeMo's refuse float64.
    precision = "f32" if peer.startswith("nemo") else "f64"
    compared = 0
    recorded = reference_data("group")
    for (kind, case, dtype), inputs in recorded.items():
        outputs = recorded.get(("out", case, dtype), {})
        if kind != "in" or dtype != precision or case in row.departures or f"{peer}/adv" not in outputs:
            continue
        x = {key: torch.from_numpy(array) for key, array in inputs.items()}
        ours = ops.compute_advantages(
            row.name,
            rewards=x["score"][:, None] if row.name == "gdpo" else x["score"],
            group_ids=x["index"],
            loss_mask=x["mask"],
            greedy_rewards=x["remax_baseline"] if row.name == "remax" else None,
            **row.options,
        )
        theirs = torch.from_numpy(outputs[f"{peer}/adv"]).double()
        theirs = (theirs if theirs.dim() == 2 else theirs[:, None]) * x["mask"]
        assert ours.isfinite().all()
        if theirs.isfinite().all():
            assert_near(ours, theirs, absolute=row.tolerance, relative=0)
            compared += 1
    assert compared >= 6


def test_returns_of_slime() -> None:
    compared = 0
    recorded = reference_data("group")
    for (kind, case, dtype), inputs in recorded.items():
        theirs = recorded.get(("out", case, dtype), {}).get("slime.get_reinforce_plus_plus_returns/returns")
        if kind != "in" or dtype != "f64" or theirs is None:
            continue
        mask = torch.from_numpy(inputs["mask"])
        ours = ops.discounted_returns(torch.from_numpy(inputs["token_rewards"]), loss_mask=mask)[mask.bool()]
        assert_near(ours, torch.from_numpy(theirs).double()[: len(ours)], absolute=1e-6, relative=0)
        compared += len(theirs) == len(ours)
    assert compared >= 4


# These take a masked token between turns for a step: they discount it, and read its value.
STEP_OVER_MASKED = ("openrlhf.get_advantages_and_returns", "skyrl.compute_gae_advantage_return")
STEP_OVER_MASKED += ("slime.chunked_gae", "slime.get_advantages_and_returns_batch", "slime.vanilla_gae")
GAE_PEERS = (
    "areal.PPOActor._compute_advantages",
    "nemo.GeneralizedAdvantageEstimator:norm=False",
    "nemo.GeneralizedAdvantageEstimator:norm=True",
    "verl.compute_gae_advantage_return",
    *STEP_OVER_MASKED,
)


def recorded_gae(precision: str) -> list[tuple[str, dict[str, Tensor], ops.GAEOutput, dict[str, Any]]]:
    """Case, inputs, our result and the outputs of all peers."""
    recorded = reference_data("gae")
    cases = []
    for (kind, case, dtype), arrays in recorded.items():
        if kind != "in" or dtype != precision:
            continue
        gamma, lam = (float(part[1:]) for part in case.split("|")[1:])  # <name>|g<gamma>|l<lam>
        x = {name: torch.from_numpy(array) for name, array in arrays.items()}
        ours = ops.gae(x["token_rewards"], x["values"], gamma=gamma, lam=lam, loss_mask=x["mask"])
        cases.append((case, x, ours, recorded.get(("out", case, dtype), {})))
    return cases


@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_gae_agrees_with_the_recorded_truth(precision: str) -> None:
    compared = 0
    bound = 1e-6 if precision == "f32" else 1e-14
    recorded = reference_data("gae")
    for case, x, ours, _ in recorded_gae(precision):
        live = x["mask"].bool()
        for value, name in zip(ours, ("adv", "returns"), strict=True):
            truth = torch.from_numpy(recorded["truth", case, name][""])
            assert_near(value[live], truth[live], absolute=bound, relative=bound)
            compared += int(live.sum())
    assert compared > 500


def test_every_recorded_gae_has_a_row() -> None:
    outputs = {key.rsplit("/", 1)[0] for *_, out in recorded_gae("f64") for key in out}
    assert outputs == set(GAE_PEERS)


@pytest.mark.parametrize("peer", GAE_PEERS)
def test_gae(peer: str) -> None:
    compared = 0
    for case, x, ours, out in recorded_gae("f64"):
        discounts = not case.endswith("g1.0|l1.0")
        if f"{peer}/returns" not in out or (peer in STEP_OVER_MASKED and "multi_turn" in case and discounts):
            continue
        names = [key.removeprefix(f"{peer}/") for key in out if key.startswith(f"{peer}/")]
        theirs = {name: torch.from_numpy(out[f"{peer}/{name}"]).double() for name in names}
        live = x["mask"].bool()
        columns = live.shape[1]  # AReaL appends one, slime cuts what no row uses
        if theirs["returns"].shape[1] < columns:
            continue
        returns = theirs["returns"][:, :columns]
        assert_near(ours.returns[live], returns[live], absolute=1e-7 if peer.startswith("areal") else 1e-14, relative=0)
        if "raw_adv" in theirs:
            assert_near(ours.advantages[live], theirs["raw_adv"][live], absolute=1e-14, relative=0)
        if "norm=True" in peer or peer.startswith(("verl", "skyrl")):
            whitened = ops.whiten(ours.advantages, loss_mask=live)
            if theirs["adv"].isfinite().all():
                assert_near(whitened[live], theirs["adv"][live], absolute=1e-8, relative=0)
        compared += 1
    assert compared >= 6
