"""An ordinary file that the I/O engine writes or reads: a checkpoint's data."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from tierzero.tiers.allocator import PAGE
from tierzero.tiers.directory import free_bytes
from tierzero.tiers.file import BufferedPages, FileUsers, Piece

_NOT_SUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY)
_BLOCK = 8 << 20
"""Bytes of a request."""
_LANE = Path("files")


class FlatFile:
    """``nbytes`` in one file, past the page cache where its file system allows. Make one with `create` or `open`."""

    is_tier = False
    room_advice = "free space there or choose another folder"

    def __init__(self, path: Path, fd: int, nbytes: int, direct: bool) -> None:
        self.path = path
        self.nbytes = nbytes
        self.direct = (direct,)
        self._fd = fd
        self._users = FileUsers()
        self._pages = BufferedPages()

    @classmethod
    def create(cls, path: Path, nbytes: int) -> FlatFile:
        """A new file of ``nbytes`` (whole pages), with `reserve` to come. OSError."""
        fd, direct = _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(fd, nbytes)
        except BaseException:
            os.close(fd)
            path.unlink()
            raise
        return cls(path, fd, nbytes, direct)

    @classmethod
    def open(cls, path: Path) -> FlatFile:
        """An existing file, for reading. OSError."""
        nbytes = path.stat().st_size
        # The end of a file that is no whole page cannot be read with O_DIRECT.
        fd, direct = _opened(path, os.O_RDONLY) if nbytes % PAGE == 0 else (os.open(path, os.O_RDONLY), False)
        return cls(path, fd, nbytes, direct)

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.path,)

    @property
    def lanes(self) -> tuple[Path, ...]:
        return (_LANE,)

    def pieces(self, offset: int, nbytes: int) -> list[Piece]:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} lie outside {self.path} of {self.nbytes} bytes")
        return [Piece(0, offset + start, start, min(_BLOCK, nbytes - start)) for start in range(0, nbytes, _BLOCK)]

    @contextlib.contextmanager
    def using(self, path_index: int) -> Iterator[int]:
        with self._users.one_more(self.path):
            yield self._fd

    def drop_cache(self, path_index: int, fd: int, offset: int, nbytes: int, *, written: bool) -> None:
        if not self.direct[0]:
            self._pages.drop(fd, offset, nbytes, written=written)

    def free_bytes(self, path_index: int) -> int:
        return free_bytes(self.path.parent)

    def reserve(self) -> None:
        """Takes the room for all of a new file, so that a full disk is met here. OSError."""
        try:
            if self.nbytes:
                os.posix_fallocate(self._fd, 0, self.nbytes)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:  # a file system without preallocation
                raise

    def sync(self) -> None:
        """What was written is on the drive when this returns. OSError."""
        os.fsync(self._fd)

    def close(self) -> None:
        """After the system calls that are using it. Safe to call twice."""
        self._users.end()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _opened(path: Path, flags: int) -> tuple[int, bool]:
    """(descriptor, whether with O_DIRECT)."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o666), True
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        if flags & os.O_EXCL:
            path.unlink(missing_ok=True)
        return os.open(path, flags | os.O_CLOEXEC, 0o666), False
