"""Control plane: what is not an authentic message of the schema is refused, whatever it is."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_core.errors import DeadlineError, PeerError
from areal_core.reshard import control
from areal_core.reshard.control import Channel, address_of, connect, listen
from areal_core.reshard.control_messages import (
    MAX_BODY_BYTES,
    Abort,
    Ack,
    Commit,
    Failed,
    Hello,
    Message,
    Prepare,
    Prepared,
    decode,
    encode,
)

TOKEN = b"0123456789abcdef"
MESSAGES: list[Message] = [
    Hello("sender", 3, 2**64 - 1, 0, "unix:/tmp/π", 0),
    Prepare(2**63 - 1, 0, 12.5, [[0, "tcp:127.0.0.1:80"], [7, ""]]),
    Prepared(1, 5, 0, 2**63 - 1, 16 << 20, 0.25),
    Failed(1, 'a "quoted"\nreason'),
    Commit(9),
    Abort(0, ""),
    Ack(4, -1, 0),
]


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    a, b = socket.socketpair()
    channels = greet(a, b)
    yield channels
    for channel in channels:
        channel.close()


def greet(a: socket.socket, b: socket.socket, token: bytes = TOKEN) -> tuple[Channel, Channel]:
    made: dict[str, Channel] = {}
    thread = threading.Thread(
        target=lambda: made.update(b=Channel(b, token, peer="b's peer", accepting=True, timeout=5.0))
    )
    thread.start()
    made["a"] = Channel(a, TOKEN, peer="a's peer", accepting=False, timeout=5.0)
    thread.join()
    return made["a"], made["b"]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_arrive_as_they_were(pair: tuple[Channel, Channel], message: Message) -> None:
    assert decode(encode(message)) == message
    for here, there in (pair, pair[::-1]):
        here.send(message, 5.0)
        assert there.receive(5.0) == message


BAD_BODIES = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b'{"type":"Commit","epoch":1,"x":"\xff"}',
    "no object": b"[1]",
    "deep": b"[" * 100_000,
    "huge number": b'{"type":"Commit","epoch":' + b"9" * 5000 + b"}",
    "unknown type": b'{"type":"Exec","epoch":1}',
    "type is a list": b'{"type":["Commit"],"epoch":1}',
    "no type": b'{"epoch":1}',
    "missing field": b'{"type":"Commit"}',
    "extra field": b'{"type":"Commit","epoch":1,"x":1}',
    "repeated key": b'{"type":"Commit","epoch":1,"epoch":2}',
    "bool": b'{"type":"Commit","epoch":true}',
    "float": b'{"type":"Commit","epoch":1.0}',
    "zero": b'{"type":"Commit","epoch":0}',
    "too large": b'{"type":"Commit","epoch":9223372036854775808}',
    "text": b'{"type":"Commit","epoch":"1"}',
    "NaN": b'{"type":"Ack","epoch":1,"version":1,"pause_s":NaN}',
    "negative seconds": b'{"type":"Ack","epoch":1,"version":1,"pause_s":-0.5}',
    "role": b'{"type":"Hello","role":"spy","rank":0,"layout_digest":0,"plan_digest":0,"address":"","epoch":0}',
    "long text": json.dumps({"type": "Failed", "epoch": 1, "reason": "x" * 5000}).encode(),
    "addresses": b'{"type":"Prepare","epoch":1,"version":0,"timeout_s":1,"addresses":[[0]]}',
    "rank of an address": b'{"type":"Prepare","epoch":1,"version":0,"timeout_s":1,"addresses":[[-1,"x"]]}',
    "oversized": b" " * (MAX_BODY_BYTES + 1),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_what_the_schema_does_not_allow_is_refused(case: str) -> None:
    with pytest.raises(PeerError, match="control: "):
        decode(BAD_BODIES[case])


@pytest.mark.parametrize("message", [Commit(0), Ack(1, 0, float("nan")), Failed(1, "x" * 5000), Commit(True)])
def test_our_own_mistakes_are_value_errors(message: Message) -> None:
    with pytest.raises(ValueError, match="expected a value of the schema"):
        encode(message)


@pytest.mark.parametrize("way", [1, -1])
def test_a_wrong_token_is_refused(way: int) -> None:
    here, there = greet(*socket.socketpair(), token=b"another token of 16 bytes")[::way]
    here.send(Commit(1), 5.0)
    with pytest.raises(PeerError, match="another token"):
        there.receive(5.0)
    with pytest.raises(PeerError):  # and the connection is over
        there.receive(5.0)


def test_a_short_token_is_a_mistake() -> None:
    a, b = socket.socketpair()
    with pytest.raises(ValueError, match="at least 16 bytes"):
        Channel(a, b"short", peer="b", accepting=False, timeout=1.0)
    b.close()


def wire() -> tuple[Channel, Channel, socket.socket, socket.socket]:
    """Two channels whose bytes pass through our hands: (a, b, the end that a's come out of, the end into b)."""
    (a_end, from_a), (into_b, b_end) = socket.socketpair(), socket.socketpair()
    made: dict[str, Channel] = {}
    threads = [
        threading.Thread(target=lambda: made.update(a=Channel(a_end, TOKEN, peer="p", accepting=False, timeout=5.0))),
        threading.Thread(target=lambda: made.update(b=Channel(b_end, TOKEN, peer="p", accepting=True, timeout=5.0))),
    ]
    for thread in threads:
        thread.start()
    into_b.sendall(from_a.recv(100))
    from_a.sendall(into_b.recv(100))
    for thread in threads:
        thread.join()
    return made["a"], made["b"], from_a, into_b


def frame_of(channel: Channel, out: socket.socket, message: Message) -> bytes:
    channel.send(message, 5.0)
    return out.recv(1 << 16)


@pytest.mark.parametrize("fault", ["every bit", "repeated", "swapped", "reflected", "another connection"])
def test_frames_that_were_tampered_with_are_refused(fault: str) -> None:
    if fault == "every bit":
        a, b, from_a, into_b = wire()
        frame = frame_of(a, from_a, Commit(1))
        for bit in range(8 * len(frame)):
            a, b, from_a, into_b = wire()
            changed = bytearray(frame_of(a, from_a, Commit(1)))
            changed[bit // 8] ^= 1 << bit % 8
            into_b.sendall(changed)
            into_b.shutdown(socket.SHUT_WR)  # a longer length waits for more
            with pytest.raises(PeerError):
                b.receive(5.0)
            for end in (a, b, from_a, into_b):
                end.close()
        return
    a, b, from_a, into_b = wire()
    first, second = frame_of(a, from_a, Commit(1)), frame_of(a, from_a, Commit(2))
    if fault == "repeated":
        into_b.sendall(first)
        assert b.receive(5.0) == Commit(1)
        into_b.sendall(first)
    elif fault == "swapped":
        into_b.sendall(second + first)
    elif fault == "reflected":
        from_a.sendall(first)
        with pytest.raises(PeerError, match="authentic"):
            a.receive(5.0)
        return
    else:
        _, other, _, into_other = wire()
        into_other.sendall(first)
        b, into_b = other, into_other
    with pytest.raises(PeerError, match="authentic"):
        b.receive(5.0)


def test_an_oversized_length_is_refused_before_anything_is_read(pair: tuple[Channel, Channel]) -> None:
    a, b = socket.socketpair()
    here, there = greet(a, b)
    a_raw = here._socket
    a_raw.sendall((MAX_BODY_BYTES + 1).to_bytes(4, "little") + bytes(32))
    with pytest.raises(PeerError, match="at most"):
        there.receive(5.0)


def test_a_peer_that_is_gone_or_silent_is_named(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    assert not here.ready(0.0)
    with pytest.raises(DeadlineError, match="a's peer"):
        here.receive(0.0)
    here, there = greet(*socket.socketpair())
    there.close()
    assert here.ready(5.0)
    assert here.hung_up()
    with pytest.raises(PeerError, match="a's peer"):
        here.receive(5.0)


def test_a_stranger_that_speaks_another_protocol_is_refused() -> None:
    a, b = socket.socketpair()
    a.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    with pytest.raises(PeerError, match="speak this protocol"):
        Channel(b, TOKEN, peer="a stranger", accepting=True, timeout=5.0)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_listen_and_connect(tmp_path: Path, kind: str) -> None:
    server = listen(f"unix:{tmp_path}/socket" if kind == "unix" else "tcp:127.0.0.1:0")
    address = address_of(server)
    made: dict[str, Channel] = {}

    def accept() -> None:
        made["b"] = Channel(server.accept()[0], TOKEN, peer="b's peer", accepting=True, timeout=5.0)

    thread = threading.Thread(target=accept)
    thread.start()
    client = connect(address, TOKEN, peer="the server", timeout=5.0)
    thread.join()
    client.send(Commit(3), 5.0)
    assert made["b"].receive(5.0) == Commit(3)
    if kind == "unix":
        assert os.stat(f"{tmp_path}/socket").st_mode & 0o777 == 0o600
        with pytest.raises(OSError, match="in use"):
            listen(address)  # somebody answers there
    for thing in (client, made["b"], server):
        thing.close()
    with pytest.raises(PeerError, match="expected the server at"):
        connect(address, TOKEN, peer="the server", timeout=5.0)
    listen(address).close()  # the file of a dead one is replaced


@pytest.mark.parametrize("address", ["", "unix:", "tcp:", "tcp:host", "tcp:host:x", "tcp:h:70000", "/run/x", "udp:a:1"])
def test_broken_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="expected an address"):
        listen(address)


def test_tokens_are_long_and_differ() -> None:
    tokens = {control.new_token() for _ in range(8)}
    assert len(tokens) == 8
    assert all(len(token) == 32 for token in tokens)


def mutate(body: bytes, rng: random.Random) -> bytes:
    data = bytearray(body)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.choice([b"0", b"9" * 30, b'"', b"{", b"]", b",", b"null", b"1e999", b"\xff", b"\\u0000"])
        elif kind == 2:
            del data[at : at + rng.randrange(1, 9)]
        else:
            other = rng.randrange(len(data) + 1)
            data[at:at] = data[min(at, other) : max(at, other)]
    return bytes(data)


def fuzz_decode(seed: int, rounds: int) -> dict[str, Any]:
    """Whatever comes is a valid message or a PeerError; returns how often each."""
    rng = random.Random(seed)
    corpus = [encode(m) for m in MESSAGES] + [b for b in BAD_BODIES.values() if len(b) < 1000]
    seen = {"valid": 0, "refused": 0}
    for _ in range(rounds):
        body = mutate(rng.choice(corpus), rng)
        try:
            message = decode(body)
        except PeerError:
            seen["refused"] += 1
            continue
        seen["valid"] += 1
        assert decode(encode(message)) == message
        if rng.random() < 0.1 and len(corpus) < 500:
            corpus.append(body)
    return seen


def test_fuzzed_bodies_are_valid_or_refused() -> None:
    seen = fuzz_decode(
        seed=int(os.environ.get("AREAL_FUZZ_SEED", "1")), rounds=int(os.environ.get("AREAL_FUZZ_ROUNDS", "30000"))
    )
    assert seen["valid"] > 100
    assert seen["refused"] > 1000
