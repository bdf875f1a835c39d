"""ppo_loss: masked, extreme and wrong inputs."""

import math
import re
from typing import Any

import pytest
import torch
from loss_cases import CURRENT_VERSION, RUNNABLE_ISAS, VARIANTS, assert_summary, make_batch, run, run_reference
from op_checks import assert_same_bits

from areal_core import _C, ops
from areal_core.ops import PPOLossConfig

JUNK = (math.nan, math.inf, -math.inf, 3e38, -91.0)


@pytest.mark.parametrize("variant", ["mask", "all", "cispo", "sapo", "gspo_weighted", "gspo_weight_sequence", "gmpo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_masked_tokens_are_never_looked_at(variant: str, dtype: torch.dtype, isa: str) -> None:
    _C.set_active_isa(isa)
    batch = make_batch(2500, dtype)
    dirty = {name: tensor.clone() for name, tensor in batch.items()}
    masked = ~batch["loss_mask"]
    dirty["keep_mask"][masked] ^= True
    dirty["versions"][masked] = -(2**60)
    for i, name in enumerate(sorted(name for name in batch if batch[name].is_floating_point())):
        dirty[name][masked] = torch.tensor([JUNK[(i + t) % len(JUNK)] for t in range(int(masked.sum()))], dtype=dtype)
    for clean, junk in zip(run(batch, VARIANTS[variant]), run(dirty, VARIANTS[variant]), strict=True):
        assert_same_bits(clean, junk)
    assert not run(dirty, VARIANTS[variant])[1][masked].any()


@pytest.mark.parametrize("tokens", [0, 1, 40, 5000])
@pytest.mark.parametrize("normalizer", [None, 0.5, torch.tensor(0.0), torch.tensor(7)], ids=str)
def test_without_live_tokens_everything_is_zero(tokens: int, normalizer: Any) -> None:
    batch = make_batch(tokens, live=0.0)
    batch["logprobs"] += math.nan
    loss, grad, grad_entropy, raw = run(batch, VARIANTS["all"], normalizer=normalizer)
    assert float(loss) == 0.0
    assert torch.equal(grad, torch.zeros(tokens))
    assert torch.equal(grad_entropy, torch.zeros(tokens))
    assert raw.isfinite().all()
    assert all(float(value) == 0.0 for value in ops.PPOLossStats(raw).finalize())


def test_nan_at_a_live_token_shows_and_stays_there() -> None:
    batch = make_batch(100, live=1.1)
    batch["logprobs"][70] = math.nan
    loss, grad, _, _ = run(batch, VARIANTS["all"])
    assert loss.isnan()
    assert grad.isnan().nonzero().flatten().tolist() == [70]


@pytest.mark.parametrize("variant", ["gspo", "gmpo", "sapo_sequence", "product"])
@pytest.mark.parametrize("name", ["logprobs", "advantages"])
def test_nan_reaches_the_sequence_that_shares_a_ratio_and_no_other(variant: str, name: str) -> None:
    batch = make_batch(100)
    del batch["keep_mask"]
    batch["cu_seqlens"], batch["loss_mask"] = torch.tensor([0, 30, 30, 75, 100]), torch.arange(100) != 40
    batch[name][70] = math.nan
    loss, grad, _, _ = run(batch, VARIANTS[variant])
    assert loss.isnan()
    assert grad.isnan().nonzero().flatten().tolist() == [t for t in range(30, 75) if t != 40]


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_u", [-math.inf, -1e30, -91.0, 91.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_extreme_ratios_stay_finite(log_u: float, advantage: float, dtype: torch.dtype) -> None:
    logprobs = torch.full((17,), log_u, dtype=dtype, requires_grad=True)
    zeros = torch.zeros(17, dtype=dtype)
    out = ops.ppo_loss(logprobs, zeros, zeros + advantage, torch.ones(17))
    out.loss.backward()
    u = min(max(math.exp(min(max(log_u, -20.0), 20.0)), 0.8 if advantage < 0 else 0.0), 1.2 if advantage > 0 else 1e9)
    assert out.loss.item() == pytest.approx(-u * advantage, rel=1e-6, abs=0)
    assert torch.equal(logprobs.grad, zeros)
    assert out.stats.raw.isfinite().all()


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("name", ["logprobs", "behavior_logprobs", "ref_logprobs", "teacher_logprobs"])
def test_every_variant_survives_extreme_log_ratios(variant: str, name: str) -> None:
    batch = make_batch(60)
    batch[name][::7] += torch.tensor([200.0, -200.0, 91.0]).repeat(3)
    batch["behavior_logprobs"][1::7] = -math.inf
    loss, grad, grad_entropy, raw = run(batch, VARIANTS[variant])
    true_loss, true_grad, _, stats = run_reference(batch, VARIANTS[variant])
    for x in (loss, grad, grad_entropy, raw):
        assert x.isfinite().all()
    torch.testing.assert_close(loss.double(), true_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.double(), true_grad, rtol=1e-5, atol=1e-6 * max(1.0, float(true_grad.abs().max())))
    assert_summary(raw, stats, rtol=1e-4, atol=1e-5)


def test_a_token_without_advantage_is_not_clipped() -> None:
    logprobs, zeros = torch.tensor([1.0, -1.0, 5.0]), torch.zeros(3)
    summary = ops.ppo_loss(logprobs, zeros, zeros, torch.ones(3), config=PPOLossConfig(dual_clip=3.0)).stats.finalize()
    fractions = (summary.clip_fraction_low, summary.clip_fraction_high, summary.clip_fraction_dual)
    assert [float(x) for x in fractions] == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["truncate", "mask", "icepop"])
def test_a_weight_at_its_bounds_is_within_them(mode: str, dtype: torch.dtype) -> None:
    low = {} if mode == "truncate" else {"behavior_low": 1.0}
    config = PPOLossConfig(behavior_mode=mode, behavior_cap=1.0, **low)
    zeros, ones = torch.zeros(20, dtype=dtype), torch.ones(20, dtype=dtype)
    out = ops.ppo_loss(zeros, zeros, ones, ones, behavior_logprobs=zeros, config=config)
    summary = out.stats.finalize()
    assert float(out.loss) == -1
    assert float(summary.behavior_capped_fraction) == float(summary.behavior_masked_fraction) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("ratio", "kl"), [(25.0, 1.0), (1.0, 25.0), (25.0, 25.0), (-25.0, -1.0)])
