"""What coordinator and members of an update say to each other: one JSON object a message, checked field by field.

    member               coordinator
    Hello            ->                 who I am: layout, plan, where my data plane listens
                     <-  Prepare        transfer this version, as this epoch, among these addresses
    Prepared|Failed  ->                 the bytes are there and intact (their digest), or why not
                     <-  Commit|Abort   show it to readers, or forget it
    Ack              ->                 done, and nothing of this epoch is still moving

A decoder trusts nothing: an unknown type, a field too many or too few, a wrong type, a number out of range, a repeated
key or a long text is a PeerError.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from areal_core.errors import PeerError

__all__ = [
    "MAX_BODY_BYTES",
    "Abort",
    "Ack",
    "Commit",
    "Failed",
    "Hello",
    "Message",
    "Prepare",
    "Prepared",
    "decode",
    "encode",
]

MAX_BODY_BYTES = 256 << 10  # 4,096 addresses of 60 characters
MAX_TEXT = 4096
MAX_RANK = 2**31 - 1
MAX_MEMBERS = 4096

Check = Callable[[Any], bool]


def _integer(low: int, high: int) -> Check:
    return lambda x: type(x) is int and low <= x <= high


def _text(x: Any) -> bool:
    return type(x) is str and len(x) <= MAX_TEXT


def _seconds(x: Any) -> bool:
    return type(x) in (int, float) and 0 <= x <= 1e9  # NaN compares false


def _addresses(x: Any) -> bool:
    pairs = type(x) is list and len(x) <= MAX_MEMBERS and all(type(p) is list and len(p) == 2 for p in x)
    return pairs and all(_RANK(rank) and _text(address) for rank, address in x)


_RANK = _integer(0, MAX_RANK)
_DIGEST = _integer(0, 2**64 - 1)
_EPOCH = _integer(1, 2**63 - 1)
_VERSION = _integer(-1, 2**63 - 1)
_BYTES = _integer(0, 2**63 - 1)


@dataclass(frozen=True)
class Hello:
    """The first message of a member; `epoch` is the last one it has taken part in, 0 before the first."""

    role: str  # "sender" or "receiver": a process that is both says hello twice
    rank: int
    layout_digest: int
    plan_digest: int
    address: str
    epoch: int
    schema: ClassVar[dict[str, Check]] = {
        "role": lambda x: x in ("sender", "receiver"),
        "rank": _RANK,
        "layout_digest": _DIGEST,
        "plan_digest": _DIGEST,
        "address": _text,
        "epoch": _BYTES,
    }


@dataclass(frozen=True)
class Prepare:
    """Transfer `version` within timeout_s; addresses: (rank, where its data plane listens) of every member."""

    epoch: int
    version: int
    timeout_s: float
    addresses: list[list[Any]]
    schema: ClassVar[dict[str, Check]] = {
        "epoch": _EPOCH,
        "version": _integer(0, 2**63 - 1),
        "timeout_s": _seconds,
        "addresses": _addresses,
    }


@dataclass(frozen=True)
class Prepared:
    """The transfer is complete here; digest: of what has arrived (UpdateStats.digests), 0 from a sender."""

    epoch: int
    digest: int
    sent_bytes: int
    received_bytes: int
    staging_bytes: int
    seconds: float
    schema: ClassVar[dict[str, Check]] = {
        "epoch": _EPOCH,
        "digest": _DIGEST,
        "sent_bytes": _BYTES,
        "received_bytes": _BYTES,
        "staging_bytes": _BYTES,
        "seconds": _seconds,
    }


@dataclass(frozen=True)
class Failed:
    """The transfer has failed here."""

    epoch: int
    reason: str
    schema: ClassVar[dict[str, Check]] = {"epoch": _EPOCH, "reason": _text}


@dataclass(frozen=True)
class Commit:
    """Show the version to readers."""

    epoch: int
    schema: ClassVar[dict[str, Check]] = {"epoch": _EPOCH}


@dataclass(frozen=True)
class Abort:
    """Stop the transfer and keep the active version. Epoch 0: the coordinator wants nothing of this member."""

    epoch: int
    reason: str
    schema: ClassVar[dict[str, Check]] = {"epoch": _BYTES, "reason": _text}


@dataclass(frozen=True)
class Ack:
    """The version is visible and copied to where it is used (or, after an abort, the member is at rest)."""

    epoch: int
    version: int
    pause_s: float
    schema: ClassVar[dict[str, Check]] = {"epoch": _EPOCH, "version": _VERSION, "pause_s": _seconds}


Message = Hello | Prepare | Prepared | Failed | Commit | Abort | Ack
_TYPES: dict[str, Any] = {c.__name__: c for c in (Hello, Prepare, Prepared, Failed, Commit, Abort, Ack)}


def encode(message: Message) -> bytes:
    """The body of a frame. Raises ValueError when a field is not what the schema says (a mistake of ours)."""
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    for name, check in message.schema.items():
        if not check(values[name]):
            raise ValueError(
                f"control: {type(message).__name__}.{name}: expected a value of the schema, got {values[name]!r}"
            )
    body = json.dumps({"type": type(message).__name__, **values}, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"control: expected a message of at most {MAX_BODY_BYTES} bytes, got {len(body)}")
    return body


def decode(body: bytes) -> Message:
    """The message of a body. Raises PeerError, saying what is wrong, for anything `encode` cannot have written."""
    if len(body) > MAX_BODY_BYTES:
        raise PeerError(f"control: expected a message of at most {MAX_BODY_BYTES} bytes, got {len(body)}")
    try:
        values = json.loads(body.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"control: expected a JSON object, got {error}") from None
    if not isinstance(values, dict):
        raise PeerError(f"control: expected a JSON object, got {type(values).__name__}")
    kind = values.pop("type", None)
    message_type = _TYPES.get(kind) if isinstance(kind, str) else None
    if message_type is None:
        raise PeerError(f"control: expected a message of {', '.join(_TYPES)}, got type {str(kind)[:40]!r}")
    if values.keys() != message_type.schema.keys():
        raise PeerError(
            f"control: {kind}: expected fields {sorted(message_type.schema)}, got {str(sorted(values))[:200]}"
        )
    for name, check in message_type.schema.items():
        if not check(values[name]):
            raise PeerError(f"control: {kind}.{name}: expected a value of the schema, got {str(values[name])[:80]!r}")
    message: Message = message_type(**values)
    return message


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a repeated key")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"the constant {name}")
