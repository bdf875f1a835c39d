"""Updates of many members: all of them show a version to their readers, or none does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_parts import PLAN_DIGEST, TOKEN, FakePart, join, layout_digests, new_store, served

from areal_core.errors import CancelledError, DeadlineError, PeerError
from areal_core.reshard.control import Channel, listen
from areal_core.reshard.control_messages import Commit, Message, Prepare, Prepared
from areal_core.reshard.coordinator import Coordinator, MemberKey
from areal_core.reshard.member import Member


class Group:
    """A coordinator and its members, in threads of this process."""

    def __init__(self, address: str, senders: int, receivers: int) -> None:
        self.digests = layout_digests(senders, receivers)
        self.coordinator = Coordinator(self.digests, PLAN_DIGEST, address, TOKEN)
        self.parts = {key: FakePart(new_store() if key.role == "receiver" else None) for key in self.digests}
        self.members = {key: join(part, key, self.coordinator.address) for key, part in self.parts.items()}

    def versions(self) -> set[int]:
        return {served(part.store) for part in self.parts.values() if part.store is not None}

    def rejoin(self, key: MemberKey) -> None:
        self.members[key].close()
        self.members[key] = join(self.parts[key], key, self.coordinator.address)

    def close(self) -> None:
        self.coordinator.close()
        for member in self.members.values():
            member.close()


S0, S1 = MemberKey("sender", 0), MemberKey("sender", 1)
R0, R1, R2 = (MemberKey("receiver", r) for r in range(3))


@pytest.fixture(params=["unix", "tcp"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Group]:
    made = Group(f"unix:{tmp_path}/control" if request.param == "unix" else "tcp:127.0.0.1:0", 2, 3)
    yield made
    made.close()


def test_an_update_reaches_every_receiver(group: Group) -> None:
    phases: list[str] = []
    for version in range(3):
        report = group.coordinator.update(version, timeout=10.0, progress=lambda phase, _: phases.append(phase))
        assert group.versions() == {version}
        assert report.keys() == group.digests.keys()
        assert all(report[key].prepared.digest == group.parts[key].store.pin().checksum() for key in (R0, R1, R2))  # type: ignore[union-attr]
        assert all(0 <= r.visible_s < 10 for r in report.values())
        assert sum(r.prepared.sent_bytes for r in report.values()) == 8
    assert phases == sorted(phases, key=["assemble", "transfer", "commit"].index) or {"transfer", "commit"} <= set(
        phases
    )
    assert not any(part.aborted for part in group.parts.values())


@pytest.mark.parametrize("failing", [S0, S1, R0, R2], ids=str)
def test_one_that_fails_aborts_all_and_a_retry_succeeds(group: Group, failing: MemberKey) -> None:
    group.coordinator.update(1, timeout=10.0)
    group.parts[failing].fail = RuntimeError("disk on fire")
    with pytest.raises(PeerError, match=f"{failing}: RuntimeError: disk on fire"):
        group.coordinator.update(2, timeout=10.0)
    assert group.versions() == {1}
    assert all(len(part.aborted) == 1 for part in group.parts.values())
    group.coordinator.update(2, timeout=10.0)
    assert group.versions() == {2}


def test_one_that_is_late_is_named_and_all_others_abort(group: Group) -> None:
    group.coordinator.update(1, timeout=10.0)
    group.parts[R1].hold.clear()
    with pytest.raises(DeadlineError, match="expected receiver 1 to end its transfer in time"):
        group.coordinator.update(2, timeout=0.3)
    assert group.versions() == {1}
    group.parts[R1].hold.set()
    group.coordinator.update(2, timeout=10.0)
    assert group.versions() == {2}


def test_one_that_leaves_during_the_transfer_aborts_all(group: Group) -> None:
    group.coordinator.update(1, timeout=10.0)
    group.parts[S1].hold.clear()
    group.parts[S1].entered.clear()

    def leave() -> None:
        group.parts[S1].entered.wait(5.0)
        group.members[S1].close()

    thread = threading.Thread(target=leave)
    thread.start()
    with pytest.raises(PeerError, match="sender 1"):
        group.coordinator.update(2, timeout=10.0)
    thread.join()
    assert group.versions() == {1}
    group.parts[S1].hold.set()
    with pytest.raises(DeadlineError, match="expected sender 1 to say hello"):
        group.coordinator.update(2, timeout=0.5)
    group.rejoin(S1)
    group.coordinator.update(2, timeout=10.0)
    assert group.versions() == {2}


def test_an_update_can_be_cancelled(group: Group) -> None:
    group.coordinator.update(1, timeout=10.0)
    group.parts[R0].hold.clear()
    group.parts[R0].entered.clear()
    with pytest.raises(CancelledError, match="transfer of epoch 2"):
        group.coordinator.update(2, timeout=10.0, cancelled=group.parts[R0].entered.is_set)
    assert group.versions() == {1}
    assert group.parts[R0].wake.is_set()
    group.parts[R0].hold.set()
    group.coordinator.update(2, timeout=10.0)
    assert group.versions() == {2}


def test_a_failure_after_the_decision_says_that_the_others_have_committed(group: Group) -> None:
    group.coordinator.update(1, timeout=10.0)
    group.parts[R1].fail_commit = ValueError("broken")
    with pytest.raises(PeerError, match="epoch 2 is committed, but receiver 1: ValueError: broken"):
        group.coordinator.update(2, timeout=10.0)
    assert [served(group.parts[r].store) for r in (R0, R1, R2)] == [2, 1, 2]  # type: ignore[arg-type]
    group.coordinator.update(2, timeout=10.0)  # the retry writes all again
    assert group.versions() == {2}


def test_another_plan_or_stranger_is_turned_away_by_name(tmp_path: Path) -> None:
    digests = layout_digests(1, 0)
    coordinator = Coordinator(digests, PLAN_DIGEST, f"unix:{tmp_path}/control", TOKEN)
    members: list[Member] = [
        join(FakePart(None), S0, coordinator.address, plan_digest=78),
        join(FakePart(None), MemberKey("sender", 5), coordinator.address),
    ]
    with pytest.raises(DeadlineError, match="expected sender 0 to say hello"):
        coordinator.update(1, timeout=0.5)
    assert "expected the plan of digest 77, got 78" in members[0].refusal
    assert "expected a member of the plan, got sender 5" in members[1].refusal
    coordinator.close()
    for member in members:
        member.close()


def test_members_find_the_successor_of_a_coordinator(tmp_path: Path) -> None:
    group = Group(f"unix:{tmp_path}/control", 1, 2)
    group.coordinator.update(1, timeout=10.0)
    group.parts[R0].hold.clear()
    group.parts[R0].entered.clear()

    def die() -> None:
        group.parts[R0].entered.wait(5.0)
        group.coordinator.close()

    thread = threading.Thread(target=die)
    thread.start()
    with pytest.raises((PeerError, CancelledError)):
        group.coordinator.update(2, timeout=10.0)
    thread.join()
    group.parts[R0].hold.set()
    group.coordinator = Coordinator(group.digests, PLAN_DIGEST, f"unix:{tmp_path}/control", TOKEN)
    assert group.versions() == {1}
    phases: list[int] = []
    group.coordinator.update(2, timeout=10.0, progress=lambda _, done: phases.append(done))
    assert group.versions() == {2}
    assert group.coordinator._epoch > 2, "an epoch that members have seen is not used again"
    group.close()


@pytest.mark.parametrize("order", [Commit(1), Prepared(1, 0, 0, 0, 0, 0.0), Prepare(1, 2, 1.0, [])], ids=str)
def test_a_member_commits_nothing_that_it_has_not_prepared(tmp_path: Path, order: Message) -> None:
    server = listen(f"unix:{tmp_path}/control")
    part = FakePart(new_store())
    part.fail = RuntimeError("not prepared")
    member = join(part, R0, f"unix:{tmp_path}/control")
    channel = Channel(server.accept()[0], TOKEN, peer="a member", accepting=True, timeout=5.0)
    channel.receive(5.0)
    channel.send(order, 5.0)
    if isinstance(order, Prepare):
        assert "not prepared" in channel.receive(5.0).reason  # type: ignore[union-attr]
        channel.send(Commit(1), 5.0)
    with pytest.raises(PeerError):  # it hangs up
        channel.receive(5.0)
    assert served(part.store) == -1  # type: ignore[arg-type]
    server.close()
    member.close()


def test_strangers_that_only_connect_do_not_hold_members_up(tmp_path: Path) -> None:
    import socket

    group = Group(f"unix:{tmp_path}/control", 1, 1)
    silent = [socket.socket(socket.AF_UNIX) for _ in range(5)]
    for s in silent:
        s.connect(f"{tmp_path}/control")
    group.coordinator.update(1, timeout=10.0)
    assert group.versions() == {1}
    for s in silent:
        s.close()
    group.close()
