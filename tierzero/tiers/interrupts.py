"""Ctrl-C at a bad moment: sections that are done as a whole or not begun."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Holds SIGINT and SIGTERM back until the end of the section, on the main thread, which alone is interrupted by
    them. Not for sections that wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # One within the other: whichever signal's handler raises, also on the way in or out, the other's is put back.
    with _one_held_back(signal.SIGTERM), _one_held_back(signal.SIGINT):
        yield


@contextmanager
def _one_held_back(number: signal.Signals) -> Iterator[None]:
    handler = signal.getsignal(number)
    if not callable(handler):
        yield
        return
    met: list[FrameType | None] = []
    signal.signal(number, lambda _, frame: met.append(frame))
    try:
        yield
    finally:
        signal.signal(number, handler)
        if met:
            handler(number, met[0])
