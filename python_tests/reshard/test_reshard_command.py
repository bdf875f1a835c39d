"""`areal-core reshard plan` as it is typed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from names_oracle import tiny
from test_inventory import hugging_face_config

from areal_core.cli import main
from areal_core.reshard.inventory import inventory
from areal_core.reshard.models import load_model
from areal_core.reshard.names import LoRA, NameMap
from areal_core.reshard.plan import plan
from areal_core.reshard.topology import Topology


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory with the configuration of a tiny model."""
    sizes = tiny("llama", vocabulary=128, hidden=16)
    (tmp_path / "config.json").write_text(json.dumps(hugging_face_config(sizes)))
    return str(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(["reshard", "plan", *arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def facts_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(run(capsys, *arguments, "--json"))
    return facts


def total_bytes(model: str) -> int:
    specs = inventory(model).values()
    return sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in specs)


def test_numbers_are_those_of_the_plan(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(capsys, "--model", model, "--src", "fsdp:3", "--dst", "vllm:tp2", "--nic", "10GB/s")
    source = NameMap.for_model(model, "fsdp", dp=3).layout
    target = NameMap.for_model(model, "vllm", tp=2, first_rank=3).layout
    made = plan(source, target, Topology(nic_bytes_per_s=10e9))
    for name in ("wire_bytes", "nic_bytes", "local_bytes", "messages", "max_received_bytes", "seconds"):
        assert facts[name] == getattr(made.stats, name), name
    for name in ("wire_bytes", "seconds", "ingress_seconds", "node_seconds", "egress_seconds"):
        assert facts["bound"][name] == getattr(made.lower_bound, name), name
    assert facts["digest"] == f"{made.digest:016x}"
    assert facts["bytes"] == total_bytes(model)
    assert (facts["source"]["ranks"], facts["target"]["ranks"]) == (3, 2)
    assert facts["tensors"] == len(source.tensors)
    assert facts["planning"]["plan_seconds"] > 0


def test_bytes_of_cases_that_are_known(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    total = total_bytes(model)
    whole = facts_of(capsys, "--model", model, "--src", "hf", "--dst", "vllm:replicas3")
    assert (whole["wire_bytes"], whole["local_bytes"], whole["messages"]) == (3 * total, 0, 3)
    same = facts_of(capsys, "--model", model, "--src", "hf", "--dst", "vllm", "--colocated")
    assert (same["wire_bytes"], same["local_bytes"], same["bound"]["seconds"]) == (0, total, 0)
    assert same["target"]["colocated"]


def test_multicast_sends_once_to_a_node(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", model, "--src", "hf", "--dst", "vllm:replicas4", "--ranks-per-node", "1"]
    assert facts_of(capsys, *arguments)["nic_bytes"] == 4 * total_bytes(model)
    # The trainer shares its node with an engine, two share the next node, the fourth is alone.
    arguments[-1] = "2"
    assert facts_of(capsys, *arguments)["nic_bytes"] == 3 * total_bytes(model)
    multicast = facts_of(capsys, *arguments, "--multicast")
    assert multicast["nic_bytes"] == multicast["bound"]["nic_bytes"] == 2 * total_bytes(model)


def test_small_chunks_change_the_plan(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", model, "--src", "hf", "--dst", "vllm"]
    digests = {facts_of(capsys, *arguments, "--chunk-mib", size)["digest"] for size in ("1", "8")}
    assert len(digests) == 2


def test_a_slow_link_and_a_dead_one(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", model, "--src", "fsdp:replicas2,dp1", "--dst", "vllm", "--ranks-per-node", "1"]
    fast = facts_of(capsys, *arguments)
    slow = facts_of(capsys, *arguments, "--link", "2=1GB/s")
    assert slow["seconds"] > 10 * fast["seconds"]
    assert facts_of(capsys, *arguments, "--link", "0=0")["messages"] == 1
    assert main(["reshard", "plan", *arguments, "--link", "0=0", "--link", "1=0"]) == 2


def test_the_summary_shows_plan_and_bound(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--model", model, "--src", "megatron:tp2,pp2", "--dst", "sglang:tp4", "--multicast")
    for words in ("megatron:tp2,pp2 (4 ranks)", "sglang:tp4 (4 ranks)", "bytes between ranks", "1.000", "<- the bound"):
        assert words in text
    for words in ("sender load, max / mean", "source tensors not needed", "planned in", "digest", "messages"):
        assert words in text


def test_an_adapter(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(capsys, "--model", model, "--src", "fsdp:2", "--dst", "vllm:tp2", "--lora-rank", "3")
    assert facts["tensors"] == len(NameMap.for_model(model, "fsdp", lora=LoRA(3)).tensors) == 28


def test_dtypes_have_short_names(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", model, "--src", "hf", "--dst", "vllm"]
    assert facts_of(capsys, *arguments, "--dtype", "fp32")["bytes"] == 2 * total_bytes(model)
    assert facts_of(capsys, *arguments, "--dtype", "bf16")["bytes"] == total_bytes(model)


def test_name_maps_and_lists(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--model", model, "--src", "megatron:tp2", "--dst", "vllm:tp4", "--names")
    assert "linear_qkv.*" in text
    assert "qkv_proj.*" in text
    text = run(capsys, "--list")
    assert "vpp<n>" in text
    assert "deepseek-v3" in text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"--model": "qwen9"}, "model: expected a directory, a config.json or a public name, got 'qwen9'"),
        ({"--src": "megatron:tp6"}, "megatron: expected tp to divide 8 attention heads, got tp6; these do: 1, 2, 4, 8"),
        ({"--dst": "tgi:tp2"}, "name map: expected a framework of fsdp, megatron, vllm, sglang"),
        ({"--nic": "50"}, "expected a rate such as 50GB/s"),
        ({"--dtype": "bf8"}, "plan: expected --dtype of bf16, fp16, fp32, fp8"),
        ({"--dtype": "int8"}, "expected a floating-point dtype, got torch.int8"),
        ({"--link": "x=1GB/s"}, "plan: expected --link RANK=RATE, got 'x=1GB/s'"),
        ({"--link": "4=1GB/s"}, "--link of a rank that takes part, 0 to 3, got '4=1GB/s'"),
        ({"--lora-rank": "0"}, "lora: expected rank >= 1, got 0"),
        ({"--chunk-mib": "0"}, "chunk"),
        ({"--chunk-mib": "99999999999999"}, "chunk_bytes of 64 bits"),
        ({"--ranks-per-node": "0"}, "ranks"),
        ({"--ranks-per-node": "99999999999"}, "ranks_per_node below 2^31"),
        ({"--src": "fsdp:dp65536,replicas2"}, "fsdp: expected at most 65536 ranks, got 131072"),
        ({"--dst": "vllm:dp300,replicas300"}, "vllm: expected at most 65536 ranks, got 90000"),
        ({"--dst": "sglang:pp9999,replicas99"}, "sglang: expected at most"),
        ({"--dst": "megatron:cp9999,dp99"}, "megatron: expected at most 65536 ranks, got 989901"),
        ({"--model": "/nowhere/qwen3-8b"}, "model: expected a config.json, got /nowhere/qwen3-8b, which is not there"),
        ({"--model": None, "--src": None}, "plan: expected --model, --src and --dst, got no --model and no --src"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    change: dict[str, str | None], text: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"--model": model, "--src": "fsdp:2", "--dst": "vllm:tp2"} | change
    arguments = [word for option, value in options.items() if value is not None for word in (option, value)]
    assert main(["reshard", "plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("areal-core reshard: ")
    assert text in error
    assert error.count("\n") == 1


def test_a_link_is_given_once(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    links = ["--link", "1=0", "--link", "01=1GB/s"]
    assert main(["reshard", "plan", "--model", model, "--src", "fsdp:2", "--dst", "vllm:tp2", *links]) == 2
    assert "expected one --link a rank, got two of rank 1" in capsys.readouterr().err


def test_a_hugging_face_directory_is_a_model(model: str) -> None:
    assert load_model(model) == load_model(Path(model) / "config.json")


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["reshard", "plan", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for option in ("--model", "--src", "--dst", "--nic", "--multicast", "--colocated", "--json", "example:"):
        assert option in text
