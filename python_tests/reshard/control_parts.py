"""A stand-in for the data plane: members whose transfer fills a version store with the version's number."""

from __future__ import annotations

import threading

import torch

from areal_core.errors import CancelledError
from areal_core.reshard import Draft, Spec, VersionStore
from areal_core.reshard.control_messages import Hello, Prepare
from areal_core.reshard.coordinator import MemberKey
from areal_core.reshard.member import Member, Transferred

TOKEN = b"a token for the tests"
PLAN_DIGEST = 77
SPECS = {f"layers.{size}": Spec(torch.int32, (size,)) for size in (0, 1, 31, 1000, 4099)}


def new_store() -> VersionStore:
    return VersionStore.create(SPECS, chunk_bytes=4096)


def served(store: VersionStore) -> int:
    """The version of a store, after a look at every element of every tensor."""
    if store.version() < 0:
        return -1
    with store.pin(timeout=5.0) as snapshot:
        snapshot.checksum()
        for name, tensor in snapshot.tensors.items():
            assert bool((tensor == snapshot.version).all()), f"{name}: expected {snapshot.version} everywhere"
        return int(snapshot.version)


class FakePart:
    """Sender or receiver; `fail` is raised in its next transfer, `hold` delays the end of every one."""

    def __init__(self, store: VersionStore | None) -> None:
        self.store = store
        self.draft: Draft | None = None
        self.fail: Exception | None = None
        self.fail_commit: Exception | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.wake = threading.Event()
        self.entered = threading.Event()
        self.aborted: list[str] = []

    def transfer(self, order: Prepare, cancelled: threading.Event) -> Transferred:
        self.entered.set()
        fail, self.fail = self.fail, None
        if fail is not None:
            raise fail
        if self.store is None:
            digest = 0
        else:
            self.draft = self.store.draft(order.version, allow_rollback=True, timeout=5.0)
            for tensor in self.draft.tensors.values():
                tensor.fill_(order.version)
            digest = self.draft.seal()
        while not (self.hold.wait(0.005) or cancelled.is_set()):
            pass
        if cancelled.is_set():
            raise CancelledError("transfer")
        return Transferred(digest=digest, received_bytes=4 if self.store else 0, sent_bytes=0 if self.store else 4)

    def cancel(self) -> None:
        self.wake.set()

    def commit(self) -> tuple[int, float]:
        fail, self.fail_commit = self.fail_commit, None
        if fail is not None:
            raise fail
        if self.draft is None:
            return -1, 0.0
        self.draft.commit()
        version, self.draft = self.draft.version, None
        return version, 0.0

    def abort(self, reason: str) -> None:
        self.aborted.append(reason)
        if self.draft is not None:
            self.draft.abort()
            self.draft = None


def join(part: FakePart, key: MemberKey, address: str, *, plan_digest: int = PLAN_DIGEST) -> Member:
    def hello(epoch: int) -> Hello:
        return Hello(key.role, key.rank, key.rank + 10, plan_digest, "", epoch)

    return Member(part, hello, address, TOKEN)


def layout_digests(senders: int, receivers: int) -> dict[MemberKey, int]:
    keys = [MemberKey("sender", r) for r in range(senders)] + [MemberKey("receiver", r) for r in range(receivers)]
    return {key: key.rank + 10 for key in keys}
