"""Requests on tier files through the runtime's engine, a slice of time at once."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from tierzero.errors import BudgetError, ConfigError
from tierzero.tiers import HostAllocator, IoEngine, MemoryPool, Priority, StripedFile, Tier, TierDirectory, free_bytes
from tierzero.tiers.drive_rate import measured_shares
from tierzero.tiers.stripes import equal_shares

Op = Literal["read", "write", "mixed"]
OPS: tuple[Op, ...] = ("write", "read", "mixed")

_PATTERN = 1 << 20
_FREE_SHARE = 0.9
"""Of the free space, what the files may take."""


@dataclass(frozen=True)
class Point:
    """``depth`` requests of ``block`` bytes in flight per path; ``direct``: past the page cache."""

    direct: bool
    block: int
    depth: int


@dataclass(frozen=True)
class Slice:
    """Bytes moved in ``seconds``, and how long each request took."""

    nbytes: int
    seconds: float
    latencies: list[float]

    @property
    def rate(self) -> float:
        return self.nbytes / self.seconds


@dataclass
class _View:
    """The tier file with one size of block. Slices go on where the last one ended, all directions in one row."""

    file: StripedFile
    request: int
    """Bytes: a block on each path, several on the faster ones."""
    next: int = 0


@dataclass
class MeasuredFile:
    """Files on one path or several that hold written data, and requests on them. Use as a context; removes the files.

    ``nbytes``: in all, rounded down to whole blocks. ``deepest``: most requests in flight.
    """

    paths: Sequence[Path]
    nbytes: int
    blocks: Sequence[int]
    deepest: int
    filled: int = 0
    _directories: list[TierDirectory] = field(default_factory=list)
    _views: dict[tuple[bool, int], _View] = field(default_factory=dict)
    _engines: dict[int, IoEngine] = field(default_factory=dict)
    _close: list[Callable[[], None]] = field(default_factory=list)

    def __enter__(self) -> MeasuredFile:
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for close in reversed([*self._close, *(engine.close for engine in self._engines.values())]):
            close()

    def _open(self) -> None:
        for path in self.paths:
            self._directories.append(TierDirectory.open(path, 0))
            self._close.append(self._directories[-1].close)
        check_room(self.paths, self.nbytes)
        shares = measured_shares(self._directories) if len(self.paths) > 1 else equal_shares(1)
        unit = math.lcm(*self.blocks) * sum(shares)
        if self.nbytes < unit:
            raise ConfigError(
                f"bench io: --size is {self.nbytes:,} bytes, but blocks of all --blocks fit together into multiples of "
                f"{unit:,} only; raise it, or give blocks that divide one another"
            )
        self.nbytes -= self.nbytes % unit
        for direct in (False, True):
            for block in self.blocks:
                self._view(direct, block, shares)
        capacity = self.deepest * max(view.request for view in self._views.values())
        pool = MemoryPool(Tier.HOST, capacity, HostAllocator())
        self._close.append(pool.close)
        self._memory = pool.allocate(capacity, "the bench")
        self._close.append(lambda: pool.release(self._memory))
        _fill(self._memory.tensor)

    def _view(self, direct: bool, block: int, shares: Sequence[int]) -> None:
        """The files are made once and opened again for each size of block, with and without O_DIRECT."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # no O_DIRECT: said once, in the report
            file = StripedFile(
                self._directories,
                self.nbytes,
                block_size=block,
                direct="auto" if direct else False,
                shares=shares,
                existing=bool(self._views),
            )
        self._close.append(file.close)
        if not direct or all(file.direct):
            self._views[direct, block] = _View(file, block * sum(shares))

    @property
    def has_direct(self) -> bool:
        return any(direct for direct, _ in self._views)

    @property
    def files(self) -> tuple[Path, ...]:
        return next(iter(self._views.values())).file.paths

    @contextlib.contextmanager
    def descriptor(self, point: Point) -> Iterator[int]:
        """Of the file on the first path, for system calls of one's own."""
        with self._views[point.direct, point.block].file.using(0) as found:
            yield found

    def memory(self, lane: int, point: Point) -> memoryview:
        """What the requests of one lane read into or write from."""
        size = self._views[point.direct, point.block].request
        return self._memory.memory(lane * size, size)

    def fill(self, seconds: float) -> None:
        """Writes the file from its start, whole or as far as the time goes: what is read later has been written."""
        block = max(self.blocks)
        point = Point(self.has_direct, block, min(8, self.deepest))
        view = self._views[point.direct, block]
        least = min(self.nbytes, 2 * self.deepest * view.request)
        self.filled = self.nbytes
        self.filled = max(least, self.run(point, "write", seconds, at_most=self.nbytes, at_least=least).nbytes)
        view.next = 0

    def run(self, point: Point, op: Op, seconds: float, *, at_most: int = 1 << 62, at_least: int = 0) -> Slice:
        """Requests until the time is over, as many as are in flight at once at least, or ``at_most`` bytes."""
        view = self._views[point.direct, point.block]
        return self._run(view, point, op, seconds, self.filled, at_most, at_least)

    def reread(self, point: Point, nbytes: int, seconds: float) -> Slice:
        """Reads the first ``nbytes`` over and over."""
        view = self._views[point.direct, point.block]
        region = max(nbytes // view.request, 1) * view.request
        again = _View(view.file, view.request)
        self._run(again, point, "read", 0.0, region, 1 << 62, region)
        return self._run(again, point, "read", seconds, region, 1 << 62, region)

    def _run(
        self, view: _View, point: Point, op: Op, seconds: float, region: int, at_most: int, at_least: int
    ) -> Slice:
        engine = self._engine(point.depth)
        lap = max(1, region // view.request)
        least, most = max(point.depth, at_least // view.request), max(1, at_most // view.request)
        latencies: list[float] = []
        first = view.next
        started = time.perf_counter()

        async def lane(memory: memoryview) -> None:
            while (done := view.next - first) < most:
                now = time.perf_counter()
                if done >= least and now - started >= seconds:
                    return
                number, view.next = view.next, view.next + 1
                transfer = engine.read if _reads(op, number, lap) else engine.write
                await transfer(view.file, number % lap * view.request, memory, Priority.DEMAND)
                latencies.append(time.perf_counter() - now)

        async def lanes() -> None:
            await asyncio.gather(*(lane(self.memory(number, point)) for number in range(point.depth)))

        engine.run(lanes())
        if op != "read" and not point.direct:
            _flush(view.file)  # what still lies in the page cache has not been written
        return Slice(len(latencies) * view.request, time.perf_counter() - started, latencies)

    def _engine(self, depth: int) -> IoEngine:
        if depth not in self._engines:
            self._engines[depth] = IoEngine(depth, compute_threads=1)
        return self._engines[depth]


def check_room(paths: Sequence[Path], nbytes: int) -> None:
    """Raises BudgetError where files of ``nbytes`` over all ``paths`` would fill a file system."""
    share, needed = nbytes // len(paths), dict[int, int]()
    for path in paths:
        needed[os.stat(path).st_dev] = needed.get(os.stat(path).st_dev, 0) + share
    for path in paths:
        need, free = needed[os.stat(path).st_dev], free_bytes(path)
        if need > _FREE_SHARE * free:
            raise BudgetError(
                f"bench io: --size: {need:,} bytes at {path} would leave less than a tenth of the {free:,} free there; "
                "free some space, lower --size or name another path",
                int(need - _FREE_SHARE * free),
            )


def _flush(file: StripedFile) -> None:
    """What was written is on the drive, and out of the page cache."""
    file.sync()
    for index in range(len(file.paths)):
        with file.using(index) as descriptor:
            file.drop_cache(index, descriptor, 0, 0, written=False)  # the whole file


def _reads(op: Op, number: int, lap: int) -> bool:
    """Of mixed requests every second one, and in the next pass over the file the others."""
    return op == "read" or (op == "mixed" and (number % lap + number // lap) % 2 == 0)


def _fill(memory: torch.Tensor) -> None:
    """With bytes that do not compress."""
    pattern = torch.from_numpy(np.random.default_rng(0).integers(0, 256, _PATTERN, dtype=np.uint8))
    for start in range(0, memory.numel(), _PATTERN):
        part = memory[start : start + _PATTERN]
        part.copy_(pattern[: part.numel()])
