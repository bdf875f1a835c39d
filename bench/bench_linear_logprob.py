"""The fused LM head against matmul and log-softmax: forward and backward, time and memory, masked tokens included.

The others multiply all tokens; ours multiply the live ones. FLOPs are those of three products over the live tokens,
what linear_ppo_loss needs and linear_logprob exceeds by up to a third (it computes logits twice, but for the last
chunk). Bytes are those of the live hidden states, the weight and what there is per row, read once, and of the
gradients, written once: no logits need to reach memory.

    python bench/bench_linear_logprob.py --tokens 1024 --vocab 151936 --hidden 896 --live 0.5 --threads 1
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_core import ops
from areal_core.ops._linear_chunks import split

from harness import Bench, argument_parser, assert_close

CHECKED = 8  # rows of each gradient
SLACK_BYTES = 64 << 20  # what torch and its BLAS keep besides
Result = tuple[Tensor, Tensor, Tensor]  # loss, gradients of hidden and weight


class Problem(NamedTuple):
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    proximal: Tensor
    advantages: Tensor
    mask: Tensor
    live: int  # the number of live tokens, which the host knows

    def chunk_bytes(self) -> int:
        """Of the longest chunk of logits that the ops choose."""
        live = self.mask.nonzero().squeeze(1)
        vocab = len(self.weight)
        return 4 * vocab * max((len(x) for x in split(live, vocab, None)), default=0)


def make_problem(tokens: int, width: int, vocab: int, live: float, dtype: torch.dtype, device: str) -> Problem:
    hidden = torch.randn(tokens, width, device=device).to(dtype)
    weight = torch.empty(vocab, width, device=device).normal_(0, width**-0.5).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), device=device)
    mask = torch.arange(tokens, device=device) >= round(tokens * (1 - live))  # the prompt first
    proximal = torch.full((tokens,), -float(torch.tensor(float(vocab)).log()), device=device)
    return Problem(hidden, weight, labels, proximal, torch.randn(tokens, device=device), mask, int(mask.sum()))


# -- providers: log-probabilities and entropy of all live tokens ------------------------------------------------------


def torch_logprobs(hidden: Tensor, weight: Tensor, p: Problem) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight.t()).float().log_softmax(-1)
    return logp.gather(1, p.labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def matmul_logprobs(hidden: Tensor, weight: Tensor, p: Problem, **options: Any) -> tuple[Tensor, Tensor]:
    out = ops.logprob_from_logits(hidden @ weight.t(), p.labels, loss_mask=p.mask, **options)
    return out.logprobs, out.entropy


def linear_logprobs(hidden: Tensor, weight: Tensor, p: Problem) -> tuple[Tensor, Tensor]:
    out = ops.linear_logprob(hidden, weight, p.labels, loss_mask=p.mask, live_tokens=p.live)
    return out.logprobs, out.entropy


def in_two_steps(logprobs: Callable[..., tuple[Tensor, Tensor]], hidden: Tensor, weight: Tensor, p: Problem) -> Tensor:
    """The policy loss of log-probabilities."""
    values, entropy = logprobs(hidden, weight, p)
    return ops.ppo_loss(values, p.proximal, p.advantages, p.mask, entropy=entropy).loss


def fused_loss(hidden: Tensor, weight: Tensor, p: Problem) -> Tensor:
    return ops.linear_ppo_loss(hidden, weight, p.labels, p.proximal, p.advantages, p.mask, live_tokens=p.live).loss


def loss_from_logits(hidden: Tensor, weight: Tensor, p: Problem) -> Tensor:
    return ops.ppo_loss_from_logits(hidden @ weight.t(), p.labels, p.proximal, p.advantages, p.mask).loss


def gradients(loss: Callable[..., Tensor], p: Problem) -> Result:
    leaves = [p.hidden.detach().requires_grad_(), p.weight.detach().requires_grad_()]
    value = loss(*leaves, p)
    hidden, weight = torch.autograd.grad(value, leaves)
    return value.detach(), hidden, weight


# -- other libraries: cross entropy of the live tokens, on a GPU only --------------------------------------------------


def peers(p: Problem) -> dict[str, Callable[[], Result]]:
    """Fused cross entropies that are installed; the mean of -logprob, not a policy loss."""
    found: dict[str, Callable[..., Tensor]] = {}
    if p.hidden.is_cuda and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        def liger(hidden: Tensor, weight: Tensor, p: Problem) -> Tensor:
            result = liger_fused_linear_cross_entropy(hidden, weight, torch.where(p.mask, p.labels, -100))
            value: Tensor = result[0] if isinstance(result, tuple) else result
            return value

        found["liger fused linear cross entropy"] = liger
    if p.hidden.is_cuda and importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        def cut(hidden: Tensor, weight: Tensor, p: Problem) -> Tensor:
            value: Tensor = linear_cross_entropy(hidden, weight, torch.where(p.mask, p.labels, -100))
            return value

        found["cut-cross-entropy"] = cut
    return {name: partial(gradients, loss, p) for name, loss in found.items()}


def cross_entropy(hidden: Tensor, weight: Tensor, p: Problem) -> Tensor:
    return -linear_logprobs(hidden, weight, p)[0].sum() / p.live


# -- cases ------------------------------------------------------------------------------------------------------------


def exact(p: Problem) -> Result:
    """The loss and some rows of its gradients, in float64 for the live tokens; all of them for the weight."""
    live = p.mask.nonzero().squeeze(1)
    hidden, weight, rows = p.hidden[live].double(), p.weight.double(), p.weight[:CHECKED].double()
    stats, label_logits = [], (hidden * weight[p.labels[live]]).sum(1)
    for x in hidden.split(64):
        stats.append((x @ weight.t()).logsumexp(1))
    lse = torch.cat(stats)
    logprobs = (label_logits - lse).requires_grad_()
    config = ops.PPOLossConfig()
    fixed = (p.proximal[live].double(), p.advantages[live].double(), torch.ones_like(live, dtype=torch.bool))
    loss = ops.ppo_loss(logprobs, *fixed, config=config).loss
    (upstream,) = torch.autograd.grad(loss, logprobs)
    some = slice(0, CHECKED)
    p_some = (hidden[some] @ weight.t() - lse[some, None]).exp()
    grad_hidden = upstream[some, None] * (weight[p.labels[live][some]] - p_some @ weight)
    is_label = (p.labels[live][:, None] == torch.arange(len(rows), device=live.device)).double()
    grad_rows = (upstream[:, None] * (is_label - (hidden @ rows.t() - lse[:, None]).exp())).t() @ hidden
    return loss.detach(), grad_hidden, grad_rows


def policy_loss_case(bench: Bench, p: Problem, title: str) -> None:
    truth = exact(p)
    first = int(p.mask.nonzero()[0])
    error = 3e-2 if p.hidden.dtype != torch.float32 else 1e-3

    def check(name: str, result: Result) -> None:
        given = (result[0], result[1][first : first + CHECKED], result[2][:CHECKED])
        for what, value, true in zip(("loss", "gradient of hidden", "gradient of weight"), given, truth, strict=True):
            assert_close(f"{name}: {what}", value, true, error * float(true.abs().max() + 1e-6))

    losses: dict[str, Callable[..., Tensor]] = {
        "matmul, logprob_from_logits": partial(in_two_steps, matmul_logprobs),
        "the same, backward in place": partial(in_two_steps, partial(matmul_logprobs, inplace_backward=True)),
        "matmul, ppo_loss_from_logits": loss_from_logits,
        "matmul, torch log_softmax": partial(in_two_steps, torch_logprobs),
        "linear_logprob": partial(in_two_steps, linear_logprobs),
        "linear_ppo_loss": fused_loss,
    }
    vocab, width = p.weight.shape
    rows = bench.compare(
        f"{title}: policy loss, forward and backward",
        {name: partial(gradients, loss, p) for name, loss in losses.items()},
        check=check,
        read_bytes=p.live * width * p.hidden.element_size() + p.weight.nbytes + per_row_bytes(p),
        written_bytes=p.hidden.nbytes + p.weight.nbytes,
        flops=6 * p.live * vocab * width,
        flops_dtype=p.hidden.dtype if p.hidden.is_cuda else torch.float32,
    )
    assert_bounded_memory(rows, p)


def per_row_bytes(p: Problem) -> int:
    """Labels, mask and the inputs of the loss."""
    return sum(x.nbytes for x in (p.labels, p.mask, p.proximal, p.advantages))


def assert_bounded_memory(rows: dict[str, dict[str, Any]], p: Problem) -> None:
    """Beyond the gradients (of the weight in float32 too, where it adds up there) ours need at most two chunks."""
    widened = 4 * p.weight.numel() if p.weight.dtype != torch.float32 else 0
    results = p.hidden.nbytes + p.weight.nbytes + widened
    bound = 2 * p.chunk_bytes() + results + SLACK_BYTES
    for name in ("linear_logprob", "linear_ppo_loss"):
        used = rows[name]["extra_bytes"]
        if not used <= bound:
            raise AssertionError(f"{name}: expected at most {bound} bytes beyond its inputs, got {used}")


def cross_entropy_case(bench: Bench, p: Problem, title: str) -> None:
    """Only where another library's fused cross entropy is installed."""
    others = peers(p)
    if not others:
        return
    truth = gradients(cross_entropy, p)

    def check(name: str, result: Result) -> None:
        for value, true in zip(result, truth, strict=True):
            assert_close(name, value, true, 3e-2 * float(true.abs().max()))

    providers = {"linear_logprob": partial(gradients, cross_entropy, p), **others}
    bench.compare(f"{title}: cross entropy, forward and backward", providers, check=check)


def main() -> None:
    parser = argument_parser("Benchmark of linear_logprob and linear_ppo_loss.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--vocab", type=int, nargs="+", default=[151936])
    parser.add_argument("--hidden", type=int, nargs="+", default=[896])
    parser.add_argument("--live", type=float, nargs="+", default=[0.5], help="share of the tokens that count")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    args = parser.parse_args()
    bench = Bench("linear_logprob", args)
    for tokens in args.tokens:
        for vocab in args.vocab:
            for width in args.hidden:
                for live in args.live:
                    for dtype in args.dtypes:
                        p = make_problem(tokens, width, vocab, live, getattr(torch, dtype), args.device)
                        title = f"T = {tokens}, {live:.0%} live, H = {width}, V = {vocab}, {dtype}"
                        policy_loss_case(bench, p, title)
                        cross_entropy_case(bench, p, title)
    bench.save()


if __name__ == "__main__":
    main()
