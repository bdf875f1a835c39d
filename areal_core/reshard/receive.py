"""The generator's side of weight updates: a version store that versions arrive in while readers go on with the old one.

On every generator rank::

    receiver = WeightReceiver(plan, rank, coordinator="unix:/run/update", token=token, transport="shm")
    receiver.store.wait(0)
    with receiver.store.pin() as snapshot:   # between decode steps, whenever store.version() has changed
        engine.load(snapshot.tensors)

`receiver.store` may be handed to other processes of the machine, as any VersionStore.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType

from torch import Tensor

from areal_core.errors import CancelledError, DeadlineError
from areal_core.reshard.control_messages import Hello, Prepare
from areal_core.reshard.data_plane import DEFAULT_OPTIONS, DataPlane, DataPlaneOptions, check_member
from areal_core.reshard.draft import Draft
from areal_core.reshard.member import Member, Transferred
from areal_core.reshard.plan import Plan
from areal_core.reshard.version_store import VersionStore

__all__ = ["WeightReceiver"]

_SLICE_S = 0.1
_SHARE_FOR_PINS = 0.9  # of an update's time, to wait for readers: before senders give up, so that the pins are named


class WeightReceiver:
    """One generator rank's end of weight updates; works in threads of its own until `close`.

    Args:
        plan, rank, coordinator, token, transport, options: as for `WeightSender`; the rank is one of the plan's target.
        store: where versions go; None: a new one for `plan.target.buffers(rank)`. Twice the rank's part of the model.
        in_place: tensors at fixed addresses (a captured graph's) to copy each version into once it is committed, by the
            names of the buffers. They are overwritten while `pause` holds; the time of that is reported by itself. The
            bytes are compared with their checksums on the way if the version has any (`options.seal`).
        pause: a context manager, entered when a version is to be copied in place: it waits until nobody uses the
            tensors and keeps it so.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        coordinator: str,
        token: bytes,
        transport: str = "shm",
        store: VersionStore | None = None,
        in_place: Mapping[str, Tensor] | None = None,
        pause: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        options: DataPlaneOptions = DEFAULT_OPTIONS,
    ) -> None:
        check_member("WeightReceiver", plan, rank, plan.target.ranks, token, transport)
        specs = plan.target.buffers(rank)
        self.store = VersionStore.create(specs) if store is None else store
        if self.store.specs != specs:
            raise ValueError(f"WeightReceiver: expected a store of the buffers of rank {rank}, got one of others")
        self._owns_store = store is None
        self._part = _ReceiverPart(plan, rank, self.store, in_place, pause, token, transport, options)
        self._member = Member(self._part, self._part.hello, coordinator, token)

    @property
    def refusal(self) -> str:
        """Why the coordinator wants nothing of this rank (another plan, say); "" when it has not said so."""
        return self._member.refusal

    @property
    def last_abort(self) -> str:
        """Why the last update that did not come to a commit here was aborted; "" before the first."""
        return self._part.last_abort

    def close(self) -> None:
        """Leave; an update under way is aborted for all. Snapshots and tensors in use keep their memory."""
        self._member.close()
        self._part.close()
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> WeightReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _ReceiverPart:
    """What a receiver does in an update: a draft of the store is filled, perhaps sealed, committed."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        store: VersionStore,
        in_place: Mapping[str, Tensor] | None,
        pause: Callable[[], contextlib.AbstractContextManager[object]],
        token: bytes,
        transport: str,
        options: DataPlaneOptions,
    ) -> None:
        self._plan, self._rank, self._store = plan, rank, store
        self._in_place, self._pause = in_place, pause
        self._seals = options.seal
        self._make_plane = partial(DataPlane, plan, rank, token, transport, options, store=store)
        self._plane: DataPlane | None = None
        self._draft: Draft | None = None
        self.last_abort = ""

    def hello(self, epoch: int) -> Hello:
        """With the address of a new data plane."""
        self.close()
        self._plane = self._make_plane()
        layout = self._plan.target.digest
        return Hello("receiver", self._rank, layout, self._plan.digest, self._plane.address, epoch)

    def transfer(self, order: Prepare, cancelled: threading.Event) -> Transferred:
        """Wait until nobody reads the inactive arena and fill it."""
        assert self._plane is not None
        deadline = time.monotonic() + order.timeout_s
        self._draft = self._open_draft(order, cancelled, deadline - (1.0 - _SHARE_FOR_PINS) * order.timeout_s)
        done = self._plane.run(order, cancelled, deadline, draft=self._draft)
        return done._replace(digest=self._draft.seal()) if self._seals else done

    def cancel(self) -> None:
        """Wake a transfer that waits."""
        if self._plane is not None:
            self._plane.cancel()

    def commit(self) -> tuple[int, float]:
        """Readers see it from here on; then it goes where it has to be."""
        draft, self._draft = self._draft, None
        assert draft is not None
        draft.commit(checksums=self._seals)
        if self._in_place is None:
            return draft.version, 0.0
        with self._pause():
            start = time.monotonic()
            with self._store.pin() as snapshot:
                snapshot.copy_into(self._in_place, verify=snapshot.has_checksums)
            return draft.version, time.monotonic() - start

    def abort(self, reason: str) -> None:
        """What has arrived is overwritten by the next draft."""
        self.last_abort = reason
        if self._draft is not None:
            self._draft.abort()
            self._draft = None

    def close(self) -> None:
        """Give the data plane back."""
        if self._plane is not None:
            self._plane.close()
            self._plane = None

    def _open_draft(self, order: Prepare, cancelled: threading.Event, deadline: float) -> Draft:
        """The coordinator says which version comes next, so that it may also be an earlier one."""
        while True:
            left = deadline - time.monotonic()
            try:
                return self._store.draft(order.version, allow_rollback=True, timeout=min(max(left, 0.0), _SLICE_S))
            except DeadlineError:
                if cancelled.is_set():
                    raise CancelledError("receive: aborted while readers held the arena") from None
                if left <= _SLICE_S:
                    raise
