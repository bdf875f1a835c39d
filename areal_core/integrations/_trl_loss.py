"""The loss of TRL's GRPOTrainer by `ops.ppo_loss`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from areal_core import ops
from areal_core.integrations._patch import Original

_OBJECTIVES = {"cispo": "cispo", "sapo": "sapo"}  # the others: "ppo"
_AGGREGATIONS = {
    "grpo": "sequence_mean_token_mean",
    "sapo": "sequence_mean_token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "constant",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "luspo": "sequence_mean_token_sum",
}


def grpo_loss(trainer: Any, model: Any, inputs: dict[str, Any], *, original: Original) -> Tensor:
    """The policy loss by `ops.ppo_loss`; metrics and entropy control by TRL's own method, without a graph."""
    if reason := _loss_is_not_ours(trainer, original.strict):
        return original.fall_through(reason, trainer, model, inputs)
    entropy_coef = _entropy_coef(trainer)  # before TRL's method adapts it
    with _score_once(trainer) as scored, torch.no_grad():
        original(trainer, model, inputs)
    (logprobs, entropy, aux_loss), *_ = scored
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    keep = _high_entropy(trainer, entropy.detach(), mask)
    loss = _policy_loss(trainer, inputs, logprobs, mask, keep)
    steps = trainer.current_gradient_accumulation_steps if trainer.model.training else 1.0
    if entropy_coef != 0:
        acting = (mask if keep is None else mask * keep).bool()
        mean = torch.where(acting, entropy, 0.0).sum() / acting.sum().clamp(min=1)
        loss = loss - entropy_coef * mean / steps
    if trainer.aux_loss_enabled:
        loss = loss + trainer.router_aux_loss_coef * aux_loss / steps
    return loss


def _policy_loss(
    trainer: Any, inputs: dict[str, Any], logprobs: Tensor, mask: Tensor, high_entropy: Tensor | None
) -> Tensor:
    advantages = inputs["advantages"]
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    proximal = inputs.get("old_per_token_logps")
    proximal = logprobs.detach() if proximal is None else proximal
    keep = high_entropy
    if trainer.off_policy_mask_threshold is not None:
        sampled = inputs.get("sampling_per_token_logps", proximal)
        threshold = trainer.off_policy_mask_threshold
        near = trainer.get_off_policy_mask(advantages, logprobs, sampled, mask, threshold).bool().expand_as(mask)
        keep = near if keep is None else keep & near
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        advantages = advantages * inputs["importance_sampling_ratio"]  # every objective is linear in both
    sequences, length = mask.shape

    def flat(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(logprobs.dtype).expand(sequences, length).reshape(-1)

    out = ops.ppo_loss(
        logprobs.reshape(-1),
        flat(proximal),  # type: ignore[arg-type]
        flat(advantages),  # type: ignore[arg-type]
        mask.reshape(-1),
        ref_logprobs=flat(inputs["ref_per_token_logps"]) if trainer.beta != 0 else None,
        keep_mask=flat(keep),
        cu_seqlens=torch.arange(sequences + 1, device=mask.device) * length,
        normalizer=_normalizer(trainer, inputs, mask),
        config=_config(trainer),
    )
    return out.loss


def _normalizer(trainer: Any, inputs: dict[str, Any], mask: Tensor) -> float | Tensor:
    training, kind = trainer.model.training, trainer.loss_type
    steps = trainer.current_gradient_accumulation_steps if training else 1.0
    if kind in ("dapo", "cispo"):  # num_items_in_batch spans the generation batch
        share = steps / trainer.args.steps_per_generation if training else 1.0
        return inputs["num_items_in_batch"].clamp(min=1.0) * share / trainer.accelerator.num_processes
    if kind == "bnpo":
        return mask.sum().clamp(min=1) * steps
    return len(mask) * steps * (trainer.max_completion_length if kind == "dr_grpo" else 1.0)


def _config(trainer: Any) -> ops.PPOLossConfig:
    args = trainer.args
    options: dict[str, Any] = {
        "objective": _OBJECTIVES.get(trainer.loss_type, "ppo"),
        "aggregation": _AGGREGATIONS[trainer.loss_type],
        "ratio_level": trainer.importance_sampling_level,
        "kl_coef": trainer.beta,
        "kl_estimator": "k3_unbiased" if args.use_bias_correction_kl else "k3",
    }
    if options["objective"] == "ppo":
        options |= {"clip_low": trainer.epsilon_low, "clip_high": trainer.epsilon_high, "dual_clip": args.delta}
    elif options["objective"] == "cispo":
        options |= {"clip_low": 1.0, "clip_high": trainer.epsilon_high - 1.0}
    else:
        options |= {"tau_positive": args.sapo_temperature_pos, "tau_negative": args.sapo_temperature_neg}
    return _checked_config(**options)


_checked_config = functools.lru_cache(maxsize=64)(ops.PPOLossConfig)  # the same in every step


def _loss_is_not_ours(trainer: Any, strict: bool) -> str | None:
    kind, low, high, delta = trainer.loss_type, trainer.epsilon_low, trainer.epsilon_high, trainer.args.delta
    if strict:
        return "strict: log-ratios are not clamped, masked values are multiplied by 0"
    if kind not in _AGGREGATIONS:
        return f"loss_type {kind}"
    if trainer.importance_sampling_level not in ("token", "sequence"):
        return f"importance_sampling_level {trainer.importance_sampling_level}"
    if trainer.importance_sampling_level == "sequence" and trainer.beta != 0 and trainer.args.use_bias_correction_kl:
        return "use_bias_correction_kl with a ratio per sequence"
    if kind == "cispo":
        return None if high >= 1 else "cispo with epsilon_high < 1"
    if kind == "sapo":
        return None
    if not (0 <= low <= 1 and high >= 0):
        return "epsilon out of range"
    return None if delta is None or delta > max(1, 1 + high) else "delta within the clip range"


def _entropy_coef(trainer: Any) -> float:
    """What TRL's method will multiply the entropy with."""
    if trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target:
        return 0.0
    return float(trainer.entropy_coef)


def _high_entropy(trainer: Any, entropy: Tensor, mask: Tensor) -> Tensor | None:
    if trainer.top_entropy_quantile >= 1.0:
        return None
    return trainer.get_high_entropy_mask(entropy, mask, 1 - trainer.top_entropy_quantile)


@contextmanager
def _score_once(trainer: Any) -> Iterator[list[Any]]:
    """Run the model for TRL's method with a graph, of which it sees the values alone; gives what the model gave."""
    name, scored, with_graph = "_get_per_token_logps_and_entropies", [], torch.is_grad_enabled()
    run = getattr(trainer, name)

    def score_and_keep(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        with torch.set_grad_enabled(with_graph):
            scored.append(run(*args, **kwargs))
        return tuple(x if x is None else x.detach() for x in scored[-1])

    before = vars(trainer).get(name)
    setattr(trainer, name, score_and_keep)
    try:
        yield scored
    finally:
        if before is None:
            delattr(trainer, name)
        else:
            setattr(trainer, name, before)
