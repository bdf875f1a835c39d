"""The one that decides: every member transfers, then all show the new version to their readers, or none does.

Two phases. Prepare: every member moves its bytes into memory that no reader looks at and says so with a digest. Only
when all have said so is Commit sent; a member that fails, dies, or is not done in time makes it Abort for all, and the
version that readers have stays what it was, everywhere. Every attempt is an epoch of its own, so that what is left over
of an earlier one is recognised and dropped.

A coordinator keeps nothing that a new one would need: should its process die, members abort what is not committed and
look for whoever listens at the same address next. Should it die between two commits, the members that got theirs serve
the new version and the others the old one, each a whole one, until the retry, which writes all of them again.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple, TypeVar

from areal_core.errors import ArealError, CancelledError, DeadlineError, PeerError
from areal_core.reshard.control import Channel, address_of, listen
from areal_core.reshard.control_messages import Abort, Ack, Commit, Failed, Hello, Message, Prepare, Prepared

__all__ = ["Coordinator", "MemberKey", "MemberReport"]

_SLICE_S = 0.02
_GREETING_S = 10.0  # for a connection to say who it is
_SEND_S = 10.0
_REST_S = 10.0  # for members to come to rest after an abort
_REASON_S = 0.5  # after the deadline, for members to say what they were waiting for
_MAX_GREETINGS = 64  # at once

Reply = TypeVar("Reply", Prepared, Ack)


class MemberKey(NamedTuple):
    """A rank in one of its roles."""

    role: str
    rank: int

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


class MemberReport(NamedTuple):
    """One member's share of an update."""

    prepared: Prepared
    pause_s: float
    visible_s: float  # from the start of the update to its acknowledgement, as the coordinator saw it


