"""Rates of tier files through the runtime's engine, by block size and queue depth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import hypot, log
from pathlib import Path
from typing import Any

import numpy as np

from tierzero.errors import BudgetError, ConfigError
from tierzero.profiling.bench import fio, suspicion
from tierzero.profiling.bench.names import BlockDevice, block_device
from tierzero.profiling.bench.requests import OPS, MeasuredFile, Op, Point, Slice
from tierzero.profiling.bench.suspicion import Reread
from tierzero.profiling.bench.timing import Progress, Spread
from tierzero.tiers import PAGE
from tierzero.tiers.free_memory import available_bytes

BLOCKS = (256 << 10, 1 << 20, 8 << 20)
DEPTHS = (1, 8, 16)
SIZE = 2 << 30
ROUNDS = 3
_REREAD = 64 << 20


@dataclass(frozen=True)
class IoPlan:
    """``nbytes``: of the file, over all paths. ``used``: the block size and queue depth that a run would use."""

    paths: tuple[Path, ...]
    blocks: tuple[int, ...] = BLOCKS
    depths: tuple[int, ...] = DEPTHS
    nbytes: int = SIZE
    seconds: float = 60.0
    used: tuple[int, int] = (8 << 20, 8)
    beside_fio: bool = False

    def check(self) -> None:
        """Raises ConfigError before anything is allocated."""
        if self.beside_fio:
            fio.check_installed()
        for path in self.paths:
            if not path.is_dir():
                problem = "is not a directory" if path.exists() else "does not exist"
                raise ConfigError(f"bench io: {path} {problem}; create it or name another path")
        for block in self.blocks:
            if block <= 0 or block % PAGE:
                raise ConfigError(f"bench io: --blocks: {block:,} bytes is no multiple of {PAGE}; write such as 1MiB")
        in_flight = max(self.blocks) * max(self.depths) * len(self.paths)
        if self.nbytes < in_flight:
            raise ConfigError(
                f"bench io: --size is {self.nbytes:,} bytes, less than what the largest block and depth keep in flight "
                f"({in_flight:,}); raise it, or lower --blocks or --depths"
            )
        available = available_bytes()
        if in_flight > available // 2:
            raise BudgetError(
                f"bench io: the largest block and depth take {in_flight:,} bytes of memory, more than half of the "
                f"{available:,} available; lower --blocks or --depths",
                in_flight - available // 2,
            )


@dataclass(frozen=True)
class IoRow:
    """Bytes per second of one direction at one point, and seconds per request at three percentiles."""

    op: Op
    point: Point
    rate: Spread
    latency: tuple[float, float, float]

    def as_json(self) -> dict[str, Any]:
        latency = dict(zip(("p50", "p95", "p99"), self.latency, strict=True))
        return {
            "op": self.op,
            "direct": self.point.direct,
            "block": self.point.block,
            "depth": self.point.depth,
            "bytes_per_s": self.rate.as_json(),
            "latency_s": latency,
        }


@dataclass(frozen=True)
class IoTarget:
    """A path, or all of them striped. ``nbytes``: of the file, as far as it was filled."""

    paths: tuple[Path, ...]
    devices: tuple[BlockDevice, ...]
    rows: tuple[IoRow, ...]
    reread: Reread | None
    nbytes: int
    beside_fio: tuple[fio.FioRow, ...] = ()

    @property
    def title(self) -> str:
        return " + ".join(map(str, self.paths))

    def at(self, op: Op, block: int, depth: int) -> IoRow:
        """The row nearest to a block size and depth; with O_DIRECT where there is any."""
        found = nearest([(row.op, row.point) for row in self.rows], op, block, depth)
        return next(row for row in self.rows if (row.op, row.point) == found)

    def as_json(self) -> dict[str, Any]:
        return {
            "paths": [str(path) for path in self.paths],
            "devices": [device.as_json() for device in self.devices],
            "bytes": self.nbytes,
            "reread": asdict(self.reread) if self.reread is not None else None,
            "rows": [row.as_json() for row in self.rows],
            "beside_fio": [row.as_json() for row in self.beside_fio],
        }


@dataclass(frozen=True)
class IoReport:
    targets: tuple[IoTarget, ...]
    used: tuple[int, int]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "used": {"block": self.used[0], "depth": self.used[1]},
            "targets": [target.as_json() for target in self.targets],
        }


def measure(plan: IoPlan, progress: Progress, host_copy: float | None = None) -> IoReport:
    """Each path, then all striped, within about ``plan.seconds``. ``host_copy``: to tell memory from drives."""
    plan.check()
    groups = [(path,) for path in plan.paths] + ([plan.paths] if len(plan.paths) > 1 else [])
    targets: list[IoTarget] = []
    notes: list[str] = []
    for number, paths in enumerate(groups):

        def shown(what: str, done: float, number: int = number) -> None:
            progress(what, (number + done) / len(groups))

        found = _Measured(plan, paths, plan.seconds / len(groups))
        targets.append(found.run(shown))
        notes += found.notes(targets[-1], host_copy)
    return IoReport(tuple(targets), plan.used, tuple(dict.fromkeys(notes)))


def nearest(points: Iterable[tuple[Op, Point]], op: Op, block: int, depth: int) -> tuple[Op, Point]:
    """Of one direction, the point nearest to a block size and depth; with O_DIRECT where there is any."""
    own = [point for each, point in points if each == op]
    direct = any(point.direct for point in own)
    return op, min(
        (point for point in own if point.direct == direct),
        key=lambda point: hypot(log(point.block / block), log(point.depth / depth)),
    )


@dataclass
class _Measured:
    """One target's samples. The grid is gone through in rounds, to and fro, all directions at each point."""

    plan: IoPlan
    paths: tuple[Path, ...]
    seconds: float
    slices: dict[tuple[Op, Point], list[Slice]] = field(default_factory=dict)
    reread: Reread | None = None

    def run(self, progress: Progress) -> IoTarget:
        plan = self.plan
        with MeasuredFile(self.paths, plan.nbytes, plan.blocks, max(plan.depths)) as file:
            progress("filling", 0.0)
            file.fill(self.seconds / 4)
            points = [
                Point(direct, block, depth)
                for direct in ([True, False] if file.has_direct else [False])
                for block in plan.blocks
                for depth in plan.depths
            ]
            self._rounds(file, points, progress)
            self._reread(file)
            rows = tuple(_row(op, point, slices) for (op, point), slices in self.slices.items())
            devices = tuple(map(block_device, self.paths))
            beside = self._fio(file, [point for point in points if point.direct], progress)
            return IoTarget(self.paths, devices, rows, self.reread, file.filled, beside)

    def _rounds(self, file: MeasuredFile, points: Sequence[Point], progress: Progress) -> None:
        each = 0.7 * self.seconds / (ROUNDS * len(points) * len(OPS))
        for number in range(ROUNDS):
            for done, point in enumerate(points[:: -1 if number % 2 else 1]):
                progress(_words(point), (number + done / len(points)) / ROUNDS)
                for op in OPS[:: -1 if number % 2 else 1]:
                    self.slices.setdefault((op, point), []).append(file.run(point, op, each))

    def _reread(self, file: MeasuredFile) -> None:
        """A small region and the whole file in turns."""
        point = nearest(self.slices, "read", *self.plan.used)[1]
        small, each = min(_REREAD, file.filled // 8), 0.05 * self.seconds / (2 * ROUNDS)
        rates = [(file.reread(point, small, each).rate, file.run(point, "read", each).rate) for _ in range(ROUNDS)]
        again, whole = min(rates, key=lambda pair: pair[0] / pair[1])  # the turn that speaks least for a cache
        self.reread = Reread(small, again, file.filled, whole)

    def _fio(self, file: MeasuredFile, points: Sequence[Point], progress: Progress) -> tuple[fio.FioRow, ...]:
        """Takes as long again."""
        if not (self.plan.beside_fio and points and len(self.paths) == 1):
            return ()
        return tuple(fio.compare(file, points, self.seconds, progress))

    def notes(self, target: IoTarget, host_copy: float | None) -> Iterator[str]:
        """What makes a figure unbelievable, in sentences."""
        yield from filter(None, _found(self, target, host_copy))


def _found(measured: _Measured, target: IoTarget, host_copy: float | None) -> Iterator[str | None]:
    used, title = measured.plan.used, target.title
    read, write = target.at("read", *used), target.at("write", *used)
    for path, device in zip(target.paths, target.devices, strict=True):
        yield suspicion.of_file_system(str(path), device)
    yield suspicion.of_shared_drive([device.name for device in target.devices])
    if not read.point.direct:
        yield f"{title}: no O_DIRECT here: all figures are buffered, which a run would be too"
    else:
        yield suspicion.of_page_cache(title, *max(_buffered_beside_direct(target), key=lambda pair: pair[0] / pair[1]))
    if target.reread is not None:
        yield suspicion.of_rereading(title, target.reread)
    samples = [each.rate for each in measured.slices["write", write.point]]
    yield suspicion.of_slowing(title, samples[0], samples[-1])
    for row in (read, write):
        if len(target.devices) == 1:
            yield suspicion.of_ceiling(title, target.devices[0], row.op, row.rate.median)
            yield suspicion.of_memory(title, target.devices[0], row.op, row.rate.median, host_copy)


def _buffered_beside_direct(target: IoTarget) -> Iterator[tuple[float, float]]:
    """Rates of reading at each block size and depth, both ways."""
    reads = {row.point: row.rate.median for row in target.rows if row.op == "read"}
    for point, rate in reads.items():
        if not point.direct:
            yield rate, reads[replace(point, direct=True)]


def _row(op: Op, point: Point, slices: Sequence[Slice]) -> IoRow:
    latencies = np.concatenate([each.latencies for each in slices])
    p50, p95, p99 = map(float, np.percentile(latencies, (50, 95, 99)))
    return IoRow(op, point, Spread.of([each.rate for each in slices]), (p50, p95, p99))


def _words(point: Point) -> str:
    size = f"{point.block >> 20} MiB" if point.block >= 1 << 20 else f"{point.block >> 10} KiB"
    return f"{size} x {point.depth}{'' if point.direct else ' buffered'}"
