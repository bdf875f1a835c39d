"""Reading and writing `Config`: a YAML file, then `key=value` overrides, into frozen dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from areal_core.errors import ConfigError
from areal_core.rl.config import Config

__all__ = ["build_config", "load_config", "load_settings", "save_config"]

_T = TypeVar("_T")


class _Loader(yaml.SafeLoader):
    """YAML 1.2 where 1.1 surprises: only true and false are truth values (`off` is a text), and 1e-5 is a number."""


_RESOLVERS = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":bool")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_implicit_resolvers = _RESOLVERS
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), [*"-+.0123456789"]
)


def load_config(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Read a configuration.

    Args:
        path: a YAML file; None starts from the defaults.
        overrides: texts such as ``rollout.eta=1`` or ``generate.top_k=5``, applied in order; values are YAML.

    Raises:
        ConfigError: the file is missing or no YAML mapping, a key is unknown, a value has the wrong type or range.
    """
    return load_settings(Config, path, overrides)


def load_settings(cls: type[_T], path: str | Path | None = None, overrides: Iterable[str] = ()) -> _T:
    """Read the settings of another frozen dataclass by the rules of `load_config`."""
    values: dict[str, Any] = {}
    if path is not None:
        values = _read_yaml(Path(path))
    for override in overrides:
        _apply_override(values, override)
    return _build(cls, values, "")


def build_config(values: Mapping[str, Any]) -> Config:
    """Turn a nested mapping into a Config; see `load_config` for errors."""
    return _build(Config, values, "")


def save_config(config: Config, path: str | Path) -> None:
    """Write every field, defaults included, so that the file alone repeats the run."""
    Path(path).write_text(yaml.safe_dump(_plain(config.to_dict()), sort_keys=False), encoding="utf-8")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # a safe loader
    except FileNotFoundError:
        raise ConfigError(f"config: expected an existing file, got {str(path)!r}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path}: not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"config: {path}: expected a mapping at the top level, got {type(values).__name__}")
    return values


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override: expected key=value, got {override!r}")
    try:
        value = yaml.load(text, _Loader) if text else None
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: not a valid YAML value: {text!r} ({error})") from None
    node = values
    *parents, last = key.strip().split(".")
    for depth, parent in enumerate(parents):
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{'.'.join(parents[: depth + 1])}: expected a section, got {child!r}")
        node = child
    node[last] = value


def _build(cls: type[_T], values: Any, prefix: str) -> _T:
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix.rstrip('.')}: expected a mapping, got {values!r}; its keys: {', '.join(names)}")
    expand = getattr(cls, "expand_preset", None)
    values = values if expand is None else expand(values)
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known keys: {', '.join(names)}"
            raise ConfigError(f"{prefix}{key}: unknown key{hint}")
    fields = {}
    for name, value in values.items():
        hint = hints[name]
        section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        fields[name] = _build(hint, value, f"{prefix}{name}.") if section else _coerce(hint, value, f"{prefix}{name}")
    try:
        return cls(**fields)
    except ConfigError:
        raise
    except ValueError as error:  # of an option that an op checks: "<Class>: expected <option> ..."
        text = str(error).partition(": ")[2] or str(error)
        option = re.match(r"expected (\w+) ", text)
        if option is not None and option[1] in names:
            raise ConfigError(f"{prefix}{option[1]}: expected {text[option.end() :]}") from None
        raise ConfigError(f"{prefix.rstrip('.')}: {text}") from None


def _coerce(hint: Any, value: Any, key: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None else _coerce(next(a for a in args if a is not type(None)), value, key)
    if origin is Literal:
        return _expect(value in args and not isinstance(value, bool), value, key, f"one of {', '.join(args)}")
    if origin is dict:
        return dict(_expect(isinstance(value, Mapping), value, key, "a mapping"))
    if origin is tuple and args[1:] == (Ellipsis,):
        _expect(isinstance(value, (list, tuple)), value, key, "a list")
        return tuple(_coerce(args[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if origin is tuple:
        _expect(isinstance(value, (list, tuple)) and len(value) == len(args), value, key, f"{len(args)} values")
        return tuple(_coerce(arg, item, f"{key}[{i}]") for i, (arg, item) in enumerate(zip(args, value, strict=True)))
    if hint is bool:
        return _expect(isinstance(value, bool), value, key, "true or false")
    if hint is float:
        return _number(value, key)
    if hint is int:
        return _expect(isinstance(value, int) and not isinstance(value, bool), value, key, "a whole number")
    return _expect(isinstance(value, str), value, key, "a text")


def _number(value: Any, key: str) -> float:
    # YAML reads inf as a text.
    number = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
    _expect(not math.isnan(number), value, key, "a number")
    return number


def _expect(ok: bool, value: _T, key: str, what: str) -> _T:
    if not ok:
        raise ConfigError(f"{key}: expected {what}, got {value!r}")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value
