"""What bench_integrations.py times: functions of frameworks, called as their trainers call them.

A work is a name, the seams that it goes through, and a function of the sizes that imports the framework, makes inputs
and returns a callable without arguments. The same callable runs unpatched and patched.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Any]


@dataclass(frozen=True)
class Work:
    """One function of a framework. `kind` "bins": groups of indices, compared by what they hold."""

    name: str
    seams: tuple[str, ...]
    make: Callable[[Sizes], Run]
    kind: str = "tensors"


class Sizes:
    """Inputs of the sizes that were asked for, the same for every framework."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        generator = torch.Generator().manual_seed(args.seed)
        self.draw = lambda *shape: torch.randn(*shape, generator=generator)
        self.whole = lambda high, *shape: torch.randint(high, shape, generator=generator)

    def logits(self) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and labels [T]."""
        tokens, vocab = self.args.tokens, self.args.vocab
        return (3 * self.draw(tokens, vocab)).to(getattr(torch, self.args.dtype)), self.whole(vocab, tokens)

    def policy(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Logprobs, those before the update, those of the generator, advantages, mask: [S, L], two thirds live."""
        shape = (self.args.sequences, self.args.length)
        old = -self.draw(*shape).abs()
        mask = torch.arange(self.args.length) < self.lengths(self.args.sequences)[:, None]
        return old + 0.1 * self.draw(*shape), old, old + 0.05 * self.draw(*shape), self.draw(*shape), mask

    def lengths(self, count: int) -> Tensor:
        """Between a third and all of the padded length."""
        return self.args.length // 3 + self.whole(self.args.length * 2 // 3, count) + 1

    def many_lengths(self) -> tuple[list[int], int]:
        """Lengths of a large batch, with a long tail, and the tokens of a bin."""
        lengths = (self.draw(self.args.lengths).exp() * self.args.cap / 24).long().clamp(1, self.args.cap)
        return lengths.tolist(), self.args.cap


def backward(leaf: Tensor, function: Callable[[Tensor], Any]) -> Any:
    """Results and the gradient of their sum."""
    leaf = leaf.detach().requires_grad_()
    outputs = function(leaf)
    heads = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x.requires_grad]
    (gradient,) = torch.autograd.grad(heads, leaf, [torch.ones_like(x) for x in heads])
    return tuple(x.detach() for x in heads), gradient


def scoring(module: str, name: str, *more: Any, leading: bool = False) -> Callable[[Sizes], Run]:
    """Log-probabilities of a function (logits, labels, ...) with their gradient; `leading`: with a batch dimension."""

    def make(sizes: Sizes) -> Run:
        functions = import_module(module)
        logits, labels = sizes.logits()
        if leading:
            logits, labels = logits[None], labels[None]
        return lambda: backward(logits, lambda leaf: getattr(functions, name)(leaf, labels, *more))

    return make


# --- AReaL ------------------------------------------------------------------------------------------------------------


def areal_loss(sizes: Sizes) -> Run:
    functional = import_module("areal.utils.functional")
    config = import_module("areal.api.cli_args").RejectionSamplingConfig(
        level="token", action="clamp", metric="ratio", upper=2.0
    )
    logprobs, proximal, behavior, advantages, mask = sizes.policy()
    return lambda: backward(
        logprobs,
        lambda leaf: functional.ppo_actor_loss_fn(
            leaf, proximal, behavior, advantages, 0.2, mask, c_clip=3.0, rejection_sampling=config
        )[0],
    )


def areal_value_loss(sizes: Sizes) -> Run:
    functional = import_module("areal.utils.functional")
    values, old, _, returns, mask = sizes.policy()
    return lambda: backward(values, lambda leaf: functional.ppo_critic_loss_fn(leaf, old, returns, 0.2, mask)[0])


