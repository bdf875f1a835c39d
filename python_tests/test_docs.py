"""The Python code of the documentation runs as it stands."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "ops.md"


def python_blocks(guide: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL)


def test_ops_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    blocks = python_blocks(GUIDE)
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), namespace)
    summary = namespace["summary"]
    assert summary.live_tokens == namespace["batch"]["loss_mask"].sum() > 0
    assert all(value.isfinite() for value in summary)
    assert summary.ratio_mean == 1, "before the first step the current policy is the proximal one"
    assert "loss" in capsys.readouterr().out


def test_readme_runs() -> None:
    namespace: dict[str, Any] = {}
    (block,) = python_blocks(ROOT / "README.md")
    exec(compile(block, "README.md", "exec"), namespace)
    gradient = namespace["logits"].grad.float()
    assert gradient.isfinite().all()
    assert gradient[[0, 1, 2, 4]].abs().amax(1).gt(0).all()
    assert gradient[[3, 5]].eq(0).all(), "the last row of a sequence predicts nothing"


def test_resharding_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    blocks = python_blocks(ROOT / "docs" / "resharding.md")
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, "resharding.md", "exec"), namespace)
    assert "linear_qkv" in capsys.readouterr().out


def test_ops_guide_names_every_function() -> None:
    from areal_core import ops

    text = GUIDE.read_text()
    missing = [name for name in ops.__all__ if name.islower() and name not in text]
    assert not missing


def test_every_formula_names_its_source() -> None:
    from areal_core import ops

    formulas = """compute_advantages discounted_returns gae whiten scale_rewards soft_overlong_penalty kl_penalty
        AdaptiveKL filter_groups ppo_loss PPOLossConfig value_loss interpolate_proximal m2po_mask"""
    assert not [name for name in formulas.split() if "Source: " not in (getattr(ops, name).__doc__ or "")]


def test_ops_guide_explains_every_setting_and_statistic() -> None:
    """Each in backticks; `name_k1`, `_k3` stands for two."""
    from areal_core import ops

    settings = (ops.Estimator, ops.RewardConfig, ops.AdaptiveKL, ops.PPOLossConfig)
    statistics = (ops.PPOLossSummary, ops.ValueLossSummary)
    names = {field.name for config in settings for field in dataclasses.fields(config)}
    names |= {name.replace("_k3", "_k1") for summary in statistics for name in summary._fields}
    written = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`", GUIDE.read_text()))))
    written |= set(re.findall(r"\w+", "".join(re.findall(r"(?m)^    .*$", GUIDE.read_text()))))  # the formulas
    assert names <= written, f"not in docs/ops.md: {sorted(names - written)}"
