"""The supervised warm-up behind the bundled policy: it can think a chain through, and hardly ever does.

Stage one teaches the skill (every demonstration thinks) until it is mostly there; stage two shifts the habit (nine
demonstrations in ten answer at once). Reinforcement learning then has something to discover: that thinking pays.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from areal_core import ops
from areal_core.model import DecoderConfig, PackedDecoder, Tokenizer
from areal_core.model.checkpoint import write_directory, write_model
from areal_core.tasks.base import Problem
from areal_core.tasks.chain import CHARACTERS, ChainArithmetic


@dataclass(frozen=True)
class WarmupConfig:
    """Sizes and lengths of the warm-up.

    seed: of weights and problems. batch: demonstrations a step. skill_target: stage one ends when the chance of the
    whole demonstration reaches it (looked at every `check_every` steps), or fails after `max_skill_steps`.
    habit_steps, habit_share: steps of stage two, and the share of its demonstrations that think.
    skill_rate, habit_rate: learning rates, reached linearly over `rate_warmup` steps.
    """

    seed: int = 0
    batch: int = 128
    skill_target: float = 0.75
    skill_rate: float = 4e-3
    max_skill_steps: int = 1000
    habit_steps: int = 60
    habit_share: float = 0.1
    habit_rate: float = 1e-3
    rate_warmup: int = 30
    check_every: int = 20
    check_problems: int = 256


class ChainSkill(NamedTuple):
    """What a policy does on held-out chains, as expectations over its own sampling, without sampling.

    accuracy: chance of one of the two right responses that demonstrations show (a wrong trace that ends right by
        luck is not counted). thinking: chance that a response begins to think. thought: accuracy given the traces are
        begun.
    """

    accuracy: float
    thinking: float
    thought: float


class WarmupReport(NamedTuple):
    """How the warm-up went: the steps of both stages, the skill after each."""

    skill_steps: int
    after_skill: ChainSkill
    after_habit: ChainSkill

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "skill_steps": self.skill_steps,
            "after_skill": self.after_skill._asdict(),
            "after_habit": self.after_habit._asdict(),
        }


Progress = Callable[[str, int, int], None]  # stage, steps done, steps at most


def chain_policy_config() -> DecoderConfig:
    """The shape of the bundled policy: 86k parameters."""
    return DecoderConfig(
        architecture="llama",
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        rope_theta=100.0,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def chain_tokenizer() -> Tokenizer:
    """One token a character, a vocabulary of 32."""
    return Tokenizer.from_characters(CHARACTERS, vocab_size=chain_policy_config().vocab_size)


def warm_up(
    task: ChainArithmetic, config: WarmupConfig, progress: Progress | None = None
) -> tuple[PackedDecoder, WarmupReport]:
    """Train the policy from nothing; deterministic for a seed, a machine and a number of threads.

    Raises: RuntimeError when stage one does not reach its target.
    """
    tokenizer, rng = chain_tokenizer(), random.Random(config.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = PackedDecoder(chain_policy_config())
    held_out = [task.problem(i, seed=config.seed, held_out=True) for i in range(config.check_problems)]

    def train(stage: str, steps: int, rate: float, think_share: float, stop: Callable[[int], bool]) -> int:
        optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        for step in range(1, steps + 1):
            problems = [task.sample(rng) for _ in range(config.batch)]
            texts = [(p.prompt, task.demonstration(p, think=rng.random() < think_share)) for p in problems]
            optimizer.param_groups[0]["lr"] = rate * min(1.0, step / config.rate_warmup)
            _supervised_step(model, optimizer, _pack(texts, tokenizer))
            if progress is not None:
                progress(stage, step, steps)
            if stop(step):
                return step
        return steps

    def skilled(step: int) -> bool:
        return step % config.check_every == 0 and chain_skill(model, task, held_out).accuracy >= config.skill_target

    skill_steps = train("skill", config.max_skill_steps, config.skill_rate, 1.0, skilled)
    after_skill = chain_skill(model, task, held_out)
    if not after_skill.accuracy >= config.skill_target:
        raise RuntimeError(
            f"warm_up: expected accuracy {config.skill_target} within {skill_steps} steps, "
            f"got {after_skill.accuracy:.3f}"
        )
    train("habit", config.habit_steps, config.habit_rate, config.habit_share, lambda _: False)
    return model, WarmupReport(skill_steps, after_skill, chain_skill(model, task, held_out))


@torch.no_grad()
def chain_skill(model: PackedDecoder, task: ChainArithmetic, problems: Sequence[Problem]) -> ChainSkill:
    """The expected behaviour on `problems`, from the likelihood of the two responses to each."""
    tokenizer = chain_tokenizer()
    chances = []
    for think in (True, False):
        batch = _pack([(p.prompt, task.demonstration(p, think=think)) for p in problems], tokenizer)
        logprobs = _logprobs(model, batch)
        total = torch.zeros(len(problems)).index_add_(0, batch.problem, logprobs).exp()
        first = logprobs[batch.problem.diff(prepend=torch.tensor([-1])) > 0].exp()
        chances.append((total.mean().item(), first.mean().item()))
    (thought, thinking), (blurted, _) = chances
    return ChainSkill(accuracy=thought + blurted, thinking=thinking, thought=thought / thinking)


class _Batch(NamedTuple):
    """Demonstrations end to end, and the N tokens of their responses."""

    input_ids: Tensor
    cu_seqlens: Tensor
    rows: Tensor  # [N], the packed token after which each response token is predicted
    labels: Tensor  # [N]
    problem: Tensor  # [N], ascending


def _pack(texts: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> _Batch:
    ids: list[int] = []
    rows: list[int] = []
    problem: list[int] = []
    cu_seqlens, end = [0], chain_policy_config().eos_token_ids[0]
    for number, (prompt, response) in enumerate(texts):
        ids += tokenizer.encode(prompt)
        response_ids = [*tokenizer.encode(response, special=False), end]
        rows += range(len(ids) - 1, len(ids) - 1 + len(response_ids))
        problem += [number] * len(response_ids)
        ids += response_ids
        cu_seqlens.append(len(ids))
    tokens, predicted_after = torch.tensor(ids), torch.tensor(rows)
    return _Batch(tokens, torch.tensor(cu_seqlens), predicted_after, tokens[predicted_after + 1], torch.tensor(problem))


def _logprobs(model: PackedDecoder, batch: _Batch) -> Tensor:
    logits = model(batch.input_ids, batch.cu_seqlens, rows=batch.rows)
    return ops.logprob_from_logits(logits, batch.labels).logprobs


def _supervised_step(model: PackedDecoder, optimizer: torch.optim.Optimizer, batch: _Batch) -> None:
    torch.autograd.backward(-_logprobs(model, batch).mean())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def save_chain_policy(model: PackedDecoder, config: WarmupConfig, report: WarmupReport, directory: str | Path) -> None:
    """Write model, tokenizer and warmup.json, which records how the policy was made, in one atomic step."""
    with write_directory(directory) as partial:
        write_model(model, partial)
        chain_tokenizer().save(partial)
        text = json.dumps({"config": asdict(config), **report.to_dict()}, indent=2) + "\n"
        (partial / "warmup.json").write_text(text, encoding="utf-8")
