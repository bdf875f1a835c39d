"""The trainer at the default setting: 32 prompts x 8 responses of the chain task, 4 mini-batches.

Forward and backward of one mini-batch is compared with transformers' LlamaForCausalLM on the padded batch, with this
project's own layers in plain torch, and with the matrix products alone, which no implementation can do without.

    python bench/bench_trainer.py --threads 1 --repeats 15
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_core.assets import resolve_model
from areal_core.model import PackedDecoder, layers, load_model, load_tokenizer
from areal_core.model.flat import unflatten
from areal_core.rl.batch import Batch, Microbatch, build_batch, cut_microbatches
from areal_core.rl.config import Config, LossConfig, TrainConfig
from areal_core.rl.data import Group, Trajectory
from areal_core.rl.trainer import Trainer
from areal_core.tasks import ChainArithmetic

from harness import Bench, argument_parser, assert_close, refuse

VERSION = 7
CPU = torch.device("cpu")
Gradients = dict[str, Tensor]


def make_groups(model: PackedDecoder, groups: int, size: int, age: int, seed: int) -> list[Group]:
    """Responses that think, a few of them cut short, with made-up rewards and behaviour logprobs."""
    tokenizer, task, rng = load_tokenizer(resolve_model("chain_policy")), ChainArithmetic(), random.Random(seed)
    out = []
    for number in range(groups):
        problem = task.problem(number, seed=seed)
        prompt = np.array(tokenizer.encode(problem.prompt), dtype=np.int32)
        trajectories = []
        for index in range(size):
            text = task.demonstration(problem, think=True)
            ids = [*tokenizer.encode(text[: rng.randint(2, 2 * len(text))], special=False), model.config.eos_token_id]
            response = np.array(ids, dtype=np.int32)
            logprobs = np.full(len(ids), -0.3, dtype=np.float32)
            versions = np.full(len(ids), VERSION - age, dtype=np.int64)
            reward = float(index % 2)
            trajectories.append(Trajectory(prompt, response, logprobs, versions, "stop", reward, number, index))
        out.append(Group(number, problem.prompt, number, tuple(trajectories)))
    return out


class MinibatchCase:
    """The gradient of a weighted sum of the logprobs of all response tokens, by several roads."""

    def __init__(self, model: PackedDecoder, groups: list[Group]) -> None:
        self.model = model
        self.trajectories = [t for group in groups for t in group.trajectories]
        self.batch: Batch = build_batch(groups, VERSION, Config().rollout)
        (self.shared,) = cut_microbatches(self.batch, np.arange(self.batch.samples), 1 << 20, CPU)
        self.weight = torch.randn(len(self.batch.response_ids))
        self.labels = torch.from_numpy(self.batch.response_ids)
        self.apart = self._write_out()
        self.names = list(model.named_weights())

    def _write_out(self) -> Microbatch:
        """Every response behind its own copy of the prompt, nothing left out."""
        whole = [np.concatenate((t.prompt_ids, t.response_ids)) for t in self.trajectories]
        bounds = np.cumsum([0, *(len(w) for w in whole)])
        rows = np.concatenate(
            [np.arange(b - len(t.response_ids), b) - 1 for t, b in zip(self.trajectories, bounds[1:], strict=True)]
        )
        ids = np.concatenate(whole).astype(np.int64)
        arrays = (ids, bounds, np.arange(len(bounds)), rows, np.arange(len(rows)), self.batch.response_bounds)
        return Microbatch(*(torch.from_numpy(a) for a in arrays))

    def objective(self, logits: Tensor, micro: Microbatch) -> Tensor:
        labels = self.labels[micro.tokens]
        return logits.log_softmax(-1).gather(1, labels[:, None])[:, 0] @ self.weight[micro.tokens].to(logits.dtype)

    def packed(self, micro: Microbatch, backward: bool) -> Gradients:
        self.model.weights.grad = None
        with torch.set_grad_enabled(backward):
            groups = micro.cu_groups if micro is self.shared else None
            logits = self.model(micro.input_ids, micro.cu_seqlens, cu_groups=groups, rows=micro.rows)
            value = self.objective(logits, micro)
        return {"value": value.detach()} | (self._backward(value) if backward else {})

    def _backward(self, value: Tensor) -> Gradients:
        (flat,) = torch.autograd.grad(value, self.model.weights)
        return PackedDecoder(self.model.config, flat).named_weights()

    def plain(self, backward: bool, dtype: torch.dtype = torch.float32) -> Gradients:
        config, micro = self.model.config, self.apart
        flat = self.model.weights.detach().to(dtype).requires_grad_(backward)
        where = layers.layout(micro.cu_seqlens, None)
        table = layers.rope_table(int(micro.cu_seqlens.diff().max()), config.head_dim, config.rope_theta)
        hidden, head = layers.hidden_states(unflatten(flat, config), config, micro.input_ids, where, micro.rows, table)
        value = self.objective(hidden @ head.T, micro)
        if not backward:
            return {"value": value.detach()}
        (gradient,) = torch.autograd.grad(value, flat)
        return {"value": value.detach()} | PackedDecoder(config, gradient).named_weights()

    def transformers(self) -> Callable[[bool], Gradients]:
        import transformers

        peer = transformers.AutoModelForCausalLM.from_pretrained(resolve_model("chain_policy"), dtype=torch.float32)
        lengths = self.apart.cu_seqlens.diff()
        width, count = int(lengths.max()), len(lengths)
        mask = torch.arange(width) < lengths[:, None]
        ids = torch.zeros(count, width, dtype=torch.int64)
        ids[mask] = self.apart.input_ids
        place = mask.flatten().nonzero()[:, 0][self.apart.rows]

        def run(backward: bool) -> Gradients:
            with torch.set_grad_enabled(backward):
                logits = peer(ids, attention_mask=mask.long(), use_cache=False).logits.flatten(0, 1)[place]
                value = self.objective(logits, self.apart)
            if not backward:
                return {"value": value.detach()}
            gradients = torch.autograd.grad(value, list(peer.parameters()))
            return {"value": value.detach()} | {
                n: g for (n, _), g in zip(peer.named_parameters(), gradients, strict=True)
            }

        return run

    def product_shapes(self) -> list[tuple[int, int, int]]:
        """(rows, outputs, inputs) of every matrix product of the shared pack's forward."""
        config, tokens = self.model.config, len(self.shared.input_ids)
        shapes = [(config.q_size + 2 * config.kv_size, config.hidden_size), (config.hidden_size, config.q_size)]
        shapes += [(2 * config.intermediate_size, config.hidden_size), (config.hidden_size, config.intermediate_size)]
        head = (len(self.shared.rows), config.vocab_size, config.hidden_size)
        return [(tokens, *shape) for shape in shapes] * config.num_layers + [head]

    def product_flops(self, backward: bool) -> int:
        return (6 if backward else 2) * sum(rows * outputs * inputs for rows, outputs, inputs in self.product_shapes())

    def products(self, backward: bool) -> Callable[[], None]:
        """Operands of the shapes of the shared pack; forward: x W', backward: dy W and dy' x."""
        shapes = self.product_shapes()
        made = {s: (torch.randn(s[0], s[2]), torch.randn(s[0], s[1]), torch.randn(s[1], s[2])) for s in set(shapes)}
        operands = [made[shape] for shape in shapes]

        def run() -> None:
            for x, upstream, weight in operands:
                torch.mm(x, weight.t())
                if backward:
                    torch.mm(upstream, weight)
                    torch.mm(upstream.t(), x)

        return run


