"""Checkpoints of a run: written whole or not at all, verified when read, never pickled.

checkpoints/step_000050/
  manifest.json       step, format, and the SHA-256 of every other file; written last
  policy/             Hugging Face directory: config.json, model.safetensors, tokenizer
  state.json          numbers and texts of the optimizer, the random generators, the rollout
  state.safetensors   their tensors
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from areal_core.errors import CheckpointError

__all__ = ["load_latest", "save_checkpoint"]

_FORMAT = 1
_NAME = re.compile(r"step_(\d{6,})")


def save_checkpoint(
    directory: Path, step: int, state: dict[str, Any], save_policy: Callable[[Path], None], *, keep: int
) -> Path:
    """Write `directory`/step_NNNNNN and remove all but the newest `keep`.

    Args:
        directory: folder of all checkpoints of a run.
        step: finished training steps.
        state: nested dicts and lists of tensors, NumPy arrays, numbers, texts, booleans and None.
        save_policy: writes the policy into the folder it is given.
        keep: checkpoints that stay.

    Returns:
        the new checkpoint's folder.
    """
    directory.mkdir(parents=True, exist_ok=True)
    final = directory / f"step_{step:06d}"
    partial = directory / f".partial_{final.name}"
    for leftover in directory.glob(".partial_*"):  # of saves that were killed
        shutil.rmtree(leftover)
    partial.mkdir()
    save_policy(partial / "policy")
    tensors: dict[str, torch.Tensor] = {}
    tree = _split(state, tensors, "")
    save_file(tensors, partial / "state.safetensors")
    (partial / "state.json").write_text(json.dumps(tree), encoding="utf-8")
    files = {str(p.relative_to(partial)): _sha256(p) for p in sorted(partial.rglob("*")) if p.is_file()}
    manifest = {"format": _FORMAT, "step": step, "sha256": files}
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    others = [path for path in _newest_first(directory) if path != final]
    later = [path for path in others if path.name > final.name]  # corrupt ones that a resumed run passed over
    for old in [*later, *[path for path in others if path not in later][keep - 1 :]]:
        shutil.rmtree(old)
    return final


def load_latest(directory: Path, warn: Callable[[str], None]) -> tuple[int, dict[str, Any], Path] | None:
    """Read the newest checkpoint that verifies; a corrupt one is reported through `warn` and passed over.

    Returns:
        (step, state, folder of the policy), or None when there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints and none of them verifies.
    """
    candidates = _newest_first(directory)
    reasons = []
    for path in candidates:
        try:
            manifest = _verify(path)
            tree = json.loads((path / "state.json").read_text(encoding="utf-8"))
            return manifest["step"], _join(tree, load_file(path / "state.safetensors")), path / "policy"
        except CheckpointError as error:
            reasons.append(str(error))
            warn(str(error))
    if candidates:
        raise CheckpointError(f"{directory}: none of {len(candidates)} checkpoints can be used: {'; '.join(reasons)}")
    return None


def _newest_first(directory: Path) -> list[Path]:
    found = [p for p in directory.glob("step_*") if p.is_dir() and _NAME.fullmatch(p.name)]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")), reverse=True)


def _verify(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        version, files = manifest["format"], manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: unreadable manifest.json ({error})") from None
    if version != _FORMAT:
        raise CheckpointError(f"{path}: expected checkpoint format {_FORMAT}, got {version}")
    for name, digest in files.items():
        if not (path / name).is_file():
            raise CheckpointError(f"{path}: {name} is missing")
        if _sha256(path / name) != digest:
            raise CheckpointError(f"{path}: {name} is corrupt (its SHA-256 differs from the manifest)")
    return manifest


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _split(node: Any, tensors: dict[str, torch.Tensor], path: str) -> Any:
    """A JSON tree of `node`; its tensors go into `tensors` under the path where they stood."""
    if isinstance(node, dict):
        # Keys may be numbers (sample indices, optimizer parameters): keep pairs, JSON would make them texts.
        return {"dict": [[key, _split(value, tensors, f"{path}/{key}")] for key, value in node.items()]}
    if isinstance(node, (list, tuple)):
        return {"list": [_split(value, tensors, f"{path}/{i}") for i, value in enumerate(node)]}
    if isinstance(node, np.ndarray):
        tensors[path] = torch.from_numpy(node.copy())
        return {"array": path}
    if isinstance(node, torch.Tensor):
        tensors[path] = node.detach().clone().contiguous()
        return {"tensor": path}
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    raise TypeError(
        f"checkpoint: expected tensors, arrays, numbers, texts or None at {path}, got {type(node).__name__}"
    )


def _join(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "dict":
        return {key: _join(item, tensors) for key, item in value}
    if kind == "list":
        return [_join(item, tensors) for item in value]
    return tensors[value].numpy() if kind == "array" else tensors[value]
