"""Plain PyTorch beside a process that moves bytes on the drive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from tierzero.errors import ConfigError, TierZeroError
from tierzero.profiling import compare as comparing
from tierzero.profiling.compare import BESIDE_IO, bytes_from, compare
from tierzero.profiling.mover import Mover, Pace
from tierzero.profiling.systems import Workload, disk_bytes

ROOT = Path(__file__).resolve().parents[2]
REQUEST = 64 << 10
WORK = Workload("plain", dim=32, layers=1, heads=2, vocab=64, seq_len=16, batch=1, steps=3, warmup=2)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_requests_keep_the_rate_and_catch_up() -> None:
    now = 0.0
    pace = Pace(16, lambda: now)

    def given() -> int:
        """Requests until none is due."""
        before = pace._given
        while (left := pace._left()) is not None and left <= 0:
            pace.next()
        return pace._given - before

    assert given() == 0  # at rest
    pace.set_rate(128.0)
    assert given() == 1
    now = 0.25
    assert given() == 2
    now = 1.0
    assert given() == 6  # what was late is not lost
    now = 1.0625
    pace.set_rate(1024.0)
    now = 2.0625
    assert given() == 64
    pace.set_rate(0.0)
    now = 9.0
    assert given() == 0


def test_half_of_the_bytes_at_the_rate_are_reads_and_the_process_ends(tmp_path: Path) -> None:
    rate = 64 * REQUEST
    with Mover(tmp_path, 16 * REQUEST, REQUEST) as mover:
        assert list(tmp_path.iterdir()) == []
        first = disk_bytes(str(mover.pid))
        started = time.monotonic()
        mover.pace(rate)

        def moved() -> list[int]:
            return [now - before for now, before in zip(disk_bytes(str(mover.pid)), first, strict=True)]

        wait_until(lambda: sum(moved()) >= 20 * REQUEST)
        read, written = moved()
        assert read + written <= rate * (time.monotonic() - started) + REQUEST
        assert abs(read - written) <= 4 * REQUEST  # in flight
    assert not psutil.pid_exists(mover.pid)


def test_the_process_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    work = Workload(**{**asdict(WORK), "steps": 10**9, "nvme": str(tmp_path), "beside": 1 << 20, "threads": 1})
    run = subprocess.Popen(
        [sys.executable, "-m", "tierzero.profiling.systems", json.dumps(asdict(work))],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        wait_until(lambda: any(disk_bytes(str(child.pid))[0] for child in psutil.Process(run.pid).children()))
        movers = psutil.Process(run.pid).children()
    finally:
        run.kill()
        run.wait()
    assert len(movers) == 1
    wait_until(lambda: not movers[0].is_running() or movers[0].status() == psutil.STATUS_ZOMBIE)
    assert list(tmp_path.iterdir()) == []


def test_where_the_process_cannot_begin_its_reason_is_said(tmp_path: Path) -> None:
    with pytest.raises(TierZeroError, match="No such file or directory"):
        Mover(tmp_path / "absent", REQUEST)


def test_it_moves_the_bytes_of_the_first_system_from_nvme_and_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Workload] = []

    def run(work: Workload) -> dict[str, Any]:
        runs.append(work)
        moved = work.beside or (1000 * len(runs) if work.system == "tierzero" else 0)
        return {
            "parameters": 10, "step_s": [1.0] * 3, "loss": [1.0] * 3, "peak_rss": 1, "stall_s": [],
            "disk_read": [7, 7, moved], "disk_write": [7, 7, moved // 2],
        }  # fmt: skip

    monkeypatch.setattr(comparing, "run_once", run)
    rows = compare(WORK, [BESIDE_IO, "tierzero-host", "tierzero-nvme", "plain"], 2)
    assert [row.name for row in rows] == [BESIDE_IO, "tierzero-host", "tierzero-nvme", "plain"]
    assert [work.system for work in runs] == 2 * ["tierzero", "tierzero", "plain", "plain"]
    assert [work.beside for work in runs] == [0, 0, 0, 3000, 0, 0, 0, 9000]
    assert not runs[3].config


@pytest.mark.parametrize(
    ("names", "work", "says"),
    [
        ([BESIDE_IO, "plain", "tierzero-host"], WORK, "name such a system too"),
        ([BESIDE_IO, "tierzero-nvme"], Workload("plain", warmup=1), "--warmup 1 must be at least 2"),
    ],
)
def test_without_an_example_or_a_warm_up_it_is_refused(names: list[str], work: Workload, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        bytes_from(work, names)
