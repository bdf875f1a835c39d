"""A member of updates: says hello to the coordinator, does what it is told, and finds a new one when it is lost."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from areal_core.errors import ArealError, CancelledError, PeerError
from areal_core.reshard.control import Channel, connect
from areal_core.reshard.control_messages import Abort, Ack, Commit, Failed, Hello, Prepare, Prepared

__all__ = ["Member", "Part", "Transferred"]

_CONNECT_S = 5.0
_RETRY_S = 0.05
_SEND_S = 10.0
_SLICE_S = 0.1
_GONE_S = 2.0  # without a coordinator, until what was waiting for one is over


class Transferred(NamedTuple):
    """What a part has done in its transfer."""

    digest: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    staging_bytes: int = 0


class Part(Protocol):
    """What a member does in an update."""

    def transfer(self, order: Prepare, cancelled: threading.Event) -> Transferred:
        """Move the bytes where no reader sees them; raises CancelledError soon after `cancelled` is set."""

    def cancel(self) -> None:
        """Called from another thread once `cancelled` is set: wake a `transfer` that waits, if there is one."""

    def commit(self) -> tuple[int, float]:
        """Show them; returns the version shown (-1: this part shows none) and the seconds that readers were paused."""

    def abort(self, reason: str) -> None:
        """Forget the transfer, whether it ended well or not; or what waits to be transferred, as nobody will ask."""


class Member:
    """Runs a part in threads of its own until `close`.

    Args:
        part: what it does.
        hello: what it says of itself; the epoch is filled in.
        address, token: of the coordinator.
    """

    def __init__(self, part: Part, hello: Callable[[int], Hello], address: str, token: bytes) -> None:
        self._part = part
        self._hello = hello
        self._address, self._token = address, token
        self._closed = threading.Event()
        self._channel: Channel | None = None
        self._epoch = 0
        self._transfer: threading.Thread | None = None
        self._cancelled = threading.Event()
        self._prepared = False
        self._thread = threading.Thread(target=self._run, name="reshard-member", daemon=True)
        self.refusal = ""
        self._thread.start()

    def close(self) -> None:
        """Leave: an update under way is aborted for all."""
        self._closed.set()
        if self._channel is not None:
            self._channel.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        lost_at = math.inf
        while not self._closed.is_set():
            try:
                channel = connect(self._address, self._token, peer="the coordinator", timeout=_CONNECT_S)
            except ArealError as error:
                if time.monotonic() - lost_at > _GONE_S:
                    lost_at = math.inf
                    self._part.abort(f"no successor of the coordinator was found in {_GONE_S} s: {error}")
                self._closed.wait(_RETRY_S)
                continue
            self._channel = channel
            try:
                channel.send(self._hello(self._epoch), _SEND_S)
                self._follow(channel)
            except ArealError as error:
                self._forget(f"lost the coordinator: {error}")
            except (OSError, ValueError) as error:  # of a data plane that can't be made
                self.refusal = f"{type(error).__name__}: {error}"
                self._part.abort(self.refusal)
            finally:
                channel.close()
            lost_at = time.monotonic()
            self._closed.wait(_RETRY_S)

    def _follow(self, channel: Channel) -> None:
        while not self._closed.is_set():
            if not channel.ready(_SLICE_S):
                continue
            order = channel.receive(_SEND_S)
            if isinstance(order, Prepare):
                self._forget(f"epoch {order.epoch} has begun")
                self._begin(channel, order)
            elif isinstance(order, Commit):
                self._commit(channel, order)
            elif isinstance(order, Abort) and order.epoch == 0:
                self.refusal = order.reason
                raise PeerError(f"expected to be welcome, got {order.reason}")
            elif isinstance(order, Abort):
                self._forget(order.reason)
                channel.send(Ack(order.epoch, -1, 0.0), _SEND_S)
            else:
                raise PeerError(f"expected an order from the coordinator, got {type(order).__name__}")
        self._forget("closed")

    def _begin(self, channel: Channel, order: Prepare) -> None:
        if order.epoch <= self._epoch:
            raise PeerError(f"expected an epoch above {self._epoch}, got {order.epoch}")
        self._epoch = order.epoch
        self.refusal = ""
        self._prepared = False
        self._cancelled = threading.Event()
        self._transfer = threading.Thread(
            target=self._run_transfer, args=(channel, order, self._cancelled), name="reshard-transfer", daemon=True
        )
        self._transfer.start()

    def _run_transfer(self, channel: Channel, order: Prepare, cancelled: threading.Event) -> None:
        start = time.monotonic()
        reply: Prepared | Failed
        try:
            done = self._part.transfer(order, cancelled)
            self._prepared = True
            reply = Prepared(order.epoch, *done, time.monotonic() - start)
        except CancelledError:
            return  # by an abort, which gets its own answer
        except Exception as error:  # whatever it is, the others must hear of it
            reply = Failed(order.epoch, f"{type(error).__name__}: {error}"[:2000])
        with suppress(ArealError):  # lost: the thread that receives finds out
            channel.send(reply, _SEND_S)

    def _commit(self, channel: Channel, order: Commit) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.join()
        if transfer is None or not self._prepared or order.epoch != self._epoch:
            raise PeerError(f"expected a commit of an epoch prepared here, got epoch {order.epoch}")
        reply: Ack | Failed
        try:
            reply = Ack(order.epoch, *self._part.commit())
        except Exception as error:
            self._part.abort(str(error))
            reply = Failed(order.epoch, f"{type(error).__name__}: {error}"[:2000])
        channel.send(reply, _SEND_S)

    def _forget(self, reason: str) -> None:
        """Ends the transfer, if there is one that was not committed."""
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return
        self._cancelled.set()
        self._part.cancel()
        transfer.join()
        self._part.abort(reason)
