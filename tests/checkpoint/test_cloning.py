"""Checkpoints whose tiles are cloned from lasting tier files: the state of the call, checked like any other."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierzero as tz
from tierzero.api import running as runtime_of
from tierzero.checked_json import CHECKSUM, read_json, write_json
from tierzero.tiers import PAGE

from ..support.cloning import REAL, Clone, cloned_by, copied
from ..support.oracle import assert_bits, config
from ..support.rank_pool import RankPool
from ..support.resuming import Run, running
from ..support.sealing import durable_settings, records, sealed_steps


@contextmanager
def bytes_written(run: Run) -> Iterator[list[int]]:
    """That are written to a checkpoint."""
    moved: list[int] = []
    engine = runtime_of(run.model).engine
    engine.fault = lambda op, path, offset, nbytes: moved.append(nbytes if path.suffix == ".bin" else 0)
    try:
        yield moved
    finally:
        engine.fault = None


def assert_holds(path: Path, run: Run, wanted: Any) -> None:
    assert tz.verify_checkpoint(path) == []
    step = run.step
    with running(
        config(path.parent / "nvme", "host", train={"precision": "bf16"}, tiers={"tile": 8192}), seed=9
    ) as other:
        other.load(path)
        assert other.step == step
        assert_bits(other.outcome(), wanted)


def index_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "rank-00000.json").read_text())
    return found


@pytest.mark.parametrize(("sealed", "direct"), [(True, "auto"), (False, False)])
def test_no_byte_of_a_tile_goes_through_memory(sealed: bool, direct: Any, tmp_path: Path) -> None:
    with running(durable_settings(tmp_path, io={"direct": direct})) as run:
        sealed_steps(run, 2)
        if not sealed:  # then the next step writes over what was cloned, in place
            run.train(1)
        engine = runtime_of(run.model).engine
        runtime_of(run.model).flush()
        before = engine.read_bytes, engine.write_bytes
        with cloned_by(copied) as cloned, bytes_written(run) as moved:
            run.save(tmp_path / "saved")
        assert (engine.read_bytes, engine.write_bytes) == before
        extents = index_of(tmp_path / "saved")["extents"]
        assert sum(moved) == PAGE * sum(1 for extent in extents if extent["segment"] == "buffer")
        assert sum(cloned) >= sum(extent["nbytes"] for extent in extents if extent["segment"] != "buffer")
        wanted = run.outcome()
        assert_holds(tmp_path / "saved", run, wanted)
        run.train(2)  # a clone keeps what it was made of
        run.step -= 2
        assert_holds(tmp_path / "saved", run, wanted)
        run.step += 2
        run.load(tmp_path / "saved")
        assert_bits(run.outcome(), wanted)


@pytest.mark.parametrize("overlap", ["forward", "none"])
def test_the_state_of_the_call_while_training_goes_on(overlap: str, tmp_path: Path) -> None:
    """Of one tile the clone comes so late that its update would have overtaken it, in place."""
    calls = iter(range(1_000_000))

    def late(*args: int) -> None:
        if next(calls) == 1:  # the first was a trial
            time.sleep(0.7)
        copied(*args)

    with running(durable_settings(tmp_path, overlap)) as run:
        sealed_steps(run, 1)
        run.train(1)
        wanted = run.outcome()
        with cloned_by(late) as cloned:
            run.save(tmp_path / "saved", background=True)
            losses = run.train(3)
            tz.finish_checkpoint(run.model)
        assert len(cloned) > 2
        run.step -= 3
        assert_holds(tmp_path / "saved", run, wanted)
        run.load(tmp_path / "saved")
        assert run.train(3) == losses


def refusing_another_drive(root: Path) -> Clone:
    def clone(source: int, *rest: int) -> None:
        if str(root / "other") in os.readlink(f"/proc/self/fd/{source}"):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        copied(source, *rest)

    return clone


def refusing_after(calls: int) -> Clone:
    left = iter(range(calls))

    def clone(*args: int) -> None:
        if next(left, None) is None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        copied(*args)

    return clone


REFUSALS: dict[str, Callable[[Path], Clone]] = {
    "never": lambda root: copied,
    "at once": lambda root: refusing_after(0),
    "in the middle": lambda root: refusing_after(20),
    "another drive": refusing_another_drive,
    "with io.verify": lambda root: copied,
}


@pytest.mark.parametrize("when", REFUSALS)
def test_what_cannot_be_cloned_is_copied(when: str, tmp_path: Path) -> None:
    """Blocks of three pages: most tiles have pieces on both drives, some on one."""
    (tmp_path / "other").mkdir()
    chosen = durable_settings(tmp_path, io={"block_size": 3 * PAGE, "verify": when == "with io.verify"})
    chosen = chosen.override([f"tiers.nvme=['{tmp_path / 'nvme'}', '{tmp_path / 'other'}']"])
    with running(chosen) as run:
        sealed_steps(run, 2)
        with cloned_by(REFUSALS[when](tmp_path)), bytes_written(run) as moved:
            run.save(tmp_path / "saved")
        written = sum(moved)
        assert_holds(tmp_path / "saved", run, run.outcome())
        index = index_of(tmp_path / "saved")
    buffers = PAGE * sum(1 for extent in index["extents"] if extent["segment"] == "buffer")
    if when == "never":
        assert written == buffers
    elif when in ("at once", "with io.verify"):
        assert written == index["nbytes"]
    else:  # some tiles were, and some were not
        assert buffers < written < index["nbytes"]


def inside(index: dict[str, Any], check: dict[str, Any]) -> list[dict[str, Any]]:
    end = check["offset"] + check["nbytes"]
    return [e for e in index["extents"] if check["offset"] <= e["offset"] and e["offset"] + e["nbytes"] <= end]


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with running(durable_settings(tmp_path)) as run:
        sealed_steps(run, 2)
        with cloned_by(copied):
            run.save(saved)
        index = index_of(saved)
        shared = [check for check in index["checks"] if len(inside(index, check)) > 1]
        check = max(shared, key=lambda check: len({extent["parameter"] for extent in inside(index, check)}))
        lost = list(dict.fromkeys(extent["parameter"] for extent in inside(index, check)))
        assert len(lost) > 3
        flip(saved / "rank-00000.bin", check["offset"] + check["nbytes"] - 1)
        [damage] = tz.verify_checkpoint(saved)
        assert (damage.offset, damage.nbytes) == (check["offset"], check["nbytes"])
        assert damage.parameter == ", ".join(lost)
        assert f"of '{lost[0]}', '{lost[1]}', '{lost[2]}' and {len(lost) - 3} more, " in str(damage)
        end = f"{check['offset']:,} to {check['offset'] + check['nbytes']:,}"
        with pytest.raises(tz.CheckpointError, match=rf"rank-00000\.bin: .*'{lost[0]}'.*bytes {end} .*of step 2"):
            run.load(saved)
        with pytest.raises(tz.CheckpointError, match=r"rank-00000\.bin: .* does not match its checksum"):
            tz.export_safetensors(saved, tmp_path / "out", dtype="fp32")


def test_what_another_process_wrote_is_read_before_it_is_saved(tmp_path: Path) -> None:
    """A clone would take damage along without a word."""
    with running(durable_settings(tmp_path)) as run:
        sealed_steps(run, 2)
        stored = runtime_of(run.model).store.lasting_objects()[3]
    assert stored.extent is not None
    flip(records(tmp_path) / "state.tier", stored.extent.offset + stored.nbytes // 2)
    with running(durable_settings(tmp_path)) as run:
        run.take(tz.resume(run.model, run.optimizer))
        with cloned_by(copied), pytest.raises(tz.CheckpointError, match=r"embed\.weight.*damaged.*state\.tier"):
            run.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def save_as_rank(rank: int, size: int, folder: str) -> Any:
    root = Path(folder)
    with running(durable_settings(root)) as run:
        sealed_steps(run, 2, rank)
        with cloned_by(copied) as cloned:
            run.save(root / "saved")
        assert cloned
        return run.outcome()


def test_at_another_number_of_ranks_with_other_units(tmp_path: Path, two_ranks: RankPool) -> None:
    wanted = two_ranks.run(save_as_rank, str(tmp_path))[0]
    settings = config(tmp_path / "nvme", train={"precision": "bf16"}, tiers={"tile": 16384})
    with running(settings, seed=3, units=(nn.Linear,)) as run:
        run.load(tmp_path / "saved")
        assert_bits(run.outcome(), wanted)
    tz.export_safetensors(tmp_path / "saved", tmp_path / "out", dtype="fp32")
    assert tz.verify_checkpoint(tmp_path / "saved") == []


def test_the_system_call_clones_or_refuses(tmp_path: Path) -> None:
    raw = torch.randint(256, (4 * PAGE,), dtype=torch.uint8).numpy().tobytes()
    (tmp_path / "source").write_bytes(raw)
    (tmp_path / "target").write_bytes(bytes(2 * PAGE))
    refused = None
    with (tmp_path / "source").open("rb") as source, (tmp_path / "target").open("r+b") as target:
        try:
            REAL(source.fileno(), PAGE, PAGE, target.fileno(), 0)
        except OSError as error:
            refused = error.errno
    assert refused in (None, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL)
    first = raw[PAGE : 2 * PAGE] if refused is None else bytes(PAGE)
    assert (tmp_path / "target").read_bytes() == first + bytes(PAGE)


def reindexed(saved: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index, manifest = (read_json(saved / f"{name}.json", name) for name in ("rank-00000", "manifest"))
    change(index)
    write_json(saved / "rank-00000.json", index)
    manifest["indexes"] = [read_json(saved / "rank-00000.json", "the index")[CHECKSUM]]
    write_json(saved / "manifest.json", manifest)


def grow_first(index: dict[str, Any]) -> None:
    index["checks"][0]["nbytes"] = index["checks"][1]["offset"] + 1


INDEXES: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "an extent without": (r"no checksum is of bytes [\d,]+ to", lambda index: index["checks"].pop(0)),
    "overlapping": ("two checksums are of byte", grow_first),
    "no list": ("'checks'", lambda index: index.pop("checks")),
}


@pytest.mark.parametrize("how", INDEXES)
def test_an_index_whose_checks_are_wrong_is_refused(how: str, tmp_path: Path) -> None:
    message, change = INDEXES[how]
    with running(config(tmp_path, train={"precision": "bf16"})) as run:
        run.save(tmp_path / "saved")
        reindexed(tmp_path / "saved", change)
        before = run.outcome()
        with pytest.raises(tz.CheckpointError, match=rf"rank-00000\.json: the index is damaged: {message}"):
            run.load(tmp_path / "saved")
        assert_bits(run.outcome(), before)
