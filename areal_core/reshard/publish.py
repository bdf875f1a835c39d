"""The trainer's side of weight updates: every trainer rank sends its part, all generator ranks flip to it or none does.

On every trainer rank::

    sender = WeightSender(plan, rank, model_buffers, coordinator="unix:/run/update", token=token, transport="shm")
    update = sender.publish(version=7)      # generation goes on; so may the trainer's next forward pass
    update.wait(60.0)                       # from here on the weights may change again

On every generator rank there is a `WeightReceiver` (receive.py). Trainer and generators may be on different machines;
whoever starts them gives all the same token and the coordinator's address, where the first trainer rank listens.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from areal_core.errors import ArealError, CancelledError, ClosedError, DeadlineError, PeerError
from areal_core.reshard.arena import ArenaTensors
from areal_core.reshard.control_messages import Hello, Prepare
from areal_core.reshard.coordinator import Coordinator, MemberKey, MemberReport
from areal_core.reshard.data_plane import DEFAULT_OPTIONS, DataPlane, DataPlaneOptions, check_member
from areal_core.reshard.member import Member, Transferred
from areal_core.reshard.plan import Plan

__all__ = ["Update", "UpdateProgress", "UpdateStats", "WeightSender"]

DEFAULT_TIMEOUT_S = 300.0
_SLICE_S = 0.02


class UpdateStats(NamedTuple):
    """What one update cost. Bytes crossed between ranks; seconds are wall time as the coordinator saw it."""

    version: int
    seconds: float  # from publish to the last acknowledgement
    transfer_seconds: float  # of the slowest member, from Prepare to its last byte checked
    bytes: int
    bound_bytes: int  # what no plan can beat
    bound_seconds: float  # at the rates of the plan's topology
    visible_p50_s: float  # from publish to a receiver's acknowledgement that readers see it
    visible_p95_s: float
    pause_s: float  # longest that a receiver kept readers waiting (copies into fixed addresses; otherwise 0)
    staging_bytes: int  # most that one member held for chunks under way
    staging_share: float  # the same, as a share of that member's part of the model
    sender_max_over_mean: float  # bytes of the busiest sender over those of the average one
    digests: tuple[tuple[int, int], ...]  # of each receiver, by rank (see below)
    # With DataPlaneOptions(seal=True) that of its contents, as `Snapshot.checksum` has it: equal on replicas. Otherwise
    # the sum of the checksums of the chunks it received: equal for equal bytes under the same plan, on the same rank.


class UpdateProgress(NamedTuple):
    """How far an update is."""

    phase: str  # "assemble", "transfer", "commit", "done", "failed"
    members: int  # through the phase
    of_members: int
    bytes: int  # that this rank has sent
    of_bytes: int


class Update:
    """A publication under way, on one trainer rank."""

    def __init__(self, version: int, members: int) -> None:
        """Private: use `WeightSender.publish`."""
        self.version = version
        self._of_members = members
        self._phase = ("assemble", 0)
        self._bytes = (0, 0)
        self._ended = threading.Event()
        self._cancelled = threading.Event()
        self._stats: UpdateStats | None = None
        self._error: ArealError | None = None

    def wait(self, timeout: float = DEFAULT_TIMEOUT_S) -> UpdateStats | None:
        """Wait until every generator serves the version. Ctrl-C ends the wait, not the update.

        Returns the statistics on the rank that coordinates, None on the others.

        Raises: DeadlineError when the update is still under way; what ended it otherwise: PeerError naming the rank
        that failed and why, DeadlineError naming who was late, CancelledError. Generators then keep their version
        (unless the text says "committed"); publish again.
        """
        if not self._ended.wait(timeout):
            raise DeadlineError(
                f"publish: expected version {self.version} published within {timeout} s, got {self.progress()}"
            )
        if self._error is not None:
            raise self._error
        return self._stats

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._ended.is_set()

    def progress(self) -> UpdateProgress:
        """A look at it, from any thread."""
        return UpdateProgress(*self._phase, self._of_members, *self._bytes)

    def cancel(self) -> None:
        """Abort for all, unless it is committed already. On the rank that coordinates."""
        self._cancelled.set()

    def _end(self, error: ArealError | None = None, stats: UpdateStats | None = None) -> None:
        if not self._ended.is_set():
            self._error, self._stats = error, stats
            self._phase = ("failed", 0) if error is not None else ("done", self._of_members)
            self._ended.set()


class WeightSender:
    """One trainer rank's end of weight updates.

    Args:
        plan: from the trainer's layout to the generators'; equal on all ranks.
        rank: of the plan's source.
        tensors: this rank's buffers (`plan.source.buffers(rank)` says which); they must stay where they are.
        coordinator: "unix:/path" or "tcp:host:port"; the source's first rank listens there, the others connect.
        token: shared secret of all ranks (`control.new_token`).
        transport: "shm" (processes of one machine) or "tcp".
        snapshot: copy the tensors before `publish` returns, casting them to the plan's dtype: they may then change at
            once. Costs a copy, and as much memory again. Without it dtypes must be the plan's.
        options: of the data plane.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        tensors: Mapping[str, Tensor],
        *,
        coordinator: str,
        token: bytes,
        transport: str = "shm",
        snapshot: bool = False,
        options: DataPlaneOptions = DEFAULT_OPTIONS,
    ) -> None:
        check_member("WeightSender", plan, rank, plan.source.ranks, token, transport)
        self._plan, self._rank = plan, rank
        self._live = dict(tensors)
        specs = plan.source.buffers(rank)
        for name, spec in specs.items():
            if name in tensors and tensors[name].dtype != spec.dtype and not snapshot:
                raise ValueError(
                    f"WeightSender: tensor '{name}': expected dtype = {spec.dtype} (or snapshot=True, which casts), "
                    f"got {tensors[name].dtype}"
                )
        self._copies = {n: torch.empty(s.shape, dtype=s.dtype) for n, s in specs.items()} if snapshot else None
        ArenaTensors(specs, []).in_order("WeightSender", self._copies or self._live)
        self._part = _SenderPart(plan, rank, self._copies or self._live, token, transport, options)
        self._coordinator: Coordinator | None = None
        self._members = members_of(plan)
        if rank == plan.source.ranks[0]:
            self._coordinator = Coordinator(self._members, plan.digest, coordinator, token)
            coordinator = self._coordinator.address
        self.address = coordinator
        self._closed = False
        self._member = Member(self._part, self._part.hello, coordinator, token)

    def publish(self, version: int, *, timeout: float = DEFAULT_TIMEOUT_S) -> Update:
        """Begin to send this version. Every trainer rank calls it with the same one, each when its weights are ready.

        The tensors must not change until `Update.wait` has returned (with snapshot=True: until this has returned).
        timeout: seconds for the whole transfer, that of the rank that coordinates.

        A version below the last is a rollback, and readers see it as any other. What was published before and has not
        begun to move is replaced: its `wait` raises CancelledError.

        Raises: ValueError for a version below 0, and while an earlier one is being sent; ClosedError.
        """
        if self._closed:
            raise ClosedError("WeightSender.publish: expected an open sender, got a closed one")
        if version < 0:
            raise ValueError(f"WeightSender.publish: expected version >= 0, got {version}")
        self._part.withdraw(version)
        if self._copies is not None:
            for name, copy in self._copies.items():
                copy.copy_(self._live[name].detach())
        update = Update(version, len(self._members))
        self._part.offer(update)
        if self._coordinator is not None:
            thread = threading.Thread(
                target=self._coordinate, args=(update, timeout), name="reshard-update", daemon=True
            )
            thread.start()
        return update

    def close(self) -> None:
        """Leave; an update under way is aborted for all."""
        self._closed = True
        if self._coordinator is not None:
            self._coordinator.close()
        self._member.close()
        self._part.close()

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _coordinate(self, update: Update, timeout: float) -> None:
        assert self._coordinator is not None

        def progress(phase: str, members: int) -> None:
            update._phase = phase, members
            update._bytes = self._part.bytes()

        start = time.monotonic()
        try:
            reports = self._coordinator.update(
                update.version, timeout=timeout, cancelled=update._cancelled.is_set, progress=progress
            )
        except ArealError as error:
            update._end(error)
            return
        update._end(stats=update_stats(update.version, self._plan, reports, time.monotonic() - start))