def areal_advantages(sizes: Sizes) -> Run:
    actor, options = import_module("areal.trainer.ppo.actor"), import_module("areal.api.cli_args")
    norm = options.NormConfig(mean_level="batch", std_level="batch")
    config = options.PPOActorConfig(
        experiment_name="bench", trial_name="bench", discount=0.99, gae_lambda=0.95, kl_ctl=0.05, adv_norm=norm
    )
    learner = actor.PPOActor(config, engine=None)
    logprobs, proximal, reference, values, mask = sizes.policy()
    batch = {
        "input_ids": mask.long(),
        "attention_mask": mask,
        "loss_mask": mask & (torch.arange(mask.shape[1]) > 8),
        "logprobs": logprobs,
        "prox_logp": proximal,
        "values": values,
        "rewards": sizes.draw(len(mask)),
    }

    def run() -> Tensor:
        inputs = {**batch, "ref_logp": reference.clone()}  # what the function changes
        result = learner._compute_advantages(inputs)
        return torch.where(result["loss_mask"].bool(), result["advantages"], 0.0)

    return run


def areal_pack(sizes: Sizes) -> Run:
    data = import_module("areal.utils.data")
    *tensors, mask = sizes.policy()
    batch = {str(i): x for i, x in enumerate(tensors)} | {"input_ids": mask.long(), "attention_mask": mask}
    return lambda: {k: v for k, v in data.pack_tensor_dict(batch).items() if isinstance(v, Tensor)}


def areal_allocate(name: str) -> Callable[[Sizes], Run]:
    def make(sizes: Sizes) -> Run:
        seqpack = import_module("areal.utils.seqpack")
        lengths, cap = sizes.many_lengths()
        return lambda: getattr(seqpack, name)(lengths, cap, 1)

    return make


# --- slime, NeMo-RL, prime-rl -----------------------------------------------------------------------------------------


def scan(module: str, name: str) -> Callable[[Sizes], Run]:
    """GAE of a function (rewards, values, gamma, lambda) over rows in which every token counts."""

    def make(sizes: Sizes) -> Run:
        functions = import_module(module)
        rewards, values = (sizes.draw(sizes.args.sequences, sizes.args.length) for _ in range(2))
        return lambda: getattr(functions, name)(rewards, values, 0.99, 0.95)

    return make


def slime_bins(sizes: Sizes) -> Run:
    balancing = import_module("slime.utils.seqlen_balancing")
    lengths, cap = sizes.many_lengths()
    return lambda: balancing.first_fit_pack(lengths, cap)


def partitions(module: str) -> Callable[[Sizes], Run]:
    def make(sizes: Sizes) -> Run:
        balancing = import_module(module)
        lengths, _ = sizes.many_lengths()
        ranks = max(2, len(lengths) // 64)
        return lambda: balancing.get_seqlen_balanced_partitions(lengths, ranks, False)

    return make


def nemo_logprob(sizes: Sizes) -> Run:
    utils = import_module("nemo_rl.distributed.model_utils")
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    logits, labels = sizes.logits()
    bounds = (0, logits.shape[-1])
    return lambda: backward(
        logits[None], lambda leaf: utils.ChunkedDistributedLogprob.apply(leaf, labels[None], *bounds, 1024, None, False)
    )


def nemo_gae(sizes: Sizes) -> Run:
    estimators = import_module("nemo_rl.algorithms.advantage_estimator")
    rewards, values, _, _, mask = sizes.policy()
    me, live = SimpleNamespace(gae_lambda=0.95, gae_gamma=0.99), mask.float()
    function = estimators.GeneralizedAdvantageEstimator
    return lambda: tuple(x * live for x in function._compute_gae(me, rewards, values, live))


def nemo_bins(sizes: Sizes) -> Run:
    packing = import_module("nemo_rl.data.packing.algorithms")
    lengths, cap = sizes.many_lengths()
    packer = packing.get_packer("modified_first_fit_decreasing", cap)
    return lambda: packer.pack(lengths)


def prime_loss(sizes: Sizes) -> Run:
    losses, configs = import_module("prime_rl.trainer.rl.loss"), import_module("prime_rl.configs.trainer")
    config = configs.DefaultLossConfig()
    logprobs, sampler, _, advantages, mask = (x.reshape(-1) for x in sizes.policy())
    return lambda: backward(
        logprobs,
        lambda leaf: losses.default_loss_fn(losses.LossInputs(leaf, sampler, None, advantages, mask), config).loss,
    )


# --- verl, OpenRLHF ---------------------------------------------------------------------------------------------------


def verl_loss(sizes: Sizes) -> Run:
    algos, workers = import_module("verl.trainer.ppo.core_algos"), import_module("verl.workers.config")
    config = workers.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.28, clip_ratio_c=3.0
    )
    logprobs, old, _, advantages, mask = sizes.policy()
    live = mask.float()
    return lambda: backward(
        logprobs,
        lambda leaf: algos.compute_policy_loss_vanilla(old, leaf, advantages, live, "token-mean", config)[0],
    )


