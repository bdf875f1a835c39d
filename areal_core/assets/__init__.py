"""Files bundled with the package: policies that runs can start from."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).parent


def resolve_model(name_or_path: str | Path, key: str = "resolve_model") -> Path:
    """The directory of a model: an existing directory as it is, else the bundled model of that name.

    Raises: FileNotFoundError naming the bundled models, and the setting `key`.
    """
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    bundled = sorted(path.parent.name for path in _ROOT.glob("*/config.json"))
    if str(name_or_path) in bundled:
        return _ROOT / name_or_path
    raise FileNotFoundError(
        f"{key}: expected a model directory or one of {', '.join(bundled)}, got {str(name_or_path)!r}"
    )
