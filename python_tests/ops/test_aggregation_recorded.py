"""ppo_loss's aggregations against those that other libraries applied to recorded per-token losses.

With equal policies the loss of a token is minus its advantage, so ppo_loss aggregates what it is given.
"""

import math
from typing import Any

import pytest
import torch
from op_checks import assert_near, reference_data

from areal_core import ops

# Peer, our aggregation, and what its normalizer is in terms of the batch: None: ours by default.
ROWS, COLUMNS, WITH_TOKENS = 5, 7, 4
PEERS: dict[str, tuple[str, float | None]] = {
    "nemo.masked_mean": ("token_mean", None),
    "openrlhf.aggregate_loss:token_level=True": ("token_mean", None),
    "skyrl.reduction:token_mean": ("token_mean", None),
    "skyrl.reduction:token_mean_legacy": ("token_mean", None),
    "verl.agg_loss:token-mean": ("token_mean", None),
    "verl.agg_loss:token-mean dp2 tok40": ("token_mean", 40 / 2),  # of the global batch, over ranks
    "verl.agg_loss:token-sum": ("token_mean", 1),
    "openrlhf.aggregate_loss:token_level=False": ("sequence_mean_token_mean", None),
    "verl.agg_loss:seq-mean-token-mean": ("sequence_mean_token_mean", None),
    # These count the row without tokens too.
    "nemo.masked_mean[seq]": ("sequence_mean_token_mean", ROWS),
    "skyrl.reduction:sequence_mean": ("sequence_mean_token_mean", ROWS),
    "verl.agg_loss:seq-mean-token-sum": ("sequence_mean_token_sum", None),
    "verl.agg_loss:seq-mean-token-sum-norm": ("sequence_mean_token_sum", WITH_TOKENS * COLUMNS),
    "skyrl.reduction:seq_mean_token_sum_norm": ("sequence_mean_token_sum", ROWS * COLUMNS),
}
DIFFERENT = {"skyrl.reduction:prompt_mean": "a mean over prompts of token means: give each its own normalizer"}


def aggregate(x: dict[str, torch.Tensor], aggregation: str, normalizer: float | None) -> torch.Tensor:
    losses, mask = x["loss_mat"].flatten(), x["mask"].flatten()
    rows, columns = x["mask"].shape
    options: dict[str, Any] = {}
    if aggregation.startswith("sequence"):
        options["cu_seqlens"] = torch.arange(rows + 1) * columns
    if normalizer is not None:
        options["normalizer"] = torch.tensor(normalizer, dtype=losses.dtype)
    same = torch.zeros_like(losses)
    config = ops.PPOLossConfig(aggregation=aggregation)
    return ops.ppo_loss(same, same, -losses, mask, config=config, **options).loss


def test_every_recorded_aggregation_has_a_row() -> None:
    recorded = {
        key.rsplit("/", 1)[0]
        for (kind, _, _), arrays in reference_data("agg").items()
        if kind == "out"
        for key in arrays
    }
    assert recorded == PEERS.keys() | DIFFERENT.keys()


@pytest.mark.parametrize("peer", PEERS)
def test_aggregations(peer: str) -> None:
    recorded = reference_data("agg")
    x = {key: torch.from_numpy(array) for key, array in recorded["in", "base", "f64"].items()}
    ours = aggregate(x, *PEERS[peer])
    theirs = torch.from_numpy(recorded["out", "base", "f64"][f"{peer}/loss"]).double().reshape(())
    assert_near(ours, theirs, absolute=1e-8, relative=0)  # some add 1e-8 to a count


@pytest.mark.parametrize("case", ["nan_masked", "inf_masked", "all_masked"])
def test_masked_junk_does_not_reach_the_loss(case: str) -> None:
    """Here most peers give NaN."""
    recorded = reference_data("agg")
    x = {key: torch.from_numpy(array) for key, array in recorded["in", case, "f64"].items()}
    clean = {**x, "loss_mat": x["loss_mat"].where(x["mask"].bool(), 0.0)}
    for aggregation in ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"):
        ours = aggregate(x, aggregation, None)
        assert math.isfinite(ours)
        assert torch.equal(ours, aggregate(clean, aggregation, None))