class Coordinator:
    """Listens for members and takes them through updates, one at a time.

    Args:
        members: who takes part, with the digest of the layout each must have.
        plan_digest: the plan all must have.
        address: "unix:/path" or "tcp:host:port" to listen at.
        token: what every member knows, and nobody else.
    """

    def __init__(self, members: Mapping[MemberKey, int], plan_digest: int, address: str, token: bytes) -> None:
        self._expected = dict(members)
        self._plan_digest = plan_digest
        self._token = token
        self._present: dict[MemberKey, tuple[Channel, Hello]] = {}
        self._changed = threading.Condition()
        self._greetings = threading.Semaphore(_MAX_GREETINGS)
        self._updating = threading.Lock()
        self._epoch = 0
        self._session: list[list[object]] | None = None  # addresses whose data planes are connected to each other
        self._turned_away = ""
        self._closed = False
        self._server = listen(address)
        self.address = address_of(self._server)
        threading.Thread(target=self._accept, name="reshard-accept", daemon=True).start()

    def update(
        self,
        version: int,
        *,
        timeout: float,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[str, int], None] = lambda phase, done: None,
    ) -> dict[MemberKey, MemberReport]:
        """Take every member from Prepare to its acknowledgement of Commit.

        timeout: seconds for the transfer; then members have _REST_S to show the version, or to come to rest.
        progress: told the phase ("assemble", "transfer", "commit") and how many members are through it.

        Raises: DeadlineError naming who is missing or late; PeerError naming who failed and why; CancelledError. In all
        of these nothing was committed, unless the text says "committed": then all others serve the version.
        """
        with self._updating:
            start = time.monotonic()
            deadline = start + timeout
            members = self._assemble(deadline, cancelled, progress)
            if self._session not in (None, _addresses(members)):
                # One has started anew: the others' connections to it are of no use, so all begin again.
                self._drop(list(members))
                members = self._assemble(deadline, cancelled, progress)
            self._epoch = max(self._epoch, *(hello.epoch for _, hello in members.values())) + 1
            epoch, channels = self._epoch, {key: channel for key, (channel, _) in members.items()}
            addresses = _addresses(members)
            try:
                left = max(deadline - time.monotonic(), 0.0)
                self._tell(channels, Prepare(epoch, version, left, addresses))
                ended = _Waiting("transfer", epoch, deadline + _REASON_S, cancelled, progress)
                prepared = {key: reply for key, (reply, _) in ended.gather(channels, Prepared).items()}
                self._session = addresses
            except ArealError as error:
                self._abort(channels, epoch, str(error))
                raise
            return self._commit(channels, epoch, prepared, start, progress)

    def close(self) -> None:
        """Stop listening and end all connections: members abort what is under way and look for a successor."""
        with self._changed:
            self._closed = True
            channels = [channel for channel, _ in self._present.values()]
            self._present.clear()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept(), which would keep it listening
        self._server.close()
        for channel in channels:
            channel.close()

    def _commit(
        self,
        channels: Mapping[MemberKey, Channel],
        epoch: int,
        prepared: Mapping[MemberKey, Prepared],
        start: float,
        progress: Callable[[str, int], None],
    ) -> dict[MemberKey, MemberReport]:
        """From here on the version is committed, whoever is lost."""
        lost: list[str] = []
        reached = {}
        for key, channel in channels.items():
            try:
                channel.send(Commit(epoch), _SEND_S)
                reached[key] = channel
            except ArealError as error:
                lost.append(str(error))
        ended = _Waiting("commit", epoch, time.monotonic() + _REST_S, lambda: False, progress, lost=lost)
        acknowledged = ended.gather(reached, Ack)
        if lost:
            self._drop([key for key in channels if key not in acknowledged])
            raise PeerError(f"update: epoch {epoch} is committed, but {'; '.join(lost)}")
        return {key: MemberReport(prepared[key], ack.pause_s, at - start) for key, (ack, at) in acknowledged.items()}

    def _abort(self, channels: Mapping[MemberKey, Channel], epoch: int, reason: str) -> None:
        """Bring everybody to rest, and have all say hello again: their data planes are to be made anew."""
        self._session = None
        lost: list[str] = []
        reached = {}
        for key, channel in channels.items():
            with suppress(ArealError):
                channel.send(Abort(epoch, reason[:1000]), _SEND_S)
                reached[key] = channel
        ended = _Waiting("abort", epoch, time.monotonic() + _REST_S, lambda: False, lambda *_: None, lost=lost)
        ended.gather(reached, Ack)
        self._drop(list(channels))

    def _tell(self, channels: Mapping[MemberKey, Channel], message: Message) -> None:
        for channel in channels.values():
            channel.send(message, _SEND_S)

    def _drop(self, keys: list[MemberKey]) -> None:
        with self._changed:
            for key in keys:
                if key in self._present:
                    self._present.pop(key)[0].close()

    def _assemble(
        self, deadline: float, cancelled: Callable[[], bool], progress: Callable[[str, int], None]
    ) -> dict[MemberKey, tuple[Channel, Hello]]:
        with self._changed:
            while missing := self._missing():
                progress("assemble", len(self._expected) - len(missing))
                if self._closed or cancelled():
                    raise CancelledError("update: cancelled while members were missing")
                if time.monotonic() >= deadline:
                    names = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if missing[8:] else "")
                    away = f" (but one that was turned away: {self._turned_away})" if self._turned_away else ""
                    raise DeadlineError(f"update: expected {names} to say hello in time, got nothing{away}")
                self._changed.wait(_SLICE_S)
            return dict(self._present)

    def _missing(self) -> list[MemberKey]:
        """Drops who has hung up meanwhile."""
        for key, (channel, _) in list(self._present.items()):
            if channel.hung_up():
                self._present.pop(key)[0].close()
        return sorted(self._expected.keys() - self._present.keys())

    def _accept(self) -> None:
        while not self._closed:
            try:
                plain, _ = self._server.accept()
            except OSError:
                return  # closed
            if not self._greetings.acquire(blocking=False):
                plain.close()
                continue
            threading.Thread(target=self._greet, args=(plain,), name="reshard-greet", daemon=True).start()

    def _greet(self, plain: object) -> None:
        """Let a connection in, if it knows the token, is a member and has the same plan."""
        channel = None
        try:
            channel = Channel(plain, self._token, peer="a member", accepting=True, timeout=_GREETING_S)  # type: ignore[arg-type]
            hello = channel.receive(_GREETING_S)
            if refusal := self._refusal(hello):
                self._turned_away = refusal
                channel.send(Abort(0, refusal), _GREETING_S)
                channel.close()
                return
            assert isinstance(hello, Hello)
            key = MemberKey(hello.role, hello.rank)
            channel.peer = str(key)
            with self._changed:
                old = self._present.pop(key, None)
                if old is not None:
                    old[0].close()
                if not self._closed:
                    self._present[key] = channel, hello
                self._changed.notify_all()
        except ArealError as error:
            self._turned_away = str(error)
            if channel is not None:
                channel.close()
        finally:
            self._greetings.release()

    def _refusal(self, hello: Message) -> str:
        if not isinstance(hello, Hello):
            return f"expected Hello, got {type(hello).__name__}"
        key = MemberKey(hello.role, hello.rank)
        if key not in self._expected:
            return f"expected a member of the plan, got {key}"
        if hello.plan_digest != self._plan_digest:
            return f"{key}: expected the plan of digest {self._plan_digest}, got {hello.plan_digest}"
        if hello.layout_digest != self._expected[key]:
            return f"{key}: expected the layout of digest {self._expected[key]}, got {hello.layout_digest}"
        return ""


