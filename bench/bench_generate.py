"""The embedded engine against `generate` of transformers and a plain torch sampler with a KV cache.

All three run the same random model on the same prompts: rows / 8 prompts with 8 samples each, every response of full
length. Before anything is timed the engine's greedy tokens must equal those of transformers and its logprobs those of
its logits. The last cases time weight updates with samples in flight.

    python bench/bench_generate.py --rows 1 8 64 256 1024 --threads 1
    python bench/bench_generate.py --model mid --dtype bfloat16 --rows 1 8 --new-tokens 8 --repeats 3
"""

from __future__ import annotations

import argparse
import itertools
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from areal_core.generate import EmbeddedEngine, GenerateRequest, SamplingParams
from areal_core.model import DecoderConfig

from harness import Bench, Provider, argument_parser, assert_close, refuse

GROUP = 8
MODELS = {
    "tiny": DecoderConfig("llama", 32, 64, 128, 2, 4, 4, 16, rope_theta=100.0, max_position_embeddings=2048),
    "mid": DecoderConfig("llama", 32000, 512, 1376, 8, 8, 8, 64, max_position_embeddings=2048),
}


def random_weights(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of a size that makes the likeliest token stand out, so that rounding doesn't choose it."""
    return {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 1.5 / math.sqrt(shape[-1])).to(dtype)
        for name, shape in config.tensor_shapes().items()
    }


class TorchSampler:
    """What one writes in an afternoon: fused projections, a preallocated cache, one eager step per token."""

    def __init__(self, config: DecoderConfig, weights: dict[str, Tensor], rows: int, context: int) -> None:
        self.config, self.rows = config, rows
        c, w = config, {name: tensor.float() for name, tensor in weights.items()}
        self.embedding, self.norm, self.head = (
            w["model.embed_tokens.weight"],
            w["model.norm.weight"],
            w["lm_head.weight"],
        )
        self.layers = []
        for i in range(c.num_layers):
            layer, attn = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
            qkv = torch.cat([w[f"{attn}{p}_proj.weight"] for p in "qkv"])
            gate_up = torch.cat([w[f"{layer}mlp.{p}_proj.weight"] for p in ("gate", "up")])
            norms = w[f"{layer}input_layernorm.weight"], w[f"{layer}post_attention_layernorm.weight"]
            self.layers.append((*norms, qkv, w[f"{attn}o_proj.weight"], gate_up, w[f"{layer}mlp.down_proj.weight"]))
        frequency = c.rope_theta ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
        angle = torch.outer(torch.arange(context), frequency).repeat(1, 2)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.keys = torch.zeros(c.num_layers, rows, c.num_kv_heads, context, c.head_dim)
        self.values = torch.zeros_like(self.keys)

    def rotate(self, x: Tensor, begin: int, end: int) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos[begin:end] + torch.cat([-second, first], -1) * self.sin[begin:end]

    def forward(self, ids: Tensor, begin: int) -> Tensor:
        """Logits of the last of ids [rows, n], which stand at positions begin, begin + 1, ..."""
        c, (rows, n) = self.config, ids.shape
        end = begin + n
        x = self.embedding[ids]
        for i, (norm1, norm2, qkv_weight, o, gate_up, down) in enumerate(self.layers):
            h = F.rms_norm(x, (c.hidden_size,), norm1, c.rms_norm_eps)
            heads = (h @ qkv_weight.t()).view(rows, n, -1, c.head_dim).transpose(1, 2)
            q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
            self.keys[i, :, :, begin:end], self.values[i, :, :, begin:end] = self.rotate(k, begin, end), v
            k, v = self.keys[i, :, :, :end], self.values[i, :, :, :end]
            out = F.scaled_dot_product_attention(self.rotate(q, begin, end), k, v, is_causal=n > 1, enable_gqa=True)
            x = x + out.transpose(1, 2).reshape(rows, n, -1) @ o.t()
            gate, up = (F.rms_norm(x, (c.hidden_size,), norm2, c.rms_norm_eps) @ gate_up.t()).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ down.t()
        return F.rms_norm(x[:, -1], (c.hidden_size,), self.norm, c.rms_norm_eps) @ self.head.t()

    @torch.no_grad()
    def generate(self, prompts: Tensor, new_tokens: int, *, greedy: bool) -> tuple[Tensor, Tensor]:
        """Token ids and logprobs, [rows, new_tokens] each. The prompts are of one length."""
        ids, logprobs, at, step = [], [], 0, prompts
        for _ in range(new_tokens):
            logp = self.forward(step, at).log_softmax(-1)
            at += step.shape[1]
            step = logp.argmax(-1, keepdim=True) if greedy else torch.multinomial(logp.exp(), 1)
            ids.append(step)
            logprobs.append(logp.gather(1, step))
        return torch.cat(ids, 1), torch.cat(logprobs, 1)


