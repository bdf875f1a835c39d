"""Build backend: scikit-build-core, asking for torch in the build environment only where the target has none.

Listing torch under ``build-system.requires`` would make isolated builds download a CUDA torch of several GB even
where torch is installed; CMake finds the installed one instead (cmake/ArealPython.cmake).
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from scikit_build_core import build as _backend
from scikit_build_core.build import *  # noqa: F403  (the PEP 517 hooks that need no change)

_TORCH = "torch>=2.10"


def _with_torch(requirements: list[str]) -> list[str]:
    return requirements if _target_has_torch() else [*requirements, _TORCH]


def _target_has_torch() -> bool:
    if os.environ.get("AREAL_TORCH_DIR"):
        return True
    # -I drops the path overlay of pip's isolation, so that this sees the environment pip installs into.
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    return subprocess.run([sys.executable, "-I", "-c", code], check=False).returncode == 0


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _with_torch(_backend.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _with_torch(_backend.get_requires_for_build_editable(config_settings))