def minibatch_cases(bench: Bench, case: MinibatchCase) -> None:
    truth = case.plain(True, torch.float64)
    peer = case.transformers()

    def check(name: str, result: Any) -> None:
        if result is None:
            return
        for key, value in result.items():
            assert_close(f"{name}, {key}", value, truth[key], 2e-4 * float(truth[key].abs().max()))

    tokens = f"{len(case.apart.input_ids)} tokens, {len(case.shared.input_ids)} with shared prompts"
    for backward in (True, False):
        bench.compare(
            f"{'forward + backward' if backward else 'forward'}: {len(case.trajectories)} responses, {tokens}",
            {
                "transformers, padded": partial(peer, backward),
                "plain torch, packed": partial(case.plain, backward),
                "PackedDecoder": partial(case.packed, case.apart, backward),
                "PackedDecoder, prompts shared": partial(case.packed, case.shared, backward),
                "its matrix products alone": case.products(backward),
            },
            check=check,
            read_bytes=4 * case.model.weights.numel(),
            written_bytes=4 * case.model.weights.numel() * backward,
            flops=case.product_flops(backward),
        )


def optimizer_case(bench: Bench, model: PackedDecoder) -> None:
    flat = torch.nn.Parameter(model.weights.detach().clone())
    listed = [torch.nn.Parameter(w.clone()) for w in model.named_weights().values()]
    gradient = PackedDecoder(model.config, torch.randn_like(flat)).named_weights()

    def make(parameters: list[torch.nn.Parameter], **options: Any) -> Callable[[], Tensor]:
        optimizer = torch.optim.AdamW(parameters, 1e-6, **options)

        def run() -> Tensor:
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1e9)
            optimizer.step()
            return norm

        return run

    flat.grad = torch.cat([g.flatten() for g in gradient.values()])
    for parameter, g in zip(listed, gradient.values(), strict=True):
        parameter.grad = g.clone()
    norm = flat.grad.double().norm()
    bench.compare(
        f"clip and AdamW: {len(flat):,} parameters, {len(listed)} tensors",
        {
            "a tensor each, foreach": make(listed, foreach=True),
            "a tensor each, fused": make(listed, fused=True),
            "one flat tensor, fused": make([flat], fused=True),
        },
        check=lambda name, value: assert_close(name, value, norm, 1e-3),
        # Read: weights, gradient twice (norm, step), two moments; written: weights and moments.
        read_bytes=20 * len(flat),
        written_bytes=12 * len(flat),
        flops=16 * len(flat),
    )


