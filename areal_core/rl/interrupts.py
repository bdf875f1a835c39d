"""Ctrl-C that ends a run at the next step instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupts"]


@contextmanager
def interrupts(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C or SIGTERM only sets a flag (the value yielded reads it); the second one raises.

    Args:
        say: shows a line to the person who pressed Ctrl-C.

    Signals belong to the main thread: in another one nothing is handled and the flag stays false.
    """
    seen = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True
        say("stopping after this step, with a checkpoint; once more to leave at once")

    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield lambda: seen
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
