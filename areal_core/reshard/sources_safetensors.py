"""Layouts of safetensors files: a checkpoint as one side of a transfer, mapped into memory and never loaded.

Source: the format, https://github.com/huggingface/safetensors#format. Headers are not trusted: sizes, offsets and names
are checked before anything is mapped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from areal_core.reshard.layout import Layout, TensorLayout
from areal_core.reshard.placements import Mesh, Replicate
from areal_core.reshard.spec import Spec

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def layout_of_safetensors(path: str | Path, *, ranks: Iterable[int] = (0,)) -> Layout:
    """Lay out a safetensors file, or a directory of them, as whole tensors on every one of the ranks that can read it.

    path: a file, or a directory with an index (`*.safetensors.index.json`) or with `*.safetensors` files. Headers alone
        are read.

    Raises: ValueError saying which file breaks the format, or which tensor is in none; OSError.
    """
    ranks = tuple(ranks)
    mesh = Mesh(ranks, (len(ranks),), ("rank",))
    found = _entries(Path(path))
    return Layout({name: TensorLayout(entry.spec, mesh, (Replicate(),)) for name, entry in found.items()})


def safetensors_buffers(path: str | Path) -> dict[str, Tensor]:
    """Map every tensor of a file or directory, as `layout_of_safetensors` names them, into memory.

    Pages are read when they are touched. Writing to a tensor changes the mapping of this process, never the file.

    Raises: as `layout_of_safetensors`.
    """
    buffers = {}
    mapped: dict[Path, np.ndarray[Any, Any]] = {}
    for name, (file, spec, begin) in _entries(Path(path)).items():
        count = math.prod(spec.shape)
        if count == 0:
            buffers[name] = torch.empty(spec.shape, dtype=spec.dtype)
            continue
        if file not in mapped:
            mapped[file] = np.memmap(file, np.uint8, "c")
        buffers[name] = torch.frombuffer(mapped[file], dtype=spec.dtype, count=count, offset=begin).reshape(spec.shape)
    return buffers


class _Entry(NamedTuple):
    file: Path
    spec: Spec
    begin: int  # bytes, in the file


def _entries(path: Path) -> dict[str, _Entry]:
    if not path.is_dir():
        return _read_header(path)
    indices = sorted(path.glob("*.safetensors.index.json"))
    files = sorted(path.glob("*.safetensors"))
    if len(indices) > 1 or not (indices or files):
        raise ValueError(f"layout_of_safetensors: expected one index or safetensors files in {path}, got {indices}")
    return _read_index(indices[0]) if indices else _read_files(files)


def _read_index(index: Path) -> dict[str, _Entry]:
    try:
        wanted = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{index}: expected JSON with a weight_map, got {error!r}") from None
    if not isinstance(wanted, dict) or not all(isinstance(f, str) and Path(f).name == f for f in wanted.values()):
        raise ValueError(f"{index}: expected a weight_map from names to files beside it, got another")
    headers = {file: _read_header(index.parent / file) for file in sorted(set(wanted.values()))}
    for name, file in wanted.items():
        if name not in headers[file]:
            raise ValueError(f"{index}: tensor '{name}': expected in {file}, got a file without it")
    return {name: headers[file][name] for name, file in wanted.items()}


def _read_files(files: list[Path]) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    for file in files:
        for name, entry in _read_header(file).items():
            if name in found:
                raise ValueError(f"{file}: tensor '{name}': expected in one file, got it in {found[name].file} too")
            found[name] = entry
    return found


def _read_header(file: Path) -> dict[str, _Entry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(
                f"{file}: expected a header within the file's {size} bytes, got {header_bytes} bytes of it"
            )
        text = stream.read(header_bytes)
    try:
        header = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: expected a header of JSON, got {error!r}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file}: expected a header that is an object, got {type(header).__name__}")
    header.pop("__metadata__", None)
    data = 8 + header_bytes
    found = {name: _entry(file, name, value, data) for name, value in header.items()}
    _check_cover(file, found, data, size)
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice")
    return found


def _entry(file: Path, name: str, value: Any, data: int) -> _Entry:
    try:
        dtype, shape, (begin, end) = _DTYPES[value["dtype"]], tuple(value["shape"]), value["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole or math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{file}: tensor '{name}': expected a dtype, shape and offsets that agree, got {value!s:.200}")
    return _Entry(file, Spec(dtype, shape), data + begin)


def _check_cover(file: Path, found: dict[str, _Entry], data: int, size: int) -> None:
    """Tensors follow one another without gaps from the header to the end of the file, as the format asks."""
    end = data
    for name, entry in sorted(found.items(), key=lambda item: (item[1].begin, math.prod(item[1].spec.shape))):
        if entry.begin != end:
            raise ValueError(f"{file}: tensor '{name}': expected at byte {end}, got {entry.begin}")
        end += math.prod(entry.spec.shape) * entry.spec.dtype.itemsize
    if end != size:
        raise ValueError(f"{file}: expected tensors up to the file's {size} bytes, got {end}")
