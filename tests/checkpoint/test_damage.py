"""Checkpoints that are damaged, incomplete or of something else are refused with the file's name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tierzero as tz

from ..support.oracle import assert_bits, config
from ..support.resuming import Run, running

STATE = {"train": {"precision": "bf16"}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    with running(config(folder, **STATE)) as run:
        run.train(3)
        run.save(folder / "saved")
    return folder / "saved"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    with running(config(nvme, **STATE), seed=4) as found:
        found.train(1)
        yield found


def rewritten(path: Path, change: Callable[[bytearray], None]) -> None:
    raw = bytearray(path.read_bytes())
    change(raw)
    path.write_bytes(raw)


def flip(position: int) -> Callable[[bytearray], None]:
    def change(raw: bytearray) -> None:
        raw[position % len(raw)] ^= 0x10

    return change


def step_of_another(folder: Path) -> None:
    """A plausible change: still JSON, still the right keys."""
    text = (folder / "manifest.json").read_text()
    assert '"step": 3' in text
    (folder / "manifest.json").write_text(text.replace('"step": 3', '"step": 2', 1))


def index_changed(folder: Path) -> None:
    text = (folder / "rank-00000.json").read_text()
    (folder / "rank-00000.json").write_text(text.replace('"start": 0', '"start": 8', 1))


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "no folder": ("saved", lambda f: shutil.rmtree(f)),
    "no manifest": ("manifest.json", lambda f: (f / "manifest.json").unlink()),
    "no index": ("rank-00000.json", lambda f: (f / "rank-00000.json").unlink()),
    "no data": ("rank-00000.bin", lambda f: (f / "rank-00000.bin").unlink()),
    "empty manifest": ("manifest.json", lambda f: (f / "manifest.json").write_bytes(b"")),
    "manifest is a list": ("manifest.json", lambda f: (f / "manifest.json").write_text("[]")),
    "manifest of something else": ("manifest.json", lambda f: (f / "manifest.json").write_text('{"a": 1}')),
    "manifest changed": ("manifest.json", step_of_another),
    "index changed": ("rank-00000.json", index_changed),
    "index cut": ("rank-00000.json", lambda f: cut(f / "rank-00000.json", 99)),
    "data cut": ("rank-00000.bin", lambda f: cut(f / "rank-00000.bin", -5000)),
    "data empty": ("rank-00000.bin", lambda f: (f / "rank-00000.bin").write_bytes(b"")),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_refused_before_anything_changes(how: str, saved: Path, run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "saved"
    shutil.copytree(saved, copy)
    named, harm = DAMAGE[how]
    harm(copy)
    before = run.outcome()
    with pytest.raises(tz.CheckpointError, match=named):
        run.load(copy)
    assert_bits(run.outcome(), before)
    run.train(1)
    run.load(saved)


def loads(run: Run, folder: Path) -> bool:
    try:
        run.load(folder)
    except tz.CheckpointError:
        return False
    return True


def test_any_flipped_bit_is_found_or_changes_nothing(saved: Path, tmp_path: Path) -> None:
    """A checkpoint that loads is the one that was saved, whatever was flipped in its files."""
    (tmp_path / "nvme").mkdir()
    settings = config(tmp_path / "nvme", **STATE)
    with running(settings) as good:
        good.load(saved)
        wanted = good.outcome()
    choose = random.Random(11)
    refused = 0
    for file in ("manifest.json", "rank-00000.json", "rank-00000.bin"):
        for _ in range(6):
            copy = tmp_path / "saved"
            shutil.copytree(saved, copy)
            rewritten(copy / file, flip(choose.randrange(1 << 30)))
            with running(settings, seed=9) as run:
                if loads(run, copy):
                    assert_bits(run.outcome(), wanted)
                else:
                    refused += 1
            shutil.rmtree(copy)
    assert refused >= 12


def test_damage_met_while_loading_leaves_a_model_that_says_so(saved: Path, run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "saved"
    shutil.copytree(saved, copy)
    index = json.loads((copy / "rank-00000.json").read_text())
    last = [extent for extent in index["extents"] if extent["segment"] != "buffer" and extent["nbytes"]][-1]
    rewritten(copy / "rank-00000.bin", flip(last["offset"]))
    with pytest.raises(tz.CheckpointError, match=r"rank-00000\.bin.*" + last["parameter"]):
        run.load(copy)
    with pytest.raises(tz.TierZeroError):
        run.train(1)


def test_files_of_two_checkpoints_do_not_mix(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "first")
    run.train(1)
    run.save(tmp_path / "second")
    for suffix in ("json", "bin"):
        shutil.copy(tmp_path / "first" / f"rank-00000.{suffix}", tmp_path / "second")
    with pytest.raises(tz.CheckpointError, match=r"rank-00000\.json.*another checkpoint"):
        run.load(tmp_path / "second")


OTHERS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "another name": (r"lacks parameter '2\.", lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))),
    "one more": (r"lacks parameter '2\.", lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))),
    "one less": (r"has parameter '1\.", lambda: nn.Sequential(nn.Linear(8, 8))),
    "another shape": (r"'1\.weight'.*\[8, 8\].*\[9, 8\]", lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 9))),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_refused_by_parameter(other: str, tmp_path: Path) -> None:
    model = tz.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config(tmp_path))
    tz.save_checkpoint(model, None, tmp_path / "saved")
    tz.close(model)
    message, build = OTHERS[other]
    model = tz.shard(build(), config(tmp_path))
    before = tz.full_state_dict(model)
    with pytest.raises(tz.CheckpointError, match=message):
        tz.load_checkpoint(model, None, tmp_path / "saved")
    assert all(torch.equal(value, before[name]) for name, value in tz.full_state_dict(model).items())
    tz.close(model)


def test_another_precision_and_other_groups_are_refused(saved: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "fp32").mkdir()
    with (
        running(config(tmp_path / "fp32")) as other,
        pytest.raises(tz.CheckpointError, match=r"train\.precision"),
    ):
        other.load(saved)
    regrouped = tz.AdamW(run.model.parameters())
    with pytest.raises(tz.CheckpointError, match=r"param groups"):
        tz.load_checkpoint(run.model, regrouped, saved)


def test_a_newer_format_is_refused(saved: Path, run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "saved"
    shutil.copytree(saved, copy)
    manifest = json.loads((copy / "manifest.json").read_text()) | {"version": 99}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(tz.CheckpointError, match=r"version 99 is newer"):
        run.load(copy)
