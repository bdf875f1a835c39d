"""Authenticated connections of the control plane: small messages between a coordinator and the members of an update.

Both ends know a secret token (`new_token`, passed to every process by whoever starts them). Each sends 16 random bytes;
the keys of the connection, one for each direction, are HMAC-SHA256 of both under the token. A frame is

    length: u32, little-endian | HMAC-SHA256 of (sequence number, body): 32 bytes | body: JSON (control_messages.py)

so that a stranger, a changed or repeated frame, or one of another connection is refused before its body is looked at.
The token authenticates; it does not hide what is said, which is never more than ranks, digests and addresses.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import stat
import struct
import time
from contextlib import suppress

from areal_core.errors import DeadlineError, PeerError
from areal_core.reshard.control_messages import MAX_BODY_BYTES, Message, decode, encode

__all__ = ["Channel", "address_of", "connect", "listen", "new_token"]

MIN_TOKEN_BYTES = 16
_MAGIC = b"ARC1"
_NONCE_BYTES = 16
_MAC_BYTES = 32


def new_token() -> bytes:
    """A secret for one group of processes. Hand it over as you would a password, never by the control plane."""
    return secrets.token_bytes(32)


def listen(address: str) -> socket.socket:
    """A listening socket at "unix:/path" or "tcp:host:port" (port 0: a free one).

    A socket file whose owner is gone is replaced; one that somebody answers on is not. `unix:` files are for this user
    alone.
    """
    place = _parse(address)
    if isinstance(place, tuple):
        return socket.create_server(place, backlog=128)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(place).st_mode) and not _answers(place):
                os.unlink(place)
        server.bind(place)
        os.chmod(place, 0o600)
        server.listen(128)
    except BaseException:
        server.close()
        raise
    return server


def address_of(server: socket.socket) -> str:
    """The address to `connect` to a listening socket."""
    if server.family == socket.AF_UNIX:
        return f"unix:{server.getsockname()}"
    host, port = server.getsockname()[:2]
    return f"tcp:{host}:{port}"


def connect(address: str, token: bytes, *, peer: str, timeout: float) -> Channel:
    """A channel to whoever listens at the address. Raises PeerError naming `peer` when nobody does."""
    place = _parse(address)
    try:
        if isinstance(place, tuple):
            plain = socket.create_connection(place, timeout=timeout)
        else:
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            plain.settimeout(timeout)
            plain.connect(place)
    except OSError as error:
        raise PeerError(f"control: expected {peer} at {address}, got {error}") from None
    return Channel(plain, token, peer=peer, accepting=False, timeout=timeout)


class Channel:
    """One authenticated connection. One thread may send while another receives; a failed call closes it."""

    def __init__(self, plain: socket.socket, token: bytes, *, peer: str, accepting: bool, timeout: float) -> None:
        """Greets the other end; takes over the socket. Raises PeerError, DeadlineError."""
        if len(token) < MIN_TOKEN_BYTES:
            plain.close()
            raise ValueError(f"control: expected a token of at least {MIN_TOKEN_BYTES} bytes, got {len(token)}")
        self.peer = peer
        self._socket = plain
        plain.setblocking(False)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that is gone says nothing
        self._sent = self._received = 0
        deadline = time.monotonic() + timeout
        mine = _MAGIC + secrets.token_bytes(_NONCE_BYTES)
        self._write(mine, deadline)
        theirs = self._read(len(mine), deadline)
        if not theirs.startswith(_MAGIC):
            self.close()
            raise PeerError(f"control: expected {peer} to speak this protocol, got {theirs[:4]!r}")
        connecting, accepting_nonce = (theirs, mine) if accepting else (mine, theirs)
        key = hmac.digest(token, b"areal-control" + connecting + accepting_nonce, "sha256")
        to_accepting, to_connecting = (hmac.digest(key, way, "sha256") for way in (b"to", b"from"))
        self._key_out, self._key_in = (to_connecting, to_accepting) if accepting else (to_accepting, to_connecting)

    def send(self, message: Message, timeout: float) -> None:
        """Raises DeadlineError when the peer does not take it in time, PeerError when it is gone."""
        body = encode(message)
        frame = struct.pack("<I", len(body)) + _mac(self._key_out, self._sent, body) + body
        self._sent += 1
        self._write(frame, time.monotonic() + timeout)

    def receive(self, timeout: float) -> Message:
        """The next message. Raises DeadlineError; PeerError when the peer is gone or the frame is not its own."""
        deadline = time.monotonic() + timeout
        head = self._read(4 + _MAC_BYTES, deadline)
        (length,) = struct.unpack_from("<I", head)
        if length > MAX_BODY_BYTES:
            self.close()
            raise PeerError(
                f"control: expected a message of at most {MAX_BODY_BYTES} bytes from {self.peer}, got {length}"
            )
        body = self._read(length, deadline)
        if not hmac.compare_digest(head[4:], _mac(self._key_in, self._received, body)):
            self.close()
            raise PeerError(
                f"control: expected an authentic message from {self.peer}, got one of another token or order"
            )
        self._received += 1
        try:
            return decode(body)
        except PeerError as error:
            self.close()
            raise PeerError(f"{error} (from {self.peer})") from None

    def hung_up(self) -> bool:
        """Whether the other end is known to be gone (without waiting)."""
        if (fd := self.fileno()) < 0:
            return True
        poller = select.poll()
        poller.register(fd, select.POLLRDHUP)
        return bool(poller.poll(0))

    def fileno(self) -> int:
        """For select; -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """End the connection; wakes a thread that waits in it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def ready(self, timeout: float) -> bool:
        """Wait for the beginning of a message (or the end of the connection): whether `receive` will find one."""
        deadline = time.monotonic() + timeout
        while True:
            if self._poll(select.POLLIN, deadline):
                return True
            if time.monotonic() >= deadline:
                return False

    def _write(self, data: bytes, deadline: float) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline, "take")
            except OSError as error:
                raise self._lost("take", str(error)) from None

    def _read(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                part = self._socket.recv(count - len(data))
            except BlockingIOError:
                self._wait(select.POLLIN, deadline, "send")
                continue
            except OSError as error:
                raise self._lost("send", str(error)) from None
            if not part:
                raise self._lost("send", "the end of the connection")
            data += part
        return bytes(data)

    def _wait(self, event: int, deadline: float, what: str) -> None:
        if not self._poll(event, deadline) and time.monotonic() >= deadline:
            self.close()
            raise DeadlineError(f"control: expected {self.peer} to {what} a message in time, got nothing")

    def _poll(self, event: int, deadline: float) -> bool:
        """In slices, so that a close by another thread is seen even if its descriptor is in use again."""
        if (fd := self.fileno()) < 0:
            return True  # the call that follows says why
        poller = select.poll()
        poller.register(fd, event)
        return bool(poller.poll(1e3 * min(max(deadline - time.monotonic(), 0.0), 0.25)))

    def _lost(self, what: str, why: str) -> PeerError:
        self.close()
        return PeerError(f"control: expected {self.peer} to {what} a message, got {why}")


def _mac(key: bytes, sequence: int, body: bytes) -> bytes:
    return hmac.digest(key, struct.pack("<Q", sequence) + body, "sha256")


def _parse(address: str) -> str | tuple[str, int]:
    """The path of a Unix socket, or host and port."""
    kind, _, place = address.partition(":")
    if kind == "unix" and place:
        return place
    host, _, port = place.rpartition(":")
    if kind == "tcp" and host and port.isdecimal() and int(port) < 65536:
        return host.strip("[]"), int(port)
    raise ValueError(f"control: expected an address 'unix:/path' or 'tcp:host:port', got {address!r}")


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