def verl_gae(sizes: Sizes) -> Run:
    algos = import_module("verl.trainer.ppo.core_algos")
    rewards, values, _, _, mask = sizes.policy()
    live = mask.float()
    return lambda: algos.compute_gae_advantage_return(rewards, values, live, 0.99, 0.95)[0] * live


def openrlhf_loss(sizes: Sizes) -> Run:
    loss = import_module("openrlhf.models.loss").PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.28, dual_clip=3.0)
    logprobs, old, _, advantages, mask = sizes.policy()
    live = mask.float()
    return lambda: backward(logprobs, lambda leaf: loss(leaf, old, advantages, action_mask=live)[0])


_SLIME, _PRIME = "slime.utils.ppo_utils", "prime_rl.trainer.rl.loss"
WORKS: dict[str, tuple[Work, ...]] = {
    "areal": (
        Work(
            "logprob and entropy",
            ("gather_logprobs_entropy",),
            scoring("areal.utils.functional", "gather_logprobs_entropy"),
        ),
        Work("policy loss", ("ppo_actor_loss_fn",), areal_loss),
        Work("value loss", ("ppo_critic_loss_fn",), areal_value_loss),
        Work("advantages", ("compute_advantages",), areal_advantages),
        Work("pack", ("pack_tensor_dict",), areal_pack),
        Work("bins (FFD)", ("ffd_allocate",), areal_allocate("ffd_allocate"), "bins"),
    ),
    "slime": (
        Work(
            "logprob and entropy",
            ("calculate_log_probs_and_entropy",),
            scoring(_SLIME, "calculate_log_probs_and_entropy", None, True),
        ),
        Work("GAE (chunked)", ("chunked_gae", "chunked_discounted_returns"), scan(_SLIME, "chunked_gae")),
        Work("GAE (serial)", ("vanilla_gae",), scan(_SLIME, "vanilla_gae")),
        Work("bins (first fit)", ("first_fit_pack",), slime_bins, "bins"),
        Work(
            "partitions",
            ("get_seqlen_balanced_partitions",),
            partitions("slime.utils.seqlen_balancing"),
            "bins",
        ),
    ),
    "nemo_rl": (
        Work("logprob", ("ChunkedDistributedLogprob",), nemo_logprob),
        Work("GAE", ("GeneralizedAdvantageEstimator",), nemo_gae),
        Work("bins (MFFD)", ("ModifiedFirstFitDecreasingPacker",), nemo_bins, "bins"),
    ),
    "prime_rl": (
        Work("logprob", ("selective_log_softmax",), scoring(_PRIME, "selective_log_softmax", leading=True)),
        Work("policy loss", ("default_loss_fn",), prime_loss),
    ),
    "trl": (
        Work(
            "logprob",
            ("selective_log_softmax",),
            scoring("trl.trainer.utils", "selective_log_softmax", leading=True),
        ),
    ),
    "verl": (
        Work("logprob", (), scoring("verl.utils.torch_functional", "logprobs_from_logits")),
        Work("policy loss", (), verl_loss),
        Work("GAE", (), verl_gae),
        Work("partitions", (), partitions("verl.utils.seqlen_balancing"), "bins"),
    ),
    "openrlhf": (
        Work("logprob", ("logprobs",), scoring("openrlhf.models.utils", "log_probs_from_logits", leading=True)),
        Work("policy loss", ("policy_loss",), openrlhf_loss),
        Work("partitions", ("karmarkar_karp",), partitions("openrlhf.utils.seqlen_balancing"), "bins"),
    ),
}
