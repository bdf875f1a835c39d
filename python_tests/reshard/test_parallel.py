"""Spec strings, and the tables themselves."""

import dataclasses
from typing import Any

import pytest
from names_oracle import tiny

from areal_core.reshard.models import PUBLIC_MODELS
from areal_core.reshard.names import FRAMEWORKS, NameMap
from areal_core.reshard.names.table import Match, NameTable
from areal_core.reshard.parallel import Parallel, spec_help


@pytest.mark.parametrize(
    ("text", "framework", "sizes"),
    [
        ("megatron:pp4,tp4,ep8,dp1", "megatron", {"pp": 4, "tp": 4, "ep": 8, "dp": 1}),
        ("fsdp:1024", "fsdp", {"dp": 1024}),
        ("fsdp:dp4,tp2", "fsdp", {"dp": 4, "tp": 2}),
        ("hsdp:replicas2,dp4", "fsdp", {"replicas": 2, "dp": 4}),
        ("hf", "fsdp", {}),
        ("vllm:tp8,dp8", "vllm", {"tp": 8, "dp": 8}),
        ("vllm:tp8,dp8,ep", "vllm", {"tp": 8, "dp": 8, "ep": True}),
        ("vllm:tp8,ep8", "vllm", {"tp": 8, "ep": 8}),
        (" SGLang : tp=4 , EP2,", "sglang", {"tp": 4, "ep": 2}),
        ("mcore:tp2,local,tp-cp-ep-pp-dp", "megatron", {"tp": 2, "local": True, "tp-cp-ep-pp-dp": True}),
    ],
)
def test_spec_strings(text: str, framework: str, sizes: dict[str, Any]) -> None:
    parallel = Parallel.parse(text)
    assert (parallel.framework, dict(parallel.sizes)) == (framework, sizes)
    assert Parallel.parse(str(parallel)) == parallel


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a framework of fsdp, megatron, vllm, sglang, hf.*got ''"),
        ("deepspeed:dp4", "got 'deepspeed'"),
        ("megatron:tp", "write tp with a number"),
        ("megatron:tp4x", "got 'tp4x'"),
        ("megatron:tq4", "got 'tq4'; did you mean tp?"),
        ("megatron:4", "got '4'"),
        ("megatron:tp0", r"expected tp in \[1, 65536\], got tp0"),
        ("megatron:tp99999999999999", "expected tp in"),
        ("megatron:tp-2", "got 'tp-2'"),
        ("megatron:tp2,tp4", "expected tp once"),
        ("sglang:tp8,dp8", "adp<n> for data-parallel attention, replicas<n> for engines"),
        ("vllm:tp8,dp2,ep8", r"expected ep \(or ep16\), got ep8: vLLM divides experts over dp x tp = 16 ranks"),
        ("vllm:tp2,ep8", r"expected ep \(or ep2\), got ep8"),
        ("fsdp:dp4,pp2", "no pipeline stages"),
        ("vllm:" + "tp2," * 60, "at most 200 characters, got 245"),
    ],
)
def test_spec_strings_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parallel.parse(text)


def test_a_spec_string_makes_the_map_of_its_sizes() -> None:
    sizes = tiny("qwen3_moe")
    by_text = Parallel.parse("vllm:tp2,dp2,ep4").name_map(sizes, first_rank=8)
    by_size = NameMap.for_model(sizes, "vllm", tp=2, dp=2, ep=True, first_rank=8)
    assert by_text.layout.digest == by_size.layout.digest
    assert list(by_text.layout.ranks) == [8, 9, 10, 11]


def test_paper_scale_numbers_of_ranks() -> None:
    model = dataclasses.replace(PUBLIC_MODELS["qwen3-235b-a22b"], experts=8)  # of 128
    source = Parallel.parse("megatron:pp4,tp4,ep8,dp1").name_map(model)
    target = Parallel.parse("vllm:tp8,dp8").name_map(model, first_rank=128)
    assert list(source.layout.ranks) == list(range(128))
    assert list(target.layout.ranks) == list(range(128, 192))
    assert source.specs == target.specs


def test_help_names_every_size_and_flag() -> None:
    text = spec_help()
    for framework in FRAMEWORKS.values():
        assert framework.name in text
        assert all(f"  {name}" in text for name in [*framework.sizes, *framework.flags])


# -- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a.weight | = | whole", "canonical | buffer | split | over"),
        ("a.weight | = | half | tp", "canonical | buffer | split | over"),
        ("a.weight | = | rows | dp", "canonical | buffer | split | over"),
        ("a.weight | = | rows | -", "a group exactly where a tensor is split"),
        ("a.weight | = | whole | tp", "a group exactly where a tensor is split"),
        ("a.* | b.weight | rows | tp", r"keeps the `\*`"),
        ("a.weight | = | whole | -\na.weight | b | whole | -", "every canonical name once"),
    ],
)
def test_lines_that_are_no_rows(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        NameTable(line)


def test_names_are_found_by_their_numbers_and_suffix() -> None:
    table = NameTable("""
        model.layers.{layer}.mlp.experts.{expert}.up_proj.*  | w13_*  | rows   | experts
        model.layers.{layer}.norm.weight                     | =      | whole  | -
    """)
    match = table.match("model.layers.12.mlp.experts.3.up_proj.weight_scale_inv")
    assert (match.layer, match.expert, match.suffix, match.row.is_stacked) == (12, 3, "weight_scale_inv", True)
    assert table.match("model.layers.0.norm.weight").layer == 0
    for name in ("model.layers.0.norm.bias", "model.layers.x.norm.weight", "norm.weight", "model.layers.0.norm"):
        with pytest.raises(ValueError, match=f"expected a tensor that the table describes, got {name}"):
            table.match(name)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("family", "tables"), [("qwen2", 1), ("qwen3_moe", 1), ("deepseek_v3", 2)])
def test_a_map_prints_as_its_tables(framework: str, family: str, tables: int) -> None:
    names = NameMap.for_model(tiny(family), framework)
    printed = str(names).split("\n\n")
    assert [NameTable(text).rows for text in printed] == [table.rows for table in names.tables]
    assert len(names.tables) == (tables if framework == "megatron" else 1)


MODELS = (
    tiny("qwen2", output_bias=True),
    tiny("qwen3_moe"),
    tiny("deepseek_v3", mtp_layers=1),
    tiny("deepseek_v3", q_lora_rank=0),
)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_row_is_without_a_tensor(framework: str) -> None:
    rows, used = set(), set()
    for sizes in MODELS:
        for flag in ("", *FRAMEWORKS[framework].flags):
            mtp = framework == "fsdp" and sizes.mtp_layers > 0
            names = NameMap.for_model(
                sizes, framework, mtp=mtp, **({flag: True} if flag and (flag != "ep" or sizes.experts) else {})
            )
            for table in names.tables:
                rows |= set(table.rows)
                used |= {match.row for name in names.specs if (match := find(table, name)) is not None}
    assert {row.canonical for row in rows - used} == set()


def find(table: NameTable, name: str) -> Match | None:
    try:
        return table.match(name)
    except ValueError:
        return None
