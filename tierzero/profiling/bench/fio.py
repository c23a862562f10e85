"""fio beside the engine: the same file, block size and depth, in turns."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierzero.errors import ConfigError, TierZeroError
from tierzero.profiling.bench.requests import MeasuredFile, Op, Point
from tierzero.profiling.bench.timing import Progress, Spread

_ROUNDS = 2
_LEAST_S = 0.5
"""fio's own start is in none of its figures, but it needs a while to fill its queue."""
_OPS: tuple[Op, ...] = ("read", "write")


@dataclass(frozen=True)
class FioRow:
    """Bytes per second of both, and the median of each round's ratio of the engine's rate to fio's."""

    op: Op
    point: Point
    fio: Spread
    engine: Spread
    ratio: float

    def as_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "block": self.point.block,
            "depth": self.point.depth,
            "fio_bytes_per_s": self.fio.as_json(),
            "engine_bytes_per_s": self.engine.as_json(),
            "engine_over_fio": self.ratio,
        }


def check_installed() -> None:
    """Raises ConfigError without fio."""
    if shutil.which("fio") is None:
        raise ConfigError("bench io: --fio: there is no fio here; install the package fio, or leave --fio out")


def compare(file: MeasuredFile, points: Sequence[Point], seconds: float, progress: Progress) -> list[FioRow]:
    """Both at every point with O_DIRECT, within about ``seconds`` where each gets its half second. One path only."""
    (path,) = file.files
    each = max(_LEAST_S, seconds / (len(points) * len(_OPS) * _ROUNDS * 2))
    rows = []
    for number, point in enumerate(points):
        progress(f"beside fio, {point.block:,} x {point.depth}", number / len(points))
        for op in _OPS:
            rates: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(_ROUNDS):
                for ours in (True, False) if turn % 2 else (False, True):
                    rate = file.run(point, op, each).rate if ours else _fio(path, file.filled, point, op, each)
                    rates[ours].append(rate)
            ratio = statistics.median(a / b for a, b in zip(rates[True], rates[False], strict=True))
            rows.append(FioRow(op, point, Spread.of(rates[False]), Spread.of(rates[True]), ratio))
    return rows


def _fio(path: Path, nbytes: int, point: Point, op: Op, seconds: float) -> float:
    """With io_uring, or with libaio where the kernel refuses it."""
    for engine in ("io_uring", "libaio"):
        command = [
            "fio",
            "--name=bench",
            f"--filename={str(path).replace(':', chr(92) + ':')}",
            f"--size={nbytes}",
            f"--rw={op}",
            f"--bs={point.block}",
            f"--iodepth={point.depth}",
            f"--ioengine={engine}",
            f"--runtime={seconds * 1000:.0f}ms",
            "--time_based",
            "--direct=1",
            "--allow_file_create=0",
            "--output-format=json",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
            return float(job[op]["bw_bytes"])
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    raise TierZeroError(f"bench io: fio failed on {path}: {said[0] if said else f'exit code {done.returncode}'}")
