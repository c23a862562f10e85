"""Ranks that die: the others end, and the same NVMe path serves a clean restart."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ..support.ranks import Job, kill_group, run_ranks, started
from ..support.training import Result, assert_identical

SLOW = {"sleep_s": 0.1}
SOON_S = 20.0


def run_of(accident: dict[str, Any] | None = None, steps: int = 10) -> dict[str, Any]:
    return {"run": {"recipe": {"steps": steps}, "accident": accident or {}}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Of a run whose path another job asked for in the middle: that job was refused, and disturbed nothing."""
    folder = tmp_path_factory.mktemp("undisturbed")
    first = Job(folder / "job", run_of({"sleep_s": 0.5, "until": 6}), folder / "nvme")
    with started(first):
        first.wait_for_step(1)
        second = Job(folder / "second", run_of(), folder / "nvme")
        with started(second, ranks=1):
            assert second.finish() == [1], second.output()
        assert first.finish() == [0, 0], first.output()
        assert "ConfigError" in second.output()
        assert str(folder / "nvme") in second.output()
        return first.results()["run"]


def leavings(nvme: Path) -> list[Path]:
    return [path for path in nvme.rglob("*") if path.is_file() and path.stat().st_size]


@pytest.mark.parametrize("victims", ["one", pytest.param("all", marks=pytest.mark.long)])
def test_kill_9_in_the_middle_then_a_clean_restart(victims: str, undisturbed: Result, tmp_path: Path) -> None:
    """Under torchrun. What the killed ranks left on the drive is found, removed and not mistaken for state."""
    nvme = tmp_path / "nvme"
    crashed = Job(tmp_path / "first", run_of(SLOW, steps=1000), nvme)
    with started(crashed, torchrun=True):
        pids = crashed.wait_for_step(4)
        if victims == "one":
            os.kill(pids[1], signal.SIGKILL)
            begun = time.monotonic()
            assert crashed.finish(SOON_S + 40)[0] != 0
            assert time.monotonic() - begun < SOON_S + 40
        else:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            kill_group(crashed.processes[0])
    # torchrun ends the surviving rank gently, and that one cleans up; killed ones could not.
    left = leavings(nvme)
    assert left, "a killed rank leaves its files behind"
    again = Job(tmp_path / "second", run_of(), nvme)
    assert_identical(run_ranks(again)["run"], undisturbed)
    assert leavings(nvme) == []


@pytest.mark.parametrize(("what", "stage"), [("raise", 2), ("kill", 3), ("kill", 1)])
def test_a_rank_that_fails_ends_the_other(what: str, stage: int, tmp_path: Path) -> None:
    """No launcher here: the surviving rank itself must notice that its peer is gone, and end with an error."""
    accident = {"rank": 1, "step": 3, "what": what}
    runs = run_of(accident)
    if stage < 3:
        placement = {"params": "host", "gradients": "host", "optimizer": "nvme"}
        runs["run"]["config"] = {"sharding": {"stage": stage}, "placement": placement}
    job = Job(tmp_path / "job", runs, tmp_path / "nvme")
    with started(job):
        job.wait_for_step(3)
        codes = job.finish(SOON_S)
        assert codes[0] not in (0, -signal.SIGKILL)
        assert codes[1] == (-signal.SIGKILL if what == "kill" else 1)
        assert "this rank fails on purpose" in job.output() or what == "kill"


def test_a_live_run_keeps_its_path_to_itself(undisturbed: Result) -> None:
    """The refusal itself is asserted where the fixture makes it; what it must not have changed is here."""
    assert len(undisturbed.losses) == 10
    assert undisturbed.losses[-1] < undisturbed.losses[0]
    assert all(torch.isfinite(tensor).all() for tensor in undisturbed.state.values())
