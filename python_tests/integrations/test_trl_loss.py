"""The GRPO loss of TRL patched against unpatched, under every option of the trainer."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_core.integrations import trl as ours

from patched import both, close

grpo = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")

B, L = 4, 7


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Accelerator:
    """That of one process."""

    num_processes, sync_gradients = 2, True  # whoever forgets to divide is seen

    def gather(self, x: Tensor) -> Tensor:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x

    def pad_across_processes(self, x: Tensor, **_: Any) -> Tensor:
        return x


def trainer(**options: Any) -> Any:
    """A GRPOTrainer that has a loss and no model: `leaves` are what its model would give."""
    made = grpo.GRPOTrainer.__new__(grpo.GRPOTrainer)
    args = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.3,
        "steps_per_generation": 3,
        "entropy_target": 1.0,
        "entropy_coef_delta": 0.01,
        "entropy_coef_max": 1.0,
        "entropy_coef_min": 0.0,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }
    state = {
        "model": SimpleNamespace(training=True),
        "accelerator": Accelerator(),
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.3,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "max_completion_length": 11,
        "current_gradient_accumulation_steps": 2,
        "aux_loss_enabled": False,
        "router_aux_loss_coef": 0.01,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "entropy_coef": 0.0,
        "_last_world_entropy": math.inf,
        "_entropy_window_stats": None,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
    }
    unknown = set(options) - set(args) - set(state)
    assert not unknown
    made.args = SimpleNamespace(**{name: options.get(name, value) for name, value in args.items()})
    for name, value in state.items():
        setattr(made, name, options.get(name, value))
    return made


def batch() -> dict[str, Any]:
    mask = torch.arange(L) < torch.tensor([7, 3, 5, 1])[:, None]
    return {
        "prompt_ids": torch.zeros(B, 2, dtype=torch.int64),
        "prompt_mask": torch.ones(B, 2, dtype=torch.int64),
        "completion_ids": torch.zeros(B, L, dtype=torch.int64),
        "completion_mask": mask.long(),
        "advantages": torch.tensor([1.0, -0.7, 0.0, 0.4]),
        "num_items_in_batch": torch.tensor(40),
    }


def policies(spread: float = 0.4) -> dict[str, Tensor]:
    current = -3 * torch.rand(B, L)
    return {
        "old_per_token_logps": current + spread * torch.randn(B, L),
        "ref_per_token_logps": current + spread * torch.randn(B, L),
        "sampling_per_token_logps": current + spread * torch.randn(B, L),
        "importance_sampling_ratio": torch.rand(B, L) + 0.5,
        "logps": current,
        "entropy": torch.rand(B, L) + 0.5,
        "aux": torch.tensor(0.7),
    }


def loss_run(options: dict[str, Any], inputs: dict[str, Any], given: dict[str, Tensor]) -> tuple[Any, ...]:
    """Loss, gradients, metrics and what the entropy controller has become."""
    made = trainer(**options)
    leaves = [given[name].clone().requires_grad_() for name in ("logps", "entropy", "aux")]
    inputs = inputs | {name: value for name, value in given.items() if name not in ("logps", "entropy", "aux")}
    made._get_per_token_logps_and_entropies = lambda *_, **__: tuple(1.0 * leaf for leaf in leaves)
    scored = made._get_per_token_logps_and_entropies
    loss = made._compute_loss(None, inputs)
    assert made.__dict__["_get_per_token_logps_and_entropies"] is scored
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    metrics = {kind: dict(values) for kind, values in made._metrics.items()}
    return loss.detach(), grads, metrics, (made.entropy_coef, made._last_world_entropy)


def same_loss(options: dict[str, Any], inputs: dict[str, Any], given: dict[str, Tensor]) -> dict[str, int]:
    theirs, mine, fallbacks = both(ours, lambda: loss_run(options, inputs, given), only=["grpo_loss"])
    close(mine[0], theirs[0], atol=1e-6)
    close(mine[1], theirs[1], atol=1e-6)
    assert repr(mine[2:]) == repr(theirs[2:]), "metrics and controller are TRL's own"
    return fallbacks


LOSS_TYPES = ("grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo", "luspo")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": {"importance_sampling_level": "sequence"},
    "delta": {"delta": 1.35},
    "kl": {"beta": 0.3},
    "corrected kl": {"beta": 0.3, "use_bias_correction_kl": True},
    "vllm": {"use_vllm": True, "beta": 0.3},
    "vllm uncorrected": {"use_vllm": True, "vllm_importance_sampling_correction": False},
    "off-policy mask": {"off_policy_mask_threshold": 0.01, "beta": 0.3},
    "entropy quantile": {"top_entropy_quantile": 0.4, "beta": 0.3},
    "both masks": {"top_entropy_quantile": 0.6, "off_policy_mask_threshold": 0.01},
    "entropy bonus": {"_entropy_bonus_enabled": True, "entropy_coef": 0.2},
    "bonus of some": {"_entropy_bonus_enabled": True, "entropy_coef": 0.2, "top_entropy_quantile": 0.4},
    "adaptive bonus": {"_entropy_bonus_enabled": True, "use_adaptive_entropy": True, "entropy_coef": 0.2},
    "bonus below target": {
        "_entropy_bonus_enabled": True,
        "use_adaptive_entropy": True,
        "entropy_coef": 0.2,
        "_last_world_entropy": 0.5,
    },
    "experts": {"aux_loss_enabled": True},
    "evaluation": {"model": SimpleNamespace(training=False), "_entropy_bonus_enabled": True, "entropy_coef": 0.2},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_loss_and_gradients_under_every_option(kind: str, name: str) -> None:
    options = {"loss_type": kind, "epsilon_high": 1.2 if kind == "cispo" else 0.3} | OPTIONS[name]
    assert not same_loss(options, batch(), policies())


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_loss_of_more_shapes_of_input(kind: str) -> None:
    options, given = {"loss_type": kind, "epsilon_high": 1.2 if kind == "cispo" else 0.3}, policies()
    by_token = batch() | {"advantages": torch.randn(B, L)}
    tools = batch() | {"tool_mask": (torch.arange(L) % 3 != 1).long().expand(B, L)}
    empty = batch()
    empty["completion_mask"] = empty["completion_mask"] * torch.tensor([1, 0, 1, 0])[:, None]
    for inputs, level in itertools.product((by_token, tools, empty), ("token", "sequence")):
        assert not same_loss(options | {"importance_sampling_level": level}, inputs, given)
    ratio = given | {"importance_sampling_ratio": torch.tensor([[0.0], [1.5], [0.5], [2.0]])}
    assert not same_loss(options | {"use_vllm": True}, batch(), ratio)
    fresh = {name: value for name, value in given.items() if name != "old_per_token_logps"}
    assert not same_loss(options, batch(), fresh)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss_type": "vespo"}, "loss_type vespo"),
        ({"delta": 1.1}, "delta within the clip range"),
        ({"loss_type": "cispo"}, "cispo with epsilon_high < 1"),
        ({"epsilon_low": 1.5}, "epsilon out of range"),
        (
            {"importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": True},
            "use_bias_correction_kl with a ratio per sequence",
        ),
    ],
)
def test_options_that_are_not_ours_fall_through(options: dict[str, Any], reason: str) -> None:
    assert same_loss(options, batch(), policies()) == {f"grpo_loss: {reason}": 1}


def test_strict_leaves_the_loss_to_trl() -> None:
    _, _, fallbacks = both(ours, lambda: loss_run({}, batch(), policies()), strict=True, only=["grpo_loss"])
    assert [key.split(":")[1] for key in fallbacks] == [" strict"]


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_what_is_masked_reaches_neither_loss_nor_gradient(kind: str) -> None:
    options, given, inputs = {"loss_type": kind, "epsilon_high": 1.2, "beta": 0.3}, policies(), batch()
    poisoned = {name: value.clone() for name, value in given.items()}
    for name in ("logps", "old_per_token_logps", "ref_per_token_logps"):
        poisoned[name][inputs["completion_mask"] == 0] = math.nan
    with ours.apply(only=["grpo_loss"]):
        clean, dirty = (loss_run(options, inputs, x) for x in (given, poisoned))
    assert dirty[0].equal(clean[0])
    assert dirty[1][0].equal(clean[1][0])
    assert loss_run(options, inputs, poisoned)[0].isnan(), "TRL multiplies by the mask"


def test_an_overflowing_ratio_keeps_the_gradient_finite() -> None:
    given = policies()
    given["old_per_token_logps"][1, 0] = -200.0
    with ours.apply(only=["grpo_loss"]):
        loss, grads, *_ = loss_run({}, batch(), given)
    assert loss.isfinite()
    assert grads[0].isfinite().all()


def test_without_a_graph_the_loss_is_the_same() -> None:
    def run() -> Tensor:
        made, given = trainer(), policies()
        torch.manual_seed(0)
        made._get_per_token_logps_and_entropies = lambda *_, **__: (given["logps"], given["entropy"], None)
        with torch.no_grad():
            return made._compute_loss(None, batch() | policies())

    torch.manual_seed(1)
    theirs = run()
    torch.manual_seed(1)
    with ours.apply(only=["grpo_loss"]):
        mine = run()
    close(mine, theirs)


def test_the_trainer_is_as_before_after_a_failing_forward() -> None:
    made = trainer()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    made._get_per_token_logps_and_entropies = fail
    with ours.apply(only=["grpo_loss"]), pytest.raises(RuntimeError, match="out of memory"):
        made._compute_loss(None, batch())
    assert made._get_per_token_logps_and_entropies is fail
