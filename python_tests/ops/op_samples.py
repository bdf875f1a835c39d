"""One list of sample calls of the public ops. It drives every test that holds for all of them: torch.library.opcheck of
the native ops they reach, torch.compile, torch.func, autocast, CUDA graphs, absence of synchronisation, error messages.

A new public function needs a sample here (test_torch_ops.py names those without), and that is all it needs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal_core import ops

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """A call `ops.<name>(**make(size))`; the number of tokens and sequences grows with `size` >= 1.

    make: keyword arguments on the CPU, the same for the same size.
    gradients: arguments that the result is differentiable in.
    traceable: whether torch.compile takes it into one graph. It then runs without synchronisation, and in a CUDA graph.
    """

    name: str
    case: str
    make: Callable[[int], Arguments]
    gradients: tuple[str, ...] = ()
    traceable: bool = True

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(ops, self.name)

    def __str__(self) -> str:
        return f"{self.name}-{self.case}" if self.case else self.name


def _random(size: int) -> torch.Generator:
    return torch.Generator().manual_seed(size)


def lengths(size: int) -> list[int]:
    """Sequences of unequal length, one of them empty."""
    return [5 * size, 0, 3, 2 * size + 2]


def cu_seqlens(size: int) -> Tensor:
    return torch.tensor([0, *lengths(size)]).cumsum(0)


def per_token(size: int, *names: str, scale: float = 1.0) -> dict[str, Tensor]:
    generator, tokens = _random(size), sum(lengths(size))
    return {name: scale * torch.randn(tokens, generator=generator) for name in names}


def loss_mask(size: int) -> Tensor:
    mask = torch.rand(sum(lengths(size)), generator=_random(size)) < 0.7
    mask[:2] = torch.tensor([True, False])
    return mask


def logits_and_labels(size: int) -> Arguments:
    generator, tokens, vocab = _random(size), sum(lengths(size)), 37
    labels = torch.randint(vocab, (tokens,), generator=generator)
    return {"logits": torch.randn(tokens, vocab, generator=generator), "labels": labels}


def logprob_options(size: int) -> Arguments:
    given = logits_and_labels(size)
    given["labels"][3] = -1
    temperature = torch.rand(len(given["labels"]), generator=_random(size)) + 0.5
    return {**given, "temperature": temperature, "loss_mask": loss_mask(size), "ignore_index": -1}


def linear_head(size: int) -> Arguments:
    generator, given = _random(size), logits_and_labels(size)
    hidden, weight = (torch.randn(rows, 8, generator=generator) for rows in given["logits"].shape)
    return {"hidden": hidden, "weight": weight, "labels": given["labels"], "loss_mask": loss_mask(size)}


def linear_ppo_batch(size: int) -> Arguments:
    rows = per_token(size, "proximal_logprobs", "advantages", "behavior_logprobs", scale=0.3)
    return {**linear_head(size), **rows, "config": ops.PPOLossConfig(entropy_coef=0.1)}


def logits_ppo_batch(size: int) -> Arguments:
    rows = per_token(size, "proximal_logprobs", "advantages", "behavior_logprobs", scale=0.3)
    return {**logits_and_labels(size), **rows, "loss_mask": loss_mask(size)}


def ppo_batch(size: int) -> Arguments:
    return {**per_token(size, "logprobs", "proximal_logprobs", "advantages", scale=0.3), "loss_mask": loss_mask(size)}


def full_ppo_batch(size: int) -> Arguments:
    names = ("logprobs", "proximal_logprobs", "advantages", "behavior_logprobs", "ref_logprobs", "entropy")
    config = ops.PPOLossConfig(
        clip_high=0.28,
        dual_clip=1.5,
        behavior_low=0.8,
        behavior_cap=1.2,
        behavior_mode="icepop",
        kl_coef=0.1,
        entropy_coef=0.01,
    )
    extra = {"loss_mask": loss_mask(size), "normalizer": torch.tensor(7.0), "cu_seqlens": cu_seqlens(size)}
    return {**per_token(size, *names, scale=0.3), **extra, "config": config}


def sequence_ppo_batch(size: int) -> Arguments:
    config = ops.PPOLossConfig.preset("gspo", behavior_level="geometric", distill_coef=0.1, entropy_coef=0.01)
    versions = torch.arange(sum(lengths(size))) % 5
    extra = {"keep_mask": ~loss_mask(size), "versions": versions, "current_version": torch.tensor(6)}
    return {**full_ppo_batch(size), **per_token(size, "teacher_logprobs", scale=0.3), **extra, "config": config}


def value_batch(size: int) -> Arguments:
    return {**per_token(size, "values", "old_values", "returns"), "loss_mask": loss_mask(size)}


def stale_tokens(size: int) -> Arguments:
    versions = torch.arange(sum(lengths(size))) % 5 - 1
    logprobs = per_token(size, "behavior_logprobs", "logprobs", scale=0.3)
    return {**logprobs, "versions": versions, "current_version": torch.tensor(3)}


def scan(size: int) -> Arguments:
    return {**per_token(size, "rewards", "values"), "cu_seqlens": cu_seqlens(size), "gamma": 0.9, "lam": 0.8}


def advantages(name: str, *inputs: str, **options: Any) -> Callable[[int], Arguments]:
    """`inputs` names what the estimator takes besides rewards: "kl", "group_ids", "values", "greedy_rewards"."""

    def make(size: int) -> Arguments:
        given = {
            "name": name,
            "rewards": torch.tensor([1.0, 0.0, 0.5, 2.0]),
            "cu_seqlens": cu_seqlens(size),
            "loss_mask": loss_mask(size),
            **options,
        }
        optional = {
            "kl": {**per_token(size, "logprobs", "ref_logprobs"), "beta": 0.1},
            "group_ids": {"group_ids": torch.tensor([4, 1, 4, 4])},
            "values": per_token(size, "values"),
            "greedy_rewards": {"greedy_rewards": torch.tensor([0.5, 0.5, 0.0, 1.0])},
        }
        return given | {key: value for name in inputs for key, value in optional[name].items()}

    return make


def groups(size: int) -> Arguments:
    return {"rewards": torch.tensor([1.0, 0.0, 0.5, 2.0] * size), "group_ids": torch.tensor([4, 1, 4, 4] * size)}


def shaped_rewards(size: int) -> Arguments:
    config = ops.RewardConfig(max_tokens=8, overlong_buffer=4, kl_coef=0.1, clip=(-1.0, 1.0))
    given = {"rewards": torch.tensor([1.0, 0.0, 0.5, 2.0]), "config": config, "cu_seqlens": cu_seqlens(size)}
    return {**given, **per_token(size, "logprobs", "ref_logprobs"), "loss_mask": loss_mask(size)}


def packed_batch(size: int) -> ops.PackedBatch:
    return ops.pack(padded_batch(size), lengths=lengths(size), multiple_of=8)


def padded_batch(size: int) -> dict[str, Tensor]:
    generator, shape = _random(size), (len(lengths(size)), max(lengths(size)))
    return {
        "ids": torch.randint(100, shape, generator=generator),
        "values": torch.randn(*shape, 2, generator=generator),
        "rewards": torch.randn(shape[0], generator=generator),
    }


def without_rewards(size: int) -> dict[str, Tensor]:
    return {name: torch.zeros_like(x) for name, x in padded_batch(size).items() if name != "rewards"}


def attention_mask(size: int) -> Tensor:
    return torch.arange(max(lengths(size))) < torch.tensor(lengths(size))[:, None]


def zigzag(size: int) -> tuple[Tensor, Tensor]:
    cu = torch.tensor([0, 4 * size, 4 * size, 12 * size])
    return torch.randn(12 * size, 3, generator=_random(size)), cu


BINS = [[2, 0], [1, 3]]

SAMPLES = [
    Sample("logprob_from_logits", "", logits_and_labels, ("logits",)),
    Sample("logprob_from_logits", "options", logprob_options, ("logits",)),
    Sample("logprob_from_logits", "inplace", lambda n: {**logits_and_labels(n), "inplace_backward": True}),
    Sample("linear_logprob", "", linear_head, ("hidden", "weight")),
    Sample(
        "linear_logprob", "bias", lambda n: {**linear_head(n), "bias": torch.ones(37)}, ("hidden", "weight", "bias")
    ),
    Sample("linear_ppo_loss", "", linear_ppo_batch, ("hidden", "weight")),
    Sample("ppo_loss_from_logits", "inplace", logits_ppo_batch),
    Sample("ppo_loss", "", ppo_batch, ("logprobs",)),
    Sample("ppo_loss", "all_options", full_ppo_batch, ("logprobs", "entropy")),
    Sample("ppo_loss", "by_sequence", sequence_ppo_batch, ("logprobs", "entropy")),
    Sample("value_loss", "", value_batch, ("values",)),
    Sample("value_loss", "bounded", lambda n: {**value_batch(n), "clip": 0.2, "huber_delta": 0.5}, ("values",)),
    Sample("interpolate_proximal", "", stale_tokens),
    Sample("interpolate_proximal", "linear", lambda n: {**stale_tokens(n), "method": "linear"}),
    Sample(
        "m2po_mask",
        "",
        lambda n: {
            **per_token(n, "proximal_logprobs", "behavior_logprobs", scale=0.3),
            "loss_mask": loss_mask(n),
            "threshold": 0.04,
        },
    ),
    Sample("gae", "", scan),
    Sample("gae", "masked", lambda n: {**scan(n), "loss_mask": loss_mask(n)}),
    Sample("discounted_returns", "", lambda n: {**per_token(n, "rewards"), "cu_seqlens": cu_seqlens(n), "gamma": 0.9}),
    Sample("masked_moments", "", lambda n: {**per_token(n, "numbers"), "loss_mask": loss_mask(n)}),
    Sample("whiten", "", lambda n: {**per_token(n, "numbers"), "loss_mask": loss_mask(n)}),
    Sample("scale_rewards", "", lambda n: {**per_token(n, "rewards"), "scaling": 0.5, "bias": 1.0}),
    Sample(
        "soft_overlong_penalty",
        "",
        lambda n: {"lengths": torch.tensor(lengths(n)), "max_tokens": 5 * n, "buffer_tokens": 4},
    ),
    Sample("kl_penalty", "", lambda n: {**per_token(n, "logprobs", "ref_logprobs"), "loss_mask": loss_mask(n)}),
    Sample("shape_rewards", "", shaped_rewards),
    Sample("filter_groups", "", lambda n: groups(n), traceable=False),
    Sample("turn_ends", "", lambda n: {"loss_mask": loss_mask(n), "cu_seqlens": cu_seqlens(n)}),
    Sample("compute_advantages", "pass_at_k", advantages("pass_at_k", "group_ids")),
    Sample("compute_advantages", "dr_grpo", advantages("dr_grpo", "group_ids")),
    Sample("compute_advantages", "grpo_original", advantages("grpo_original", "group_ids", "kl")),
    Sample("compute_advantages", "grpo_batch", advantages("grpo_r1", "group_ids", "kl", std_level="batch")),
    Sample("compute_advantages", "rloo", advantages("rloo", "group_ids", "kl")),
    Sample("compute_advantages", "reinforce_pp", advantages("reinforce_pp", "kl", gamma=0.9)),
    Sample("compute_advantages", "remax", advantages("remax", "greedy_rewards", "kl")),
    Sample("compute_advantages", "ppo", advantages("ppo", "values", "kl", lam=0.9)),
    Sample("compute_advantages", "gpg", advantages("gpg", "group_ids")),
    Sample(
        "next_token_labels",
        "",
        lambda n: {"input_ids": torch.arange(sum(lengths(n))), "cu_seqlens": cu_seqlens(n)},
    ),
    Sample("to_token_aligned", "", lambda n: {**per_token(n, "x"), "cu_seqlens": cu_seqlens(n), "fill": 1.5}, ("x",)),
    Sample("to_prediction_aligned", "", lambda n: {**per_token(n, "x"), "cu_seqlens": cu_seqlens(n)}, ("x",)),
    Sample(
        "to_prediction_aligned",
        "dict",
        lambda n: {"x": {**per_token(n, "x"), "mask": loss_mask(n)}, "cu_seqlens": cu_seqlens(n), "fill": {"x": 1.5}},
    ),
    Sample("position_ids", "", lambda n: {"cu_seqlens": cu_seqlens(n), "total_tokens": sum(lengths(n))}),
    Sample(
        "zigzag_split",
        "",
        lambda n: {"x": zigzag(n)[0], "cu_seqlens": zigzag(n)[1], "cp_size": 2, "cp_rank": 1},
        ("x",),
    ),
    Sample(
        "zigzag_merge",
        "",
        lambda n: {"parts": zigzag(n)[0].unflatten(0, (2, -1)), "cu_seqlens": zigzag(n)[1]},
        ("parts",),
    ),
    Sample("pack", "lengths", lambda n: {"batch": padded_batch(n), "lengths": lengths(n)}, traceable=False),
    Sample("pack", "mask", lambda n: {"batch": padded_batch(n), "attention_mask": attention_mask(n)}, traceable=False),
    Sample("unpack", "", lambda n: {"packed": packed_batch(n), "padding": "left"}, traceable=False),
    Sample("unpack", "out", lambda n: {"packed": packed_batch(n), "out": without_rewards(n)}, traceable=False),
    Sample("select_sequences", "", lambda n: {"packed": packed_batch(n), "indices": [3, 0]}, traceable=False),
    Sample(
        "merge_microbatches",
        "",
        lambda n: {"parts": [ops.select_sequences(packed_batch(n), b) for b in BINS], "bins": BINS},
        traceable=False,
    ),
    Sample("allocate_microbatches", "", lambda n: {"lengths": lengths(n), "max_tokens": 8 * n}, traceable=False),
    Sample("partition_balanced", "", lambda n: {"lengths": lengths(n), "k": 2}, traceable=False),
]
TRACEABLE = [sample for sample in SAMPLES if sample.traceable]
DIFFERENTIABLE = [sample for sample in SAMPLES if sample.gradients]


def map_tensors(tree: Any, fn: Callable[[Tensor], Any]) -> Any:
    """The same structure with fn applied to its tensors."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, fn) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, fn) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(value, fn) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return type(tree)(**{f.name: map_tensors(getattr(tree, f.name), fn) for f in fields(tree)})
    return tree