class _SenderPart:
    """What a sender does in an update: nothing before its own rank has offered the version."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        tensors: Mapping[str, Tensor],
        token: bytes,
        transport: str,
        options: DataPlaneOptions,
    ) -> None:
        self._plan, self._rank = plan, rank
        self._make_plane = partial(DataPlane, plan, rank, token, transport, options, sources=tensors)
        self._plane: DataPlane | None = None
        self._offered: Update | None = None  # ready to be sent
        self._sending: Update | None = None
        self._ordered = -1  # the version that the coordinator asks for
        self._changed = threading.Condition()
        self._is_coordinating = rank == plan.source.ranks[0]

    def hello(self, epoch: int) -> Hello:
        """With the address of a new data plane."""
        self.close()
        self._plane = self._make_plane()
        layout = self._plan.source.digest
        return Hello("sender", self._rank, layout, self._plan.digest, self._plane.address, epoch)

    def withdraw(self, version: int) -> None:
        """Before the weights become this version: what was offered and is not being sent is over."""
        with self._changed:
            if self._sending is not None:
                raise ValueError(
                    f"WeightSender.publish: expected version {self._sending.version} to have ended before version "
                    f"{version} (Update.wait, Update.cancel), got it under way"
                )
            earlier, self._offered = self._offered, None
        if earlier is not None:
            earlier.cancel()
            earlier._end(CancelledError(f"publish: version {earlier.version} was replaced by version {version}"))

    def offer(self, update: Update) -> None:
        """The weights are ready for this update."""
        with self._changed:
            self._offered = update
            self._changed.notify_all()

    def bytes(self) -> tuple[int, int]:
        """Sent, and to be sent."""
        return self._plane.bytes() if self._plane is not None else (0, 0)

    def transfer(self, order: Prepare, cancelled: threading.Event) -> Transferred:
        """Wait for the offer, then send."""
        deadline = time.monotonic() + order.timeout_s
        with self._changed:
            self._ordered = order.version
            while self._offered is None or self._offered.version != order.version:
                if cancelled.is_set():
                    raise CancelledError("publish: aborted before the weights were ready")
                if time.monotonic() >= deadline:
                    raise DeadlineError(f"expected publish({order.version}) on sender {self._rank} in time, got none")
                self._changed.wait(_SLICE_S)
            self._sending, self._offered = self._offered, None
        assert self._plane is not None
        return self._plane.run(order, cancelled, deadline)

    def cancel(self) -> None:
        """Wake a transfer that waits."""
        if self._plane is not None:
            self._plane.cancel()

    def commit(self) -> tuple[int, float]:
        """The weights may change again."""
        self._take(None)
        return -1, 0.0

    def abort(self, reason: str) -> None:
        """The same; this update is over."""
        self._take(PeerError(f"publish: aborted, {reason}"))

    def close(self) -> None:
        """Give the data plane back."""
        if self._plane is not None:
            self._plane.close()
            self._plane = None

    def _take(self, error: ArealError | None) -> None:
        with self._changed:
            update, self._sending = self._sending, None
            if update is None and self._offered is not None and self._ordered in (-1, self._offered.version):
                update, self._offered = self._offered, None
            self._ordered = -1
        if update is not None and not self._is_coordinating:  # there the coordinator says more
            update._end(error)


def members_of(plan: Plan) -> dict[MemberKey, int]:
    """Everybody who takes part in a plan's updates, with the digest of the layout each must have."""
    senders = {MemberKey("sender", rank): plan.source.digest for rank in plan.source.ranks}
    return senders | {MemberKey("receiver", rank): plan.target.digest for rank in plan.target.ranks}


