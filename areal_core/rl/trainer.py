"""The trainer: turns a batch of groups into optimizer steps on the policy.

One step, in order:

1. pack      usable samples as flat arrays; which samples train (groups that would get no advantage do not);
2. split     k mini-batches of whole groups, each cut into packed micro-batches under a token cap;
3. proximal  logprobs under the weights before the step, without gradient; likewise reference, teacher and critic;
4. credit    an advantage for every token;
5. update    per mini-batch: forward and backward of every micro-batch, clip, AdamW; the same for a critic.

The loss of a mini-batch is normalised over the mini-batch, whatever micro-batches it was cut into. Three kinds of
proximal logprobs are not computed because they are known already: mini-batch 1 still runs under the weights before the
step, so its own logprobs serve, detached; loglinear and behavior proximal logprobs need none; and a response all of
whose tokens come from the current version was sampled by this very policy, so its behaviour logprobs serve as long as
they are those of the full distribution (top_p = 1, top_k = 0). Generator and trainer compute these with different
kernels and agree to about 1e-5, which makes such a ratio 1 within 1e-5.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from areal_core import ops
from areal_core.model import PackedDecoder
from areal_core.rl.batch import Batch, Ints, Microbatch, build_batch, cut_microbatches, split_minibatches
from areal_core.rl.config import Config
from areal_core.rl.credit import CreditAssigner, mean_advantages
from areal_core.rl.critic import Critic
from areal_core.rl.data import Group
from areal_core.rl.policy_loss import BatchTensors, PolicyLoss
from areal_core.rl.train_metrics import data_metrics, loss_metrics, mean_metrics, update_metrics

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
        config: the run; reads seed, rollout, generate (how samples were drawn), advantage, loss, critic and train.
        tracer: receives the spans of each step on the track "trainer"; None: nobody does.
        reference: the policy of KL penalties; needed when one is set (`Config.needs_reference`).
        teacher: the policy to distill from; needed with loss.distill_coef.
    """

    def __init__(
        self,
        model: PackedDecoder,
        config: Config,
        tracer: Tracer | None = None,
        *,
        reference: PackedDecoder | None = None,
        teacher: PackedDecoder | None = None,
    ) -> None:
        train, generate = config.train, config.generate
        self.model = model
        self.config = config
        self.steps_done = 0
        self._tracer = tracer
        self._reference = reference
        self._teacher = teacher
        self._critic = Critic(model, config.critic, train) if config.needs_critic else None
        self._credit = CreditAssigner(config)
        self._policy_loss = PolicyLoss(config)
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
            metrics by name, and the mean advantage of each usable sample by (group_id, sample_index).

        Deterministic: equal weights, state and batch give equal bits for a fixed number of threads. A mini-batch whose
        gradient is not finite leaves the weights alone and is counted.

        Raises:
            ValueError: a group whose samples have different prompts, a sample longer than
                train.max_tokens_per_microbatch.
        """
        clock = _Clock(self._tracer)
        with clock.time("pack"):
            batch = build_batch(groups, version, self.config.rollout)
            samples = _with_live_tokens(batch)
            parts = self._split(batch, samples)
            tensors = BatchTensors(batch, self.model.weights.device)
        with clock.time("proximal"):
            self._score(batch, samples, parts, tensors)
        with clock.time("pack"):
            self._assign(batch, tensors)
        rate = self._learning_rate()
        stats: list[ops.PPOLossStats] = []
        norms: list[float] = []
        critic: list[dict[str, float]] = []
        for index, part in enumerate(parts):
            with clock.time("pack"):
                microbatches = self._cut(batch, part)
            if self._critic is not None:
                with clock.time("critic"):
                    critic.append(self._critic.update(microbatches, tensors.values, tensors.returns))
            if self.steps_done < self.config.policy_starts_at:
                continue
            with clock.time("forward_backward"):
                stats += self._backward(microbatches, tensors, at_proximal=index == 0)
            with clock.time("optimizer"):
                norms.append(self._update(rate))
        self.steps_done += 1
        metrics = data_metrics(groups, batch) | loss_metrics(stats) | update_metrics(norms, rate) | clock.metrics()
        metrics |= mean_metrics(critic) | self._credit.metrics
        return metrics, dict(zip(batch.keys, mean_advantages(batch, tensors.advantages.cpu()), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the weights. (Mini-batches are drawn from seed and step alone.)"""
        state: dict[str, Any] = {
            "optimizer": self._optimizer.state_dict(),
            "steps_done": self.steps_done,
            "credit": self._credit.state_dict(),
        }
        return state if self._critic is None else state | {"critic": self._critic.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave; betas and weight decay stay those of the configuration.

        A run resumed with an estimator that needs a critic, from a checkpoint without one, starts a new critic.
        """
        self._optimizer.load_state_dict(state["optimizer"])
        train = self.config.train
        self._optimizer.param_groups[0].update(betas=train.betas, weight_decay=train.weight_decay)
        self.steps_done = int(state["steps_done"])
        self._credit.load_state_dict(state.get("credit", {}))
        if self._critic is not None and "critic" in state:
            self._critic.load_state_dict(state["critic"])

    def _split(self, batch: Batch, samples: Ints) -> list[Ints]:
        """Mini-batches of the samples that train: those in a group that teaches something."""
        if self._credit.drops_zero_variance:
            samples = samples[~batch.zero_variance[batch.group_of[samples]]]
        rng = np.random.default_rng((self.config.seed, self.steps_done))
        return split_minibatches(batch, samples, self.config.train.minibatches, rng)

    def _cut(self, batch: Batch, samples: Ints) -> list[Microbatch]:
        return cut_microbatches(batch, samples, self.config.train.max_tokens_per_microbatch, self.model.weights.device)

    def _score(self, batch: Batch, samples: Ints, parts: Sequence[Ints], tensors: BatchTensors) -> None:
        """What other models, and this one before the step, say of every token that needs it."""
        config = self.config
        if config.loss.proximal == "recompute":
            stale = samples if config.needs_all_proximal else _union(parts[1:])
            if self._behavior_is_exact:
                stale = stale[~batch.current[stale]]
            self._fill(tensors.proximal, batch, stale, partial(self._logprobs, self.model, tensors))
        for model, target in ((self._reference, tensors.reference), (self._teacher, tensors.teacher)):
            if model is not None:
                self._fill(target, batch, samples, partial(self._logprobs, model, tensors))
        if self._critic is not None:
            self._fill(tensors.values, batch, samples, self._critic.values)
        if config.loss.m2po_threshold is not None:
            live = torch.from_numpy(batch.live).to(tensors.device)
            tensors.keep = ops.m2po_mask(tensors.proximal, tensors.behavior, live, threshold=config.loss.m2po_threshold)

    @torch.no_grad()
    def _fill(self, target: Tensor, batch: Batch, samples: Ints, function: Callable[[Microbatch], Tensor]) -> None:
        for micro in self._cut(batch, samples):
            target[micro.tokens] = function(micro)

    def _assign(self, batch: Batch, tensors: BatchTensors) -> None:
        advantages, plain = self._credit.assign(
            batch,
            logprobs=tensors.proximal if self.config.needs_policy_logprobs else None,
            ref_logprobs=tensors.reference if self.config.needs_policy_logprobs else None,
            values=tensors.values if self._critic is not None else None,
        )
        tensors.advantages = advantages.to(tensors.device)
        tensors.returns = plain.to(tensors.device) + tensors.values

    def _logprobs(self, model: PackedDecoder, tensors: BatchTensors, micro: Microbatch) -> Tensor:
        return self._outputs(model, tensors, micro).logprobs

    def _outputs(self, model: PackedDecoder, tensors: BatchTensors, micro: Microbatch) -> ops.LogprobOutput:
        logits = model(micro.input_ids, micro.cu_seqlens, cu_groups=micro.cu_groups, rows=micro.rows)
        labels = tensors.labels[micro.tokens]
        return ops.logprob_from_logits(
            logits, labels, temperature=self.config.generate.temperature, inplace_backward=True
        )

    def _backward(
        self, microbatches: Sequence[Microbatch], tensors: BatchTensors, *, at_proximal: bool
    ) -> list[ops.PPOLossStats]:
        """Accumulate the gradient of one mini-batch; `at_proximal`: the weights are still those before the step."""
        normalizer = self._policy_loss.normalizer(microbatches)
        stats = []
        for micro in microbatches:
            outputs = self._outputs(self.model, tensors, micro)
            output = self._policy_loss(outputs, micro, tensors, normalizer=normalizer, at_proximal=at_proximal)
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


def _with_live_tokens(batch: Batch) -> Ints:
    """Samples with a token that the loss falls on."""
    if not batch.samples:
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(np.logical_or.reduceat(batch.live, batch.response_bounds[:-1]))


def _union(parts: Sequence[Ints]) -> Ints:
    return np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)


class _Clock:
    """Adds up the seconds of each phase, and records each as a span."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer
        self._seconds = dict.fromkeys(("pack", "proximal", "critic", "forward_backward", "optimizer"), 0.0)

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._tracer.span(phase, "trainer") if self._tracer is not None else nullcontext():
            yield
        self._seconds[phase] += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"time/{phase}_s": seconds for phase, seconds in self._seconds.items()}
