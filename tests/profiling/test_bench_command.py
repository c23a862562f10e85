"""`tierzero bench` as a person runs it: small real measurements, mistakes, and interruptions."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from tierzero.cli.app import app
from tierzero.errors import TierZeroError
from tierzero.planner.machine import MachineProfile
from tierzero.profiling.bench import fio, local_ranks
from tierzero.profiling.bench.collective import CollectivePlan
from tierzero.profiling.bench.requests import MeasuredFile, Point

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
SMALL = ("--size", "16MiB", "--blocks", "1MiB", "--depths", "2")


def bench(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["bench", *words])
    return done.exit_code, done.stdout, done.stderr


def test_everything_is_measured_and_saved(tmp_path: Path) -> None:
    drive, profile = tmp_path / "drive", tmp_path / "profile.json"
    drive.mkdir()
    quick = ["--seconds", "0.2", "--sizes", "64KiB,256KiB"]
    code, out, err = bench("all", "--nvme", str(drive), *SMALL, *quick, "--save", str(profile), "--json")
    assert code == 0, err
    found = json.loads(out)
    (target,) = found["io"]["targets"]
    assert {row["op"] for row in target["rows"]} == {"read", "write", "mixed"}
    for row in target["rows"]:
        rate, latency = row["bytes_per_s"], row["latency_s"]
        assert 0 < rate["low"] <= rate["median"] <= rate["high"]
        assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"]
    assert found["adam"]["rows"][0]["threads"] == 1
    assert found["link"]["bytes_per_s"]["host_copy"]["median"] > 1e8
    assert {"bf16", "fp32"} <= set(found["compute"]["by_dtype"])
    assert found["collective"]["ranks"] == 2
    assert list(drive.iterdir()) == []

    loaded = MachineProfile.load(profile)
    assert loaded.date == found["date"]
    assert loaded.host.name == found["machine"]["cpu"]
    assert str(drive) in loaded.drives[0].name
    direct = any(row["direct"] for row in target["rows"])
    medians = {r["op"]: r["bytes_per_s"]["median"] for r in target["rows"] if r["direct"] == direct}
    assert {op: getattr(loaded.drives[0], op) for op in medians} == medians
    assert loaded.network is not None
    assert {each.nbytes for each in loaded.network.all_gather} <= {65536, 262144}


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "no path to measure; give --nvme PATH"),
        (("--nvme", "{folder}/nowhere"), "nowhere does not exist; create it"),
        (("--nvme", "{folder}/file"), "file is not a directory"),
        (("--nvme", "{folder}", "--blocks", "1000"), "1,000 bytes is no multiple of 4096"),
        (("--nvme", "{folder}", "--blocks", "1MiB", "--depths", "32", "--size", "16MiB"), "less than what the largest"),
        (("--nvme", "{folder}", "--blocks", "8KiB,12KiB", "--size", "16KiB", "--depths", "1"), "multiples of 24,576"),
        (("--nvme", "{folder}", "--size", "1000TB"), "would leave less than a tenth"),
        (("--nvme", "{folder}", "--blocks", "1GiB", "--depths", "256", "--size", "1TB"), "of memory, more than half"),
        (("--nvme", "{folder}", "--depths", "many"), "no list of whole numbers"),
        (("--nvme", "{folder}", "--plot", "{folder}/nowhere/x.png"), "--plot"),
        (("--config", "{folder}/nowhere.toml"), "nowhere.toml"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path: Path, words: tuple[str, ...], part: str) -> None:
    (tmp_path / "file").touch()
    code, out, err = bench("io", *(word.format(folder=tmp_path) for word in words))
    assert code == 2
    assert part in " ".join((out + err).split())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_fio_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = bench("io", "--nvme", str(tmp_path), "--fio")
    assert code == 2
    assert "there is no fio here; install the package fio" in err


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
def test_fio_is_measured_on_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fio, "_LEAST_S", 0.1)
    with MeasuredFile([tmp_path], 16 * MIB, [MIB], 2) as file:
        file.fill(1.0)
        if not file.has_direct:
            pytest.skip("no O_DIRECT here")
        rows = fio.compare(file, [Point(True, MIB, 2)], 0.1, lambda what, done: None)
        assert [path.name for path in file.files[0].parent.iterdir()] == [file.files[0].name]
    assert [row.op for row in rows] == ["read", "write"]
    for row in rows:
        assert row.fio.samples == row.engine.samples == 2
        assert 0.01 < row.ratio < 100


def test_a_rank_that_fails_ends_the_others_with_its_cause() -> None:
    before = {process.pid for process in psutil.Process().children()}

    def kill_second() -> None:
        """As soon as both run."""
        while len(found := [p for p in psutil.Process().children() if p.pid not in before]) < 2:
            time.sleep(0.02)
        time.sleep(0.3)
        max(found, key=lambda process: (process.create_time(), process.pid)).kill()

    killer = threading.Thread(target=kill_second, daemon=True)
    killer.start()
    with pytest.raises(TierZeroError, match=r"rank 1 was ended by SIGKILL"):
        local_ranks.measure(CollectivePlan(seconds=30.0), 2, lambda what, done: None)
    killer.join()
    assert [process for process in psutil.Process().children() if process.pid not in before] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_files(tmp_path: Path, number: signal.Signals) -> None:
    script = [sys.executable, str(ROOT / "tools" / "swap_bench.py")]
    words = ["--nvme", str(tmp_path), "--size", "64MiB", "--blocks", "1MiB", "--depths", "2", "--seconds", "60"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*script, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.rglob("*.tier")) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        time.sleep(0.2)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (128 + number, "", "")
    assert list(tmp_path.iterdir()) == []
