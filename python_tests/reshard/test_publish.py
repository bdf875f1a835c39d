"""Weight updates from trainer ranks to generator ranks: what arrives, when, and what is left when one fails."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from publish_cases import RECEIVERS, SENDERS, make_plan, source_part, target_part
from torch import Tensor

from areal_core.errors import CancelledError, ClosedError, CorruptedError, DeadlineError, PeerError
from areal_core.reshard.data_plane import DataPlaneOptions
from areal_core.reshard.plan import plan
from areal_core.reshard.publish import Update, WeightSender
from areal_core.reshard.receive import WeightReceiver

TOKEN = b"a token for the tests"
RANKS = range(SENDERS, SENDERS + RECEIVERS)


class Group:
    """All ranks, in threads of this process."""

    def __init__(self, address: str, transport: str, **receiver: object) -> None:
        self.plan = make_plan()
        self.address, self.transport = address, transport
        self.tensors = {rank: source_part(0, rank) for rank in range(SENDERS)}
        self.senders: dict[int, WeightSender] = {}
        for rank in range(SENDERS):
            self.senders[rank] = self._sender(rank)
        self.receivers = {rank: self._receiver(rank, **receiver) for rank in RANKS}

    def _sender(self, rank: int) -> WeightSender:
        return WeightSender(
            self.plan, rank, self.tensors[rank], coordinator=self._at(rank), token=TOKEN, transport=self.transport
        )

    def _receiver(self, rank: int, **more: object) -> WeightReceiver:
        return WeightReceiver(
            self.plan,
            rank,
            coordinator=self._at(rank),
            token=TOKEN,
            transport=self.transport,
            **more,  # type: ignore[arg-type]
        )

    def _at(self, rank: int) -> str:
        return self.address if rank == 0 or self.address.startswith("unix:") else self.senders[0].address

    def set_weights(self, version: int) -> None:
        for rank, tensors in self.tensors.items():
            for name, value in source_part(version, rank).items():
                tensors[name].copy_(value)

    def publish(self, version: int, timeout: float = 20.0) -> list[Update]:
        self.set_weights(version)
        return [sender.publish(version, timeout=timeout) for sender in self.senders.values()]

    def expect(self, version: int) -> None:
        for rank, receiver in self.receivers.items():
            with receiver.store.pin(timeout=5.0) as snapshot:
                assert snapshot.version == version
                expect_tensors(snapshot.tensors, version, rank)

    def close(self) -> None:
        for end in (*self.senders.values(), *self.receivers.values()):
            end.close()


def expect_tensors(got: dict[str, Tensor], version: int, rank: int) -> None:
    for name, expected in target_part(version, rank).items():
        assert torch.equal(got[name], expected), f"{name} of rank {rank}"


@pytest.fixture(params=["shm", "tcp"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Group]:
    made = Group(f"unix:{tmp_path}/c" if request.param == "shm" else "tcp:127.0.0.1:0", request.param)
    yield made
    made.close()


def test_versions_arrive_whole_and_with_their_statistics(group: Group) -> None:
    for version in range(4):
        updates = group.publish(version)
        stats = updates[0].wait(20.0)
        assert [u.wait(20.0) for u in updates[1:]] == [None] * (SENDERS - 1)
        group.expect(version)
        assert stats is not None
        assert (stats.version, stats.bytes) == (version, group.plan.stats.wire_bytes)
        assert stats.bytes == stats.bound_bytes
        assert 0 < stats.visible_p50_s <= stats.visible_p95_s <= stats.seconds
        assert 0 < stats.transfer_seconds < stats.seconds
        assert stats.pause_s == 0.0
        assert stats.sender_max_over_mean >= 1.0
        assert [rank for rank, _ in stats.digests] == list(RANKS)
        assert updates[0].progress().phase == "done"
        assert updates[0].done()


def test_digests_follow_the_bytes(group: Group) -> None:
    seen = []
    for version, content in enumerate((5, 5, 6)):
        group.set_weights(content)
        first, *_ = [sender.publish(version) for sender in group.senders.values()]
        stats = first.wait(20.0)
        assert stats is not None
        seen.append(stats.digests)
    assert seen[0] == seen[1]
    assert all(old[1] != new[1] for old, new in zip(seen[1], seen[2], strict=True))
    for receiver in group.receivers.values():
        with receiver.store.pin() as snapshot, pytest.raises(ValueError, match="without"):
            snapshot.checksum()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_sealed_versions_can_be_verified_by_their_readers(tmp_path: Path, transport: str) -> None:
    group = Group(f"unix:{tmp_path}/c", transport, options=DataPlaneOptions(seal=True))
    stats = group.publish(1)[0].wait(20.0)
    assert stats is not None
    for rank, digest in stats.digests:
        store = group.receivers[rank].store
        with store.pin() as snapshot:
            assert snapshot.checksum() == digest
            memory = mmap.mmap(store.fileno(), os.fstat(store.fileno()).st_size)
            at = memory.find(snapshot.tensors["down"].numpy().tobytes())
            memory[at] ^= 8  # a bit of the arena flips
            with pytest.raises(CorruptedError, match="'down' of version 1"):
                snapshot.checksum()
            with pytest.raises(CorruptedError, match="'down' of version 1"):
                snapshot.copy_into({n: torch.zeros_like(t) for n, t in snapshot.tensors.items()})
            memory.close()
    assert len(stats.digests) == RECEIVERS
    group.close()


def test_chunks_under_way_are_all_the_memory_it_takes(group: Group) -> None:
    stats = group.publish(1)[0].wait(20.0)
    assert stats is not None
    peers = max(SENDERS, RECEIVERS)
    assert stats.staging_bytes <= 2 * peers * group.plan.chunk_bytes


def test_a_reader_keeps_its_version_during_an_update_and_later(group: Group) -> None:
    group.publish(0)[0].wait(20.0)
    rank = RANKS[0]
    with group.receivers[rank].store.pin() as snapshot:
        group.publish(1)[0].wait(20.0)
        expect_tensors(snapshot.tensors, 0, rank)
        assert group.receivers[rank].store.version() == 1
        group.set_weights(2)
        late = [sender.publish(2, timeout=1.0) for sender in group.senders.values()]
        pinned = rf"receiver {rank}: DeadlineError: .*pins on version 0 .* pinned by .*{os.getpid()}"
        with pytest.raises(PeerError, match=pinned):  # the arena is still being read
            late[0].wait(20.0)
        expect_tensors(snapshot.tensors, 0, rank)
    group.publish(2)[0].wait(20.0)
    group.expect(2)


def test_a_sender_that_is_not_ready_is_named_and_a_retry_succeeds(group: Group) -> None:
    group.publish(0)[0].wait(20.0)
    group.set_weights(1)
    updates = [group.senders[rank].publish(1, timeout=0.5) for rank in (0, 1)]
    with pytest.raises((DeadlineError, PeerError), match=r"(sender|rank) 2"):
        updates[0].wait(20.0)
    with pytest.raises(PeerError, match="aborted"):
        updates[1].wait(20.0)
    group.expect(0)
    assert "2" in group.receivers[RANKS[0]].last_abort
    group.publish(1)[0].wait(20.0)
    group.expect(1)


def test_an_update_can_be_cancelled(group: Group) -> None:
    group.publish(0)[0].wait(20.0)
    update = group.senders[0].publish(1)
    update.cancel()
    with pytest.raises(CancelledError):
        update.wait(20.0)
    group.expect(0)
    group.publish(1)[0].wait(20.0)
    group.expect(1)


def test_what_has_not_begun_to_move_is_replaced(group: Group) -> None:
    replaced = group.senders[1].publish(1)  # sender 0, which coordinates, has not published it
    group.publish(2)[0].wait(20.0)
    with pytest.raises(CancelledError, match="version 1 was replaced by version 2"):
        replaced.wait(20.0)
    group.expect(2)


def test_no_second_version_is_published_while_one_is_sent(group: Group) -> None:
    first = group.senders[0].publish(1)
    second = group.senders[1].publish(1)  # sender 2 publishes nothing, so that version 1 stays under way
    for rank in (0, 1):
        while group.senders[rank]._part._sending is None:
            os.sched_yield()
        with pytest.raises(ValueError, match="expected version 1 to have ended before version 2"):
            group.senders[rank].publish(2)
    first.cancel()
    for update in (first, second):
        with pytest.raises((CancelledError, PeerError), match="cancelled"):
            update.wait(20.0)
    group.publish(2)[0].wait(20.0)
    group.expect(2)


def test_versions_may_go_back(group: Group) -> None:
    for version in (7, 3):
        group.publish(version)[0].wait(20.0)
        group.expect(version)


def test_who_was_turned_away_is_told(tmp_path: Path) -> None:
    group = Group(f"unix:{tmp_path}/c", "shm")
    rank = RANKS[0]
    group.receivers[rank].close()
    group.receivers[rank] = WeightReceiver(group.plan, rank, coordinator=group.address, token=b"some other token")
    update = group.senders[0].publish(1, timeout=1.0)
    with pytest.raises(DeadlineError, match=f"receiver {rank} to say hello.*turned away.*another token"):
        update.wait(20.0)
    group.close()


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (1, {"transport": "pigeon"}, "transport 'shm' or 'tcp', got 'pigeon'"),
        (1, {"token": b"short"}, "at least 16 bytes, got 5"),
        (4, {}, "one of the ranks 0 to 2, got rank 4"),
    ],
)
def test_what_only_a_thread_would_find_is_refused_at_once(rank: int, change: dict[str, Any], message: str) -> None:
    given = {"coordinator": "unix:/nowhere", "token": TOKEN} | change
    with pytest.raises(ValueError, match=f"WeightSender: expected .*{message}"):
        WeightSender(make_plan(), rank, source_part(0, 1), **given)
    if rank == 1:
        with pytest.raises(ValueError, match=f"WeightReceiver: expected .*{message}"):
            WeightReceiver(make_plan(), RANKS[0], **given)


def test_a_rank_on_both_sides_is_refused() -> None:
    layout = make_plan().source
    both = plan(layout, layout)
    with pytest.raises(ValueError, match="got rank 0 on both sides"):
        WeightSender(both, 0, source_part(0, 0), coordinator="unix:/nowhere", token=TOKEN)
    with pytest.raises(ValueError, match="got rank 0 on both sides"):
        WeightReceiver(both, 0, coordinator="unix:/nowhere", token=TOKEN)


def test_a_receiver_that_starts_anew_joins_the_next_update(group: Group) -> None:
    group.publish(0)[0].wait(20.0)
    rank = RANKS[1]
    group.receivers[rank].close()
    group.receivers[rank] = group._receiver(rank)
    assert group.receivers[rank].store.version() == -1
    group.publish(1)[0].wait(20.0)
    group.expect(1)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_fixed_addresses_are_filled_while_nobody_uses_them(tmp_path: Path, transport: str) -> None:
    held: list[str] = []

    @contextlib.contextmanager
    def pause() -> Iterator[None]:
        held.append("enter")
        yield
        held.append("leave")

    rank = RANKS[0]
    in_place = {name: torch.zeros_like(t) for name, t in target_part(0, rank).items()}
    group = Group(f"unix:{tmp_path}/c", transport)
    group.receivers[rank].close()
    group.receivers[rank] = group._receiver(rank, in_place=in_place, pause=pause)
    stats = group.publish(3)[0].wait(20.0)
    expect_tensors(in_place, 3, rank)  # the acknowledgement comes after the copy
    group.expect(3)
    assert held == ["enter", "leave"]
    assert stats is not None
    assert 0 < stats.pause_s < stats.seconds
    group.close()


def test_masters_are_cast_and_may_change_at_once(tmp_path: Path) -> None:
    group = Group(f"unix:{tmp_path}/c", "shm")
    masters = {rank: {n: t.double() for n, t in source_part(5, rank).items()} for rank in range(SENDERS)}
    for rank in range(SENDERS):
        with pytest.raises(ValueError, match=r"'down': expected dtype = torch.int32 \(or snapshot=True"):
            WeightSender(group.plan, rank, masters[rank], coordinator="unix:/nowhere", token=TOKEN)
        group.senders[rank].close()
    group.senders = {}
    for rank in range(SENDERS):
        group.senders[rank] = WeightSender(
            group.plan, rank, masters[rank], coordinator=group.address, token=TOKEN, snapshot=True
        )
    updates = [sender.publish(5, timeout=20.0) for sender in group.senders.values()]
    for tensors in masters.values():
        for tensor in tensors.values():
            tensor.zero_()
    updates[0].wait(20.0)
    group.expect(5)
    group.close()


def test_readers_hammering_see_one_version_in_every_tensor(tmp_path: Path) -> None:
    group = Group(f"unix:{tmp_path}/c", "shm")
    group.publish(0)[0].wait(20.0)
    stop, faults, pins = threading.Event(), [], [0]

    def hammer(rank: int) -> None:
        while not stop.is_set():
            with group.receivers[rank].store.pin(timeout=5.0) as snapshot:
                expected = target_part(snapshot.version, rank)
                faults.extend(n for n, t in snapshot.tensors.items() if not torch.equal(t, expected[n]))
                pins[0] += 1

    threads = [threading.Thread(target=hammer, args=(rank,)) for rank in RANKS]
    for thread in threads:
        thread.start()
    for version in range(1, 40):
        group.publish(version)[0].wait(20.0)
    stop.set()
    for thread in threads:
        thread.join()
    assert not faults
    assert pins[0] > 10
    group.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": torch.zeros(1)}, "'extra': expected no tensor of that name"),
        ({"norm": None}, "'norm': expected, got no tensor"),
        ({"norm": torch.zeros(7, dtype=torch.int32)}, "'norm': expected shape"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Tensor | None], message: str) -> None:
    given = {name: tensor for name, tensor in {**source_part(0, 1), **change}.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        WeightSender(make_plan(), 1, given, coordinator="unix:/nowhere", token=TOKEN)


def test_closed_senders_and_negative_versions_are_refused(tmp_path: Path) -> None:
    sender = WeightSender(make_plan(), 0, source_part(0, 0), coordinator=f"unix:{tmp_path}/c", token=TOKEN)
    with pytest.raises(ValueError, match="expected version >= 0"):
        sender.publish(-1)
    sender.close()
    with pytest.raises(ClosedError):
        sender.publish(1)


def test_a_hundred_updates_leave_descriptors_and_mappings_flat(group: Group) -> None:
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len(os.listdir("/proc/self/fd")), sum("memfd:" in line for line in maps)

    for version in range(100):
        group.publish(version)[0].wait(20.0)
        if version == 2:
            before = held()
    assert held() == before
    group.expect(99)
