"""Layouts of safetensors files, written by the safetensors package, and of what is not quite one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import bits, numbered
from safetensors.torch import save_file
from torch import Tensor

from areal_core.reshard import Spec
from areal_core.reshard.sources import local_buffers
from areal_core.reshard.sources_safetensors import layout_of_safetensors, safetensors_buffers

DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.uint8, torch.int16, torch.bool]


def tensors() -> dict[str, Tensor]:
    made = {f"{dtype}.w".removeprefix("torch."): numbered((3, 5), torch.uint8).to(dtype) for dtype in DTYPES[-1:]}
    made |= {f"{dtype}.w".removeprefix("torch."): numbered((3, 5), dtype) for dtype in DTYPES[:-1]}
    return made | {"scalar": numbered((), torch.float32), "empty": torch.ones(0, 4)}


def check(path: Path, expected: dict[str, Tensor]) -> None:
    layout = layout_of_safetensors(path, ranks=(3, 5))
    assert layout.ranks == (3, 5)
    assert layout.buffers(5) == {name: Spec.of(value) for name, value in sorted(expected.items())}
    buffers = local_buffers(layout, path, rank=5)
    assert buffers.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(bits(buffers[name]), bits(value)), name


def test_one_file(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    check(tmp_path / "model.safetensors", tensors())
    check(tmp_path, tensors())


def test_a_directory_with_an_index(tmp_path: Path) -> None:
    weight_map = {}
    for i, name in enumerate(tensors()):
        file = f"model-{i % 2}.safetensors"
        weight_map[name] = file
        save_file({n: v for j, (n, v) in enumerate(tensors().items()) if j % 2 == i % 2}, tmp_path / file)
    check(tmp_path, tensors())
    index = tmp_path / "model.safetensors.index.json"
    del weight_map["scalar"]  # what the index leaves out is not of the model
    index.write_text(json.dumps({"weight_map": weight_map}))
    check(tmp_path, {name: value for name, value in tensors().items() if name != "scalar"})
    for broken, message in [
        ({"weight_map": {"nobody": "model-0.safetensors"}}, "tensor 'nobody': expected in model-0.safetensors"),
        ({"weight_map": {"scalar": "../model-0.safetensors"}}, "files beside it"),
        ({"weight_map": ["scalar"]}, "files beside it"),
        ({}, "expected JSON with a weight_map"),
        ([], "expected JSON with a weight_map"),
    ]:
        index.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=message):
            layout_of_safetensors(tmp_path)


def test_a_tensor_in_two_files_and_an_empty_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected one index or safetensors files"):
        layout_of_safetensors(tmp_path)
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(
        ValueError, match=r"b\.safetensors: tensor 'w': expected in one file, got it in .*a\.safetensors"
    ):
        layout_of_safetensors(tmp_path)
    with pytest.raises(FileNotFoundError):
        layout_of_safetensors(tmp_path / "c.safetensors")


def test_writing_to_a_mapped_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(4)}, file)
    before = file.read_bytes()
    safetensors_buffers(file)["w"].zero_()
    assert file.read_bytes() == before
    assert safetensors_buffers(file)["w"].tolist() == [1.0] * 4


def write(file: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def entry(dtype: Any, shape: Any, *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def test_tensors_need_no_alignment(tmp_path: Path) -> None:
    header = {"a": entry("U8", [1], 0, 1), "w": entry("I32", [2], 1, 9)}
    file = write(tmp_path / "f.safetensors", header, b"\7" + (5).to_bytes(4, "little") + (6).to_bytes(4, "little"))
    assert safetensors_buffers(file)["w"].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"w": entry("F3", [2], 0, 8)}, b"8" * 8, "tensor 'w': expected a dtype, shape and offsets that agree"),
        ({"w": entry("F32", [2], 0, 4)}, b"8" * 4, "tensor 'w': .* agree"),
        ({"w": entry("F32", [-2], 0, 8)}, b"8" * 8, "tensor 'w': .* agree"),
        ({"w": entry("F32", [True], 0, 4)}, b"8" * 4, "tensor 'w': .* agree"),
        ({"w": entry("F32", [1], 4, 0)}, b"8" * 4, "tensor 'w': .* agree"),
        ({"w": entry("F32", [1], 0)}, b"8" * 4, "tensor 'w': .* agree"),
        ({"w": 3}, b"", "tensor 'w': .* agree"),
        ({"w": entry("F32", [1], 4, 8)}, b"8" * 8, "tensor 'w': expected at byte"),
        ({"w": entry("F32", [1], 0, 4), "v": entry("F32", [1], 2, 6)}, b"8" * 6, "tensor 'v': expected at byte"),
        ({"w": entry("F32", [1], 0, 4)}, b"8" * 3, "expected tensors up to the file's"),
        ({"w": entry("F32", [1], 0, 4)}, b"8" * 5, "expected tensors up to the file's"),
        ([], b"", "expected a header that is an object, got list"),
        (b"{", b"", "expected a header of JSON"),
        (b"[" * 100_000, b"", "expected a header of JSON"),
        (b'{"w":1,"w":1}', b"", "a name twice"),
    ],
)
def test_broken_headers_are_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_of_safetensors(write(tmp_path / "f.safetensors", header, data))


@pytest.mark.parametrize("content", [b"", b"\1\0\0", (9).to_bytes(8, "little"), b"\xff" * 8 + b"{}"])
def test_headers_longer_than_the_file_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="expected a header within the file's"):
        layout_of_safetensors(tmp_path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damaged_header_is_a_layout_or_a_value_error(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "f.safetensors"
    save_file({"w": torch.ones(3, 2), "b": torch.ones(2, dtype=torch.uint8)}, file)
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        layout = layout_of_safetensors(file)
    except ValueError:
        return
    assert layout.buffers(0) == {name: Spec.of(value) for name, value in safetensors_buffers(file).items()}
