"""Where a step's time went: parts that add up, and the right name for each wait."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierzero as tz
from tierzero.api import running
from tierzero.runtime import stats as stats_module
from tierzero.runtime.accounts import counters
from tierzero.runtime.pager import Pager
from tierzero.runtime.state import UnitState
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


@pytest.mark.parametrize("overlap", ["forward", "none", "both"])
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
            assert 0 <= found["cold_start_s"] <= math.fsum(found["stall_s"].values())
            tz.full_state_dict(model)  # waiting between steps belongs to none


def test_the_cold_start_ends_where_the_first_unit_runs(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second for each wait: those for the root and for the first block count, and not those of an evaluation."""
    original = Pager._finish

    def slow(pager: Pager, unit: UnitState, record: Any) -> None:
        original(pager, unit, record)
        with pager._stalls.waiting("gather"):
            clock.now += 1.0

    settings = config(tmp_path, tiers={"prefetch": 0}, sharding={"reshard_after_forward": False})
    with sharded(built(STACK), settings, STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), **hyper(STACK))
        monkeypatch.setattr(Pager, "_finish", slow)
        for step, warm in enumerate([False, False, True]):
            with torch.no_grad():
                regression(model, step, 0) if warm else None
            regression(model, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            found = tz.stats(model)
            assert found["cold_start_s"] == (0.0 if warm else 2.0)
            assert warm or found["stall_s"]["gather"] >= len(running(model).units) > 2


TRIED = ("tried_bytes", "kept_bytes", "redone_bytes")


def test_what_became_of_the_tries(tmp_path: Path) -> None:
    """In step 4 clipping acts, and step 5 goes without. The bytes of a step's tries are counted in the next one."""
    settings = config(tmp_path, optimizer={"overlap": "both"}, train={"precision": "bf16"})
    case = Case(lambda: Stack(5), regression, (Block,))
    with sharded(built(case), settings, case.units) as model:
        optimizer, found = tz.AdamW(model.parameters(), **hyper(case)), []
        speculation = running(model).updater.speculation
        for step in range(1, 8):
            before, deadline = speculation.tried_bytes, time.monotonic() + 0.3
            regression(model, step, 0).backward()
            while speculation.tried_bytes == before and time.monotonic() < deadline:
                time.sleep(0.001)  # else there may be none before the step
            tz.clip_grad_norm_(model, 0.01 if step == 4 else 1e6)
            optimizer.step()
            optimizer.zero_grad()
            found.append(tz.stats(model))
    assert [one["tries"] for one in found] == [None, "kept", "kept", "lost", "left out", "kept", "kept"]
    assert [step for step, one in enumerate(found, 1) if one["clip_factor"] != 1.0] == [4]
    assert {step for step, one in enumerate(found, 1) if one["kept_bytes"]} <= {3, 4, 7}
    assert {step for step, one in enumerate(found, 1) if one["redone_bytes"]} <= {5}
    tried, kept, redone = (sum(one[key] for one in found) for key in TRIED)
    assert 0 < kept + redone <= tried
    assert any(one["read_ahead_bytes"] for one in found[1:])


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
