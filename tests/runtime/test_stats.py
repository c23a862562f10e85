"""Where a step's time went: parts that add up, and the right name for each wait."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import tierzero as tz
from tierzero.api import running
from tierzero.runtime import stats as stats_module
from tierzero.runtime.accounts import counters
from tierzero.runtime.stats import RoomClock, Stalls

from ..support.oracle import Case, built, config, hyper, sharded
from ..support.zoo import Block, Stack, regression

STACK = Case(Stack, regression, (Block,))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stats_module.time, "perf_counter", clock)
    return clock


def test_room_is_waited_for_while_all_memory_is_on_its_way_home(clock: Clock) -> None:
    room = RoomClock()
    room.change(holding=2)
    room.change(waiting=1)
    clock.now = 1.0
    room.change(writing=1)  # the other tile is still read or updated: that is what everyone waits for
    clock.now = 3.0
    room.change(writing=1)
    clock.now = 3.5
    assert room.seconds() == 0.5
    clock.now = 4.0
    room.change(holding=-1, writing=-1)
    room.change(waiting=-1, holding=1)
    clock.now = 9.0
    assert room.seconds() == 1.0


def test_a_wait_is_split_between_its_kind_and_room(clock: Clock) -> None:
    stalls, room = Stalls(), RoomClock()
    with stalls.waiting("nvme_read", room), stalls.waiting("gather"):
        room.change(waiting=1, holding=1, writing=1)
        clock.now = 2.0
        room.change(waiting=-1)
        clock.now = 5.0
    assert stalls.seconds == {"nvme_read": 3.0, "nvme_write": 0, "gather": 0, "optimizer": 0, "host_budget": 2.0}


@pytest.mark.parametrize("overlap", ["forward", "none"])
def test_the_parts_of_a_step_add_up(tmp_path: Path, overlap: str) -> None:
    settings = config(tmp_path, optimizer={"overlap": overlap})
    with sharded(built(STACK), settings, STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        for step in range(3):
            regression(model, step, 0).backward()
            tz.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found = tz.stats(model)
            parts = found["compute_s"] + math.fsum(found["stall_s"].values())
            assert parts == pytest.approx(found["step_s"], rel=1e-9)
            assert found["compute_s"] > 0
            tz.full_state_dict(model)  # waiting between steps belongs to none


def _of_the_system() -> tuple[int, int]:
    """Bytes that this process has read and written, by its system calls."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["wchar"])


@pytest.mark.parametrize("tier", ["nvme", {"host": 0.5, "nvme": 0.5}], ids=str)
def test_traffic_is_what_the_system_counts(tmp_path: Path, tier: object) -> None:
    with sharded(built(STACK), config(tmp_path, tier), STACK.units) as model:
        optimizer, runtime = tz.AdamW(model.parameters(), **hyper(STACK)), running(model)
        found = []
        for step in range(3):
            runtime.flush()
            found.append((_of_the_system(), counters(runtime)))
            regression(model, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        (before, first), (after, last) = found[1], found[2]
        assert last.nvme_read_bytes - first.nvme_read_bytes == pytest.approx(after[0] - before[0], rel=0.05)
        assert last.nvme_write_bytes - first.nvme_write_bytes == pytest.approx(after[1] - before[1], rel=0.05)
