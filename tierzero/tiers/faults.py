"""The messages of failed transfers."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from tierzero.errors import TierError
from tierzero.tiers.file import Piece, TransferFile

_ADVICE = {
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EINVAL: "memory, offset and length must be aligned to what the file system needs; try io.direct = false",
    errno.EIO: "the drive reports an error; look at the system log",
}


class AbandonedError(TierError):
    """A piece was not transferred because another piece of its transfer had failed, or the transfer was cancelled."""


def first_cause(errors: Sequence[BaseException]) -> BaseException:
    """The first error that is not the consequence of another one."""
    return next((error for error in errors if not isinstance(error, AbandonedError)), errors[0])


def transfer_error(op: str, file: TransferFile, piece: Piece, done: int, error: OSError) -> TierError:
    """What failed, where, how far it came and what to do, in one line; carries the errno."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    text = f"{_head(op, file, piece)} failed: {reason}; {done:,} bytes were done"
    advice = _ADVICE.get(error.errno or 0)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = file.room_advice
        with contextlib.suppress(OSError):
            text += f", {file.free_bytes(piece.path_index):,} bytes are free"
    failure = TierError(f"{text}; {advice}" if advice else text)
    failure.errno = error.errno
    return failure


def no_progress(op: str, file: TransferFile, piece: Piece, done: int) -> TierError:
    """Nothing moved, and no error was reported: the file is shorter than it was made, or the drive is stuck."""
    return TierError(
        f"{_head(op, file, piece)} stopped after {done:,} bytes without an error; was the file changed from outside?"
    )


def _head(op: str, file: TransferFile, piece: Piece) -> str:
    return f"{op} of {piece.nbytes:,} bytes at offset {piece.file_offset:,} of {file.paths[piece.path_index]}"
