"""Durable tiers: a new process takes up the last sealed step from the tier files, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tierzero as tz
from tierzero.api import running as runtime_of
from tierzero.checked_json import write_json

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
        with pytest.raises(tz.TierError, match=rf"{stored.name}.*\(embed\.weight\).*damaged.*state\.tier"):
            run.train(2)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_record_is_as_good_as_none(damage: str, tmp_path: Path) -> None:
    """Of two records, as a crash can leave them, the older one is whole."""
    with running(settings(tmp_path)) as run:
        sealed_steps(run, 2)
    folder = records(tmp_path)
    path = max(folder.glob("sealed-*.json"))
    text = path.read_text()
    newer = folder / f"sealed-{json.loads(text)['number'] + 1:08d}.json"
    newer.write_text({"cut": text[:300], "flipped": text.replace('"step": 2', '"step": 3', 1), "empty": ""}[damage])
    with running(settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 2
        sealed_steps(run, 1)
    with running(settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 3


def test_a_damaged_record_alone_is_no_fresh_start(tmp_path: Path) -> None:
    with running(settings(tmp_path)) as run:
        sealed_steps(run, 2)
    (path,) = records(tmp_path).glob("sealed-00000002.json")
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"step": 2', b'"step": 3', 1))
    path.with_name("sealed-00000001.json").unlink(missing_ok=True)
    with pytest.raises(tz.ConfigError, match=r"sealed-00000002\.json.*damaged.*remove"), running(settings(tmp_path)):
        pass
    path.write_bytes(good)
    with running(settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 2


def test_a_record_of_a_newer_version(tmp_path: Path) -> None:
    with running(settings(tmp_path)) as run:
        sealed_steps(run, 1)
    path = max(records(tmp_path).glob("sealed-*.json"))
    write_json(path, json.loads(path.read_text()) | {"version": 99})
    with pytest.raises(tz.ConfigError, match=r"sealed-.*json has version 99"), running(settings(tmp_path)):
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
        with pytest.raises(tz.ConfigError, match=r"checkpoint\.durable = true"):
            tz.seal(run.model, run.optimizer, {})
        with pytest.raises(tz.ConfigError, match=r"checkpoint\.durable = true"):
            tz.resume(run.model, run.optimizer)


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
    with pytest.raises(tz.ConfigError, match="records of the last sealed step are missing"), running(settings(root)):
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


def drives(root: Path, names: str) -> tz.Config:
    for name in names:
        (root / name).mkdir(exist_ok=True)
    return settings(root).override([f"tiers.nvme={[str(root / name) for name in names]}"])


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


def test_the_same_folder_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for name in ("real/ck", "link/ck", "real/../real/ck"):
        with running(settings(tmp_path).override([f"checkpoint.dir={tmp_path}/{name}"])) as run:
            if name != "real/ck":
                run.take(tz.resume(run.model, run.optimizer))
            sealed_steps(run, 1)
    assert run.step == 3


def test_between_an_early_update_and_its_step(tmp_path: Path) -> None:
    """The weights are half of the next step's then: no state to seal."""
    with running(settings(tmp_path, "backward", train={"grad_clip": 0})) as run:
        run.model(torch.arange(18).view(2, 9)).square().mean().backward()
        with pytest.raises(tz.ConfigError, match=r"backward"):
            tz.seal(run.model, run.optimizer, {"step": 1})
        run.optimizer.step()
        tz.seal(run.model, run.optimizer, {"step": 1})


def test_what_the_loop_counts_is_asked_for(tmp_path: Path) -> None:
    with running(settings(tmp_path)) as run, pytest.raises(tz.ConfigError, match="extra is no dict"):
        tz.seal(run.model, run.optimizer, None)


