"""A task for the worker processes of `RewardPool`: what its verifier does stands in the response."""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import sys
import threading
from typing import Any


def wrong_task() -> Any:
    return WrongTask()


def task_that_cannot_start() -> Any:
    raise RuntimeError("no such data")


class WrongTask:
    def verify(self, problem: Any, text: str) -> Any:
        kind, _, value = text.partition(" ")
        return getattr(self, kind)(value) if kind != "value" else float(value)

    def pid(self, _: str) -> int:
        return os.getpid()

    def raises(self, text: str) -> float:
        raise RuntimeError(text)

    def exits(self, _: str) -> float:
        sys.exit(3)

    def nan(self, _: str) -> float:
        return math.nan

    def text(self, _: str) -> Any:
        return "right"

    def waits(self, _: str) -> float:
        threading.Event().wait()
        return 1.0

    def swallows(self, _: str) -> float:
        while True:
            try:
                threading.Event().wait()
            except BaseException:
                continue

    def holds_the_interpreter(self, _: str) -> float:
        return float(bool(re.fullmatch("(a|aa)+b", "a" * 80)))

    def takes_the_timer(self, _: str) -> float:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        threading.Event().wait()
        return 1.0

    def crashes(self, _: str) -> float:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(0)
        return 1.0

    def leaves(self, _: str) -> float:
        os._exit(0)
