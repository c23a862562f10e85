"""Sealed states that are damaged, of something else, or partly there are refused, and nothing of them is harmed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tierzero as tz
from tierzero.api import running as runtime_of
from tierzero.checked_json import write_json

from ..support.oracle import assert_bits, config
from ..support.rank_pool import RankPool
from ..support.resuming import running
from ..support.sealing import durable_settings, killed, records, sealed_steps


def test_nothing_is_done_with_a_state_that_was_not_taken_up(tmp_path: Path) -> None:
    with running(durable_settings(tmp_path)) as run:
        sealed_steps(run, 2)
        run.save(tmp_path / "saved")
        wanted = run.outcome()
    with running(durable_settings(tmp_path)) as run:
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
    with running(durable_settings(tmp_path)) as run:
        sealed_steps(run, 2)
    message = r"checkpoint\.durable: .*sealed step of another model|cut short"
    with pytest.raises(tz.ConfigError, match=message), running(change(durable_settings(tmp_path))):
        pass
    with running(durable_settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 2


def test_auto_tiles_are_those_of_the_files(tmp_path: Path) -> None:
    """What "auto" gives depends on the memory that is free; the files stay as they are."""
    free = durable_settings(tmp_path, tiers={"tile": "auto"})
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
    with running(durable_settings(tmp_path)) as run:
        sealed_steps(run, 2)
        stored = runtime_of(run.model).store.lasting_objects()[3]
    assert stored.extent is not None  # where the end of the run has left it
    flip(records(tmp_path) / "state.tier", stored.extent.offset + stored.nbytes // 2)
    with running(durable_settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        with pytest.raises(tz.TierError, match=rf"{stored.name}.*\(embed\.weight; of step 2\).*damaged.*state\.tier"):
            run.train(2)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_record_is_as_good_as_none(damage: str, tmp_path: Path) -> None:
    """Of two records, as a crash can leave them, the older one is whole."""
    with running(durable_settings(tmp_path)) as run:
        sealed_steps(run, 2)
    folder = records(tmp_path)
    path = max(folder.glob("sealed-*.json"))
    text = path.read_text()
    newer = folder / f"sealed-{json.loads(text)['number'] + 1:08d}.json"
    newer.write_text({"cut": text[:300], "flipped": text.replace('"step": 2', '"step": 3', 1), "empty": ""}[damage])
    with running(durable_settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 2
        sealed_steps(run, 1)
    with running(durable_settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 3


def test_a_damaged_record_alone_is_no_fresh_start(tmp_path: Path) -> None:
    with running(durable_settings(tmp_path)) as run:
        sealed_steps(run, 2)
    (path,) = records(tmp_path).glob("sealed-00000002.json")
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"step": 2', b'"step": 3', 1))
    path.with_name("sealed-00000001.json").unlink(missing_ok=True)
    with (
        pytest.raises(tz.ConfigError, match=r"sealed-00000002\.json.*damaged.*remove"),
        running(durable_settings(tmp_path)),
    ):
        pass
    path.write_bytes(good)
    with running(durable_settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 2


def test_a_record_of_a_newer_version(tmp_path: Path) -> None:
    with running(durable_settings(tmp_path)) as run:
        sealed_steps(run, 1)
    path = max(records(tmp_path).glob("sealed-*.json"))
    write_json(path, json.loads(path.read_text()) | {"version": 99})
    with pytest.raises(tz.ConfigError, match=r"sealed-.*json has version 99"), running(durable_settings(tmp_path)):
        pass


def test_missing_room_is_said_before_anything_is_made(tmp_path: Path) -> None:
    plain = config(tmp_path, "nvme", train={"precision": "bf16"})
    with running(plain) as run:
        single = tz.stats(run.model)["tier_bytes"]["nvme"]
    limited = durable_settings(tmp_path).override([f"tiers.nvme_limit={single}"])
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
        with pytest.raises(tz.ConfigError, match=r"checkpoint\.durable = true"):
            tz.seal(run.model, run.optimizer, {})
        with pytest.raises(tz.ConfigError, match=r"checkpoint\.durable = true"):
            tz.resume(run.model, run.optimizer)


def at_other_stages(rank: int, size: int, folder: str) -> None:
    for stage in (1, 2):
        chosen = durable_settings(Path(folder), sharding={"stage": stage})
        with pytest.raises(tz.ConfigError, match=f"sharding.stage = {stage}"), running(chosen):
            pass


def test_stages_that_keep_weights_in_memory_are_refused(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(at_other_stages, str(tmp_path))


def drives(root: Path, names: str) -> tz.Config:
    for name in names:
        (root / name).mkdir(exist_ok=True)
    return durable_settings(root).override([f"tiers.nvme={[str(root / name) for name in names]}"])


@pytest.mark.parametrize("others", ["ba", "b", "ca", "abc"])
def test_other_drives_are_refused_and_harm_nothing(others: str, tmp_path: Path) -> None:
    with running(drives(tmp_path, "ab")) as run:
        sealed_steps(run, 3)
    message = r"drive . of 2.*same paths in the same order|records of the last sealed step are missing"
    with pytest.raises(tz.ConfigError, match=message), running(drives(tmp_path, others)):
        pass
    with running(drives(tmp_path, "ab")) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 3
        run.train(2)


def test_what_the_loop_counts_is_asked_for(tmp_path: Path) -> None:
    with running(durable_settings(tmp_path)) as run, pytest.raises(tz.ConfigError, match="extra is no dict"):
        tz.seal(run.model, run.optimizer, None)


def test_another_buffer_is_refused_by_name(tmp_path: Path) -> None:
    with running(durable_settings(tmp_path)) as run:
        sealed_steps(run, 1)
    with running(durable_settings(tmp_path)) as run:
        run.model.register_buffer("new", torch.zeros(3))
        with pytest.raises(tz.CheckpointError, match="buffer 'new'"):
            tz.resume(run.model, run.optimizer)


def diverging(rank: int, size: int, folder: str) -> None:
    """A later record that one rank alone has written, of a life whose steps are done again otherwise."""
    root = Path(folder)
    with killed(durable_settings(root)) as run:
        sealed_steps(run, 3, rank)
    own = next((root / "nvme" / "tierzero").glob(f"lasting-*-rank-{rank}"))
    stale = max(own.glob("sealed-*.json"))  # of step 2
    copied = json.loads(stale.read_text())
    with killed(durable_settings(root)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 2
        if rank == 1:
            write_json(own / "sealed-00000003.json", copied | {"number": 3, "life": "of the first"})
        torch.distributed.barrier()
    with killed(durable_settings(root)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 2
        assert not (own / "sealed-00000003.json").exists()
        if rank == 1:
            write_json(own / "sealed-00000003.json", copied | {"number": 3, "life": "of the first"})
        torch.distributed.barrier()
        if rank == 0:
            write_json(own / "sealed-00000003.json", json.loads(max(own.glob("sealed-*")).read_text()) | {"number": 3})
        torch.distributed.barrier()
    with killed(durable_settings(root)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 2


def test_records_of_two_lives_do_not_mix(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(diverging, str(tmp_path))


def first_and_last(rank: int, size: int, folder: str) -> None:
    """A crash in the first seal, and one at the end: on rank 0 it has happened, on rank 1 not yet."""
    root = Path(folder)
    with killed(durable_settings(root)) as run:
        sealed_steps(run, 2, rank)
    own = next((root / "nvme" / "tierzero").glob(f"lasting-*-rank-{rank}"))
    (sealed,) = own.glob("sealed-*.json")
    begun = json.loads(sealed.read_text()) | {"number": 0, "kind": "begun", "slots": "", "digests": [], "content": {}}
    write_json(own / "sealed-00000000.json", begun)
    if rank == 1:
        sealed.unlink()
    torch.distributed.barrier()
    with killed(durable_settings(root)) as run:
        assert tz.resume(run.model, run.optimizer) is None
        sealed_steps(run, 3, rank)
    ended = json.loads(max(own.glob("sealed-*.json")).read_text()) | {"number": 9, "kind": "ended"}
    if rank == 1:
        write_json(own / "sealed-00000009.json", ended | {"slots": "", "digests": [], "content": {}})
    else:
        for path in own.glob("sealed-*.json"):
            path.unlink()
    torch.distributed.barrier()
    with killed(durable_settings(root)) as run:
        assert tz.resume(run.model, run.optimizer) is None


def test_crashes_in_the_first_seal_and_at_the_end(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(first_and_last, str(tmp_path))