def test_what_is_clamped_has_no_part_in_the_gradient_of_the_unbiased_kl(
    ratio: float, kl: float, dtype: torch.dtype
) -> None:
    """Of u (exp(y) - 1 - y), with log u = ratio and y = -kl, each clamped to [-20, 20]."""
    proximal = torch.zeros(20, dtype=dtype)
    logprobs = (proximal + ratio).requires_grad_()
    inputs = (logprobs, proximal, proximal, torch.ones(20))
    config = PPOLossConfig(kl_coef=1.0, kl_estimator="k3_unbiased")
    out = ops.ppo_loss(*inputs, ref_logprobs=logprobs.detach() - kl, config=config)
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    u, y = math.exp(max(-20.0, min(20.0, ratio))), max(-20.0, min(20.0, -kl))
    expected = u * ((abs(ratio) < 20) * (math.expm1(y) - y) - (abs(kl) < 20) * math.expm1(y)) / 20
    assert grad.tolist() == pytest.approx([expected] * 20, rel=2e-6)


def test_two_impossible_logprobs_have_ratio_one_and_no_gradient() -> None:
    logprobs = torch.tensor([-math.inf, -1.0], requires_grad=True)
    same = logprobs.detach().clone()
    out = ops.ppo_loss(logprobs, same, torch.ones(2), torch.ones(2), behavior_logprobs=same, ref_logprobs=same)
    out.loss.backward()
    assert out.loss.item() == -1.0
    assert logprobs.grad.tolist() == [0.0, -0.5]


@pytest.mark.parametrize(
    ("config", "weight", "stat"),
    [
        (PPOLossConfig(), math.exp(20), "behavior_weight_mean"),
        (PPOLossConfig(behavior_cap=5.0), 5.0, "behavior_capped_fraction"),
        (PPOLossConfig(behavior_cap=5.0, behavior_mode="mask"), 0.0, "behavior_masked_fraction"),
    ],
)
def test_an_impossible_behavior_logprob_is_a_huge_weight(config: PPOLossConfig, weight: float, stat: str) -> None:
    logprobs = torch.tensor([-1.0])
    behavior = torch.tensor([-math.inf])
    out = ops.ppo_loss(logprobs, logprobs, torch.ones(1), torch.ones(1), behavior_logprobs=behavior, config=config)
    assert out.loss.item() == pytest.approx(-weight, rel=1e-6)
    assert float(getattr(out.stats.finalize(), stat)) == pytest.approx(max(weight, 1.0) if "mean" in stat else 1.0)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16], ids=str)
