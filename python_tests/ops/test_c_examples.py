"""The C and C++ examples build against the installed header and library, and compute what torch does."""

import itertools
import math
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from c_header import headers, library_path

from areal_core import info, ops

EXAMPLES = Path(__file__).parents[2] / "examples" / "c_api"
STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
LANGUAGES = {"c": ["cc", "-std=c99"], "c++": ["c++", "-std=c++11"]}


def compiler(language: str) -> list[str]:
    command, standard = LANGUAGES[language]
    if shutil.which(command) is None:
        pytest.skip(f"no {command}")
    return [command, standard, *STRICT]


def build_and_run(command: list[str], source: str, folder: Path, *libraries: str) -> list[str]:
    library_path()  # skips where there is none
    program = str(folder / "program")
    flags = shlex.split(f"{info.compile_flags()} {info.link_flags()}")
    subprocess.run([*command, str(EXAMPLES / source), *flags, *libraries, "-o", program], check=True)
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_header_compiles_alone_without_a_warning(language: str, tmp_path: Path) -> None:
    suffix = {"c": "c", "c++": "cpp"}[language]
    sources = []
    for header in headers():
        source = tmp_path / f"{header.stem}.{suffix}"
        source.write_text(f"#include <areal_core/{header.name}>\nint main(void) {{ return AREAL_ABI_VERSION == 0; }}\n")
        sources.append(str(source))
    assert len(sources) > 4
    subprocess.run([*compiler(language), info.compile_flags(), "-fsyntax-only", *sources], check=True)


def test_ppo_step_in_c(tmp_path: Path) -> None:
    lines = build_and_run(compiler("c"), "ppo_step.c", tmp_path, "-lm")
    results = {name: float(value) for name, value in (line.split() for line in lines[1:])}

    tokens, vocab = 12, 50
    steps = torch.arange(tokens, dtype=torch.float64)
    logits = (2 * torch.sin(0.37 * torch.arange(tokens * vocab, dtype=torch.float64))).float()
    logits = logits.reshape(tokens, vocab).requires_grad_()
    cu_seqlens = torch.tensor([0, 5, tokens])
    ids = (7 * torch.arange(tokens) + 3) % vocab
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[[0, 5]] = False
    rewards = torch.zeros(tokens)
    rewards[[4, 11]] = torch.tensor([1, -0.5])
    values = (0.1 * torch.cos(steps)).float()
    rows = ops.logprob_from_logits(logits, ops.next_token_labels(ids, cu_seqlens)).logprobs
    out = ops.ppo_loss(
        ops.to_token_aligned(rows, cu_seqlens),
        (-4 + 0.3 * torch.sin(steps)).float(),
        ops.gae(rewards, values, cu_seqlens, lam=0.95, loss_mask=mask).advantages,
        mask,
        config=ops.PPOLossConfig(clip_low=0.2, clip_high=0.28),
    )
    out.loss.backward()
    assert results["loss"] == pytest.approx(out.loss.item(), rel=1e-6)
    assert results["gradient_norm"] == pytest.approx(logits.grad.double().norm().item(), rel=1e-6)
    stats = list(results.values())[2:]
    assert stats == pytest.approx(out.stats.raw.tolist(), rel=1e-6)
    assert all(math.isfinite(value) for value in stats)


def test_microbatches_in_cpp(tmp_path: Path) -> None:
    command = [*compiler("c++"), "-std=c++17", "-pthread"]
    *bins, error = build_and_run(command, "microbatches.cpp", tmp_path)
    lengths = [9, 3, 7, 1, 5, 5]
    padded = 100.0 * torch.arange(6)[:, None] + torch.arange(10)
    packed = ops.pack({"x": padded}, lengths=lengths)
    chosen = [ops.select_sequences(packed, b) for b in ops.allocate_microbatches(lengths, 10)]
    for line, batch in itertools.zip_longest(bins, chosen):
        want = zip(batch["x"].tolist(), ops.position_ids(batch.cu_seqlens).tolist(), strict=True)
        assert line == "bin" + "".join(f" {value:g}:{position}" for value, position in want)
    assert error == "error allocate_microbatches: expected lengths <= max_tokens = 4, got lengths[0] = 9"


def test_the_flags_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    library_path()
    assert info.main(["--cflags", "--libs"]) == 0
    assert capsys.readouterr().out.strip() == f"{info.compile_flags()} {info.link_flags()}"
