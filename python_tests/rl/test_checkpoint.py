import math

import numpy as np
import pytest
import torch

from areal_core.errors import CheckpointError
from areal_core.rl.checkpoint import load_latest, save_checkpoint


def save(directory, step, *, keep=2, **state):
    def save_policy(path):
        path.mkdir()
        (path / "weights").write_text(f"weights {step}")

    return save_checkpoint(directory, step, {"step": step, **state}, save_policy, keep=keep)


def load(directory):
    warnings = []
    return load_latest(directory, warnings.append), warnings


def test_round_trip_keeps_types_and_bits(tmp_path):
    state = {
        "a": torch.randn(3, 4),
        "bf16": torch.tensor([1.5, math.nan], dtype=torch.bfloat16),
        "empty": torch.zeros(0),
        "shared": [torch.arange(4), np.arange(3, dtype=np.int32), (1, 2.5, "x", None, True)],
        "by_number": {0: {"exp_avg": torch.ones(2)}, 7: math.inf},
    }
    save(tmp_path, 3, **state)
    (step, loaded, policy), warnings = load(tmp_path)
    assert (step, warnings) == (3, [])
    assert torch.equal(loaded["a"], state["a"])
    assert torch.equal(loaded["bf16"].view(torch.int16), state["bf16"].view(torch.int16))
    assert loaded["empty"].shape == (0,)
    assert isinstance(loaded["shared"][1], np.ndarray)
    assert loaded["shared"][2] == [1, 2.5, "x", None, True]
    assert torch.equal(loaded["by_number"][0]["exp_avg"], torch.ones(2))
    assert loaded["by_number"][7] == math.inf
    assert (policy / "weights").read_text() == "weights 3"


def test_only_the_newest_stay(tmp_path):
    for step in (1, 2, 10):
        save(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000010"]
    (step, _, _), _ = load(tmp_path)
    assert step == 10


def test_no_checkpoint_is_none(tmp_path):
    assert load(tmp_path / "nowhere") == (None, [])


@pytest.mark.parametrize("victim", ["state.safetensors", "state.json", "policy/weights", "manifest.json"])
def test_a_corrupt_checkpoint_is_named_and_the_one_before_used(tmp_path, victim):
    save(tmp_path, 1)
    save(tmp_path, 2, tensor=torch.ones(100))
    path = tmp_path / "step_000002" / victim
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(bytes(content))
    (step, _, policy), warnings = load(tmp_path)
    assert step == 1
    assert policy.parent.name == "step_000001"
    assert len(warnings) == 1
    assert "step_000002" in warnings[0]
    assert victim in warnings[0] or victim == "manifest.json"


def test_a_missing_file_is_named(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step_000001" / "state.safetensors").unlink()
    warnings = []
    with pytest.raises(CheckpointError, match="none of 1 checkpoints can be used"):
        load_latest(tmp_path, warnings.append)
    assert "state.safetensors is missing" in warnings[0]


def test_a_crash_while_writing_leaves_the_old_ones(tmp_path):
    save(tmp_path, 1)

    def crash(path):
        path.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, {}, crash, keep=1)
    (step, _, _), warnings = load(tmp_path)
    assert (step, warnings) == (1, [])
    save(tmp_path, 2)
    (step, _, _), _ = load(tmp_path)
    assert step == 2


def test_what_json_and_safetensors_cannot_carry_is_refused(tmp_path):
    with pytest.raises(TypeError, match="at /thing, got object"):
        save(tmp_path, 1, thing=object())
    assert load(tmp_path) == (None, [])


def test_a_corrupt_newer_one_does_not_cost_the_good_one(tmp_path):
    save(tmp_path, 2, keep=1)
    save(tmp_path, 4, keep=2)
    (tmp_path / "step_000004" / "state.json").write_text("{}")
    save(tmp_path, 3, keep=1)
    (step, _, _), _ = load(tmp_path)
    assert step == 3
    assert [p.name for p in tmp_path.iterdir()] == ["step_000003"]
