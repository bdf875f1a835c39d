"""The JSON form of a layout: how the two sides of a transfer tell each other what they hold.

Reading trusts nothing. Every value is checked for its type, every object for its keys, before the layout itself is
checked as any other; anything else is a ValueError that says where.

    {"format": "areal_core.layout", "version": 1,
     "meshes": [{"ranks": [0, 1, 2, 3], "shape": [2, 2], "dim_names": ["dp", "tp"]}],
     "tensors": [{"name": "w", "dtype": "bfloat16", "shape": [10, 6], "mesh": 0,
                  "placements": [{"kind": "strided_shard", "dim": 0, "split_factor": 2}, {"kind": "shard", "dim": 0}],
                  "storage": {"buffer": "fused", "offset": 60}}]}

Keys whose value is the default are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from areal_core.reshard.layout import Layout, Storage, TensorLayout
from areal_core.reshard.placements import Flat, Mesh, Placement, Ragged, Replicate, Shard, StridedShard
from areal_core.reshard.spec import Spec, dtype_name, dtype_of

FORMAT = "areal_core.layout"
VERSION = 1

_KINDS: dict[str, type[Placement]] = {
    "replicate": Replicate,
    "shard": Shard,
    "strided_shard": StridedShard,
    "flat": Flat,
    "ragged": Ragged,
}
_KIND_OF = {kind: name for name, kind in _KINDS.items()}


def layout_to_json(layout: Layout) -> str:
    """The layout as JSON text, the same for equal layouts."""
    numbers: dict[Mesh, int] = {}
    number_of: dict[int, int] = {}  # by identity: hashing a mesh of a thousand ranks for every tensor would take long
    tensors = []
    for name, tensor in layout.tensors.items():
        if id(tensor.mesh) not in number_of:
            number_of[id(tensor.mesh)] = numbers.setdefault(tensor.mesh, len(numbers))
        entry: dict[str, Any] = {
            "name": name,
            "dtype": dtype_name(tensor.spec.dtype),
            "shape": tensor.spec.shape,
            "mesh": number_of[id(tensor.mesh)],
            "placements": [{"kind": _KIND_OF[type(p)]} | _non_default(p) for p in tensor.placements],
        }
        if storage := _non_default(tensor.storage):
            entry["storage"] = storage
        tensors.append(entry)
    meshes = [{"ranks": mesh.ranks, "shape": mesh.shape, "dim_names": mesh.dim_names} for mesh in numbers]
    whole = {"format": FORMAT, "version": VERSION, "meshes": meshes, "tensors": tensors}
    return json.dumps(whole, separators=(",", ":"))


def layout_from_json(text: str | bytes, max_bytes: int) -> Layout:
    """The layout of a JSON text. Raises ValueError for anything that `layout_to_json` cannot have written."""
    size = len(text) if isinstance(text, bytes) else len(text.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise ValueError(f"Layout.from_json: expected at most {max_bytes} bytes, got {size}")
    try:
        whole = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("Layout.from_json: expected shallow JSON, got deeply nested") from None
    except ValueError as error:
        raise ValueError(f"Layout.from_json: {error}") from None
    found = _keys(whole, "the layout", required={"format", "version", "meshes", "tensors"})
    if (found["format"], found["version"]) != (FORMAT, VERSION) or isinstance(found["version"], (bool, float)):
        raise ValueError(f"Layout.from_json: expected format {FORMAT}, version {VERSION}, got another")
    meshes = [_mesh(item, f"meshes[{i}]") for i, item in enumerate(_list(found["meshes"], "meshes"))]
    tensors: dict[str, TensorLayout] = {}
    placed: dict[str, tuple[Placement, ...]] = {}
    for i, item in enumerate(_list(found["tensors"], "tensors")):
        name, tensor = _tensor(item, meshes, placed, f"tensors[{i}]")
        if name in tensors:
            raise ValueError(f"Layout.from_json: expected unique names, got '{name}' twice")
        tensors[name] = tensor
    return Layout(tensors)


def _non_default(value: Placement | Storage) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}


# -- Reading: each function checks one kind of value, `where` it stands in the text ------------------------------------


def _fail(where: str, expected: str, got: object) -> ValueError:
    return ValueError(f"Layout.from_json: {where}: expected {expected}, got {type(got).__name__} {str(got)[:40]!r}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("expected unique keys in every object, got one twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"expected numbers, got {name}")


def _keys(
    value: object, where: str, required: set[str], optional: frozenset[str] | set[str] = frozenset()
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _fail(where, "an object", value)
    if not required <= value.keys() or not value.keys() <= required | optional:
        raise _fail(where, f"the keys {sorted(required)}, maybe {sorted(optional)}", sorted(value))
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _fail(where, "a list", value)
    return value


def _int(value: object, where: str) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise _fail(where, "an integer of 64 bits", value)
    return value


def _str(value: object, where: str) -> str:
    if not isinstance(value, str) or _has_surrogates(value):
        raise _fail(where, "text", value)
    return value


def _has_surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _ints(value: object, where: str) -> tuple[int, ...]:
    return tuple(_int(item, where) for item in _list(value, where))


def _ragged_boxes(value: object, where: str) -> list[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    boxes = []
    for of_rank in _list(value, where):
        pairs = [_list(pair, where) for pair in _list(of_rank, where)]
        if any(len(pair) != 2 for pair in pairs):
            raise _fail(where, "boxes of a start and a size", of_rank)
        boxes.append([(_ints(start, where), _ints(size, where)) for start, size in pairs])
    return boxes


_FIELDS: Mapping[str, Callable[[object, str], Any]] = {
    "dim": _int,
    "chunk": _int,
    "split_factor": _int,
    "offset": _int,
    "boxes": _ragged_boxes,
    "buffer": _str,
    "buffer_shape": _ints,
    "strides": _ints,
    "group_rows": _int,
    "group_stride": _int,
}


# Of a placement or storage, the fields without a default and those with one.
_FIELD_NAMES: Mapping[type[Any], tuple[set[str], set[str]]] = {
    kind: (
        {f.name for f in fields(kind) if f.default is MISSING},
        {f.name for f in fields(kind) if f.default is not MISSING},
    )
    for kind in (*_KINDS.values(), Storage)
}


def _fields(kind: type[Any], value: object, where: str) -> Any:
    """A placement or storage of the fields of an object. Fields without a default are required, no others known."""
    found = _keys(value, where, *_FIELD_NAMES[kind])
    return kind(**{name: _FIELDS[name](item, f"{where}.{name}") for name, item in found.items()})


def _mesh(value: object, where: str) -> Mesh:
    found = _keys(value, where, {"ranks", "shape", "dim_names"})
    names = [_str(name, f"{where}.dim_names") for name in _list(found["dim_names"], f"{where}.dim_names")]
    return Mesh(_ints(found["ranks"], f"{where}.ranks"), _ints(found["shape"], f"{where}.shape"), names)


def _placement(value: object, where: str) -> Placement:
    found = dict(value) if isinstance(value, dict) else {}
    kind = found.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise _fail(where, f"an object with a kind of {sorted(_KINDS)}", value)
    made: Placement = _fields(_KINDS[kind], found, where)
    return made


def _placements(value: object, where: str) -> tuple[Placement, ...]:
    return tuple(_placement(item, where) for item in _list(value, where))


def _tensor(
    value: object, meshes: list[Mesh], placed: dict[str, tuple[Placement, ...]], where: str
) -> tuple[str, TensorLayout]:
    """placed: placements by their text, read already: most tensors have those of another."""
    found = _keys(value, where, {"name", "dtype", "shape", "mesh", "placements"}, {"storage"})
    name = _str(found["name"], f"{where}.name")
    spec = Spec(
        dtype_of("Layout.from_json", name, _str(found["dtype"], f"{where}.dtype")),
        _ints(found["shape"], f"{where}.shape"),
    )
    mesh = _int(found["mesh"], f"{where}.mesh")
    if not 0 <= mesh < len(meshes):
        raise _fail(f"{where}.mesh", f"one of {len(meshes)} meshes", mesh)
    key = repr(found["placements"])
    if key not in placed:
        placed[key] = _placements(found["placements"], f"{where}.placements")
    storage = _fields(Storage, found.get("storage", {}), f"{where}.storage")
    return name, TensorLayout(spec, meshes[mesh], placed[key], storage)
