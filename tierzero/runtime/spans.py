"""Spans of time that a step spent on something, kept in memory of a fixed size until the step is over."""

from __future__ import annotations

import itertools
import struct
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt


class Kind(IntEnum):
    """What a span is about. The numbers are those of recorded files."""

    FORWARD = 1
    BACKWARD = 2
    RECOMPUTE = 3
    OPTIMIZER_STEP = 4
    GRADIENT_NORM = 5
    CHECKPOINT = 6
    SEAL = 7
    STALL_NVME_READ = 10
    STALL_NVME_WRITE = 11
    STALL_GATHER = 12
    STALL_OPTIMIZER = 13
    STALL_HOST_BUDGET = 14
    ALL_GATHER = 20
    REDUCE_SCATTER = 21
    ALL_REDUCE = 22
    PAGE_IN = 30
    READ_AHEAD = 31
    PAGE_OUT = 32
    GRADIENTS = 33
    UPDATE = 40
    TRIED = 41
    KEPT = 42
    LOST = 43


STALL_SPANS = {
    "nvme_read": Kind.STALL_NVME_READ,
    "nvme_write": Kind.STALL_NVME_WRITE,
    "gather": Kind.STALL_GATHER,
    "optimizer": Kind.STALL_OPTIMIZER,
    "host_budget": Kind.STALL_HOST_BUDGET,
}

SPAN = np.dtype(
    [
        ("start", "<f8"),
        ("end", "<f8"),
        ("bytes", "<i8"),
        ("unit", "<i4"),
        ("tile", "<i4"),
        ("group", "<u2"),
        ("kind", "<u2"),
    ]
)
"""Start and end in seconds of `time.perf_counter`; ``unit`` and ``tile`` are -1 where it is about none."""

_PACKED = struct.Struct("<ddqiiHH")
assert _PACKED.size == SPAN.itemsize

SPANS_PER_STEP = 65_536
"""What a page holds: 2.4 MB, of which only what is written takes memory."""


class SpanPage:
    """The spans of one step, written by any thread without a lock: each takes the next slot, which is then its own."""

    def __init__(self, capacity: int = SPANS_PER_STEP) -> None:
        self.capacity = capacity
        self._memory = bytearray(capacity * SPAN.itemsize)
        self._slots = itertools.count()

    def write(self, kind: int, unit: int, group: int, tile: int, start: float, end: float, nbytes: int) -> None:
        """Adds a span; one that finds the page full is only counted."""
        slot = next(self._slots)
        if slot < self.capacity:
            _PACKED.pack_into(self._memory, slot * _PACKED.size, start, end, nbytes, unit, tile, group, kind)

    def close(self) -> tuple[npt.NDArray[Any], int]:
        """A copy of what was written, and how many spans found no room."""
        taken = next(self._slots)
        spans = np.frombuffer(self._memory, SPAN, min(taken, self.capacity))
        return spans[spans["kind"] != 0], max(0, taken - self.capacity)

    def restart(self) -> None:
        """Empties the page. A thread that is still about to write into its slot leaves one span of the past there."""
        taken = min(next(self._slots), self.capacity)
        np.frombuffer(self._memory, SPAN, taken)["kind"] = 0
        self._slots = itertools.count()
