"""``tierzero check``: every part is told, and why it is not in use."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tierzero.cli.app import app
from tierzero.optim import loops
from tierzero.tiers import free_memory, striped_file

PARTS = ["tierzero", "device", "page locking", "host memory", "cores", "kernels"]


def checked(nvme: Path) -> dict[str, Any]:
    config = nvme.parent / "run.toml"
    config.write_text(f'[tiers]\nnvme = ["{nvme}"]\n')
    ran = CliRunner().invoke(app, ["check", str(config), "--json"])
    assert ran.exit_code == 0, ran.output
    found: dict[str, Any] = json.loads(ran.stdout)
    assert list(found) == [*PARTS, f"nvme {nvme}"]
    return found


def test_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    found = checked(tmp_path / "nvme")
    assert found["kernels"]["active"]
    assert f"{len(os.sched_getaffinity(0))} of the machine's" in found["cores"]["text"]
    assert "free" in found[f"nvme {tmp_path / 'nvme'}"]["text"]
    assert not list((tmp_path / "nvme").iterdir())
    lines = CliRunner().invoke(app, ["check"]).stdout.splitlines()
    assert len(lines) == len(PARTS) + 1
    assert lines[-1].split(maxsplit=2) == ["nvme", "off", "tiers.nvme names no folder"]


def test_why_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        return os.strerror(errno.EINVAL)

    monkeypatch.setattr(striped_file, "_go_direct", refuse)
    monkeypatch.setattr(loops.adam_bf16, "_cache", object())
    monkeypatch.setattr(free_memory, "PROCESS", tmp_path)
    monkeypatch.setattr(free_memory, "GROUPS", tmp_path)
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "memory.max").write_text(str(2**30))
    (tmp_path / "nvme").mkdir()
    found = checked(tmp_path / "nvme")
    assert "a control group allows" in found["host memory"]["text"]
    assert found["kernels"] == {
        "active": False,
        "text": "compiled again by every process, as no folder can be written to; set NUMBA_CACHE_DIR to a writable "
        "folder",
    }
    drive = found[f"nvme {tmp_path / 'nvme'}"]
    assert not drive["active"]
    assert "no O_DIRECT" in drive["text"]
    missing = checked(tmp_path / "nowhere")[f"nvme {tmp_path / 'nowhere'}"]
    assert missing["text"].endswith("does not exist; create it or name another path")
