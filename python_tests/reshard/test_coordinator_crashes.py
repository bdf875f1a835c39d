"""Coordinator, sender or receiver killed at every message of an update: whole versions everywhere, and retries work."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from control_parts import PLAN_DIGEST, TOKEN, FakePart, join, layout_digests, new_store, served

from areal_core.errors import ArealError
from areal_core.reshard import VersionStore
from areal_core.reshard.control import Channel
from areal_core.reshard.coordinator import Coordinator, MemberKey

FORK = multiprocessing.get_context("fork")
RECEIVERS = 2


def die_at(event: int) -> None:
    """Kill this process at the event-th beginning or end of a message, sent or received."""
    count = iter(range(10**9))

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            if next(count) == event:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args)
            if next(count) == event:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapper

    Channel.send = counted(Channel.send)  # type: ignore[method-assign]
    Channel.receive = counted(Channel.receive)  # type: ignore[method-assign]


def coordinate(address: str, pipe: Connection, event: int) -> None:
    if event >= 0:
        die_at(event)
    coordinator = Coordinator(layout_digests(1, RECEIVERS), PLAN_DIGEST, address, TOKEN)
    while True:
        version = pipe.recv()
        try:
            coordinator.update(version, timeout=20.0)
            pipe.send("done")
        except ArealError as error:
            pipe.send(f"{type(error).__name__}: {error}")


def take_part(key: MemberKey, store: VersionStore | None, address: str, event: int) -> None:
    if event >= 0:
        die_at(event)
    join(FakePart(store), key, address)
    signal.pause()


class Cast:
    """One process each for the coordinator, a sender and the receivers; their stores are this process's."""

    def __init__(self, address: str, victim: str, event: int) -> None:
        self.address = address
        self.stores = [new_store() for _ in range(RECEIVERS)]
        for store in self.stores:
            store.publish({n: t.fill_(1) for n, t in _empty(store).items()}, 1)
        self.revived = False
        self.pipe: Connection
        self.processes: dict[str, Any] = {}
        for name in ("coordinator", "sender 0", *(f"receiver {r}" for r in range(RECEIVERS))):
            self.start(name, event if name == victim else -1)

    def start(self, name: str, event: int = -1) -> None:
        if name == "coordinator":
            self.pipe, theirs = FORK.Pipe()
            process = FORK.Process(target=coordinate, args=(self.address, theirs, event), daemon=True)
            process.start()
            theirs.close()
        else:
            role, rank = name.split()
            store = self.stores[int(rank)] if role == "receiver" else None
            process = FORK.Process(
                target=take_part, args=(MemberKey(role, int(rank)), store, self.address, event), daemon=True
            )
            process.start()
        self.processes[name] = process

    def update(self, version: int, victim: str) -> str:
        """Its outcome; the victim is started again as soon as it has died (the coordinator, once that is known)."""
        try:
            self.pipe.send(version)
            wait([self.pipe, self.processes[victim].sentinel])
            if victim != "coordinator":
                self.revive(victim)
            return str(self.pipe.recv())
        except (EOFError, OSError):
            return "the coordinator died"

    def revive(self, name: str) -> bool:
        """Whether it had been killed."""
        if wait([self.processes[name].sentinel], 0.0):
            self.processes[name].join()  # its descriptors close a moment before it can be reaped
        if self.processes[name].exitcode != -signal.SIGKILL:
            return False
        self.processes.pop(name).close()
        self.start(name)
        self.revived = True
        return True

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
            process.close()
        self.pipe.close()
        for store in self.stores:
            store.close()


def _empty(store: VersionStore) -> dict[str, Any]:
    import torch

    return {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in store.specs.items()}


@pytest.mark.parametrize("victim", ["coordinator", "sender 0", "receiver 1"])
def test_killed_at_every_message(tmp_path: Path, victim: str) -> None:
    event, died = 0, True
    descriptors = len(os.listdir("/proc/self/fd"))
    while died:
        cast = Cast(f"unix:{tmp_path}/c{event}", victim, event)
        outcome = cast.update(2, victim)
        if outcome != "done" and not cast.revived:
            cast.processes[victim].join()  # nothing else makes an update fail
            cast.revive(victim)
        versions = [served(store) for store in cast.stores]
        assert set(versions) <= {1, 2}, f"event {event}: {outcome}"
        if outcome == "done":
            assert versions == [2] * RECEIVERS
        elif "committed" not in outcome and victim != "coordinator":
            assert versions == [1] * RECEIVERS, f"event {event}: {outcome}"
        had_died = cast.revived
        if (retry := cast.update(3, victim)) != "done":  # it may have died after the update, or just now
            assert not had_died, f"event {event}: the retry failed: {retry}"
            if not cast.revived:
                cast.processes[victim].join()
                cast.revive(victim)
            assert cast.update(3, victim) == "done", f"event {event}: the retry failed"
        assert [served(store) for store in cast.stores] == [3] * RECEIVERS
        died = had_died
        cast.close()
        event += 1
    assert event >= 8, "expected the update to take several messages"
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # fewer: what earlier tests left is collected meanwhile
