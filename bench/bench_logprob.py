"""logprob_from_logits against torch and other libraries: with and without entropy, forward and backward.

Eager torch computes in float32 whatever the logits' dtype (`.float()`), as trainers do; ours always gives the entropy.
On a CPU ours runs once for each instruction set.

    python bench/bench_logprob.py --tokens 256 2048 --vocab 151936 --dtypes bfloat16 float32 --threads 1
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from areal_core import _C, ops
from areal_core.reference.logprob import logprob_from_logits as oracle

from harness import Bench, argument_parser, assert_close
from peers import available

CHECKED_ROWS = 4
FORWARD_FLOPS = 5  # per logit: scale, subtract, exp, two sums
BACKWARD_FLOPS = 6  # the same exp, then a (1{j=y} - p) - b p (ln p + entropy)

Provider = Callable[[], Any]
Function = Callable[[Tensor, Tensor], Any]


def eager_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), -1).gather(1, labels[:, None]).squeeze(1)


def eager_with_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(logits.float(), -1)
    return logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def ours(logits: Tensor, labels: Tensor, inplace: bool = False) -> tuple[Tensor, Tensor]:
    out = ops.logprob_from_logits(logits, labels, inplace_backward=inplace)
    return out.logprobs, out.entropy


def on(isa: str | None, run: Provider) -> Any:
    """Run with an instruction set (None: as it is)."""
    before = _C.active_isa()
    if isa:
        _C.set_active_isa(isa)
    try:
        return run()
    finally:
        _C.set_active_isa(before)


def gradient(function: Function, logits: Tensor, labels: Tensor, *, entropy: bool) -> Tensor:
    """Of sum(logprobs), minus a tenth of the entropy where asked."""
    leaf = logits.detach().requires_grad_()
    result = function(leaf, labels)
    logprobs = result if isinstance(result, Tensor) else result[0]
    (grad,) = torch.autograd.grad((logprobs - 0.1 * result[1]).sum() if entropy else logprobs.sum(), leaf)
    return grad


class Case:
    """One size: its logits, labels and title, and who is compared."""

    def __init__(self, bench: Bench, args: argparse.Namespace, logits: Tensor) -> None:
        self.bench, self.args, self.logits = bench, args, logits
        tokens, vocab = logits.shape
        self.labels = torch.randint(0, vocab, (tokens,), device=logits.device)
        self.title = f"T = {tokens}, V = {vocab}, {str(logits.dtype).removeprefix('torch.')}"
        self.size = logits.numel() * logits.element_size()
        self.isas: list[str | None] = list(args.isas) if args.device == "cpu" else [None]
        self.cores = args.threads if args.device == "cpu" else 0

    def others(self, entropy: bool) -> dict[str, Function]:
        """Everyone else; torch's eager code first, as the baseline."""
        eager = eager_with_entropy if entropy else eager_logprobs
        functions: dict[str, Function] = {"torch": eager}
        if self.args.compile:
            functions["torch.compile"] = torch.compile(eager, dynamic=False)
        if not self.args.no_peers:
            functions |= available("logprob_entropy" if entropy else "logprob", self.args.device)[0]
        return functions

    def forward(self, entropy: bool) -> None:
        truth = oracle(self.logits[:CHECKED_ROWS], self.labels[:CHECKED_ROWS])
        loose = 0.1 if self.logits.dtype == torch.bfloat16 else 1e-4  # TRL and verl round to bfloat16

        def check(name: str, result: Any) -> None:
            outputs = (result,) if isinstance(result, Tensor) else result
            absolute, relative = (1e-5, 1e-6) if name.startswith("ours") else (loose, 1e-2 * loose)
            for value, true in zip(outputs, truth, strict=False):
                assert_close(name, value[:CHECKED_ROWS], true, absolute, relative)

        providers: dict[str, Provider] = {
            name: partial(function, self.logits, self.labels) for name, function in self.others(entropy).items()
        }
        for isa in self.isas:
            providers[named("ours", isa)] = partial(on, isa, partial(ours, self.logits, self.labels))
        with torch.no_grad():
            rows = self.bench.compare(
                f"{self.title}: logprob{' and entropy' if entropy else ''}, forward",
                providers,
                check=check,
                read_bytes=self.size,
                flops=FORWARD_FLOPS * self.logits.numel(),
            )
        self.print_per_row(rows, self.size)

    def forward_and_backward(self, entropy: bool) -> None:
        logits, labels = self.logits, self.labels
        truth = gradient(oracle, logits[:CHECKED_ROWS].double(), labels[:CHECKED_ROWS], entropy=entropy)
        scratch = logits.clone()  # what the in-place backward destroys

        def check(name: str, result: Tensor) -> None:
            absolute, relative = (1e-6, 2.0**-7) if logits.dtype == torch.bfloat16 else (1e-6, 1e-3)
            loose = 1 if name.startswith("ours") or logits.dtype == torch.float32 else 100
            assert_close(name, result[:CHECKED_ROWS], truth, loose * absolute, loose * relative)

        providers: dict[str, Provider] = {
            name: partial(gradient, function, logits, labels, entropy=entropy)
            for name, function in self.others(entropy).items()
        }
        before: dict[str, Provider] = {}
        for isa in self.isas:
            providers[named("ours", isa)] = partial(on, isa, partial(gradient, ours, logits, labels, entropy=entropy))
            name = named("ours, in place", isa)
            inplace = partial(gradient, partial(ours, inplace=True), scratch, labels, entropy=entropy)
            providers[name] = partial(on, isa, inplace)
            before[name] = partial(scratch.copy_, logits)
        rows = self.bench.compare(
            f"{self.title}: logprob{' and entropy' if entropy else ''}, forward and backward",
            providers,
            check=check,
            read_bytes=2 * self.size,
            written_bytes=self.size,
            flops=(FORWARD_FLOPS + BACKWARD_FLOPS) * logits.numel(),
            before=before,
        )
        self.print_per_row(rows, 3 * self.size)

    def print_per_row(self, rows: Mapping[str, Mapping[str, Any]], moved_bytes: int) -> None:
        """Time for a row and core, and the share of the bandwidth at which the machine reads."""
        for name, row in rows.items():
            if not name.startswith("ours") or not self.cores:
                continue
            each = 1e3 * self.cores * row["best_ms"] / len(self.labels)
            gbps = moved_bytes / row["best_ms"] / 1e6
            share = gbps / self.bench.read_gbps
            print(f"  {name:34} {each:.1f} us a row and core at best: {gbps:.1f} GB/s, {share:.0%} of reading")


def named(name: str, isa: str | None) -> str:
    return f"{name} ({isa})" if isa else name


def main() -> None:
    best = ("baseline", "avx2", "avx512").index(_C.best_isa())
    parser = argument_parser("Benchmark of logprob_from_logits.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[151936])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--isas", nargs="+", default=["avx2", "avx512"][:best] or ["baseline"], help="of ours, on CPU")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile of the eager code")
    parser.add_argument("--no-peers", action="store_true", help="torch and ours only")
    parser.add_argument("--forward", action="store_true", help="forward only")
    args = parser.parse_args()
    bench = Bench("logprob", args)
    for vocab in args.vocab:
        for tokens in args.tokens:
            for dtype in args.dtypes:
                logits = (3 * torch.randn(tokens, vocab, device=args.device)).to(getattr(torch, dtype))
                case = Case(bench, args, logits)
                for entropy in (False, True):
                    case.forward(entropy)
                    if not args.forward:
                        case.forward_and_backward(entropy)
    bench.save()


if __name__ == "__main__":
    main()