def step_metrics(trainer: Trainer, batch: list[Group]) -> dict[str, Any]:
    return trainer.step(batch, VERSION)[0]


def step_case(bench: Bench, groups: int, size: int) -> None:
    """Whole steps; each provider trains its own copy, at a rate that leaves the work the same."""
    providers: dict[str, Callable[[], Any]] = {}
    cases: tuple[tuple[str, LossConfig, int], ...] = (
        ("decoupled, stale", LossConfig(), 1),
        ("decoupled, synchronous", LossConfig(), 0),
        ("naive, stale", LossConfig(proximal="behavior"), 1),
        ("uncorrected, stale", LossConfig(objective="reinforce", ratio_level="off", proximal="behavior"), 1),
    )
    for name, loss, age in cases:
        model = load_model(resolve_model("chain_policy"))
        config = Config(loss=loss, train=TrainConfig(learning_rate=1e-9))
        trainer, batch = Trainer(model, config), make_groups(model, groups, size, age, bench.args.seed)
        providers[name] = partial(step_metrics, trainer, batch)

    def check(name: str, metrics: Any) -> None:
        if not (metrics["optim/updates"] == 4 and metrics["tokens/trained"] > 0):
            raise AssertionError(f"{name}: expected 4 updates, got {metrics}")

    rows = bench.compare(f"Trainer.step: {groups} x {size}, 4 mini-batches", providers, check=check)
    for name, provider in providers.items():
        metrics = min((provider() for _ in range(bench.args.repeats)), key=lambda m: m["time/forward_backward_s"])
        phases = {k.split("/")[1]: round(1e3 * v, 2) for k, v in metrics.items() if k.startswith("time/")}
        rows[name]["phases_ms"] = phases
        print(f"  {name}, ms: {phases}")


def main() -> None:
    parser = argument_parser("Benchmark of the trainer and its decoder.")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    args = parser.parse_args()
    refuse(args, "bench_trainer", "device")
    bench = Bench("trainer", args)
    model = load_model(resolve_model("chain_policy"))
    minibatch_cases(bench, MinibatchCase(model, make_groups(model, args.groups // 4, args.group_size, 1, args.seed)))
    optimizer_case(bench, model)
    step_case(bench, args.groups, args.group_size)
    bench.save()


if __name__ == "__main__":
    main()
