"""`areal-core reshard bench`: a transfer between real processes, checked and reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_core.cli import main

CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}


def test_versions_travel_between_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = ["--src", "fsdp:2", "--dst", "vllm:tp1", "--rounds", "2", "--transport", "tcp"]
    assert main(["reshard", "bench", "--model", str(tmp_path), *options]) == 0
    printed = capsys.readouterr().out
    assert "2 sending and 1 receiving processes" in printed
    assert "2 versions, medians:" in printed
    assert "bytes, plan / bound            1.000" in printed
    assert "readers paused                 0.0 ms" in printed


def test_too_many_processes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reshard", "bench", "--layers", "1", "--src", "fsdp:80"]) != 0
    assert "expected at most 64 ranks" in capsys.readouterr().err
