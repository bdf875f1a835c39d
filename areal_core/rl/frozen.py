"""Policies beside the trained one that are only asked for logprobs: the reference and the teacher."""

from __future__ import annotations

from areal_core.assets import resolve_model
from areal_core.errors import ConfigError
from areal_core.model import PackedDecoder, load_model
from areal_core.rl.config import Config

__all__ = ["load_frozen"]


def load_frozen(config: Config, policy: PackedDecoder) -> dict[str, PackedDecoder]:
    """Those that a run needs, by name ("reference", "teacher").

    Raises:
        ConfigError: a vocabulary that is not the policy's.
    """
    paths = {}
    if config.needs_reference:
        paths["reference"] = config.reference.path or config.model.path
    if config.teacher.path is not None:
        paths["teacher"] = config.teacher.path
    folders = {name: resolve_model(path, f"{name}.path") for name, path in paths.items()}
    models = {name: load_model(folder).requires_grad_(False) for name, folder in folders.items()}
    for name, model in models.items():
        if model.config.vocab_size != policy.config.vocab_size:
            raise ConfigError(
                f"{name}.path: expected a vocabulary of {policy.config.vocab_size} tokens (the policy's), "
                f"got {model.config.vocab_size} in {paths[name]}"
            )
    return models
