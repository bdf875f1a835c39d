"""The trainer: turns a batch of groups into optimizer steps on the policy.

One step, in order:

1. pack      usable samples as flat arrays; advantages; which samples train (groups with equal rewards do not);
2. split     k mini-batches of whole groups, each cut into packed micro-batches under a token cap;
3. proximal  logprobs of mini-batches 2..k under the weights before the step, without gradient;
4. update    per mini-batch: forward and backward of every micro-batch, clip, AdamW.

The loss of a mini-batch is a mean over its live tokens, whatever micro-batches it was cut into. Three kinds of
proximal logprobs are not computed because they are known already: mini-batch 1 still runs under the weights before the
step, so its own logprobs serve, detached; naive and uncorrected objectives need none; and a response all of whose
tokens come from the current version was sampled by this very policy, so its behaviour logprobs serve as long as they
are those of the full distribution (top_p = 1, top_k = 0). Generator and trainer compute these with different kernels
and agree to about 1e-5, which makes such a ratio 1 within 1e-5.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_core import ops
from areal_core.model import PackedDecoder
from areal_core.rl.batch import Batch, Ints, Microbatch, build_batch, cut_microbatches, split_minibatches
from areal_core.rl.config import Config, LossConfig
from areal_core.rl.data import Group
from areal_core.rl.train_metrics import data_metrics, loss_metrics, update_metrics

__all__ = ["Trainer"]


class Tracer(Protocol):
    """What records spans."""

    def span(self, name: str, track: str = ...) -> AbstractContextManager[None]:
        """Record the time the body takes."""
        ...


class Trainer:
    """Takes optimizer steps on `model`, one batch of groups at a time.

    Args:
        model: the policy, changed in place.
        config: the run; reads seed, rollout, generate (how samples were drawn), advantage, loss and train.
        tracer: receives the spans of each step on the track "trainer"; None: nobody does.
    """

    def __init__(self, model: PackedDecoder, config: Config, tracer: Tracer | None = None) -> None:
        train, generate = config.train, config.generate
        self.model = model
        self.config = config
        self.steps_done = 0
        self._tracer = tracer
        self._loss_config = _loss_config(config.loss)
        self._behavior_is_exact = generate.top_p == 1 and generate.top_k == 0
        self._optimizer = torch.optim.AdamW(
            model.parameters(), train.learning_rate, betas=train.betas, weight_decay=train.weight_decay, fused=True
        )

    def step(self, groups: Sequence[Group], version: int) -> tuple[dict[str, Any], dict[tuple[int, int], float]]:
        """Train on a batch.

        Args:
            groups: the batch; failed samples (NaN reward) are left out, their siblings used.
            version: the version of the weights before the step; ages are counted from it.

        Returns:
            metrics by name, and the advantage of each usable sample by (group_id, sample_index).

        Deterministic: equal weights, state and batch give equal bits for a fixed number of threads. A mini-batch whose
        gradient is not finite leaves the weights alone and is counted.

        Raises:
            ValueError: a group whose samples have different prompts, a sample longer than
                train.max_tokens_per_microbatch.
        """
        clock = _Clock(self._tracer)
        with clock.time("pack"):
            batch = build_batch(groups, version, self.config.rollout)
            advantages = self._advantages(batch)
            parts = self._split(batch)
            tensors = _BatchTensors(batch, advantages, self.model.weights.device)
        if self.config.loss.objective == "decoupled":
            with clock.time("proximal"):
                self._recompute_proximal(batch, parts[1:], tensors)
        rate = self._learning_rate()
        stats: list[ops.PPOLossStats] = []
        norms: list[float] = []
        for index, part in enumerate(parts):
            with clock.time("pack"):
                microbatches = self._cut(batch, part)
            with clock.time("forward_backward"):
                stats += self._backward(microbatches, tensors, at_proximal=index == 0)
            with clock.time("optimizer"):
                norms.append(self._update(rate))
        self.steps_done += 1
        metrics = data_metrics(groups, batch) | loss_metrics(stats) | update_metrics(norms, rate) | clock.metrics()
        return metrics, dict(zip(batch.keys, advantages[batch.response_bounds[:-1]].tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the weights. (Mini-batches are drawn from seed and step alone.)"""
        return {"optimizer": self._optimizer.state_dict(), "steps_done": self.steps_done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave; betas and weight decay stay those of the configuration."""
        self._optimizer.load_state_dict(state["optimizer"])
        train = self.config.train
        self._optimizer.param_groups[0].update(betas=train.betas, weight_decay=train.weight_decay)
        self.steps_done = int(state["steps_done"])

    def _advantages(self, batch: Batch) -> npt.NDArray[np.float32]:
        """float32 [N]; of withheld tokens too, which are kept out of the loss later."""
        if not batch.samples:
            return np.zeros(0, dtype=np.float32)
        config = self.config.advantage
        advantages = ops.compute_advantages(
            config.name,
            rewards=torch.from_numpy(batch.rewards),
            cu_seqlens=torch.from_numpy(batch.response_bounds),
            group_ids=torch.from_numpy(batch.group_of),
            **config.options,
        )
        return np.asarray(advantages.float().numpy())

    def _split(self, batch: Batch) -> list[Ints]:
        """Mini-batches of the samples that train: those with a live token, in a group that teaches something."""
        if not batch.samples:
            return []
        trains = np.logical_or.reduceat(batch.live, batch.response_bounds[:-1])
        if self.config.advantage.drop_zero_variance:
            trains &= ~batch.zero_variance[batch.group_of]
        rng = np.random.default_rng((self.config.seed, self.steps_done))
        return split_minibatches(batch, np.flatnonzero(trains), self.config.train.minibatches, rng)

    def _cut(self, batch: Batch, samples: Ints) -> list[Microbatch]:
        return cut_microbatches(batch, samples, self.config.train.max_tokens_per_microbatch, self.model.weights.device)

    @torch.no_grad()
    def _recompute_proximal(self, batch: Batch, parts: Sequence[Ints], tensors: _BatchTensors) -> None:
        """Replace behaviour logprobs in `tensors.proximal` by the policy's, wherever these differ."""
        samples = np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)
        if self._behavior_is_exact:
            samples = samples[~batch.current[samples]]
        for micro in self._cut(batch, samples):
            tensors.proximal[micro.tokens] = self._logprobs(micro, tensors).logprobs

    def _logprobs(self, micro: Microbatch, tensors: _BatchTensors) -> ops.LogprobOutput:
        logits = self.model(micro.input_ids, micro.cu_seqlens, cu_groups=micro.cu_groups, rows=micro.rows)
        labels = tensors.labels[micro.tokens]
        return ops.logprob_from_logits(
            logits, labels, temperature=self.config.generate.temperature, inplace_backward=True
        )

    def _backward(
        self, microbatches: Sequence[Microbatch], tensors: _BatchTensors, *, at_proximal: bool
    ) -> list[ops.PPOLossStats]:
        """Accumulate the gradient of one mini-batch; `at_proximal`: the weights are still those before the step."""
        objective = self.config.loss.objective
        normalizer = float(sum(len(micro.tokens) for micro in microbatches))
        stats = []
        for micro in microbatches:
            logprobs, entropy, _ = self._logprobs(micro, tensors)
            behavior, proximal = tensors.behavior[micro.tokens], tensors.proximal[micro.tokens]
            if objective == "uncorrected" or (objective == "decoupled" and at_proximal):
                proximal = logprobs.detach()
            output = ops.ppo_loss(
                logprobs,
                proximal,
                tensors.advantages[micro.tokens],
                torch.ones_like(micro.tokens, dtype=torch.bool),
                behavior_logprobs=behavior if objective == "decoupled" else None,
                entropy=entropy if self._loss_config.entropy_coef else entropy.detach(),
                normalizer=normalizer,
                config=self._loss_config,
            )
            torch.autograd.backward(output.loss)
            stats.append(output.stats)
        return stats

    def _learning_rate(self) -> float:
        warmup = self.config.train.lr_warmup_steps
        return self.config.train.learning_rate * min(1.0, (self.steps_done + 1) / max(warmup, 1))

    def _update(self, rate: float) -> float:
        """Clip, step and clear the gradient; return its norm before clipping."""
        gradient = self.model.weights.grad
        assert gradient is not None
        norm = float(torch.linalg.vector_norm(gradient))
        if math.isfinite(norm):
            gradient.mul_(min(1.0, self.config.train.grad_clip / max(norm, 1e-12)))
            self._optimizer.param_groups[0]["lr"] = rate
            self._optimizer.step()
        self._optimizer.zero_grad()
        return norm


