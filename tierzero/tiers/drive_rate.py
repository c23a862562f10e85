"""What a drive gives to plain positional reads and writes at once: the yardstick for a step's traffic, and for how much
of it each of several drives gets."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tierzero.tiers.directory import TierDirectory
from tierzero.tiers.stripes import shares_of

_HUGE_PAGE = 2 << 20
_SAMPLE = 128 << 20
"""Bytes: about a tenth of a second on each drive."""


def mixed_rate(folder: str | Path, *, nbytes: int = 2 << 30, block: int = 8 << 20, depth: int = 8) -> float:
    """Bytes per second, reads and writes together, half of each, ``depth`` requests of ``block`` bytes in flight on a
    file of ``nbytes`` in ``folder``: O_DIRECT where the file system has it, buffers on huge pages.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".rate-", suffix=".tier") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        descriptor = open_direct(file.name)
        try:
            blocks = nbytes // block
            with ThreadPoolExecutor(depth) as threads:
                buffers = [huge_buffer(block) for _ in range(depth)]

                def transfer(lane: int, write_all: bool) -> None:
                    for index in range(lane, blocks, depth):
                        if write_all or index // depth % 2:
                            os.pwritev(descriptor, [buffers[lane]], index * block)
                        else:
                            os.preadv(descriptor, [buffers[lane]], index * block)

                list(threads.map(lambda lane: transfer(lane, True), range(depth)))  # a file of written blocks
                started = time.perf_counter()
                list(threads.map(lambda lane: transfer(lane, False), range(depth)))
                return blocks * block / (time.perf_counter() - started)
        finally:
            os.close(descriptor)


def measured_shares(directories: Sequence[TierDirectory]) -> tuple[int, ...]:
    """The blocks that each of several drives should hold, from a short transfer on one after another; alike for
    directories of one file system. Raises OSError where a drive cannot be written to.
    """
    rates: dict[int, float] = {}
    for directory in directories:
        device = os.stat(directory.root).st_dev
        if device not in rates:
            rates[device] = mixed_rate(directory.path, nbytes=_SAMPLE)
    return shares_of([rates[os.stat(directory.root).st_dev] for directory in directories])


def open_direct(path: str) -> int:
    """A descriptor for reading and writing, with O_DIRECT where the file system has it."""
    with suppress(OSError):
        return os.open(path, os.O_RDWR | os.O_DIRECT)
    return os.open(path, os.O_RDWR)


def huge_buffer(nbytes: int) -> memoryview:
    """``nbytes`` of memory on huge pages where there are any, filled with bytes that do not compress."""
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    view[:] = os.urandom(1 << 16) * (len(view) // (1 << 16))
    return view[:nbytes]
