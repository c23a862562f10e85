"""A checkpoint written beside the training holds the state of the call, and the training does not notice it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierzero as tz
from tierzero.api import running as runtime_of
from tierzero.runtime.snapshot import Snapshot, _Entry

from ..support.fake_device import FakeDevice
from ..support.oracle import Outcome, assert_bits, config
from ..support.rank_pool import RankPool
from ..support.resuming import Run, running

STEPS = 4


def settings(nvme: Path, tier: object, overlap: str = "forward", **sections: dict[str, Any]) -> tz.Config:
    nvme.mkdir(exist_ok=True)
    return config(nvme, tier, train={"precision": "bf16"}, optimizer={"overlap": overlap}, **sections)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[float], Outcome]:
    """The state after two steps, and what four more steps give and end with, without any checkpoint."""
    with running(settings(tmp_path_factory.mktemp("nvme"), "host")) as run:
        run.train(2)
        saved = run.outcome()
        return saved, run.train(STEPS), run.outcome()


def slow_files(run: Run, seconds: float = 0.1) -> None:
    def fault(op: str, path: Path, offset: int, nbytes: int) -> None:
        if path.suffix == ".bin":
            time.sleep(seconds)

    runtime_of(run.model).engine.fault = fault


@pytest.fixture
def copied_first(monkeypatch: pytest.MonkeyPatch) -> list[_Entry]:
    """Tiles that an update has copied because no worker had yet."""
    found: list[_Entry] = []
    secure, copy = Snapshot.secure, Snapshot._copy

    async def recorded(self: Snapshot, tile: Any, opened: Any) -> None:
        securing.append(tile)
        await secure(self, tile, opened)

    async def copying(self: Snapshot, entry: _Entry, opened: Any, priority: Any) -> None:
        if entry.tile in securing:
            found.append(entry)
        await copy(self, entry, opened, priority)

    securing: list[Any] = []
    monkeypatch.setattr(Snapshot, "secure", recorded)
    monkeypatch.setattr(Snapshot, "_copy", copying)
    return found


def holds(path: Path, saved: Outcome, nvme: Path) -> bool:
    with running(settings(nvme, "host"), seed=9) as other:
        other.load(path)
        assert other.step == 2
        assert_bits(other.outcome(), saved)
    return True


@pytest.mark.parametrize("overlap", ["forward", "none"])
@pytest.mark.parametrize("tier", ["host", "nvme", "device", {"host": 0.4, "nvme": 0.6}], ids=str)
def test_training_goes_on_and_the_state_of_the_call_is_saved(
    tier: object,
    overlap: str,
    wanted: tuple[Outcome, list[float], Outcome],
    copied_first: list[_Entry],
    tmp_path: Path,
) -> None:
    saved, losses, end = wanted
    with running(settings(tmp_path / "nvme", tier, overlap)) as run:
        run.train(2)
        slow_files(run)
        run.save(tmp_path / "saved", background=True)
        assert not (tmp_path / "saved").exists()
        assert run.train(STEPS) == losses
        tz.finish_checkpoint(run.model)
        assert (tmp_path / "saved" / "manifest.json").exists()
        tz.finish_checkpoint(run.model)  # nothing left to do
        assert_bits(run.outcome(), end)
    assert copied_first, "no update met a tile that was not copied yet"
    assert holds(tmp_path / "saved", saved, tmp_path / "other")


def test_on_a_device_with_late_copies(wanted: tuple[Outcome, list[float], Outcome], tmp_path: Path) -> None:
    saved, losses, end = wanted
    for seed, tier in enumerate(("device", "host", "nvme")):
        device = FakeDevice(seed)
        try:
            with running(settings(tmp_path / f"nvme-{seed}", tier), device=device) as run:
                run.train(2)
                slow_files(run)
                run.save(tmp_path / f"saved-{seed}", background=True)
                assert run.train(STEPS) == losses
                tz.finish_checkpoint(run.model)
                assert_bits(run.outcome(), end)
        finally:
            device.close()
        assert holds(tmp_path / f"saved-{seed}", saved, tmp_path / "other")


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_failed_one_is_reported_later_and_harms_nothing(
    tier: str, wanted: tuple[Outcome, list[float], Outcome], tmp_path: Path
) -> None:
    saved, losses, end = wanted
    with running(settings(tmp_path / "nvme", tier)) as run:
        run.train(2)
        run.save(tmp_path / "saved")
        begun = time.monotonic()

        def full(op: str, path: Path, offset: int, nbytes: int) -> None:
            if path.suffix == ".bin" and time.monotonic() - begun > 0.01:
                raise OSError(28, os.strerror(28), str(path))

        runtime_of(run.model).engine.fault = full
        run.save(tmp_path / "saved", background=True)
        assert run.train(STEPS) == losses
        with pytest.raises(tz.CheckpointError, match=r"saved.*No space left on device"):
            tz.finish_checkpoint(run.model)
        assert_bits(run.outcome(), end)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["nvme", "saved"]
        runtime_of(run.model).engine.fault = None
        run.save(tmp_path / "later", background=True)
        tz.finish_checkpoint(run.model)
    assert holds(tmp_path / "saved", saved, tmp_path / "other")


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_changes_by_hand_come_after_it(tier: str, wanted: tuple[Outcome, list[float], Outcome], tmp_path: Path) -> None:
    """An edit, a load, another save."""
    with running(settings(tmp_path / "nvme", tier)) as run:
        run.train(2)
        slow_files(run)
        run.save(tmp_path / "saved", background=True)
        weight = run.model.fixed.weight
        with tz.gathered(weight), torch.no_grad():
            weight.zero_()
        run.save(tmp_path / "edited", background=True)
        run.load(tmp_path / "saved")
        assert_bits(run.outcome(), wanted[0])
        run.load(tmp_path / "edited")
        assert not tz.read_state(weight, "weight").any()
    assert holds(tmp_path / "saved", wanted[0], tmp_path / "other")


def test_the_end_of_the_model_completes_it(wanted: tuple[Outcome, list[float], Outcome], tmp_path: Path) -> None:
    with running(settings(tmp_path / "nvme", "nvme")) as run:
        run.train(2)
        slow_files(run)
        run.save(tmp_path / "saved", background=True)
    assert holds(tmp_path / "saved", wanted[0], tmp_path / "other")


def test_what_the_end_cannot_complete_is_said(tmp_path: Path) -> None:
    with running(settings(tmp_path / "nvme", "nvme")) as run:
        run.train(1)

        def full(op: str, path: Path, offset: int, nbytes: int) -> None:
            if path.suffix == ".bin":
                raise OSError(28, os.strerror(28), str(path))

        runtime_of(run.model).engine.fault = full
        run.save(tmp_path / "saved", background=True)
        with pytest.warns(RuntimeWarning, match=r"saved was not completed: .*No space left"):
            tz.close(run.model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nvme"]


def as_rank(rank: int, size: int, folder: str) -> list[float]:
    root = Path(folder)
    (root / "nvme").mkdir(exist_ok=True)
    with running(settings(root / "nvme", "nvme")) as run:
        run.train(2, rank)
        state = run.outcome()
        slow_files(run, 0.05 * (1 + rank))
        run.save(root / "saved", background=True)
        losses = run.train(STEPS, rank)
        tz.finish_checkpoint(run.model)
        assert (root / "saved" / "manifest.json").exists()
        run.load(root / "saved")
        found = run.outcome()
        for name in [name for name in found.weights if "running" in name]:
            del found.weights[name], state.weights[name]  # rank 0's are saved
        assert_bits(found, state)
        assert run.train(STEPS, rank) == losses or rank  # with rank 0's running statistics
    return losses


def test_on_two_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(as_rank, str(tmp_path))


def failing_as_rank(rank: int, size: int, folder: str) -> None:
    root = Path(folder)
    with running(settings(root, "nvme")) as run:
        run.train(1, rank)

        def full(op: str, path: Path, offset: int, nbytes: int) -> None:
            if path.suffix == ".bin" and rank == 1:
                raise OSError(28, os.strerror(28), str(path))

        runtime_of(run.model).engine.fault = full
        run.save(root / "saved", background=True)
        run.train(2, rank)
        with pytest.raises(tz.CheckpointError, match="No space left" if rank else "another rank"):
            tz.finish_checkpoint(run.model)
        run.train(1, rank)
        torch.distributed.barrier()
        assert not (root / "saved").exists()
        assert not (root / ".saved.partial").exists()


def test_one_of_two_ranks_fails(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(failing_as_rank, str(tmp_path))