def _addresses(members: Mapping[MemberKey, tuple[Channel, Hello]]) -> list[list[object]]:
    return [[key.rank, hello.address] for key, (_, hello) in sorted(members.items()) if hello.address]


class _Waiting:
    """For one message from each of many members. With `lost` it collects who fails, otherwise it raises."""

    def __init__(
        self,
        phase: str,
        epoch: int,
        deadline: float,
        cancelled: Callable[[], bool],
        progress: Callable[[str, int], None],
        lost: list[str] | None = None,
    ) -> None:
        self.phase, self.epoch, self.deadline = phase, epoch, deadline
        self.cancelled, self.progress, self.lost = cancelled, progress, lost

    def gather(
        self, channels: Mapping[MemberKey, Channel], expected: type[Reply]
    ) -> dict[MemberKey, tuple[Reply, float]]:
        """The replies, and when each came."""
        waiting = dict(channels)
        replies: dict[MemberKey, tuple[Reply, float]] = {}
        while waiting:
            self.progress(self.phase, len(replies))
            if self.cancelled():
                raise CancelledError(f"update: cancelled in its {self.phase} of epoch {self.epoch}")
            if time.monotonic() >= self.deadline:
                self._fail(DeadlineError(f"expected {', '.join(map(str, waiting))} to end its {self.phase} in time"))
                return replies
            for key in self._readable(waiting):
                try:
                    reply = self._reply(key, waiting[key], expected)
                except ArealError as error:
                    del waiting[key]
                    self._fail(error)
                    continue
                if reply is not None:
                    replies[key] = reply, time.monotonic()
                    del waiting[key]
        self.progress(self.phase, len(replies))
        return replies

    def _readable(self, waiting: Mapping[MemberKey, Channel]) -> list[MemberKey]:
        poller = select.poll()
        keys = {}
        for key, channel in waiting.items():
            if (fd := channel.fileno()) < 0:
                return [key]  # closed: receive() says so
            keys[fd] = key
            poller.register(fd, select.POLLIN)
        return [keys[fd] for fd, _ in poller.poll(1e3 * min(_SLICE_S, max(self.deadline - time.monotonic(), 0.0)))]

    def _reply(self, key: MemberKey, channel: Channel, expected: type[Reply]) -> Reply | None:
        message = channel.receive(_SEND_S)
        if isinstance(message, Hello | Prepare | Commit | Abort):
            raise PeerError(f"{key}: expected {expected.__name__}, got {type(message).__name__}")
        if isinstance(message, Failed):
            if self.phase == "abort":
                return None  # it crossed our Abort
            raise PeerError(f"{key}: {message.reason}")
        if isinstance(message, Prepared) and expected is Ack:
            return None  # likewise
        if not isinstance(message, expected) or message.epoch != self.epoch:
            got = f"{type(message).__name__} of {message.epoch}"
            raise PeerError(f"{key}: expected {expected.__name__} of epoch {self.epoch}, got {got}")
        return message

    def _fail(self, error: ArealError) -> None:
        if self.lost is None:
            raise error
        self.lost.append(str(error))
