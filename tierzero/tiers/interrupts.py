"""Ctrl-C at a bad moment: sections that are done as a whole or not begun."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Holds SIGINT back until the end of the section, on the main thread, which alone is interrupted by it. Not for
    sections that wait.
    """
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):
        yield
        return
    met: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: met.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if met:
            handler(*met[0])
