"""What a checkpoint is, and every place where it is damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tierzero as tz
from tierzero.cli.app import app

from ..support.oracle import config
from ..support.rank_pool import RankPool
from ..support.resuming import running

STATE = {"train": {"precision": "bf16"}}


def save_as_rank(rank: int, size: int, folder: str) -> None:
    with running(config(Path(folder), **STATE)) as run:
        run.train(2, rank)
        run.save(Path(folder) / "saved")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, two_ranks: RankPool) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    two_ranks.run(save_as_rank, str(folder))
    return folder / "saved"


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "saved")
    return tmp_path / "saved"


def inspect(*arguments: str) -> tuple[int, str, str]:
    ran = CliRunner().invoke(app, ["inspect", *arguments])
    return ran.exit_code, ran.stdout, ran.stderr


def as_json(*arguments: str, code: int = 0) -> dict[str, Any]:
    exit_code, out, err = inspect(*arguments, "--json")
    assert (exit_code, err) == (code, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_what_it_holds(original: Path) -> None:
    found = as_json(str(original), "--tensors")
    assert found["path"] == str(original)
    assert found["complete"] is True
    assert (found["step"], found["world_size"], found["extra"]) == (2, 2, ["step", "scheduler"])
    assert [group["parameters"] for group in found["optimizer"]] == [9, 15, 0]
    assert found["optimizer"][1]["betas"] == [0.8, 0.99]
    trained = found["elements"] - 24 * 25
    sizes = found["segment_bytes"]
    assert {kind: sizes[kind] for kind in ("m", "v")} == {"m": 4 * trained, "v": 4 * trained}
    assert sum(found["dtypes"].values()) == found["elements"]
    assert found["dtypes"]["float32"] == 48
    rows = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert rows["none"] == {
        "name": "none",
        "shape": [0, 3],
        "dtype": "bfloat16",
        "trainable": True,
        "step": 2,
        "tied": [],
    }
    assert rows["embed.weight"]["tied"] == ["head.weight"]
    assert rows["fixed.weight"]["trainable"] is False
    assert rows["norm.num_batches_tracked"]["step"] is None
    assert "tensors" not in as_json(str(original))
    code, out, _ = inspect(str(original), "--tensors", "--verify")
    assert code == 0
    for text in ("step 2, 2 ranks", "24 with", "also head.weight", "frozen", "buffer", "every checksum matches"):
        assert text in out, out


def extents(folder: Path, rank: int) -> list[dict[str, Any]]:
    index = json.loads((folder / f"rank-{rank:05d}.json").read_text())
    found: list[dict[str, Any]] = [extent for extent in index["extents"] if extent["nbytes"]]
    return found


def harm(folder: Path, rank: int, offset: int) -> None:
    path = folder / f"rank-{rank:05d}.bin"
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 4
    path.write_bytes(raw)


def test_all_damage_is_named(saved: Path) -> None:
    harmed = [(rank, extents(saved, rank)[number]) for rank in (0, 1) for number in (3, 7)]
    for rank, extent in harmed:
        harm(saved, rank, extent["offset"] + extent["nbytes"] - 1)
    assert as_json(str(saved))["complete"] is True  # nothing was read
    found = as_json(str(saved), "--verify", code=1)
    assert found["complete"] is False
    keys = ("segment", "parameter", "offset", "nbytes")
    wanted = [(f"rank-{rank:05d}.bin", *(extent[key] for key in keys)) for rank, extent in harmed]
    assert [(damage["file"], *(damage[key] for key in keys)) for damage in found["damage"]] == wanted
    code, out, err = inspect(str(saved), "--verify")
    assert (code, err) == (1, "")
    for rank, extent in harmed:
        line = next(line for line in out.splitlines() if f"rank-{rank:05d}.bin" in line and extent["parameter"] in line)
        assert f"at {extent['offset']:,}: does not match its checksum" in line


def test_files_that_are_cut_or_missing(saved: Path) -> None:
    last = max(extents(saved, 1), key=lambda extent: int(extent["offset"]))
    path = saved / "rank-00001.bin"
    path.write_bytes(path.read_bytes()[: last["offset"] + 2])
    [damage] = tz.verify_checkpoint(saved)
    assert (damage.file, damage.parameter, damage.offset) == (path.name, last["parameter"], last["offset"])
    assert damage.problem == "the file ends after 2 of them"
    path.unlink()
    (saved / "rank-00000.json").write_text("{}")
    found = as_json(str(saved), "--verify", code=1)
    assert [damage["file"] for damage in found["damage"]] == ["rank-00000.json", "rank-00001.bin"]
    code, out, err = inspect(str(saved))
    assert (code, out) == (1, "")
    assert "rank-00000.json" in err
    assert err.count("\n") == 1
    (saved / "manifest.json").write_text("{}")
    assert [damage.file for damage in tz.verify_checkpoint(saved)] == ["manifest.json"]


def test_a_gap_between_extents_is_damage(tmp_path: Path) -> None:
    """Sound files that leave out a part of a parameter, as a writer with a fault could make them."""
    from tierzero.checked_json import CHECKSUM, read_json, write_json

    save_as_rank(0, 1, str(tmp_path))
    saved = tmp_path / "saved"
    index = read_json(saved / "rank-00000.json", "the index")
    index["extents"] = [e for e in index["extents"] if (e["parameter"], e["segment"]) != ("norm.bias", "v")]
    write_json(saved / "rank-00000.json", index)
    manifest = read_json(saved / "manifest.json", "the manifest")
    manifest["indexes"] = [read_json(saved / "rank-00000.json", "the index")[CHECKSUM]]
    write_json(saved / "manifest.json", manifest)
    [damage] = tz.verify_checkpoint(saved)
    assert "'norm.bias' is incomplete" in damage.problem
    with pytest.raises(tz.CheckpointError, match=r"norm\.bias"):
        tz.inspect_checkpoint(saved)


def test_a_folder_of_checkpoints(original: Path, tmp_path: Path) -> None:
    for step in (3, 20, 100):
        shutil.copytree(original, tmp_path / f"step-{step:08d}")
    (tmp_path / "step-00000020" / "rank-00001.bin").unlink()
    harm(tmp_path / "step-00000100", 0, extents(original, 0)[0]["offset"])
    found = as_json(str(tmp_path))["checkpoints"]
    assert [Path(each["path"]).name for each in found] == ["step-00000003", "step-00000020", "step-00000100"]
    assert [each["step"] for each in found] == [2, 20, 2]
    assert [each["complete"] for each in found] == [True, False, True]
    assert "rank-00001.bin" in found[1]["problem"]
    code, out, _ = inspect(str(tmp_path), "--verify")
    assert code == 1
    lines = out.splitlines()
    assert "whole" in lines[0]
    assert "rank-00001.bin" in lines[1]
    assert "does not match its checksum" in lines[2]


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        code, out, err = inspect(str(path))
        assert (code, out) == (2, "")
        assert err.startswith(f"tierzero: error: {path}: ")
        assert err.count("\n") == 1