def on_device(tree: Any, device: torch.device | str) -> Any:
    """The same arguments there, but for the lengths of packed batches, which live on the host."""
    if isinstance(tree, dict):
        return {key: on_device(value, device) for key, value in tree.items()}
    if isinstance(tree, list):
        return [on_device(value, device) for value in tree]
    if isinstance(tree, ops.PackedBatch):
        return replace(map_tensors(tree, lambda x: x.to(device)), lengths=tree.lengths)
    return map_tensors(tree, lambda x: x.to(device))


def tensors_of(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(tree, found.append)
    return found


def scalar(result: Any) -> Tensor:
    """A number that depends on every differentiable entry of a result."""
    parts = [x for x in tensors_of(result) if x.requires_grad or x.is_floating_point()]
    return sum(((i + 1) * x.double().sum() for i, x in enumerate(parts) if x.requires_grad), torch.zeros(()).double())


def with_leaves(sample: Sample, arguments: Arguments) -> tuple[Arguments, list[Tensor]]:
    """The arguments with fresh leaves where the sample is differentiable, and these leaves."""
    leaves = {name: arguments[name].detach().clone().requires_grad_() for name in sample.gradients}
    return {**arguments, **leaves}, list(leaves.values())


class NativeCalls(TorchDispatchMode):
    """Records the calls of native ops, with copies of their arguments as they were before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "areal_core":
            self.calls.append((func, map_tensors(tuple(args), _copy)))
        return func(*args, **(kwargs or {}))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(tensor.requires_grad)


def native_calls(samples: list[Sample], size: int = 1) -> Iterator[tuple[Sample, Any, tuple[Any, ...]]]:
    """What the samples call below, forward and backward: (sample, native op, arguments)."""
    for sample in samples:
        arguments, leaves = with_leaves(sample, sample.make(size))
        if sample.case == "inplace":
            leaves = [arguments["logits"].requires_grad_()]
            arguments["logits"] = leaves[0] * 1
        with NativeCalls() as recorded:
            result = sample.function(**arguments)
            if leaves:
                scalar(result).backward()
        yield from ((sample, func, args) for func, args in recorded.calls)
