"""What the I/O engine needs of a file."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from tierzero.checked_json import write_json
from tierzero.errors import TierError

Direct = Literal["auto"] | bool

SYNC_EVERY = 256 << 20
"""Bytes written through the page cache between two flushes: what a buffered file may hold in it."""


class FileUsers:
    """Counts the system calls that are using a file, so that it is closed after them."""

    def __init__(self) -> None:
        self._closed = False
        self._count = 0
        self._idle = threading.Condition()

    @contextlib.contextmanager
    def one_more(self, path: Path) -> Iterator[None]:
        """Around one system call. Raises TierError after `end`."""
        with self._idle:
            if self._closed:
                raise TierError(f"{path} is closed")
            self._count += 1
        try:
            yield
        finally:
            with self._idle:
                self._count -= 1
                self._idle.notify_all()

    def end(self) -> None:
        """No more from now on; waits for those that there are."""
        with self._idle:
            self._closed = True
            while self._count:
                self._idle.wait()


class BufferedPages:
    """Keeps buffered I/O on one file from filling the page cache."""

    def __init__(self) -> None:
        self._unsynced = 0
        self._lock = threading.Lock()

    def drop(self, fd: int, offset: int, nbytes: int, *, written: bool) -> None:
        """After a read or a write of ``nbytes`` at ``offset``."""
        if written:
            with self._lock:
                self._unsynced += nbytes
                flush = self._unsynced >= SYNC_EVERY
                self._unsynced = 0 if flush else self._unsynced
            if flush:
                # Pages that are still dirty cannot be dropped.
                os.fdatasync(fd)
                offset = nbytes = 0  # the whole file
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class Piece:
    """Part of a request that lies in one file: ``nbytes`` at ``file_offset``, and ``start`` bytes into the request."""

    path_index: int
    file_offset: int
    start: int
    nbytes: int


class TransferFile(Protocol):
    """One logical file over one or several real ones. Offsets and sizes are in bytes."""

    is_tier: bool
    """Its traffic is that of the tiers, which a step's figures show."""
    room_advice: str
    """What to do when there is no room for it."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The real files, in the order of their index."""

    @property
    def lanes(self) -> tuple[Path, ...]:
        """For each real file the queue of requests that it shares with others of the same lane."""

    @property
    def direct(self) -> tuple[bool, ...]:
        """For each real file whether it bypasses the page cache."""

    def pieces(self, offset: int, nbytes: int) -> list[Piece]:
        """Cuts a request into parts that lie in one real file each. Raises ValueError outside the file."""

    def using(self, path_index: int) -> AbstractContextManager[int]:
        """The descriptor of a real file for one system call. Raises TierError after the file was closed."""

    def drop_cache(self, path_index: int, fd: int, offset: int, nbytes: int, *, written: bool) -> None:
        """Keeps buffered I/O from filling the page cache; nothing to do with O_DIRECT."""

    def free_bytes(self, path_index: int) -> int:
        """Free space of the file system that the real file lies on."""


def write_json_flushed(path: Path, value: dict[str, Any]) -> None:
    """The object gets its name when all of it is on the drive; flushing the name is the caller's. Raises OSError."""
    unnamed = path.with_suffix(".tmp")
    write_json(unnamed, value)
    sync_path(unnamed)
    unnamed.rename(path)


def sync_path(path: Path) -> None:
    """A file's or folder's contents are on the drive when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
