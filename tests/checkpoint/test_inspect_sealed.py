"""What ``tierzero inspect`` says of durable tier files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tierzero as tz
from tierzero.cli.app import app

from ..support.rank_pool import RankPool
from ..support.resuming import running
from ..support.sealing import durable_settings, sealed_steps


def settings(root: Path) -> tz.Config:
    (root / "other").mkdir(exist_ok=True)
    return durable_settings(root).override([f"tiers.nvme=['{root / 'nvme'}', '{root / 'other'}']"])


def seal_as_rank(rank: int, size: int, folder: str) -> None:
    with running(settings(Path(folder))) as run:
        sealed_steps(run, 3, rank)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, two_ranks: RankPool) -> Path:
    folder = tmp_path_factory.mktemp("sealed")
    two_ranks.run(seal_as_rank, str(folder))
    return folder


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    return tmp_path


def inspect(*arguments: Path | str) -> tuple[int, str, str]:
    ran = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return ran.exit_code, ran.stdout, ran.stderr


def as_json(*paths: Path) -> dict[str, Any]:
    code, out, err = inspect(*paths, "--json")
    assert (code, err) == (0, "")
    (found,) = json.loads(out)["sealed"]
    assert isinstance(found, dict)
    return found


def folder_of(root: Path, drive: str, rank: int) -> Path:
    (folder,) = (root / drive / "tierzero").glob(f"lasting-*-rank-{rank}")
    return folder


def test_what_is_sealed(root: Path) -> None:
    found = as_json(root / "nvme", root / "other")
    assert (found["complete"], found["problems"]) == (True, [])
    assert (found["step"], found["number"], found["world_size"], found["ranks"]) == (3, 3, 2, [0, 1])
    assert (found["drives"], found["drives_in_all"]) == ([1, 2], 2)
    assert found["layout"]["tile"] == 4096
    assert sum(found["slots"]) > 20
    for path in (root / "other", folder_of(root, "other", 1)):
        part = as_json(path)
        assert (part["drives"], part["step"], part["complete"]) == ([2], 3, True)
    code, out, _ = inspect(root / "nvme")
    assert code == 0
    for text in ("rank-0, 1", "step 3, seal 3", "2 of 2 ranks, 1 of 2 drives", "tile 4,096", "objects in the first"):
        assert text in out, out


def test_the_step_that_stands_on_all_of_them(root: Path) -> None:
    """The newest record of one drive of one rank was not written any more, or is damaged."""
    newest = max(folder_of(root, "other", 1).glob("sealed-*.json"))
    text = newest.read_text()
    newest.unlink()
    found = as_json(root / "nvme", root / "other")
    assert (found["step"], found["problems"]) == (2, [])
    assert as_json(root / "nvme")["step"] == 3
    newest.write_text(text.replace('"step": 3', '"step": 4', 1))
    found = as_json(root / "nvme", root / "other")
    assert (found["step"], found["complete"]) == (2, False)
    assert f"{newest}: the record does not match its checksum" in found["problems"][0]


def test_what_cannot_go_on(root: Path) -> None:
    lost = folder_of(root, "other", 0)
    shutil.rmtree(lost)
    found = as_json(root / "nvme", root / "other")
    assert (found["step"], found["complete"]) == (None, False)
    assert str(lost) in found["problems"][0]
    code, out, _ = inspect(root / "nvme", root / "other")
    assert code == 0
    assert "damage " in out
    assert str(lost) in out


def test_mistakes(root: Path) -> None:
    for arguments in (("nvme", "--verify"), ("other", "none", "--verify"), ("none",), ("none", "nothing")):
        code, out, err = inspect(*(root / a if "-" not in a else a for a in arguments))
        assert (code, out) == (2, ""), arguments
        assert err.startswith("tierzero: error: ")
        assert err.count("\n") == 1
