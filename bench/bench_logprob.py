"""logprob_from_logits against torch: log_softmax and gather, with and without entropy, forward and backward.

Eager torch computes in float32 whatever the logits' dtype (`.float()`), as trainers do; ours always gives the entropy.

    python bench/bench_logprob.py --tokens 256 2048 --vocab 151936 --dtypes bfloat16 float32 --threads 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from areal_core import ops
from areal_core.reference.logprob import logprob_from_logits as oracle

from harness import Bench, argument_parser, assert_close

CHECKED_ROWS = 4
FORWARD_FLOPS = 5  # per logit: scale, subtract, exp, two sums
BACKWARD_FLOPS = 6  # the same exp, then a (1{j=y} - p) - b p (ln p + entropy)


def eager_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(1, labels[:, None]).squeeze(1)


def eager_with_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logp = logits.float().log_softmax(-1)
    return logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def ours(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    out = ops.logprob_from_logits(logits, labels)
    return out.logprobs, out.entropy


def ours_inplace(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    out = ops.logprob_from_logits(logits, labels, inplace_backward=True)
    return out.logprobs, out.entropy


def gradient(function: Callable[..., Any], logits: Tensor, labels: Tensor, *, entropy: bool) -> Tensor:
    """Of sum(logprobs), minus a tenth of the entropy where asked."""
    leaf = logits.detach().requires_grad_()
    result = function(leaf, labels)
    logprobs = result if isinstance(result, Tensor) else result[0]
    (grad,) = torch.autograd.grad((logprobs - 0.1 * result[1]).sum() if entropy else logprobs.sum(), leaf)
    return grad


def forward_cases(bench: Bench, logits: Tensor, labels: Tensor, title: str, compiled: bool) -> None:
    truth = oracle(logits[:CHECKED_ROWS], labels[:CHECKED_ROWS])
    size = logits.numel() * logits.element_size()

    def check(name: str, result: Any) -> None:
        outputs = (result,) if isinstance(result, Tensor) else result
        for value, true in zip(outputs, truth, strict=False):
            assert_close(name, value[:CHECKED_ROWS], true, 1e-4, 1e-5)

    providers: dict[str, Callable[[], Any]] = {
        "torch log_softmax, gather": lambda: eager_logprobs(logits, labels),
        "ours (with entropy)": lambda: ours(logits, labels),
    }
    with torch.no_grad():
        flops = FORWARD_FLOPS * logits.numel()
        bench.compare(f"{title}: logprob, forward", providers, check=check, read_bytes=size, flops=flops)
        providers = {
            "torch log_softmax, gather, entropy": lambda: eager_with_entropy(logits, labels),
            "ours": lambda: ours(logits, labels),
        }
        if compiled:
            fused = torch.compile(eager_with_entropy, dynamic=False)
            providers["torch.compile of the first"] = lambda: fused(logits, labels)
        bench.compare(f"{title}: logprob and entropy, forward", providers, check=check, read_bytes=size, flops=flops)


def backward_case(bench: Bench, logits: Tensor, labels: Tensor, title: str, compiled: bool, entropy: bool) -> None:
    truth = gradient(oracle, logits[:CHECKED_ROWS].double(), labels[:CHECKED_ROWS], entropy=entropy)
    size = logits.numel() * logits.element_size()
    scratch = logits.clone()  # what the in-place backward destroys
    eager = eager_with_entropy if entropy else eager_logprobs

    def check(name: str, result: Tensor) -> None:
        assert_close(name, result[:CHECKED_ROWS], truth, 1e-6, 2.0**-7 if logits.dtype == torch.bfloat16 else 1e-3)

    providers = {
        "torch": lambda: gradient(eager, logits, labels, entropy=entropy),
        "ours": lambda: gradient(ours, logits, labels, entropy=entropy),
        "ours, in place": lambda: gradient(ours_inplace, scratch, labels, entropy=entropy),
    }
    if compiled:
        fused = torch.compile(eager, dynamic=False)
        providers["torch.compile"] = lambda: gradient(fused, logits, labels, entropy=entropy)
    what = "logprob and entropy" if entropy else "logprob"
    restore = {"ours, in place": lambda: scratch.copy_(logits)}
    bench.compare(
        f"{title}: {what}, forward and backward",
        providers,
        check=check,
        read_bytes=2 * size,
        written_bytes=size,
        flops=(FORWARD_FLOPS + BACKWARD_FLOPS) * logits.numel(),
        before=restore,
    )


def main() -> None:
    parser = argument_parser("Benchmark of logprob_from_logits.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[151936])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--compile", action="store_true", help="also time torch.compile of the eager code")
    args = parser.parse_args()
    bench = Bench("logprob", args)
    for vocab in args.vocab:
        for tokens in args.tokens:
            for dtype in args.dtypes:
                logits = (3 * torch.randn(tokens, vocab, device=args.device)).to(getattr(torch, dtype))
                labels = torch.randint(0, vocab, (tokens,), device=args.device)
                title = f"T = {tokens}, V = {vocab}, {dtype}"
                forward_cases(bench, logits, labels, title, args.compile)
                for entropy in (False, True):
                    backward_case(bench, logits, labels, title, args.compile, entropy)
    bench.save()


if __name__ == "__main__":
    main()
