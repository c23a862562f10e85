"""What the workers do: one system call at a time, awaitable, counted, and open to a test's faults."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aiofiles.ospath import wrap

from tierzero.tiers.executor import Request
from tierzero.tiers.faults import AbandonedError
from tierzero.tiers.file import TransferFile

Fault = Callable[[str, Path, int, int], None]
"""(operation, path, offset in that file, bytes): called on the worker before each system call; may sleep or raise."""


class Traffic:
    """Bytes moved in one direction, and the wall time with at least one transfer in flight. What is in flight counts
    for the time of ``part_of`` too.
    """

    def __init__(self, part_of: Traffic | None = None) -> None:
        self._part_of = part_of
        self._lock = threading.Lock()
        self._in_flight = 0
        self._since = 0.0
        self._busy_s = 0.0
        self.nbytes = 0

    @contextlib.contextmanager
    def flight(self) -> Iterator[None]:
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self) -> None:
        if self._part_of is not None:
            self._part_of._begin()
        with self._lock:
            if self._in_flight == 0:
                self._since = time.perf_counter()
            self._in_flight += 1

    def _end(self) -> None:
        with self._lock:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy_s += time.perf_counter() - self._since
        if self._part_of is not None:
            self._part_of._end()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes

    @property
    def busy_s(self) -> float:
        with self._lock:
            return self._busy_s + (time.perf_counter() - self._since if self._in_flight else 0.0)


def _system_call(
    call: Callable[[int, Any, int], int],
    op: str,
    fault: Fault | None,
    traffic: Traffic,
    file: TransferFile,
    path_index: int,
    memory: memoryview,
    offset: int,
    request: Request,
) -> int:
    """On a worker: one positional, vectored system call; returns the bytes that it moved."""
    if request.abandoned:
        raise AbandonedError(
            f"{op} of {file.paths[path_index]} was given up: another part of it failed or it was cancelled"
        )
    with file.using(path_index) as fd, traffic.flight():
        if fault is not None:
            fault(op, file.paths[path_index], offset, len(memory))
        moved = call(fd, [memory], offset)
        file.drop_cache(path_index, fd, offset, moved, written=op == "write")
        return moved


def _preadv(*args: Any) -> int:
    return _system_call(os.preadv, "read", *args)


def _pwritev(*args: Any) -> int:
    return _system_call(os.pwritev, "write", *args)


read_some = wrap(_preadv)
write_some = wrap(_pwritev)
