"""kill -9 at any moment of a step or a save: the run goes on from its newest checkpoint, bit for bit."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ..support.forked import Module

NEVER = 10**9


def run_job(folder: Path, ranks: int, how: str, victim: int = 0, moment: int = NEVER) -> list[str]:
    """What the ranks print; each has a short time to end after another one was killed."""
    (folder / "nvme").mkdir(parents=True, exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    printed = [folder / f"printed-{rank}" for rank in range(ranks)]
    processes = []
    try:
        for rank, output in enumerate(printed):
            output.unlink(missing_ok=True)
            words = [str(folder), str(rank), str(ranks), str(moment if rank == victim else NEVER), how]
            processes.append(Module("tests.checkpoint.kill_job", words, environment, output, Path(os.devnull)))
        for process in processes:
            process.wait(120)
        return [output.read_text() for output in printed]
    finally:
        for process in processes:
            process.kill()


def losses(folder: Path, ranks: int) -> list[dict[str, set[str]]]:
    """Of each rank: every loss that it saw at each step, over all its lives."""
    found: list[dict[str, set[str]]] = []
    for rank in range(ranks):
        seen: dict[str, set[str]] = {}
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, loss = line.split()
            seen.setdefault(step, set()).add(loss)
        found.append(seen)
    return found


def check(ranks: int, how: str, seeds: range, kills: int, tmp_path: Path) -> None:
    printed = run_job(tmp_path / "whole", ranks, how)
    wanted = losses(tmp_path / "whole", ranks)
    assert all(len(seen) == 10 for seen in wanted)
    moments = [int(text.split()[-1]) for text in printed]
    for seed in seeds:
        random.seed(seed)
        folder, victim = tmp_path / f"killed-{seed}", random.randrange(ranks)
        for _ in range(kills):
            run_job(folder, ranks, how, victim, random.randrange(1, moments[victim]))
        assert all("moments" in text for text in run_job(folder, ranks, how)), f"seed {seed} did not end"
        assert losses(folder, ranks) == wanted, f"seed {seed}"


@pytest.mark.parametrize(("ranks", "how"), [(1, "sealed"), (2, "checkpoints")])
def test_killed_run_goes_on(ranks: int, how: str, tmp_path: Path) -> None:
    check(ranks, how, range(1), 1, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("how", ["checkpoints", "sealed", "averaged", "both"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_a_hundred_moments(ranks: int, how: str, tmp_path: Path) -> None:
    check(ranks, how, range(100, 125), 1, tmp_path)
