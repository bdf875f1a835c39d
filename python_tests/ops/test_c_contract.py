"""The C library exports what its header declares, and refuses what breaks its contract."""

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from c_header import (
    STATUS,
    StatusError,
    call,
    function_names,
    header_text,
    library,
    library_path,
    make,
    struct_type,
)
from torch import Tensor

import areal_core

ROOT = Path(__file__).parents[2]
CU = torch.tensor([0, 3, 3, 10, 12])
T, S = 12, 4


def some_mask(device: torch.device) -> Tensor:
    return torch.tensor([1, 1, 0, 1, 0, 1, 1, 1, 1, 0, 1, 1], dtype=torch.bool, device=device)


def test_every_function_of_the_header_is_tested() -> None:
    tests = [*Path(__file__).parent.glob("test_c_*.py"), *(ROOT / "cpp_tests" / "c_api").glob("*.cpp")]
    text = "\n".join(path.read_text() for path in tests)
    called = set(re.findall(r"\bareal_\w+", text))
    called |= {
        f"areal_{op}_{device}" for op in re.findall(r'call_on\(\s*device, "(\w+)"', text) for device in ("cpu", "cuda")
    }
    names = function_names()
    assert len(names) > 30
    assert sorted(set(names) - called) == []


def test_the_library_exports_the_header_and_nothing_else() -> None:
    listing = subprocess.run(["nm", "-D", "--defined-only", library_path()], capture_output=True, text=True, check=True)
    assert sorted(line.split()[-1] for line in listing.stdout.splitlines()) == sorted(function_names())


def test_every_field_is_eight_bytes_wide() -> None:
    for name in re.findall(r"typedef struct (\w+) ", header_text()):
        if name != "areal_thread_pool":  # pointers to functions
            struct = struct_type(name)
            assert ctypes.sizeof(struct) == 8 * len(struct._fields_), name
            assert struct._fields_[0] == ("size", ctypes.c_size_t), name


def test_versions_and_build() -> None:
    lib = library()
    assert lib.areal_version().decode() == areal_core.__version__ == areal_core._C.__version__
    assert str(lib.areal_abi_version()) == re.search(r"#define AREAL_ABI_VERSION (\d+)", header_text())[1]
    assert bool(lib.areal_has_cuda()) == areal_core._C.cuda_compiled
    assert lib.areal_isa().decode() == areal_core._C.best_isa()


