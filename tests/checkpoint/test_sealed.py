"""Durable tiers: a new process takes up the last sealed step from the tier files, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tierzero as tz
from tierzero.api import running as runtime_of
from tierzero.checked_json import write_json
from tierzero.tiers.seals import read_records

from ..support.oracle import Outcome, assert_bits, config
from ..support.rank_pool import RankPool
from ..support.resuming import Run, running

STEPS = 6


def settings(root: Path, overlap: str = "forward", **sections: dict[str, Any]) -> tz.Config:
    (root / "nvme").mkdir(exist_ok=True, parents=True)
    durable = {"durable": True, "dir": str(root / "checkpoints")}
    train = {"precision": "bf16"} | sections.pop("train", {})
    optimizer = {"overlap": overlap}
    return config(root / "nvme", "nvme", checkpoint=durable, train=train, optimizer=optimizer, **sections)


def sealed_steps(run: Run, steps: int, rank: int = 0) -> list[float]:
    losses = []
    for _ in range(steps):
        losses += run.train(1, rank)
        tz.seal(run.model, run.optimizer, run.extra())
    return losses


@contextmanager
def killed(settings: tz.Config, **options: Any) -> Iterator[Run]:
    """A run whose process ends without a word: what it would do at its end is left out."""
    with running(settings, **options) as run:
        yield run
        sealer = runtime_of(run.model).sealer
        assert sealer is not None
        sealer._marked = None


def records(root: Path) -> Path:
    (folder,) = (root / "nvme" / "tierzero").glob("lasting-*-rank-0")
    return folder


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Outcome]:
    """Without durable tiers."""
    with running(config(tmp_path_factory.mktemp("nvme"), "host", train={"precision": "bf16"})) as run:
        return run.train(STEPS), run.outcome()


OPTIONS: dict[str, dict[str, Any]] = {
    "forward": {"overlap": "forward"},
    "none": {"overlap": "none"},
    "two drives": {"tiers": {"prefetch": 2}},
    "buffered": {"io": {"direct": False}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_killed_run_goes_on_from_its_last_sealed_step(
    name: str, wanted: tuple[list[float], Outcome], tmp_path: Path
) -> None:
    losses, end = wanted
    chosen = settings(tmp_path, **OPTIONS[name])
    if name == "two drives":
        (tmp_path / "other").mkdir()
        chosen = chosen.override([f"tiers.nvme=['{tmp_path / 'nvme'}', '{tmp_path / 'other'}']"])
    found: list[float] = []
    for life in range(3):
        with killed(chosen, seed=life) as run:
            extra = tz.resume(run.model, run.optimizer)
            if life:
                run.take(extra)
            else:
                assert extra is None
            # The last step of a life is marked but not yet sealed when updates run beside the next forward.
            lost = 1 if life and name != "none" else 0
            assert run.step == 2 * life - lost
            part = sealed_steps(run, 2 + lost)
            assert found[len(found) - lost :] == part[:lost]
            found += part[lost:]
    assert found == losses
    with killed(chosen) as run:
        run.take(tz.resume(run.model, run.optimizer))
        sealed_steps(run, STEPS - run.step)
        assert_bits(run.outcome(), end)
    records(tmp_path)


def test_updates_in_the_backward(tmp_path: Path) -> None:
    """No clipping then; compared with the same run that is not stopped."""

    def run_for(root: Path, lives: list[int]) -> list[str]:
        chosen = settings(root, "backward", train={"grad_clip": 0})
        losses: list[str] = []
        for life, steps in enumerate(lives):
            with killed(chosen, seed=life) as run:
                extra = tz.resume(run.model, run.optimizer)
                if extra is not None:
                    run.take(extra)
                for _ in range(steps):
                    ids = torch.arange(18).view(2, 9) * (run.step + 1) % 101
                    loss = run.model(ids).square().mean()
                    loss.backward()
                    run.optimizer.step()
                    run.optimizer.zero_grad()
                    run.step += 1
                    losses.append(loss.item().hex())
                    tz.seal(run.model, run.optimizer, run.extra())
        return losses

    assert run_for(tmp_path / "killed", [2, 3, 1]) == run_for(tmp_path / "whole", [6])


def test_the_end_of_a_run_seals_what_is_marked(wanted: tuple[list[float], Outcome], tmp_path: Path) -> None:
    with running(settings(tmp_path)) as run:
        sealed_steps(run, 3)
    with running(settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 3
        assert run.train(STEPS - 3) == wanted[0][3:]
        assert_bits(run.outcome(), wanted[1])


def test_steps_that_are_not_sealed_are_done_again(wanted: tuple[list[float], Outcome], tmp_path: Path) -> None:
    with killed(settings(tmp_path)) as run:
        sealed_steps(run, 1)
        run.train(4)
    with killed(settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 1
        assert run.train(STEPS - 1) == wanted[0][1:]


def test_a_seal_writes_its_record_and_nothing_else(tmp_path: Path) -> None:
    def written(chosen: tz.Config, seals: bool) -> int:
        with running(chosen) as run:
            for _ in range(3):
                run.train(1)
                if seals:
                    tz.seal(run.model, run.optimizer, run.extra())
            found: int = tz.stats(run.model)["nvme_write_bytes"]
            return found

    durable = written(settings(tmp_path), True)
    (tmp_path / "plain").mkdir()
    assert durable == written(config(tmp_path / "plain", "nvme", train={"precision": "bf16"}), False)


def test_other_runs_leave_it_alone(tmp_path: Path) -> None:
    with running(settings(tmp_path)) as run:
        sealed_steps(run, 2)
    other = settings(tmp_path).override([f"checkpoint.dir={tmp_path / 'another'}"])
    with running(other) as run:  # the same drive, another run
        assert tz.resume(run.model, run.optimizer) is None
        sealed_steps(run, 1)
    with running(config(tmp_path / "nvme", "nvme", train={"precision": "bf16"})) as run:
        run.train(1)
    for chosen, step in ((settings(tmp_path), 2), (other, 1)):
        with running(chosen) as run:
            run.take(tz.resume(run.model, run.optimizer))
            assert run.step == step


def test_nothing_is_done_with_a_state_that_was_not_taken_up(tmp_path: Path) -> None:
    with running(settings(tmp_path)) as run:
        sealed_steps(run, 2)
        run.save(tmp_path / "saved")
        wanted = run.outcome()
    with running(settings(tmp_path)) as run:
        with pytest.raises(tz.ConfigError, match=r"sealed step.*tierzero\.resume"):
            run.train(1)
        run.load(tmp_path / "saved")  # a checkpoint instead
        assert_bits(run.outcome(), wanted)
        sealed_steps(run, 1)


def another_tile(chosen: tz.Config) -> tz.Config:
    return chosen.override(["tiers.tile=8192"])


def another_precision(chosen: tz.Config) -> tz.Config:
    return chosen.override(["train.precision=fp32"])


@pytest.mark.parametrize("change", [another_tile, another_precision])
def test_another_layout_is_refused_and_harms_nothing(change: Callable[[tz.Config], tz.Config], tmp_path: Path) -> None:
    with running(settings(tmp_path)) as run:
        sealed_steps(run, 2)
    message = r"checkpoint\.durable: .*sealed step of another model|cut short"
    with pytest.raises(tz.ConfigError, match=message), running(change(settings(tmp_path))):
        pass
    with running(settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 2


def test_auto_tiles_are_those_of_the_files(tmp_path: Path) -> None:
    """What "auto" gives depends on the memory that is free; the files stay as they are."""
    free = settings(tmp_path, tiers={"tile": "auto"})
    with running(free.override(["tiers.tile=4096"])) as run:
        sealed_steps(run, 2)
    with running(free) as run:
        assert tz.stats(run.model)["tile"] == 4096
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 2


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_flipped_bit_is_found_when_it_is_read(tmp_path: Path) -> None:
    with running(settings(tmp_path)) as run:
        sealed_steps(run, 2)
        stored = runtime_of(run.model).store.lasting_objects()[3]
    assert stored.extent is not None  # where the end of the run has left it
    flip(records(tmp_path) / "state.tier", stored.extent.offset + stored.nbytes // 2)
    with running(settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        with pytest.raises(tz.TierError, match=f"{stored.name}.*damaged"):
            run.train(2)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_record_is_as_good_as_none(damage: str, tmp_path: Path) -> None:
    """Of two records, as a crash can leave them, the older one is whole."""
    with running(settings(tmp_path)) as run:
        sealed_steps(run, 2)
    folder = records(tmp_path)
    (last,) = read_records(folder)
    path = folder / f"sealed-{last.number:08d}.json"
    newer = folder / f"sealed-{last.number + 1:08d}.json"
    text = path.read_text()
    newer.write_text({"cut": text[:300], "flipped": text.replace('"step": 2', '"step": 3', 1), "empty": ""}[damage])
    with running(settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 2
        sealed_steps(run, 2)
    assert [record.content["manifest"]["extra"]["step"] for record in read_records(folder)] == [4]


def test_a_record_of_a_newer_version(tmp_path: Path) -> None:
    with running(settings(tmp_path)) as run:
        sealed_steps(run, 1)
    (path,) = records(tmp_path).glob("sealed-*.json")
    write_json(path, json.loads(path.read_text()) | {"version": 99})
    with pytest.raises(tz.ConfigError, match=r"sealed-.*json: version 99"), running(settings(tmp_path)):
        pass


def test_missing_room_is_said_before_anything_is_made(tmp_path: Path) -> None:
    plain = config(tmp_path, "nvme", train={"precision": "bf16"})
    with running(plain) as run:
        single = tz.stats(run.model)["tier_bytes"]["nvme"]
    limited = settings(tmp_path).override([f"tiers.nvme_limit={single}"])
    with pytest.raises(tz.BudgetError, match=r"nvme_limit"), running(limited):
        pass


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["checkpoint.durable=true"], "checkpoint.dir is not"),
        (["checkpoint.durable=true", "checkpoint.dir=x", "placement.params=host"], "placement.params"),
        (["checkpoint.durable=true", "checkpoint.dir=x", "placement.optimizer={host=0.5, nvme=0.5}"], "placement.opt"),
    ],
)
def test_what_durable_tiers_need(keys: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(tz.ConfigError, match=message):
        config(tmp_path, "nvme").override(keys).check()


def test_without_durable_tiers(tmp_path: Path) -> None:
    with running(config(tmp_path)) as run:
        for act in (tz.seal, tz.resume):
            with pytest.raises(tz.ConfigError, match=r"checkpoint\.durable = true"):
                act(run.model, run.optimizer)


def as_rank(rank: int, size: int, folder: str) -> None:
    root = Path(folder)
    with running(config(root, "host", train={"precision": "bf16"})) as run:
        losses, end = run.train(4, rank), run.outcome()
    for life in range(2):
        with killed(settings(root), seed=life) as run:
            extra = tz.resume(run.model, run.optimizer)
            if life:
                run.take(extra)
                assert run.step == 1
            assert sealed_steps(run, 2 + life, rank) == losses[run.step - 2 - life : run.step]
    with killed(settings(root)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        run.train(4 - run.step, rank)
        assert_bits(run.outcome(), end)
    torch.distributed.barrier()
    if rank == 1:  # of which the newest record is lost
        folder_of = next((root / "nvme" / "tierzero").glob("lasting-*-rank-1"))
        for path in folder_of.glob("sealed-*.json"):
            path.unlink()
    torch.distributed.barrier()
    with pytest.raises(tz.ConfigError, match="sealed step of 2 ranks"), running(settings(root)):
        pass


def test_on_two_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(as_rank, str(tmp_path))
    with pytest.raises(tz.ConfigError, match="sealed step of 2 ranks"), running(settings(tmp_path)):
        pass


def at_other_stages(rank: int, size: int, folder: str) -> None:
    for stage in (1, 2):
        chosen = settings(Path(folder), sharding={"stage": stage})
        with pytest.raises(tz.ConfigError, match=f"sharding.stage = {stage}"), running(chosen):
            pass


def test_stages_that_keep_weights_in_memory_are_refused(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(at_other_stages, str(tmp_path))
