"""Work that no signal cuts in two."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let what a signal would raise (``KeyboardInterrupt``, or a handler's ``SystemExit``) wait for the end.

    Only the main thread is ever interrupted; elsewhere nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if callable(handler := signal.getsignal(number))
    }
    try:
        for number in before:
            signal.signal(number, lambda number, frame: came.append((number, frame)))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for which, frame in came[:1]:
            before[signal.Signals(which)](which, frame)
