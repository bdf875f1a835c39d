"""Our ops beside what other projects run for the same work, wherever those import (bench/peers.py).

Every result is compared with the fp64 reference before anything is timed; the error is a column of its own, because
peers that return half-precision logprobs are off by more than a gradient step. A peer that is wrong is not timed.

    python bench/bench_peers.py --tasks allocate partition pack --threads 1
    python bench/bench_peers.py --device cuda --tokens 8192 --vocab 151936
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from areal_core import ops
from areal_core.reference import advantages as reference_advantages
from areal_core.reference import loss as reference_loss
from areal_core.reference.logprob import logprob_from_logits as reference_logprob

from harness import Bench, Provider, argument_parser, reuse_freed_memory
from peers import available

CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.2, 0.28, 3.0
GAMMA, LAM = 0.99, 0.95
TOLERANCE = 0.06  # of a peer: half-precision logprobs pass, wrong ones do not


class Case:
    """One task: providers are added, checked against the truth one by one, and timed together."""

    def __init__(self, bench: Bench, task: str, title: str) -> None:
        self.bench, self.task, self.title = bench, task, title
        self.providers: dict[str, Provider] = {}
        self.errors: dict[str, float] = {}

    def add(self, name: str, provider: Provider) -> None:
        self.providers[name] = provider

    def add_peers(self, bind: Callable[[Callable[..., Any]], Provider]) -> None:
        functions, reasons = available(self.task, self.bench.args.device)
        for name, function in functions.items():
            self.add(name, bind(function))
        for name, reason in reasons.items():
            print(f"not here: {name}: {reason}")

    def run(
        self,
        error: Callable[[Any], float],
        ours: str,
        tolerance: float = TOLERANCE,
        *,
        read_bytes: int,
        written_bytes: int = 0,
        flops: int = 0,
    ) -> None:
        """Drop peers that fail or err; then compare. `error` measures a result against the truth."""
        for name in list(self.providers):
            try:
                self.errors[name] = error(self.providers[name]())
            except Exception as problem:  # a peer may fail in its own way on this machine
                if name == ours:
                    raise
                print(f"not timed: {name}: {type(problem).__name__}: {problem}")
                del self.providers[name]
                continue
            if not self.errors[name] <= (1e-4 if name == ours else tolerance):
                if name == ours:
                    raise AssertionError(f"{name}: expected the reference's result, off by {self.errors[name]}")
                print(f"not timed: {name}: off by {self.errors[name]:.3g}")
                del self.providers[name]
        rows = self.bench.compare(
            self.title,
            self.providers,
            check=lambda name, result: None,  # done above
            read_bytes=read_bytes,
            written_bytes=written_bytes,
            flops=flops,
        )
        for name, row in rows.items():
            row["error"] = self.errors[name]
        print("  errors: " + ", ".join(f"{name} {self.errors[name]:.2g}" for name in rows))


def largest(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth.double()).abs().max())


def logprob_cases(bench: Bench, args: argparse.Namespace) -> None:
    logits = (3 * torch.randn(args.tokens, args.vocab, device=args.device)).to(getattr(torch, args.dtype))
    labels = torch.randint(0, args.vocab, (args.tokens,), device=args.device)
    few = slice(0, 8)
    truth = reference_logprob(logits[few], labels[few])
    size = f"T = {args.tokens}, V = {args.vocab}, {args.dtype}"

    def eager(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logp = logits.float().log_softmax(-1)
        return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def eager_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.float().log_softmax(-1).gather(1, labels[:, None])[:, 0]

    def error(result: Any) -> float:
        outputs = (result,) if isinstance(result, Tensor) else result[:2]
        return max(largest(o[few], t) for o, t in zip(outputs, truth, strict=False))

    read = logits.nbytes
    for task, entropy in (("logprob", False), ("logprob_entropy", True)):
        case = Case(bench, task, f"{task}, forward: {size}")
        function = eager if entropy else eager_logprobs
        case.add("torch eager", partial(function, logits, labels))
        if args.compile:
            case.add("torch.compile", partial(torch.compile(function, dynamic=False), logits, labels))
        case.add_peers(lambda peer: partial(peer, logits, labels))
        case.add("areal_core (with entropy)", lambda: ops.logprob_from_logits(logits, labels)[:2])
        with torch.no_grad():
            case.run(error, "areal_core (with entropy)", read_bytes=read, flops=5 * logits.numel())


def linear_case(bench: Bench, args: argparse.Namespace) -> None:
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.hidden, device=args.device).to(dtype).requires_grad_()
    weight = (torch.randn(args.vocab, args.hidden, device=args.device) / args.hidden**0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, args.vocab, (args.tokens,), device=args.device)
    with torch.no_grad():
        logits = hidden[:8].double() @ weight.double().T
        truth = logits.log_softmax(-1).gather(1, labels[:8, None])[:, 0]

    def forward_backward(function: Callable[..., Tensor]) -> Tensor:
        logprobs = function(hidden, weight, labels)
        torch.autograd.grad(logprobs.float().sum(), (hidden, weight))
        return logprobs.detach()

    def eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return (hidden @ weight.T).float().log_softmax(-1).gather(1, labels[:, None])[:, 0]

    def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return ops.linear_logprob(hidden, weight, labels).logprobs

    size = f"T = {args.tokens}, V = {args.vocab}, H = {args.hidden}, {args.dtype}"
    case = Case(bench, "linear_logprob", f"linear_logprob, forward and backward: {size}")
    for name, function in (("torch eager", eager), ("areal_core", ours)):
        case.add(name, partial(forward_backward, function))
    case.add_peers(lambda function: partial(forward_backward, function))
    # The matrix product three times, and once more where the logits are recomputed instead of kept.
    flops = 8 * args.tokens * args.vocab * args.hidden
    rounding = 0.0 if dtype == torch.float32 else TOLERANCE  # of the half-precision logits that the truth does not have
    case.run(
        lambda logprobs: max(0.0, largest(logprobs[:8], truth) - rounding),
        "areal_core",
        read_bytes=hidden.nbytes + weight.nbytes,
        written_bytes=hidden.nbytes + weight.nbytes,
        flops=flops,
    )


def loss_case(bench: Bench, args: argparse.Namespace) -> None:
    shape = (args.sequences, args.length)
    proximal = -3 * torch.rand(shape, device=args.device)
    logprobs = (proximal + 0.1 * torch.randn(shape, device=args.device)).requires_grad_()
    advantages = torch.randn(shape, device=args.device)
    mask = torch.rand(shape, device=args.device) < 0.8
    config = ops.PPOLossConfig(clip_low=CLIP_LOW, clip_high=CLIP_HIGH, dual_clip=DUAL_CLIP)
    flat = [x.flatten() for x in (proximal, advantages, mask)]

    def truth_gradient() -> tuple[Tensor, Tensor]:
        leaf = logprobs.detach().double().requires_grad_()
        loss = reference_loss.ppo_loss(leaf.flatten(), *flat, config=config)[0]
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    true_loss, true_gradient = truth_gradient()

    def with_gradient(function: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        loss = function()
        return loss.detach(), torch.autograd.grad(loss, logprobs)[0]

    def bind(function: Callable[..., Tensor]) -> Provider:
        arguments = (logprobs, proximal, advantages, mask, CLIP_LOW, CLIP_HIGH, DUAL_CLIP)
        return partial(with_gradient, partial(function, *arguments))

    def error(result: tuple[Tensor, Tensor]) -> float:
        return max(largest(result[0], true_loss), largest(result[1], true_gradient) * mask.sum().item())

    tokens = args.sequences * args.length
    case = Case(bench, "ppo_loss", f"ppo_loss with dual clip, forward and backward: {tokens} tokens")
    case.add_peers(bind)
    case.add(
        "areal_core (with statistics)",
        partial(with_gradient, lambda: ops.ppo_loss(logprobs.flatten(), *flat, config=config).loss),
    )
    case.run(
        error, "areal_core (with statistics)", 1e-3, read_bytes=17 * tokens, written_bytes=4 * tokens, flops=20 * tokens
    )


def gae_case(bench: Bench, args: argparse.Namespace) -> None:
    rewards, values = torch.randn(2, args.sequences, args.length, device=args.device)
    mask = torch.ones_like(rewards, dtype=torch.bool)
    mask[:, : args.length // 8] = False  # a prompt
    cu = torch.arange(args.sequences + 1, device=args.device) * args.length
    packed = (rewards.flatten(), values.flatten(), cu)
    few = 3 * args.length
    truth = reference_advantages.gae(
        packed[0][:few], packed[1][:few], cu[:4], gamma=GAMMA, lam=LAM, loss_mask=mask.flatten()[:few]
    )[1]
    live = mask.flatten()[:few]

    def error(returns: Tensor) -> float:
        return largest(returns.flatten()[:few][live], truth[live])

    tokens = args.sequences * args.length
    case = Case(bench, "gae", f"gae: {args.sequences} sequences of {args.length} tokens")
    case.add_peers(lambda function: partial(function, rewards, values, mask, GAMMA, LAM))
    case.add("areal_core", lambda: ops.gae(*packed, gamma=GAMMA, lam=LAM, loss_mask=mask.flatten()).returns)
    case.run(error, "areal_core", read_bytes=9 * tokens, written_bytes=8 * tokens, flops=6 * tokens)


def pack_case(bench: Bench, args: argparse.Namespace) -> None:
    shape = (args.sequences, args.length)
    lengths = torch.randint(1, args.length + 1, (args.sequences,))
    mask = (torch.arange(args.length) < lengths[:, None]).to(args.device)
    batch = {name: torch.randn(shape, device=args.device) for name in ("logprobs", "advantages", "values", "rewards")}
    batch["input_ids"] = torch.randint(0, 150_000, shape, device=args.device)
    batch["versions"] = torch.randint(0, 100, shape, device=args.device)
    truth = {key: value[mask] for key, value in batch.items()}

    def error(packed: dict[str, Tensor]) -> float:
        return max(largest(packed[key], truth[key]) for key in truth)

    moved = sum(value.nbytes for value in truth.values())
    case = Case(bench, "pack", f"pack: {args.sequences} sequences, {int(lengths.sum())} tokens, {len(batch)} keys")
    case.add("boolean mask", lambda: {key: value[mask] for key, value in batch.items()})
    case.add_peers(lambda function: partial(function, batch, mask))
    case.add("areal_core", lambda: ops.pack(batch, mask).data)
    case.run(error, "areal_core", 0.0, read_bytes=moved, written_bytes=moved)


def allocation_cases(bench: Bench, args: argparse.Namespace) -> None:
    drawn = torch.empty(args.lengths).log_normal_(torch.tensor(args.median_length).log().item(), 0.8)
    lengths = [int(n) for n in drawn.clamp(1, args.cap)]

    def loads(bins: list[list[int]]) -> list[int]:
        if sorted(i for b in bins for i in b) != list(range(len(lengths))):
            raise AssertionError("expected every sequence once")
        return [sum(lengths[i] for i in b) for b in bins]

    def over_cap(bins: list[list[int]]) -> float:
        return float(max(0, max(loads(bins)) - args.cap))

    case = Case(bench, "allocate", f"allocate {args.lengths} lengths into bins of {args.cap} tokens")
    case.add_peers(lambda function: partial(function, lengths, args.cap))
    case.add("areal_core ffd", lambda: ops.allocate_microbatches(lengths, args.cap))
    case.run(over_cap, "areal_core ffd", 0.0, read_bytes=8 * args.lengths, written_bytes=8 * args.lengths)
    bins = {name: len(provider()) for name, provider in case.providers.items()}
    print(f"  bins: {bins}, at least {-(-sum(lengths) // args.cap)} by tokens")

    case = Case(bench, "partition", f"spread {args.lengths} lengths over {args.ranks} ranks")
    case.add_peers(lambda function: partial(function, lengths, args.ranks))
    case.add("areal_core", lambda: ops.partition_balanced(lengths, args.ranks))
    case.run(lambda bins: 0.0 * len(loads(bins)), "areal_core", 0.0, read_bytes=8 * args.lengths)
    spread = {name: max(loads(p())) - min(loads(p())) for name, p in case.providers.items()}
    print(f"  tokens from the fullest to the emptiest rank: {spread}")


TASKS: dict[str, Callable[[Bench, argparse.Namespace], None]] = {
    "logprob": logprob_cases,
    "linear": linear_case,
    "loss": loss_case,
    "gae": gae_case,
    "pack": pack_case,
    "allocation": allocation_cases,
}


def main() -> None:
    parser = argument_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--tokens", type=int, default=256, help="of logprob and linear")
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--sequences", type=int, default=512, help="of loss, gae and pack")
    parser.add_argument("--length", type=int, default=1024, help="padded length of these, tokens")
    parser.add_argument("--lengths", type=int, default=4096, help="of allocation")
    parser.add_argument("--median-length", type=float, default=3400.0, help="of allocation, tokens (log-normal)")
    parser.add_argument("--cap", type=int, default=32768, help="tokens of a micro-batch")
    parser.add_argument("--ranks", type=int, default=64, help="data-parallel ranks to spread over")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile of the eager logprobs")
    args = parser.parse_args()
    reuse_freed_memory()
    bench = Bench("peers", args)
    for task in args.tasks:
        TASKS[task](bench, args)
    bench.save()


if __name__ == "__main__":
    main()
