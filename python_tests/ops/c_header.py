"""The C library through ctypes, its structs read from the installed header."""

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_core import info

STATUS = {"AREAL_OK": 0, "AREAL_INVALID_ARGUMENT": 1, "AREAL_UNSUPPORTED": 2, "AREAL_CUDA_ERROR": 3}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


def include_dir() -> Path:
    try:
        return Path(info.compile_flags().removeprefix("-I"))
    except FileNotFoundError as error:
        pytest.skip(str(error))


def library_path() -> Path:
    try:
        return Path(info.link_flags().split()[0].removeprefix("-L")) / "libareal_core_c.so"
    except FileNotFoundError as error:
        pytest.skip(str(error))


def headers() -> list[Path]:
    return sorted((include_dir() / "areal_core").glob("*.h"))


@functools.cache
def header_text() -> str:
    """All headers, without comments."""
    return re.sub(r"/\*.*?\*/", "", "\n".join(h.read_text() for h in headers()), flags=re.DOTALL)


def function_names() -> list[str]:
    return re.findall(r"\bAREAL_API [\w\s*]*?\b(areal_\w+)\(", header_text())


def _field_type(declaration: str) -> type[Any]:
    if "*" in declaration:
        return ctypes.c_void_p
    return {"size_t": ctypes.c_size_t, "int64_t": ctypes.c_int64, "double": ctypes.c_double}[declaration.split()[0]]


@functools.cache
def struct_type(name: str) -> type[ctypes.Structure]:
    match = re.search(rf"typedef struct {name} {{(.*?)}} {name};", header_text(), re.DOTALL)
    assert match, f"expected struct {name} in the header"
    declarations = [d.strip() for d in match[1].split(";") if d.strip()]
    fields = [(re.findall(r"\w+", d)[-1], _field_type(d)) for d in declarations]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def make(name: str, **fields: Any) -> ctypes.Structure:
    """A struct with its size set; tensors become their address, dtypes their code. It keeps the tensors alive."""
    struct = struct_type(name)()
    struct.size = ctypes.sizeof(struct)
    for field, value in fields.items():
        if isinstance(value, Tensor):
            assert value.is_contiguous()
        assert field in dict(type(struct)._fields_), f"{name} has no field {field}"
        raw = value.data_ptr() if isinstance(value, Tensor) else DTYPES.get(value, value)
        setattr(struct, field, raw)
    struct.kept = fields
    return struct


class StatusError(Exception):
    """A call that returned another status than AREAL_OK; args: status, text."""


@functools.cache
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(library_path()))
    for name in function_names():
        getattr(lib, name).restype = ctypes.c_int64
    for name in ("areal_last_error", "areal_version", "areal_isa", "areal_policy_loss_stat_name"):
        getattr(lib, name).restype = ctypes.c_char_p
    return lib


def call(function: str, *arguments: Any) -> None:
    """Calls a function that returns a status; structs and tensors go as pointers, integers as int64."""
    lib = library()
    fn = getattr(lib, function)
    fn.restype = ctypes.c_int32
    raw = [
        ctypes.byref(a)
        if isinstance(a, ctypes.Structure | ctypes.Array)
        else ctypes.c_void_p(a.data_ptr())
        if isinstance(a, Tensor)
        else ctypes.c_int64(a)
        if isinstance(a, int)
        else a
        for a in arguments
    ]
    status = fn(*raw)
    if status != STATUS["AREAL_OK"]:
        raise StatusError(status, lib.areal_last_error().decode())


def call_on(device: torch.device, op: str, *arguments: Any) -> None:
    """Calls areal_<op>_cpu, or areal_<op>_cuda on torch's current stream."""
    if device.type == "cpu":
        return call(f"areal_{op}_cpu", *arguments)
    return call(f"areal_{op}_cuda", *arguments, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