class Ours:
    """The engine, fed as the loop feeds it; it takes all prompts on in one step, as the others do."""

    def __init__(self, config: DecoderConfig, weights: dict[str, Tensor], rows: int, args: argparse.Namespace) -> None:
        self.engine = EmbeddedEngine(
            config,
            max_slots=rows,
            max_context=args.prompt_tokens + args.new_tokens,
            prefill_tokens=rows * args.prompt_tokens,
            threads=args.threads,
        )
        self.engine.load_weights(weights, 0)
        self.request_ids = itertools.count()

    def submit(self, prompts: Tensor, new_tokens: int, *, greedy: bool, group: int) -> list[int]:
        sampling = SamplingParams(new_tokens, temperature=0.0 if greedy else 1.0)
        ids = [next(self.request_ids) for _ in range(0, len(prompts), group)]
        for request, prompt in zip(ids, prompts[::group].numpy().astype(np.int32), strict=True):
            self.engine.submit(GenerateRequest(request, prompt, group, sampling))
        return ids

    def generate(self, prompts: Tensor, new_tokens: int, *, greedy: bool, group: int) -> tuple[Tensor, Tensor]:
        first = self.submit(prompts, new_tokens, greedy=greedy, group=group)[0]
        samples = []
        while len(samples) < len(prompts):
            samples += self.engine.decode(64)
        samples.sort(key=lambda s: (s.request_id - first, s.sample_index))
        ids, logprobs = np.stack([s.token_ids for s in samples]), np.stack([s.logprobs for s in samples])
        return torch.from_numpy(ids).long(), torch.from_numpy(logprobs)


def transformers_model(config: DecoderConfig, weights: dict[str, Tensor]) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config.to_hf())).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def peer_generate(peer: Any, prompts: Tensor, new_tokens: int, *, greedy: bool) -> Tensor:
    """Prompts and responses, [rows, P + new_tokens]. Without the mask a prompt's own padding ids would be masked."""
    mask = torch.ones_like(prompts)
    return peer.generate(prompts, attention_mask=mask, do_sample=not greedy, max_new_tokens=new_tokens)


def verify(peer: Any, ours: Ours, sampler: TorchSampler, prompts: Tensor, new_tokens: int, group: int) -> None:
    """Greedy tokens of all three are equal; logprobs are those of the peer's logits."""
    with torch.no_grad():
        expected = peer_generate(peer, prompts, new_tokens, greedy=True)
        logits = peer(expected).logits[:, prompts.shape[1] - 1 : -1]
    truth = logits.log_softmax(-1).gather(2, expected[:, prompts.shape[1] :, None])[:, :, 0]
    for name, (ids, logprobs) in {
        "areal_core": ours.generate(prompts, new_tokens, greedy=True, group=group),
        "torch": sampler.generate(prompts, new_tokens, greedy=True),
    }.items():
        if not torch.equal(ids, expected[:, prompts.shape[1] :]):
            raise AssertionError(f"{name}: expected the greedy tokens of transformers, got others")
        assert_close(name, logprobs, truth, 1e-4, 1e-5)
    ids, logprobs = ours.generate(prompts, new_tokens, greedy=False, group=group)
    with torch.no_grad():
        logits = peer(torch.cat([prompts, ids], 1)).logits[:, prompts.shape[1] - 1 : -1]
    assert_close("areal_core", logprobs, logits.log_softmax(-1).gather(2, ids[:, :, None])[:, :, 0], 1e-4, 1e-5)


