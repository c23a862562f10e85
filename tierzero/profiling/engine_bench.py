"""The tile engine against bare positional reads and writes: the same file, the same huge-page buffer, in turns."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tierzero.tiers import HostAllocator, IoEngine, MemoryPool, Priority, StripedFile, Tier, TierDirectory

Op = Literal["read", "write"]


@dataclass(frozen=True)
class EngineRate:
    """Medians over the rounds in bytes per second, and the median of each round's ratio."""

    op: Op
    bare: float
    engine: float
    ratio: float


class _Bench:
    def __init__(self, directory: TierDirectory, nbytes: int, block: int, depth: int) -> None:
        self.nbytes, self.block, self.depth = nbytes, block, depth
        self.file = StripedFile([directory], nbytes, block_size=block)
        self.engine = IoEngine(depth)
        self.pool = MemoryPool(Tier.HOST, nbytes, HostAllocator())
        self.buffer = self.pool.allocate(nbytes, "the bench")
        self.buffer.tensor.random_(0, 256)
        self.memory = self.buffer.memory(0, nbytes)

    def bare(self, op: Op) -> None:
        """``depth`` threads, each with every ``depth``-th block."""
        with self.file.using(0) as descriptor:
            call = os.preadv if op == "read" else os.pwritev

            def work(lane: int) -> None:
                for at in range(lane * self.block, self.nbytes, self.depth * self.block):
                    piece = self.memory[at : at + self.block]
                    if call(descriptor, [piece], at) != piece.nbytes:
                        raise OSError("a transfer was cut short")

            threads = [threading.Thread(target=work, args=(lane,)) for lane in range(self.depth)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def tiles(self, op: Op) -> None:
        """``depth`` tiles in flight through the engine, as the update keeps them."""
        transfer = self.engine.read if op == "read" else self.engine.write

        async def run() -> None:
            starts = iter(range(0, self.nbytes, self.block))

            async def lane() -> None:
                for at in starts:
                    await transfer(self.file, at, self.memory[at : at + self.block], Priority.DEMAND)

            await asyncio.gather(*(lane() for _ in range(self.depth)))

        self.engine.run(run())

    def close(self) -> None:
        self.engine.close()
        self.file.close()
        self.pool.release(self.buffer)
        self.pool.close()


def measure(
    folder: Path, *, nbytes: int = 2 << 30, block: int = 8 << 20, depth: int = 8, rounds: int = 6
) -> list[EngineRate]:
    """Rates of both on a tier file of ``nbytes`` in ``folder``, in alternating order."""
    directory = TierDirectory.open(folder, 0)
    try:
        bench = _Bench(directory, nbytes, block, depth)
        try:
            bench.bare("write")
            return [_compare(bench, op, rounds) for op in ("write", "read")]
        finally:
            bench.close()
    finally:
        directory.close()


def _compare(bench: _Bench, op: Op, rounds: int) -> EngineRate:
    rates: dict[str, list[float]] = {"bare": [], "engine": []}
    ways: list[tuple[str, Callable[[Op], None]]] = [("bare", bench.bare), ("engine", bench.tiles)]
    for number in range(rounds):
        for name, way in ways if number % 2 else ways[::-1]:
            started = time.perf_counter()
            way(op)
            rates[name].append(bench.nbytes / (time.perf_counter() - started))
    ratios = [ours / bare for ours, bare in zip(rates["engine"], rates["bare"], strict=True)]
    bare, engine = (statistics.median(rates[name]) for name in ("bare", "engine"))
    return EngineRate(op, bare, engine, statistics.median(ratios))
