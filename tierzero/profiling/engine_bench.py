"""The tile engine against bare positional reads and writes: the same file, the same huge-page buffer, in turns."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tierzero.profiling.bench.requests import MeasuredFile, Op, Point


@dataclass(frozen=True)
class EngineRate:
    """Medians over the rounds in bytes per second, and the median of each round's ratio."""

    op: Op
    bare: float
    engine: float
    ratio: float


def measure(
    folder: Path, *, nbytes: int = 2 << 30, block: int = 8 << 20, depth: int = 8, rounds: int = 6
) -> list[EngineRate]:
    """Rates of both on a tier file of ``nbytes`` in ``folder``, in alternating order."""
    with MeasuredFile([folder], nbytes, [block], depth) as file:
        file.fill(math.inf)
        point = Point(file.has_direct, block, depth)
        return [_compare(file, point, op, rounds) for op in ("write", "read")]


def _bare(file: MeasuredFile, point: Point, op: Op) -> None:
    """``depth`` threads, each with every ``depth``-th block."""
    call = os.preadv if op == "read" else os.pwritev
    with file.descriptor(point) as descriptor, ThreadPoolExecutor(point.depth) as threads:

        def work(lane: int) -> None:
            memory = file.memory(lane, point)
            for at in range(lane * point.block, file.nbytes, point.depth * point.block):
                if call(descriptor, [memory], at) != memory.nbytes:
                    raise OSError("a transfer was cut short")

        list(threads.map(work, range(point.depth)))


def _compare(file: MeasuredFile, point: Point, op: Op, rounds: int) -> EngineRate:
    rates: dict[str, list[float]] = {"bare": [], "engine": []}
    whole = file.nbytes
    ways: list[tuple[str, Callable[[], object]]] = [
        ("bare", lambda: _bare(file, point, op)),
        ("engine", lambda: file.run(point, op, 0.0, at_most=whole, at_least=whole)),
    ]
    for number in range(rounds):
        for name, way in ways if number % 2 else ways[::-1]:
            started = time.perf_counter()
            way()
            rates[name].append(whole / (time.perf_counter() - started))
    ratios = [ours / bare for ours, bare in zip(rates["engine"], rates["bare"], strict=True)]
    bare, engine = (statistics.median(rates[name]) for name in ("bare", "engine"))
    return EngineRate(op, bare, engine, statistics.median(ratios))