def gae_args(**change: Any) -> Any:
    fields: dict[str, Any] = {
        "dtype": torch.float32,
        "tokens": T,
        "sequences": S,
        "cu_seqlens": CU,
        "gamma": 1.0,
        "lam": 1.0,
        **{name: torch.zeros(T) for name in ("rewards", "values", "advantages", "returns")},
    }
    return make("areal_gae_args", **fields | change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": 1}, "expected dtype AREAL_FLOAT32 or AREAL_FLOAT64, got 1"),
        ({"tokens": -1}, "expected tokens >= 0, got -1"),
        ({"tokens": 11}, r"expected cu_seqlens\[-1\] = 11 \(number of packed tokens\), got 12"),
        ({"sequences": -1}, "expected sequences >= 0, got -1"),
        ({"returns": None}, "expected returns, got NULL"),
        ({"cu_seqlens": None}, "expected cu_seqlens, got NULL"),
        ({"gamma": 1.5}, r"expected gamma in \[0, 1\], got 1.5"),
        ({"lam": float("nan")}, r"expected lam in \[0, 1\], got -?nan"),
        ({"loss_mask": torch.full((T,), 2, dtype=torch.uint8)}, "expected loss_mask of bytes 0 and 1"),
        ({"size": 0}, r"expected args.size = sizeof\(\*args\), got 0"),
        ({"size": 12}, r"expected args.size = sizeof\(\*args\), got 12"),
    ],
)
def test_broken_contracts_are_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(StatusError, match=f"areal_gae_cpu: {text}") as caught:
        call("areal_gae_cpu", gae_args(**change))
    assert caught.value.args[0] == STATUS["AREAL_INVALID_ARGUMENT"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"aggregation": 3}, "expected normalizer with aggregation AREAL_CONSTANT set, got NULL"),
        ({"ratio_level": 1}, "expected cu_seqlens with a ratio, behavior weight or aggregation by sequence set"),
        ({"objective": 3}, "expected ratio_level AREAL_RATIO_SEQUENCE with AREAL_OBJECTIVE_GMPO, got 0"),
        (
            {"ratio_level": 3},
            "expected ratio_level other than AREAL_RATIO_OFF but with AREAL_OBJECTIVE_REINFORCE, got 3",
        ),
        ({"objective": 1, "dual_clip": 2.0}, "expected dual_clip 0 but with AREAL_OBJECTIVE_PPO, got 2"),
        ({"objective": 5}, r"expected objective in 0\.\.4, got 5"),
        ({"kl_coef": 0.1}, "expected ref_logprobs with kl_coef set, got NULL"),
        ({"entropy_coef": 0.1}, "expected entropy with entropy_coef set, got NULL"),
        ({"stats_count": 3}, "expected stats_count >= "),
        ({"tokens": 2**63 - 1}, r"expected tokens <= 281474976710656, got 9223372036854775807"),
        ({"sequences": 2**62}, r"expected sequences <= 281474976710656, got 4611686018427387904"),
        ({"clip_low": 1.5}, r"expected clip_low in \[0, 1\], got 1\.5"),
        ({"dual_clip": 0.5}, "expected dual_clip > 1, or 0 for none, got 0.5"),
        ({"versions": torch.arange(T)}, "expected current_version with versions set"),
    ],
)
def test_losses_refuse_what_does_not_fit(change: dict[str, Any], text: str) -> None:
    arrays = ("logprobs", "proximal_logprobs", "advantages", "grad_logprobs", "loss", "scale")
    fields = {name: torch.zeros(T) for name in arrays}
    stats = torch.zeros(library().areal_policy_loss_stat_count(), dtype=torch.float64)
    sizes = {"tokens": T, "stats": stats, "stats_count": stats.numel(), "loss_mask": some_mask(torch.device("cpu"))}
    with pytest.raises(StatusError, match=f"areal_policy_loss_cpu: {text}"):
        call("areal_policy_loss_cpu", make("areal_policy_loss_args", **{**fields, **sizes, **change}))


def test_a_null_struct_is_named() -> None:
    with pytest.raises(StatusError, match="areal_gae_cpu: expected args, got NULL"):
        call("areal_gae_cpu", None)


def test_structs_may_be_older_or_newer_than_the_library() -> None:
    """An older program's struct ends early; a newer one's tail must be zero."""
    masked = some_mask(torch.device("cpu"))
    known = gae_args(loss_mask=masked)
    older = bytearray(bytes(known))
    with pytest.raises(StatusError, match="expected returns, got NULL"):
        call("areal_gae_cpu", (ctypes.c_char * 88).from_buffer(_resized(older, 88)))
    newer = _resized(older, len(older) + 16)
    call("areal_gae_cpu", (ctypes.c_char * len(newer)).from_buffer(newer))
    newer[-1] = 1
    with pytest.raises(StatusError, match="without fields newer than this library") as caught:
        call("areal_gae_cpu", (ctypes.c_char * len(newer)).from_buffer(newer))
    assert caught.value.args[0] == STATUS["AREAL_UNSUPPORTED"]


def _resized(struct: bytearray, size: int) -> bytearray:
    resized = bytearray((bytes(struct) + bytes(size))[:size])
    resized[:8] = size.to_bytes(8, "little")
    return resized


@pytest.mark.skipif(areal_core._C.cuda_compiled, reason="a build with the CUDA kernels")
def test_without_cuda_the_cuda_functions_say_so() -> None:
    for name in function_names():
        if name.endswith("_cuda") and name != "areal_has_cuda":
            with pytest.raises(StatusError, match=f"{name}: expected a library built with CUDA") as caught:
                call(name, None, None, None, None)
            assert caught.value.args[0] == STATUS["AREAL_UNSUPPORTED"]
