"""The policy loss of a micro-batch: which logprobs meet in it, and what it is normalised by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

import torch
from torch import Tensor

from areal_core import ops
from areal_core.rl.batch import Batch, Microbatch
from areal_core.rl.config import Config
from areal_core.rl.config_algorithm import LossConfig

__all__ = ["BatchTensors", "PolicyLoss"]


class BatchTensors:
    """The per-token arrays of a batch as float32 tensors [N] on the model's device.

    labels and versions are int64, keep is bool. proximal starts as the behaviour logprobs; reference, teacher and
    values stay zeros, and keep true, where nobody needs them.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.device = device
        self.labels: Tensor = torch.from_numpy(batch.response_ids).to(device)
        self.version = batch.version
        self.versions: Tensor = torch.from_numpy(batch.version - batch.ages).to(device)
        self.behavior: Tensor = torch.from_numpy(batch.logprobs).to(device)
        self.proximal: Tensor = self.behavior.clone()
        self.reference: Tensor = torch.zeros_like(self.behavior)
        self.teacher: Tensor = torch.zeros_like(self.behavior)
        self.values: Tensor = torch.zeros_like(self.behavior)
        self.advantages: Tensor = torch.zeros_like(self.behavior)
        self.returns: Tensor = torch.zeros_like(self.behavior)
        self.keep: Tensor = torch.ones_like(self.behavior, dtype=torch.bool)


class PolicyLoss:
    """`ops.ppo_loss` as a run configures it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.options = _op_config(config.loss)

    def normalizer(self, microbatches: Sequence[Microbatch]) -> float:
        """What divides the loss of a mini-batch: its live tokens, its sequences, or these x generate.max_new_tokens."""
        sequences = sum(micro.samples for micro in microbatches)
        if self.options.aggregation == "token_mean":
            return float(sum(len(micro.tokens) for micro in microbatches))
        return float(sequences * (self.config.generate.max_new_tokens if self.options.aggregation == "constant" else 1))

    def __call__(
        self,
        outputs: ops.LogprobOutput,
        micro: Microbatch,
        tensors: BatchTensors,
        *,
        normalizer: float,
        at_proximal: bool,
    ) -> ops.PPOLossOutput:
        """Loss and statistics; `at_proximal`: the weights are those before the step, so proximal = current."""
        loss, logprobs, entropy = self.config.loss, outputs.logprobs, outputs.entropy
        tokens = micro.tokens
        behavior, proximal, versions = tensors.behavior[tokens], tensors.proximal[tokens], tensors.versions[tokens]
        if loss.proximal == "recompute" and at_proximal:
            proximal = logprobs.detach()
        elif loss.proximal == "loglinear":  # between the policy that sampled a token and the one being made
            proximal = ops.interpolate_proximal(
                behavior, logprobs, versions, current_version=tensors.version + 1, proximal_version=tensors.version
            )
        return ops.ppo_loss(
            logprobs,
            proximal,
            tensors.advantages[tokens],
            torch.ones_like(tokens, dtype=torch.bool),
            behavior_logprobs=behavior if loss.decoupled else None,
            ref_logprobs=tensors.reference[tokens] if loss.kl_coef else None,
            entropy=entropy if loss.entropy_coef else entropy.detach(),
            teacher_logprobs=tensors.teacher[tokens] if loss.distill_coef else None,
            keep_mask=None if loss.m2po_threshold is None else tensors.keep[tokens],
            versions=versions,
            current_version=tensors.version,
            cu_seqlens=micro.cu_tokens,
            normalizer=normalizer,
            config=self.options,
        )


def _op_config(config: LossConfig) -> ops.PPOLossConfig:
    """The op's part of the configuration; without behaviour weights their default bound is dropped."""
    names = [field.name for field in fields(ops.PPOLossConfig)]
    options = {name: value for name, value in asdict(config).items() if name in names}
    return ops.PPOLossConfig(**options | ({} if config.decoupled else {"behavior_cap": None}))
