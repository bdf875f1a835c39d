"""Decoders in Hugging Face's directory format: config.json and safetensors."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from areal_core.model.config import DecoderConfig
from areal_core.model.decoder import PackedDecoder
from areal_core.model.flat import parameter_count

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_model(directory: str | Path) -> PackedDecoder:
    """Read a decoder; bf16 and fp16 weights become fp32.

    Reads config.json and model.safetensors, or the shards that model.safetensors.index.json lists. Rotary
    frequencies that old checkpoints carry are ignored, and so is the head of a model with tied embeddings.
    Raises: FileNotFoundError; ValueError naming the tensor that is missing, unknown or of another shape.
    """
    directory = Path(directory)
    config = DecoderConfig.from_pretrained(directory)
    model = PackedDecoder(config, torch.empty(parameter_count(config)))
    missing = dict(model.named_weights())
    for path in _shard_paths(directory):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  (safe_open is no mapping)
                if not _derived(name, config):
                    _fill(missing, name, shard.get_tensor(name), path)
    if missing:
        raise ValueError(f"{directory}: expected the tensor {next(iter(missing))}, which no file holds")
    return model


def save_model(model: PackedDecoder, directory: str | Path) -> None:
    """Write config.json and model.safetensors (fp32); see `write_directory` for what a crash leaves behind."""
    with write_directory(directory) as partial:
        write_model(model, partial)


def write_model(model: PackedDecoder, directory: Path) -> None:
    """Write config.json and model.safetensors into an existing directory."""
    text = json.dumps(model.config.to_hf(), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    weights = {name: weight.float().cpu().clone() for name, weight in model.named_weights().items()}
    save_file(weights, directory / _SINGLE, metadata={"format": "pt"})
    (directory / _SINGLE).chmod(0o644)  # the library leaves it readable to its owner alone


@contextmanager
def write_directory(directory: str | Path) -> Iterator[Path]:
    """Fill a directory atomically: write into the path yielded, which takes the place of `directory` at the end.

    A reader sees the old contents or the new, never a mixture; an exception leaves the old. (Between two renames an
    existing `directory` is missing for an instant: POSIX cannot exchange two directories portably.)
    """
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        partial = scratch / "new"
        partial.mkdir()
        yield partial
        _sync(partial)
        if directory.exists():
            os.rename(directory, scratch / "old")
        os.rename(partial, directory)
    finally:
        shutil.rmtree(scratch)


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _shard_paths(directory: Path) -> list[Path]:
    if (directory / _SINGLE).exists():
        return [directory / _SINGLE]
    if (directory / _INDEX).exists():
        index: Mapping[str, str] = json.loads((directory / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return [directory / name for name in sorted(set(index.values()))]
    raise FileNotFoundError(f"{directory}: expected {_SINGLE} or {_INDEX}, found neither")


def _derived(name: str, config: DecoderConfig) -> bool:
    """True for a tensor that follows from the others or from the config."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _fill(missing: dict[str, Tensor], name: str, tensor: Tensor, path: Path) -> None:
    target = missing.pop(name, None)
    if target is None:
        raise ValueError(f"{path}: unknown tensor {name}, or one that another file holds too")
    if target.shape != tensor.shape:
        raise ValueError(f"{path}: expected {name} of shape {list(target.shape)}, got {list(tensor.shape)}")
    target.copy_(tensor)
