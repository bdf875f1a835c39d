"""The bundled policy and the script that makes it agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from areal_core.assets import resolve_model
from areal_core.model import PackedDecoder, load_model, load_tokenizer
from areal_core.tasks import ChainArithmetic
from areal_core.tasks.chain_warmup import ChainSkill, WarmupConfig, chain_skill, save_chain_policy, warm_up

TASK = ChainArithmetic()
PROBLEMS = [TASK.problem(i, seed=99, held_out=True) for i in range(512)]


@torch.no_grad()
def sample(model: PackedDecoder, prompts: list[list[int]], max_new: int, seed: int) -> list[list[int]]:
    """The plainest sampler there is: every step runs every sequence from its beginning."""
    generator = torch.Generator().manual_seed(seed)
    sequences, live = [list(p) for p in prompts], list(range(len(prompts)))
    for _ in range(max_new):
        if not live:
            break
        cu_seqlens = torch.tensor([0, *(len(sequences[i]) for i in live)]).cumsum(0)
        ids: Tensor = torch.tensor([token for i in live for token in sequences[i]])
        chances = model(ids, cu_seqlens)[cu_seqlens[1:] - 1].softmax(-1)
        drawn = torch.multinomial(chances, 1, generator=generator)[:, 0].tolist()
        for i, token in zip(live, drawn, strict=True):
            sequences[i].append(token)
        live = [i for i, token in zip(live, drawn, strict=True) if token != model.config.eos_token_id]
    return [s[len(p) :] for s, p in zip(sequences, prompts, strict=True)]


@pytest.fixture(scope="module")
def shipped() -> tuple[PackedDecoder, ChainSkill]:
    model = load_model(resolve_model("chain_policy"))
    return model, chain_skill(model, TASK, PROBLEMS)


def test_it_rarely_thinks_but_is_usually_right_when_it_does(shipped: tuple[PackedDecoder, ChainSkill]) -> None:
    model, skill = shipped
    assert 0.12 <= skill.accuracy <= 0.24
    assert 0.04 <= skill.thinking <= 0.2
    assert skill.thought >= 0.5
    assert model.weights.numel() < 90_000


def test_expected_skill_is_what_sampling_shows(shipped: tuple[PackedDecoder, ChainSkill]) -> None:
    model, skill = shipped
    tokenizer = load_tokenizer(resolve_model("chain_policy"))
    responses = sample(model, [tokenizer.encode(p.prompt) for p in PROBLEMS], TASK.max_response_chars + 1, seed=0)
    texts = [tokenizer.decode(r) for r in responses]
    rewards = [TASK.verify(problem, text) for problem, text in zip(PROBLEMS, texts, strict=True)]
    # Sampling also rewards wrong traces that end right by luck, a tenth of the wrong ones at most.
    assert skill.accuracy - 0.05 <= sum(rewards) / len(rewards) <= skill.accuracy + 0.07
    assert abs(sum(text.startswith("(") for text in texts) / len(texts) - skill.thinking) <= 0.05


def test_the_record_matches_the_policy(shipped: tuple[PackedDecoder, ChainSkill]) -> None:
    record = json.loads((resolve_model("chain_policy") / "warmup.json").read_text())
    config = WarmupConfig(**record["config"])
    problems = [TASK.problem(i, seed=config.seed, held_out=True) for i in range(config.check_problems)]
    assert chain_skill(shipped[0], TASK, problems)._asdict() == pytest.approx(record["after_habit"], abs=1e-3)


def test_the_warm_up_makes_such_a_policy_again(tmp_path: Path, shipped: tuple[PackedDecoder, ChainSkill]) -> None:
    """Rounding differs between machines, and the skill at which stage one stops with it: bands, not bits."""
    record = json.loads((resolve_model("chain_policy") / "warmup.json").read_text())
    config = WarmupConfig(**record["config"])
    seen: list[str] = []
    model, report = warm_up(TASK, config, lambda stage, done, at_most: seen.append(stage))
    made = chain_skill(model, TASK, PROBLEMS)
    assert report.after_skill.accuracy >= config.skill_target
    assert report.after_skill.thinking >= 0.98
    assert seen == ["skill"] * report.skill_steps + ["habit"] * config.habit_steps
    assert abs(made.accuracy - shipped[1].accuracy) <= 0.06
    assert abs(made.thinking - shipped[1].thinking) <= 0.08
    assert made.thought >= 0.4
    save_chain_policy(model, config, report, tmp_path / "policy")
    assert torch.equal(load_model(tmp_path / "policy").weights, model.weights)
    assert sorted(p.name for p in (tmp_path / "policy").iterdir()) == sorted(
        p.name for p in resolve_model("chain_policy").iterdir()
    )


def test_a_skill_out_of_reach_is_an_error() -> None:
    config = WarmupConfig(max_skill_steps=2, check_problems=4)
    with pytest.raises(RuntimeError, match=r"expected accuracy 0\.75 within 2 steps"):
        warm_up(TASK, config)


def test_warm_up_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        warm_up(TASK, WarmupConfig(max_skill_steps=1, check_problems=1))
    assert torch.equal(before, torch.get_rng_state())


def test_resolve_model(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    with pytest.raises(FileNotFoundError, match="one of chain_policy, got 'gpt'"):
        resolve_model("gpt")
