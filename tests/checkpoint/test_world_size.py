"""Checkpoints between worlds: written by two ranks and read by one, and the other way round."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import tierzero as tz

from ..support.oracle import Outcome, assert_bits, config
from ..support.rank_pool import RankError, RankPool
from ..support.resuming import running

STATE = {"train": {"precision": "bf16"}}


def save_as_rank(rank: int, size: int, folder: str, steps: int, more: int) -> tuple[Outcome, list[float], Outcome]:
    """Trains, saves, goes on; the state at the save, the losses after it, and the state at the end."""
    with running(config(Path(folder), **STATE)) as run:
        torch.manual_seed(50 + rank)
        run.train(steps, rank)
        run.save(Path(folder) / "saved")
        at_save = run.outcome()
        return at_save, run.train(more, rank), run.outcome()


def load_as_rank(rank: int, size: int, folder: str, tier: str, more: int) -> tuple[Outcome, list[float], Outcome]:
    with running(config(Path(folder), tier, **STATE), seed=60 + rank) as run:
        run.train(1, rank)
        run.load(Path(folder) / "saved")
        loaded = run.outcome()
        return loaded, run.train(more, rank), run.outcome()


def without_buffers(outcome: Outcome) -> Outcome:
    """Running statistics are each rank's own; rank 0's are saved."""
    kept = {name: value for name, value in outcome.weights.items() if "norm.running" not in name}
    return Outcome(outcome.losses, outcome.norms, kept, outcome.moments, outcome.updates)


@pytest.mark.parametrize("tier", ["nvme", "host"])
def test_same_world_continues_bit_identically(tier: str, tmp_path: Path, two_ranks: RankPool) -> None:
    saved = two_ranks.run(save_as_rank, str(tmp_path), 4, 10)
    loaded = two_ranks.run(load_as_rank, str(tmp_path), tier, 10)
    for (at_save, losses, end), (again, same_losses, same_end) in zip(saved, loaded, strict=True):
        assert_bits(without_buffers(again), without_buffers(at_save))
        assert same_losses == losses
        assert_bits(without_buffers(same_end), without_buffers(end))
    assert saved[0][1] != saved[1][1]


@pytest.mark.parametrize("tier", ["nvme", "host"])
def test_two_ranks_to_one(tier: str, tmp_path: Path, two_ranks: RankPool) -> None:
    at_save = two_ranks.run(save_as_rank, str(tmp_path), 4, 0)[0][0]
    loaded, _, _ = load_as_rank(0, 1, str(tmp_path), tier, 3)
    assert_bits(loaded, at_save)


def test_one_rank_to_two_and_back(tmp_path: Path, two_ranks: RankPool) -> None:
    at_save, _, _ = save_as_rank(0, 1, str(tmp_path), 4, 0)
    for loaded, _, _ in two_ranks.run(load_as_rank, str(tmp_path), "nvme", 0):
        assert_bits(loaded, at_save)
    shutil.copytree(tmp_path / "saved", tmp_path / "first" / "saved")
    two_ranks.run(resave_as_rank, str(tmp_path))
    again, losses, end = load_as_rank(0, 1, str(tmp_path), "host", 5)
    assert_bits(again, at_save)
    _, same_losses, same_end = load_as_rank(0, 1, str(tmp_path / "first"), "nvme", 5)
    assert same_losses == losses
    assert_bits(same_end, end)


def load_at_stages(rank: int, size: int, folder: str) -> list[Outcome]:
    found = []
    for stage, floor in ((3, 0), (0, 0), (1, 500)):
        settings = config(Path(folder), "host", **STATE, sharding={"stage": stage, "min_unit": floor})
        with running(settings, seed=60 + rank) as run:
            run.load(Path(folder) / "saved")
            found.append(run.outcome())
    return found


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.long)])
def test_two_ranks_to_more_at_other_stages(size: int, tmp_path: Path, two_ranks: RankPool) -> None:
    at_save = two_ranks.run(save_as_rank, str(tmp_path), 4, 0)[0][0]
    ranks = RankPool(size)
    try:
        for outcomes in ranks.run(load_at_stages, str(tmp_path)):
            for found in outcomes:
                assert_bits(found, at_save)
    finally:
        ranks.close()


def resave_as_rank(rank: int, size: int, folder: str) -> None:
    with running(config(Path(folder), **STATE), seed=rank) as run:
        run.load(Path(folder) / "saved")
        run.save(Path(folder) / "saved")


def damaged_for_one(rank: int, size: int, folder: str) -> None:
    """Only rank 1's part is damaged: both ranks are told, nobody waits."""
    path = Path(folder) / "saved"
    with running(config(Path(folder), **STATE)) as run:
        run.train(2, rank)
        run.save(path)
        torch.distributed.barrier()
        if rank == 1:
            raw = bytearray((path / "rank-00001.bin").read_bytes())
            first = json.loads((path / "rank-00001.json").read_text())["extents"][0]
            raw[first["offset"]] ^= 1
            (path / "rank-00001.bin").write_bytes(raw)
        torch.distributed.barrier()
        with pytest.raises(tz.CheckpointError, match=r"rank-00001\.bin|another rank"):
            run.load(path)
        torch.distributed.barrier()
        if rank == 0:
            (path / "rank-00001.json").unlink()
        torch.distributed.barrier()
    with running(config(Path(folder), **STATE)) as run:
        before = run.outcome()
        with pytest.raises(tz.CheckpointError, match=r"rank-00001\.json"):
            run.load(path)
        assert_bits(run.outcome(), before)
        run.train(1, rank)


def failing_on_one(rank: int, size: int, folder: str) -> None:
    """One rank cannot write: every rank's save fails and the previous checkpoint stands."""
    from tierzero.checkpoint import save as saving

    path = Path(folder) / "saved"
    with running(config(Path(folder), **STATE)) as run:
        run.train(2, rank)
        run.save(path)
        wanted = run.outcome()
        run.train(1, rank)
        original = saving.RankWriter.sync
        if rank == 1:
            saving.RankWriter.sync = fail  # type: ignore[method-assign]
        try:
            with pytest.raises(tz.CheckpointError, match="No space left" if rank == 1 else "another rank"):
                run.save(path)
        finally:
            saving.RankWriter.sync = original  # type: ignore[method-assign]
        run.load(path)
        assert_bits(without_buffers(run.outcome()), without_buffers(wanted))


def fail(writer: object) -> None:
    raise OSError(28, "No space left on device")


def test_damage_in_one_ranks_part(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(damaged_for_one, str(tmp_path))


def test_failure_on_one_rank(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(failing_on_one, str(tmp_path))


def wrong(rank: int, size: int) -> None:
    assert rank == 0, "rank one says so"


def test_ranks_report_their_failures(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank one says so"):
        two_ranks.run(wrong)
