"""Files and folders that appear under their name whole or not at all, written with little memory and page cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from tierzero.errors import BudgetError, CheckpointError, ConfigError
from tierzero.tiers import free_bytes
from tierzero.tiers.file import sync_path

_LET_GO = 64 << 20
"""Bytes of dirty pages at most; a large file would otherwise push everything else out of memory."""


ByteProgress = Callable[[int, int], None]
"""Told how far something is: bytes done, and bytes in all."""


def partial_of(path: Path) -> Path:
    """Where a file or folder is written before it gets its name."""
    path = Path(os.path.abspath(path))  # "." has no name
    return path.with_name(f".{path.name}.partial")


def check_space(target: Path, nbytes: int) -> None:
    """Raises BudgetError unless ``nbytes`` can be written at ``target``, which need not exist yet."""
    standing = next(path for path in (target, *target.absolute().parents) if path.exists())
    free = free_bytes(standing)
    if free < nbytes:
        raise BudgetError(
            f"{target}: {nbytes:,} bytes are to be written and {free:,} are free there; free {nbytes - free:,} more or "
            "choose another drive",
            nbytes - free,
        )


@contextmanager
def failures_named(target: Path) -> Iterator[None]:
    """Turns an OSError inside into a CheckpointError that names ``target``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error}") from error


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous 1-D tensor on the host."""
    return values.view(torch.uint8).numpy().data if values.numel() else memoryview(b"")


class OutputFile:
    """Writes a file at a temporary name; leaving the ``with`` block without an error flushes and renames it, an error
    removes it. ``position`` counts bytes. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = partial_of(path)
        self.position = 0
        self._let_go_at = _LET_GO

    def __enter__(self) -> Self:
        self._file = self._temporary.open("wb")
        return self

    def write(self, raw: bytes | memoryview) -> None:
        self._file.write(raw)
        self._advance(len(raw))

    def skip(self, nbytes: int) -> None:
        """Leaves bytes that read as zeros: a hole, which takes no space where the file system has them."""
        self._file.seek(nbytes, os.SEEK_CUR)
        self._advance(nbytes)

    def _advance(self, nbytes: int) -> None:
        self.position += nbytes
        if self.position >= self._let_go_at:
            self._flush()
            os.posix_fadvise(self._file.fileno(), 0, self.position, os.POSIX_FADV_DONTNEED)
            self._let_go_at = self.position + _LET_GO

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if error is None:
                    self._file.truncate(self.position)  # a hole at the end counts only so
                    self._flush()
            if error is None:
                self._temporary.rename(self._path)
                sync_path(self._path.parent)
        finally:
            self._temporary.unlink(missing_ok=True)


def give_name(staging: Path, target: Path) -> None:
    """A folder whose files are on the drive appears as ``target``. Raises OSError."""
    sync_path(staging)
    staging.rename(target)
    sync_path(target.parent)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside ``target`` to write to; it gets that name at the end, and goes after an error.

    Raises OSError. ``target`` must have been checked with `check_unused`.
    """
    staging = partial_of(target)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        give_name(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def check_unused(target: Path) -> None:
    """Raises ConfigError where anything but an empty folder stands at ``target``."""
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir() or next(target.iterdir(), None) is not None:
        raise ConfigError(f"{target}: something stands there already; choose a new folder")