def test_another_buffer_is_refused_by_name(tmp_path: Path) -> None:
    with running(settings(tmp_path)) as run:
        sealed_steps(run, 1)
    with running(settings(tmp_path)) as run:
        run.model.register_buffer("new", torch.zeros(3))
        with pytest.raises(tz.CheckpointError, match="buffer 'new'"):
            tz.resume(run.model, run.optimizer)


def diverging(rank: int, size: int, folder: str) -> None:
    """A later record that one rank alone has written, of a life whose steps are done again otherwise."""
    root = Path(folder)
    with killed(settings(root)) as run:
        sealed_steps(run, 3, rank)
    own = next((root / "nvme" / "tierzero").glob(f"lasting-*-rank-{rank}"))
    stale = max(own.glob("sealed-*.json"))  # of step 2
    copied = json.loads(stale.read_text())
    with killed(settings(root)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 2
        if rank == 1:
            write_json(own / "sealed-00000003.json", copied | {"number": 3, "life": "of the first"})
        torch.distributed.barrier()
    with killed(settings(root)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 2
        assert not (own / "sealed-00000003.json").exists()
        if rank == 1:
            write_json(own / "sealed-00000003.json", copied | {"number": 3, "life": "of the first"})
        torch.distributed.barrier()
        if rank == 0:
            write_json(own / "sealed-00000003.json", json.loads(max(own.glob("sealed-*")).read_text()) | {"number": 3})
        torch.distributed.barrier()
    with killed(settings(root)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 2


def test_records_of_two_lives_do_not_mix(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(diverging, str(tmp_path))


def first_and_last(rank: int, size: int, folder: str) -> None:
    """A crash in the first seal, and one at the end: on rank 0 it has happened, on rank 1 not yet."""
    root = Path(folder)
    with killed(settings(root)) as run:
        sealed_steps(run, 2, rank)
    own = next((root / "nvme" / "tierzero").glob(f"lasting-*-rank-{rank}"))
    (sealed,) = own.glob("sealed-*.json")
    begun = json.loads(sealed.read_text()) | {"number": 0, "kind": "begun", "slots": "", "digests": [], "content": {}}
    write_json(own / "sealed-00000000.json", begun)
    if rank == 1:
        sealed.unlink()
    torch.distributed.barrier()
    with killed(settings(root)) as run:
        assert tz.resume(run.model, run.optimizer) is None
        sealed_steps(run, 3, rank)
    ended = json.loads(max(own.glob("sealed-*.json")).read_text()) | {"number": 9, "kind": "ended"}
    if rank == 1:
        write_json(own / "sealed-00000009.json", ended | {"slots": "", "digests": [], "content": {}})
    else:
        for path in own.glob("sealed-*.json"):
            path.unlink()
    torch.distributed.barrier()
    with killed(settings(root)) as run:
        assert tz.resume(run.model, run.optimizer) is None


def test_crashes_in_the_first_seal_and_at_the_end(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(first_and_last, str(tmp_path))


SCRIPT = """
import sys
from pathlib import Path
import tierzero as tz
from tests.checkpoint.test_sealed import sealed_steps, settings
from tests.support.resuming import running
context = running(settings(Path(sys.argv[1])))
run = context.__enter__()
sealed_steps(run, 2)
run.save(Path(sys.argv[1]) / "saved", background=True)
run.train(1)
tz.seal(run.model, run.optimizer, run.extra())
"""


def test_the_end_of_a_script_completes_both(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, timeout=120, check=False)
    assert done.returncode == 0
    with running(settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        assert run.step == 3
        run.load(tmp_path / "saved")
        assert run.step == 2


def test_a_run_that_never_sealed_leaves_nothing(tmp_path: Path) -> None:
    with running(settings(tmp_path)) as run:
        run.train(1)
    assert [path for path in (tmp_path / "nvme").rglob("*") if path.is_file()] == []
    with running(settings(tmp_path)) as run:
        sealed_steps(run, 1)
        tz.discard_sealed(run.model)
    assert [path for path in (tmp_path / "nvme").rglob("*") if path.is_file()] == []
