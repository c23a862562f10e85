"""A seal that runs beside a backward and fails, is interrupted, or loses a rank: nothing hangs, and no step is lost."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierzero as tz
from tierzero.api import running
from tierzero.runtime import sealing
from tierzero.tiers import TieredStore

from ..support.crash_images import Moments, Plan, copy_tiers, live, on_durable_tiers, take_step
from ..support.oracle import Outcome, assert_bits, record_state
from ..support.rank_pool import RankPool

PLAN = Plan(steps=5, patient=False)


def refuse(*_: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def begin(model: Any, optimizer: Any, rank: int = 0, plan: Plan = PLAN) -> list[float]:
    """Two steps, of which the first is sealed and the second marked."""
    losses = []
    for step in range(2):
        losses.append(take_step(model, optimizer, plan, step, rank))
        tz.seal(model, optimizer, {"step": step + 1})
    return losses


def assert_the_rest(root: Path, wanted: Outcome, first: int, rank: int = 0, plan: Plan = PLAN) -> None:
    life = live(root, "both", plan, rank)
    assert life.first == first
    life.outcome.losses = wanted.losses[:first] + life.outcome.losses
    assert_bits(life.outcome, wanted)


FAULTS: dict[str, tuple[Any, str, type[Exception], str, int]] = {
    "flush": (os, "fdatasync", tz.TierError, "cannot be flushed to its drive", 1),
    "record": (sealing, "write_record", tz.CheckpointError, "a step cannot be sealed: .*Input/output", 1),
    "removal": (sealing, "remove_records", tz.CheckpointError, "the step before cannot be removed", 2),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failure_ends_the_run_with_its_cause(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, function, error, text, sealed = FAULTS[name]
    wanted = live(tmp_path / "none", "none", PLAN, seals=False).outcome
    with on_durable_tiers(tmp_path / "both", "both") as (model, optimizer, _):
        begin(model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(holder, function, refuse)
            with pytest.raises(error, match=text):
                take_step(model, optimizer, PLAN, 2, 0)
        for call in (
            lambda: take_step(model, optimizer, PLAN, 2, 0),
            optimizer.step,
            lambda: tz.seal(model, optimizer, {"step": 3}),
        ):
            with pytest.raises(error, match=text):
                call()
    assert_the_rest(tmp_path / "both", wanted, sealed)


def test_ctrl_c_in_the_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that was to come may be taken after it, as after any Ctrl-C."""
    wanted = live(tmp_path / "none", "none", PLAN, seals=False).outcome
    outcome = Outcome()
    with on_durable_tiers(tmp_path / "both", "both") as (model, optimizer, _):
        outcome.losses = begin(model, optimizer)
        sealer, sync = running(model).sealer, TieredStore.sync
        waiting, wait = threading.Event(), sealing.Sealer._wait

        def noted(self: sealing.Sealer) -> None:
            waiting.set()
            wait(self)

        def interrupting(store: TieredStore) -> None:
            assert waiting.wait(30)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            sync(store)

        with monkeypatch.context() as patch:
            patch.setattr(sealing.Sealer, "_wait", noted)
            patch.setattr(TieredStore, "sync", interrupting)
            with pytest.raises(KeyboardInterrupt):
                take_step(model, optimizer, PLAN, 2, 0)
            assert sealer is not None
            assert sealer.under_way is not None
        optimizer.step()
        assert sealer.under_way is None
        optimizer.zero_grad()
        tz.seal(model, optimizer, {"step": 3})
        for step in range(3, PLAN.steps):
            take_step(model, optimizer, PLAN, step, 0)
        record_state(model, outcome)
    outcome.losses = wanted.losses
    assert_bits(outcome, wanted)
    assert_the_rest(tmp_path / "both", wanted, 3)


# Several ranks.


def failing_on_one(rank: int, size: int, folder: str) -> None:
    root = Path(folder)
    wanted = live(root / "none", "none", PLAN, rank, seals=False).outcome
    text = "a step cannot be sealed" if rank == 1 else "another rank could not seal a step"
    with on_durable_tiers(root / "both", "both") as (model, optimizer, _), pytest.MonkeyPatch.context() as patch:
        begin(model, optimizer, rank)

        def late(*_: Any) -> None:
            time.sleep(0.5)  # the backward's gathers are over by then
            refuse()

        if rank == 1:
            patch.setattr(sealing, "write_record", late)
        with pytest.raises(tz.CheckpointError, match=text):
            take_step(model, optimizer, PLAN, 2, rank)
    torch.distributed.barrier()
    assert_the_rest(root / "both", wanted, 1, rank)


def test_a_failure_on_one_rank_is_one_of_all(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(failing_on_one, str(tmp_path))


KILLED = [("write_spare", 8), ("write_record", 4)]
MORE_KILLED = [("write_spare", 5), ("adopt_spare", 8), ("remove_records", 4), ("seal", 2), ("page_out", 7)]


def killed_on_one(rank: int, size: int, folder: str, plan: Plan, chosen: list[tuple[str, int]]) -> list[int]:
    """Rank 1 ends at a moment; rank 0 gets as far as it can without it, and then ends too. Where they go on from."""
    wanted = live(Path(folder) / "none", "none", plan, rank, seals=False).outcome
    return [one_kill(rank, Path(folder) / moment[0], moment, plan, wanted) for moment in chosen]


def one_kill(rank: int, folder: Path, moment: tuple[str, int], plan: Plan, wanted: Outcome) -> int:
    root, image, dead, over = (folder / name for name in ("both", "both-image-0", "dead", "over"))

    def die() -> None:
        dead.touch()
        while not over.exists():
            time.sleep(0.01)

    moments = Moments(root, [moment] if rank == 1 else [], rank=rank, after_image=die)
    with moments.watched(), on_durable_tiers(root, "both") as (model, optimizer, _):
        witness = threading.Thread(target=copy_after, args=(running(model).engine, dead, over, root, image))
        if rank == 0:
            witness.start()
        for step in range(plan.steps):
            take_step(model, optimizer, plan, step, rank)
            tz.seal(model, optimizer, {"step": step + 1})
        if rank == 0:
            witness.join()
    torch.distributed.barrier()
    life = live(image, "both", plan, rank)
    assert not moments.images or moments.images[0][1] <= life.first
    life.outcome.losses = wanted.losses[: life.first] + life.outcome.losses
    assert_bits(life.outcome, wanted)
    return life.first


def copy_after(engine: Any, dead: Path, over: Path, root: Path, image: Path) -> None:
    while not dead.exists():
        time.sleep(0.01)
    time.sleep(0.2)

    async def copy() -> None:
        copy_tiers(root, image)

    engine.run(copy())
    over.touch()


def test_one_rank_is_killed(tmp_path: Path, two_ranks: RankPool) -> None:
    first, second = two_ranks.run(killed_on_one, str(tmp_path), Plan(steps=4), KILLED)
    assert first == second
    assert all(first)


@pytest.mark.long
@pytest.mark.parametrize("moment", MORE_KILLED)
@pytest.mark.parametrize("plan", [Plan(steps=5, slow="sync"), Plan(steps=6, clips=(2,), skips=(3,), slow="page_in")])
def test_one_rank_is_killed_at_other_moments(
    plan: Plan, moment: tuple[str, int], tmp_path: Path, two_ranks: RankPool
) -> None:
    first, second = two_ranks.run(killed_on_one, str(tmp_path), plan, [moment])
    assert first == second