def generation_case(bench: Bench, config: DecoderConfig, weights: dict[str, Tensor], peer: Any, rows: int) -> None:
    args, group = bench.args, min(rows, GROUP)
    new_tokens, context = args.new_tokens, args.prompt_tokens + args.new_tokens
    prompts = torch.randint(0, config.vocab_size, (rows // group, args.prompt_tokens)).repeat_interleave(group, 0)
    sampler = TorchSampler(config, weights, rows, context)
    ours = Ours(config, weights, rows, args)
    verify(peer, ours, sampler, prompts, new_tokens, group)

    def check(name: str, result: Any) -> None:
        ids = result[:, prompts.shape[1] :] if isinstance(result, Tensor) else result[0]
        if ids.shape != (rows, new_tokens):
            raise AssertionError(f"{name}: expected {rows} x {new_tokens} tokens, got {list(ids.shape)}")

    providers: dict[str, Provider] = {
        "transformers generate": lambda: peer_generate(peer, prompts, new_tokens, greedy=False),
        "torch sampler": lambda: sampler.generate(prompts, new_tokens, greedy=False),
        "areal_core": lambda: ours.generate(prompts, new_tokens, greedy=False, group=group),
    }
    parameters = sum(tensor.numel() for tensor in weights.values())
    done = bench.compare(
        f"{args.model} {args.dtype}, {rows} rows x {new_tokens} tokens",
        providers,
        check=check,
        read_bytes=4 * parameters * new_tokens,  # every step reads every weight
        flops=2 * parameters * rows * new_tokens,  # without attention and the prompts
    )
    for name, row in done.items():
        row["tokens_per_s"] = rows * new_tokens / row["median_ms"] * 1e3
        row["us_per_token"] = 1e3 * row["best_ms"] / (rows * new_tokens)
        print(f"  {name:34} {row['tokens_per_s']:11.0f} tokens/s, at best {row['us_per_token']:.2f} us a token")


def update_case(bench: Bench, config: DecoderConfig, weights: dict[str, Tensor], rows: int) -> None:
    """Repacking alone, and with the caches of samples half way through their responses computed anew."""
    args, group = bench.args, min(rows, GROUP)
    ours = Ours(config, weights, rows, args)
    prompts = torch.randint(0, config.vocab_size, (rows, args.prompt_tokens))
    versions = itertools.count(1)
    target = {name: tensor.clone() for name, tensor in weights.items()}

    def start() -> None:
        for request in {sample.request_id for sample in ours.engine.unfinished()}:
            ours.engine.abort(request)
        ours.submit(prompts, args.new_tokens, greedy=False, group=group)
        ours.engine.decode(args.new_tokens // 2)

    def check(name: str, result: Any) -> None:
        expected = rows // group * args.prompt_tokens + rows * (args.new_tokens // 2 - 1)
        if name.endswith("recompute") and result.recomputed_tokens != expected:
            raise AssertionError(f"{name}: expected {expected} recomputed tokens, got {result.recomputed_tokens}")

    providers: dict[str, Provider] = {
        "torch copy_": lambda: [target[name].copy_(tensor) for name, tensor in weights.items()],
        "areal_core keep": lambda: ours.engine.load_weights(weights, next(versions), "keep"),
        "areal_core recompute": lambda: ours.engine.load_weights(weights, next(versions), "recompute"),
    }
    before = dict.fromkeys(providers, start)
    size = sum(tensor.nbytes for tensor in weights.values())
    bench.compare(
        f"{args.model} {args.dtype}, update, {rows} in flight",
        providers,
        check=check,
        read_bytes=size,
        written_bytes=size,
        before=before,
    )


def parse() -> argparse.Namespace:
    parser = argument_parser((__doc__ or "").splitlines()[0])
    parser.set_defaults(threads=1)
    parser.add_argument("--model", default="tiny", choices=sorted(MODELS))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the weights given")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--prompt-tokens", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    args = parse()
    refuse(args, "bench_generate", "device")
    bench = Bench("generate", args)
    config = MODELS[args.model]
    weights = random_weights(config, getattr(torch, args.dtype))
    peer = transformers_model(config, weights)
    for rows in args.rows:
        if rows > GROUP and rows % GROUP:
            raise SystemExit(f"--rows: expected at most {GROUP} or a multiple of it, got {rows}")
        generation_case(bench, config, weights, peer, rows)
    update_case(bench, config, weights, max(args.rows))
    bench.save()


if __name__ == "__main__":
    main()