class _BatchTensors:
    """The per-token arrays of a batch as tensors [N] on the model's device."""

    def __init__(self, batch: Batch, advantages: npt.NDArray[np.float32], device: torch.device) -> None:
        self.labels: Tensor = torch.from_numpy(batch.response_ids).to(device)
        self.behavior: Tensor = torch.from_numpy(batch.logprobs).to(device)
        self.proximal: Tensor = self.behavior.clone()
        self.advantages: Tensor = torch.from_numpy(advantages).to(device)


class _Clock:
    """Adds up the seconds of each phase, and records each as a span."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer
        self._seconds = dict.fromkeys(("pack", "proximal", "forward_backward", "optimizer"), 0.0)

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._tracer.span(phase, "trainer") if self._tracer is not None else nullcontext():
            yield
        self._seconds[phase] += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"time/{phase}_s": seconds for phase, seconds in self._seconds.items()}


def _loss_config(config: LossConfig) -> ops.PPOLossConfig:
    """The op's configuration; behaviour weights exist in the decoupled objective alone."""
    weighted = config.objective == "decoupled"
    return ops.PPOLossConfig(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        behavior_cap=config.behavior_cap if weighted else None,
        behavior_mode=config.behavior_mode if weighted else "truncate",
        entropy_coef=config.entropy_coef,
    )