def test_masks_of_any_dtype_and_strided_inputs(mask_dtype: torch.dtype) -> None:
    batch = make_batch(77)
    strided = {name: torch.stack([x, x], dim=1)[:, 0] for name, x in batch.items()}
    strided["loss_mask"] = strided["loss_mask"].to(mask_dtype)
    for a, b in zip(run(batch, VARIANTS["all"]), run(strided, VARIANTS["all"]), strict=True):
        assert_same_bits(a, b)


def test_normalizers() -> None:
    batch = make_batch(60)
    live = int(batch["loss_mask"].sum())
    batch = {name: x for name, x in batch.items() if name != "versions"}
    default = ops.ppo_loss(**batch).loss
    for normalizer in (live, float(live), torch.tensor(live), torch.tensor([float(live)])):
        assert torch.equal(ops.ppo_loss(**batch, normalizer=normalizer).loss, default)
    torch.testing.assert_close(ops.ppo_loss(**batch, normalizer=2.0 * live).loss, default / 2)
    stats = [ops.ppo_loss(**batch, normalizer=n).stats.raw for n in (None, 123.0)]
    assert torch.equal(*stats)


def test_a_reference_without_coefficient_feeds_statistics_only() -> None:
    batch = make_batch(60)
    without = {name: x for name, x in batch.items() if name not in ("ref_logprobs", "entropy", "versions")}
    poisoned = {**batch, "ref_logprobs": batch["ref_logprobs"] * math.nan, "entropy": batch["entropy"] * math.nan}
    for a, b in zip(run(batch, VARIANTS["default"])[:2], run(poisoned, VARIANTS["default"])[:2], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(ops.ppo_loss(**without).loss, run(batch, VARIANTS["default"])[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio_level": "seq"}, "ratio_level in ('token', 'sequence', 'sequence_product', 'off'), got 'seq'"),
        ({"objective": "gspo"}, "objective in ('ppo', 'cispo', 'sapo', 'gmpo', 'reinforce'), got 'gspo'"),
        ({"aggregation": "token-mean"}, "aggregation in ('token_mean', 'sequence_mean_token_sum', "),
        ({"behavior_level": "product"}, "behavior_level in ('token', 'sequence', 'geometric'), got 'product'"),
        ({"behavior_mode": "clip"}, "behavior_mode in ('truncate', 'mask', 'icepop'), got 'clip'"),
        ({"kl_estimator": "k4"}, "kl_estimator in ('k1', 'k2', 'k3', 'k3_unbiased'), got 'k4'"),
        ({"objective": "gmpo"}, "ratio_level = 'sequence' with objective = 'gmpo', got 'token'"),
        ({"ratio_level": "off"}, "ratio_level other than 'off' with objective = 'ppo'"),
        ({"objective": "sapo", "dual_clip": 3.0}, "dual_clip = None with objective = 'sapo', got 3.0"),
        ({"objective": "sapo", "clip_low": 0.1}, "clip_low = 0.2 with objective = 'sapo', which does not use it"),
        ({"objective": "reinforce", "clip_high": 0.1}, "clip_high = None with objective = 'reinforce', which does"),
        ({"tau_negative": 2.0}, "tau_negative = 1.05 with objective = 'ppo', which does not use it, got 2.0"),
        ({"tau_positive": 0.0}, "tau_positive > 0 and finite, got 0.0"),
        ({"tau_negative": math.inf}, "tau_negative"),
        ({"distill_coef": math.nan}, "distill_coef"),
        ({"m2po_threshold": 0.0}, "m2po_threshold > 0, got 0.0"),
        ({"clip_low": 1.5}, "clip_low in [0, 1], got 1.5"),
        ({"clip_low": math.nan}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip > 1 and finite, got 1.0"),
        ({"behavior_cap": 0.0}, "behavior_cap"),
        ({"behavior_cap": 2.0, "behavior_low": 3.0, "behavior_mode": "mask"}, "behavior_low"),
        ({"behavior_low": 0.5}, "behavior_low = None with behavior_mode = 'truncate'"),
        ({"behavior_mode": "mask"}, "behavior_cap or behavior_low"),
        ({"behavior_mode": "icepop", "behavior_cap": 2.0}, "behavior_low and behavior_cap"),
        ({"kl_coef": math.inf}, "kl_coef"),
        ({"entropy_coef": math.nan}, "entropy_coef"),
    ],
)
def test_a_config_out_of_range_names_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"PPOLossConfig: expected .*" + re.escape(message)):
        PPOLossConfig(**options)


@pytest.mark.parametrize("options", [{"clip_low": "0.2"}, {"kl_coef": None}, {"dual_clip": True}])
def test_what_is_no_number_names_the_option(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(TypeError, match=f"PPOLossConfig: expected {name} a number"):
        PPOLossConfig(**options)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"config": "gspo"}, TypeError, "config a PPOLossConfig, got 'gspo'"),
        (
            {"behavior_logprobs": None, "config": VARIANTS["truncate"]},
            ValueError,
            "behavior_logprobs with behavior_cap",
        ),
        ({"ref_logprobs": None, "config": VARIANTS["k3"]}, ValueError, "ref_logprobs with kl_coef"),
        ({"entropy": None, "config": VARIANTS["entropy"]}, ValueError, "entropy with entropy_coef"),
        ({"teacher_logprobs": None, "config": VARIANTS["distill"]}, ValueError, "teacher_logprobs with distill_coef"),
        ({"keep_mask": None, "config": PPOLossConfig.preset("m2po")}, ValueError, "keep_mask with m2po_threshold"),
        ({"cu_seqlens": None, "config": VARIANTS["gspo"]}, ValueError, "cu_seqlens with a ratio, .* by sequence set"),
        ({"config": PPOLossConfig.preset("dr_grpo")}, ValueError, "normalizer with aggregation = 'constant' set"),
        ({"current_version": None}, ValueError, "versions and current_version together"),
        ({"versions": torch.zeros(5)}, TypeError, "versions of an integer dtype"),
        ({"normalizer": 0.0}, ValueError, "normalizer > 0"),
        ({"normalizer": math.nan}, ValueError, "normalizer > 0"),
        ({"normalizer": torch.ones(2)}, ValueError, "normalizer with 1 element"),
        ({"cu_seqlens": torch.ones(2)}, TypeError, "cu_seqlens of an integer dtype"),
        ({"cu_seqlens": torch.tensor([[0, 5]])}, ValueError, r"cu_seqlens of shape \[2\], got 2-D"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, r"cu_seqlens\[-1\] = 5 .*, got 4"),
        ({"cu_seqlens": torch.tensor([0, 6, 5])}, ValueError, "non-decreasing cu_seqlens"),
        ({"advantages": torch.zeros(4)}, ValueError, r"advantages of shape \[5\]"),
        ({"loss_mask": torch.ones(5, 1)}, ValueError, "loss_mask"),
        ({"logprobs": torch.zeros(5, 1)}, ValueError, "logprobs of shape"),
        ({"logprobs": torch.zeros(5).bfloat16()}, TypeError, "logprobs dtype in {float32, float64}, got BFloat16"),
        ({"proximal_logprobs": torch.zeros(5).double()}, TypeError, "proximal_logprobs dtype = Float, got Double"),
    ],
)
def test_bad_arguments_name_themselves(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match="ppo_loss: expected .*" + message):
        ops.ppo_loss(**{**make_batch(5), "current_version": CURRENT_VERSION, **change})


def test_cu_seqlens_do_not_change_a_token_level_loss() -> None:
    batch = {name: x for name, x in make_batch(9).items() if name != "versions"}
    without = {name: x for name, x in batch.items() if name != "cu_seqlens"}
    for dtype in (torch.int32, torch.int64):
        out = ops.ppo_loss(**{**batch, "cu_seqlens": torch.tensor([0, 4, 9], dtype=dtype)})
        torch.testing.assert_close(out.loss, ops.ppo_loss(**without).loss)  # fp32 sums in another order
        assert int(out.stats.finalize().live_sequences) == 2


def test_presets_are_known_by_name_and_may_be_changed() -> None:
    gspo = PPOLossConfig.preset("gspo", entropy_coef=0.01)
    assert (gspo.ratio_level, gspo.clip_low, gspo.clip_high, gspo.entropy_coef) == ("sequence", 3e-4, 4e-4, 0.01)
    with pytest.raises(ValueError, match=r"expected preset in \('ppo', 'grpo', 'dapo', .*\), got 'dpo'"):
        PPOLossConfig.preset("dpo")
