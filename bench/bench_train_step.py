"""A transformers model's training step and TRL's fused head, with the integrations and without: time and memory.

The model is a Llama of one layer, so that its head stands for most of the work, as the head of a small model does.
FLOPs are those of the head's three products over the rows that count; bytes those of its weight and gradient.

    python bench/bench_train_step.py --tokens 1024 --vocab 151936 --hidden 512 --threads 1
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from areal_core.integrations import trl
from areal_core.integrations.huggingface import apply_to

from harness import Bench, argument_parser, assert_close

SEQUENCES = 2
Result = tuple[Tensor, Tensor]  # loss and gradient of the head's weight


def make_model(args: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(args.hidden // 64, 1)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=args.tokens,
    )
    return LlamaForCausalLM(config).to(args.device, getattr(torch, args.dtype)).train()


def step(model: Any, patch: Callable[[], AbstractContextManager[Any]], **inputs: Any) -> Result:
    model.zero_grad(set_to_none=True)
    with patch():
        outputs = model(**inputs)
        loss = outputs.loss if outputs.get("log_probs") is None else -outputs.log_probs.sum() - outputs.entropy.sum()
        loss.backward()
    return loss.detach(), model.lm_head.weight.grad


def compare(
    bench: Bench, case: str, model: Any, live: int, patches: dict[str, Callable[[], Any]], **inputs: Any
) -> None:
    tolerance = 1e-4 if model.dtype == torch.float32 else 2e-2
    loss, gradient = step(model, nullcontext, **inputs)
    gradient = gradient[:64].clone()

    def check(name: str, result: Result) -> None:
        assert_close(f"{name}: loss", result[0], loss, 0.0, tolerance)
        assert_close(f"{name}: gradient", result[1][:64], gradient, tolerance * float(gradient.abs().max()))

    weight = model.lm_head.weight
    bench.compare(
        f"{case}: T = {inputs['labels'].numel()}, {live} of them count, V = {len(weight)}, H = {weight.shape[1]}, "
        f"{weight.dtype}",
        {name: lambda patch=patch: step(model, patch, **inputs) for name, patch in patches.items()},
        check=check,
        read_bytes=weight.nbytes,
        written_bytes=weight.nbytes,
        flops=6 * live * weight.numel(),
    )


def main() -> None:
    parser = argument_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    bench = Bench("train_step", args)
    model = make_model(args)
    ids = torch.randint(0, args.vocab, (SEQUENCES, args.tokens // SEQUENCES), device=args.device)
    inputs = {"input_ids": ids, "labels": ids}
    providers = {"transformers": nullcontext, "areal_core": lambda: apply_to(model)}
    compare(bench, "transformers, training loss", model, ids.numel() - SEQUENCES, providers, **inputs)
    if importlib.util.find_spec("trl") is None:
        print("\nTRL's fused head: not measured, trl is not installed")
    else:
        importlib.import_module("trl.trainer.utils").add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        response = ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) < ids.shape[1] // 2, -100)
        inputs = {"input_ids": ids, "labels": response, "fused_lm_head": True}
        live = int((response[:, 1:] != -100).sum())
        compare(bench, "TRL, fused head", model, live, {"TRL": nullcontext, "areal_core": trl.apply}, **inputs)
    bench.save()


if __name__ == "__main__":
    main()