def update_stats(version: int, plan: Plan, reports: Mapping[MemberKey, MemberReport], seconds: float) -> UpdateStats:
    """The figures of one update from those of its members."""
    receivers = {key: report for key, report in reports.items() if key.role == "receiver"}
    sent = [report.prepared.sent_bytes for key, report in reports.items() if key.role == "sender"]
    visible = sorted(report.visible_s for report in receivers.values())
    staging = {key: report.prepared.staging_bytes for key, report in reports.items()}
    most = max(staging, key=lambda key: staging[key])
    side = plan.source if most.role == "sender" else plan.target
    shard_bytes = sum(torch.Size(s.shape).numel() * s.dtype.itemsize for s in side.buffers(most.rank).values())
    return UpdateStats(
        version=version,
        seconds=seconds,
        transfer_seconds=max(report.prepared.seconds for report in reports.values()),
        bytes=sum(sent),
        bound_bytes=plan.lower_bound.wire_bytes,
        bound_seconds=plan.lower_bound.seconds,
        visible_p50_s=statistics.median(visible),
        visible_p95_s=visible[min(len(visible) - 1, int(0.95 * len(visible)))],
        pause_s=max(report.pause_s for report in receivers.values()),
        staging_bytes=staging[most],
        staging_share=staging[most] / max(shard_bytes, 1),
        sender_max_over_mean=max(sent) / max(statistics.mean(sent), 1e-9) if any(sent) else 1.0,
        digests=tuple((key.rank, report.prepared.digest) for key, report in sorted(receivers.items())),
    )
