"""Copies within a file system that share their blocks with the original (XFS, btrfs): nothing is read or written.

The copy is of the bytes as they are when it is made. Whatever is written to either file later goes to new blocks and
leaves the other as it was, so the room that a clone saves is taken then.
"""

from __future__ import annotations

import fcntl
import struct

from tierzero.tiers.allocator import PAGE
from tierzero.tiers.file import TransferFile

_FICLONERANGE = 0x4020940D
"""Linux's number of it; where an architecture has another one, it is refused like everything that is not known."""


def clone_range(source: int, offset: int, nbytes: int, target: int, at: int) -> None:
    """Makes ``nbytes`` of the file ``target`` at byte ``at`` those of ``source`` (descriptors) at ``offset``: whole
    blocks of one file system. Raises OSError where that cannot be done.
    """
    fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", source, offset, nbytes, at))


class Cloner:
    """Clones parts of the tier files ``source`` to the one new file ``target``, where their file systems can. What is
    refused once, for whatever reason, is not asked for again: an ordinary copy will do, or say what is wrong.
    """

    def __init__(self, source: TransferFile, target: TransferFile) -> None:
        """Tries it with the first page of each path, whose place in ``target`` must get its own bytes later."""
        self._source, self._target = source, target
        self._able = set(range(len(source.paths)))
        for path_index in range(len(source.paths)):
            self._cloned(path_index, 0, PAGE, 0)

    @property
    def is_able(self) -> bool:
        """Whether there is a path that it can clone from."""
        return bool(self._able)

    def clone(self, offset: int, nbytes: int, at: int) -> bool:
        """Whether ``nbytes`` at ``offset`` of the tier files are now at byte ``at`` of the target. If not, a part of
        them may be. Waits for other use of the files: call it on a worker. Raises TierError after a file was closed.
        """
        pieces = self._source.pieces(offset, nbytes)
        return all(self._cloned(p.path_index, p.file_offset, p.nbytes, at + p.start) for p in pieces)

    def _cloned(self, path_index: int, offset: int, nbytes: int, at: int) -> bool:
        if path_index not in self._able:
            return False
        try:
            with self._source.using(path_index) as source, self._target.using(0) as target:
                clone_range(source, offset, nbytes, target, at)
        except OSError:
            self._able.discard(path_index)
            return False
        return True
