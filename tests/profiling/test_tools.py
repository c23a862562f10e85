"""The tools measure what they say: small real runs, and the arithmetic on made-up ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tierzero.errors import ConfigError
from tierzero.profiling.compare import Row, bound, parse_settings, table
from tierzero.profiling.memory_cap import run_capped
from tierzero.profiling.moments import MomentRun
from tierzero.profiling.moments import table as moments_table
from tierzero.tiers.drive_rate import mixed_rate

from ..support.forked import run_module

ROOT = Path(__file__).resolve().parents[2]
ROW = Row("plain", 1_000_000, 2.0, 512.0, 4 * 10**9, 0.0, 3.5, 0.0)
TINY = ["--size", "tiny", "--seq-len", "32", "--batch", "2"]


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_module(str(ROOT / "tools" / name), *arguments)


@pytest.mark.long
def test_compare_prints_what_both_systems_measured(tmp_path: Path) -> None:
    common = [*TINY, "--rounds", "1", "--steps", "2", "--warmup", "1", "--nvme", str(tmp_path), "--json"]
    done = tool("compare.py", *common, "plain", "tierzero-nvme-gradients")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    plain, ours = found["rows"]
    assert (plain["name"], ours["name"]) == ("plain", "tierzero-nvme-gradients")
    assert plain["parameters"] == ours["parameters"]
    assert plain["last_loss"] == pytest.approx(ours["last_loss"], rel=1e-3)
    assert plain["disk_bytes_per_parameter"] < 1 < 20 < ours["disk_bytes_per_parameter"] < 40
    assert found["disk_bytes_per_s"] > 0
    assert found["bound_s"]["tierzero-nvme-gradients"] >= plain["step_s"]
    assert list(tmp_path.iterdir()) == []


def test_unknown_systems_are_named() -> None:
    done = tool("compare.py", "fast")
    assert done.returncode == 2
    assert "unknown system 'fast'" in done.stderr


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="deepspeed is installed: the tool would run it")
def test_missing_packages_are_named() -> None:
    done = tool("compare.py", "deepspeed-nvme")
    assert done.returncode == 2
    assert "deepspeed is not installed" in done.stderr


def test_the_bound_is_the_slower_of_computing_and_moving() -> None:
    row = replace(ROW, name="ours", step_s=3.0, disk_bytes_per_parameter=25.0)
    assert bound(row, 2.0, 25e6) == 2.0
    assert bound(row, 2.0, 10e6) == 2.5
    lines = table([ROW, row], 10e6).splitlines()
    assert lines[3].split("|")[1:5] == [" ours ", " 3.00 ", " 1.50 ", " 1.20 "]


def test_settings_are_those_of_the_command_line() -> None:
    assert parse_settings(["tiers.tile=4096", "placement.params=host"]) == {
        "tiers": {"tile": 4096},
        "placement": {"params": "host"},
    }
    with pytest.raises(ConfigError, match=r"tiers\.tile"):
        parse_settings(["tiers.tile=many"])


def test_the_drives_rate_is_that_of_real_transfers(tmp_path: Path) -> None:
    assert mixed_rate(tmp_path, nbytes=32 << 20, block=1 << 20, depth=4) > 1e6
    assert list(tmp_path.iterdir()) == []


def test_a_cap_is_enforced() -> None:
    take = "import sys; x = b'x' * (int(sys.argv[1]) << 20); print(len(x))"
    fits = run_capped([sys.executable, "-c", take, "20"], 200 << 20)
    assert (fits.returncode, fits.killed, fits.stdout.strip()) == (0, False, str(20 << 20))
    assert fits.peak is None or 20 << 20 < fits.peak <= 200 << 20
    beyond = run_capped([sys.executable, "-c", take, "400"], 200 << 20)
    assert beyond.returncode != 0


@pytest.mark.long
def test_scale_names_the_largest_size_that_trains(tmp_path: Path) -> None:
    arguments = ["--seq-len", "32", "--batch", "2", "--steps", "2", "--nvme", str(tmp_path)]
    done = tool("scale.py", "--sizes", "tiny", "--cap", "2GiB", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2].startswith("| tiny | 5 M | 2.00 | ")
    refused = tool("scale.py", "--sizes", "tiny", "125m", "--cap", "300MiB", *arguments)
    assert refused.returncode == 1, refused.stdout
    assert len(refused.stdout.splitlines()) == 3, "it goes on after a size that does not fit"


def test_the_engine_is_measured_beside_bare_transfers(tmp_path: Path) -> None:
    done = tool("bench_engine.py", "--nvme", str(tmp_path), "--size", "32MiB", "--block", "1MiB", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:5] for line in done.stdout.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["write", "read"]
    assert all(float(value) > 0 for row in rows for value in row[1:])


def test_the_kernel_is_measured_beside_code_that_gives_the_same_bits() -> None:
    done = tool("bench_adam.py", "--numel", str(1 << 16), "--tile", str(1 << 14), "--threads", "2", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2].startswith("| tierzero | ")
    if shutil.which("g++"):
        assert "the same bits" in done.stdout


def test_losses_of_moments_are_compared_seed_by_seed() -> None:
    losses = {
        ("fp32", 0): 2.0,
        ("bf16", 0): 2.1,
        ("int8", 0): 1.9,
        ("fp32", 1): 3.0,
        ("bf16", 1): 3.2,
        ("int8", 1): 3.0,
    }
    runs = [MomentRun(name, seed, 16.0 + seed, 0.5, loss) for (name, seed), loss in losses.items()]
    lines = moments_table(runs)
    assert lines[3] == "| bf16 | 16.5 | 0.500 | 2.6500 | +0.1500 (+0.2000) |"
    assert lines[4] == "| int8 | 16.5 | 0.500 | 2.4500 | -0.0500 (-0.1000) |"


@pytest.mark.long
def test_moments_in_fewer_bytes_move_less_and_learn_as_much(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        f'[model]\ndim = 128\nlayers = 3\n[train]\nbatch_size = 4\nseq_len = 64\n[tiers]\nnvme = ["{tmp_path}"]\n'
        '[placement]\nparams = "nvme"\noptimizer = "nvme"\ngradients = "nvme"\n'
    )
    done = tool("compare_moments.py", str(config), "--steps", "60", "--margin", "0.06")
    assert done.returncode == 0, done.stderr + done.stdout
    moved = [float(line.split("|")[2]) for line in done.stdout.splitlines()[2:]]
    assert moved[0] - 8.5 < moved[1] < moved[0] - 7.5
    assert moved[1] - 4.5 < moved[2] < moved[1] - 3.0
