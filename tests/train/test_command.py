"""The command line as a person runs it: small jobs in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..support.forked import run_module

CONFIG = """
[model]
dim = 32
layers = 2
heads = 2
[data]
path = "text/*.txt"
[train]
steps = 6
batch_size = 4
seq_len = 32
validation_batches = 1
sample_tokens = 8
threads = 1
[optimizer]
lr = 1e-3
schedule = "cosine"
warmup = 2
[tiers]
nvme = ["nvme"]
[sharding]
min_unit = 0
[placement]
params = "nvme"
optimizer = "nvme"
gradients = "nvme"
[checkpoint]
dir = "checkpoints"
every = 3
[log]
metrics = "metrics.jsonl"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "nvme").mkdir()
    for name in ("a", "b"):
        (tmp_path / "text" / f"{name}.txt").write_text("to be or not to be, that is the question\n" * 200)
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def command(folder: Path, *arguments: str, ranks: int = 1) -> list[str]:
    start = [sys.executable]
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        start += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}"]
    return [*start, "-m", "tierzero", "train", str(folder / "run.toml"), *arguments]


def run(folder: Path, *arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    if ranks == 1:
        return run_module("tierzero", "train", str(folder / "run.toml"), *arguments)
    return subprocess.run(
        command(folder, *arguments, ranks=ranks), capture_output=True, text=True, timeout=200, check=False
    )


def metrics(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tier_files(folder: Path) -> list[Path]:
    return [path for path in (folder / "nvme").rglob("*") if path.is_file()]


def test_whole_job_and_resume(folder: Path) -> None:
    whole = subprocess.run(command(folder), capture_output=True, text=True, timeout=200, check=False)
    assert whole.returncode == 0, whole.stderr
    for line in ("validation loss", "sample", "model", "tiers", "nvme", "memory"):
        assert line in whole.stdout, whole.stdout
    records = metrics(folder)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    fields = "loss grad_norm lr tokens step_s tokens_per_s rss_bytes peak_rss_bytes nvme_read_bytes nvme_write_bytes"
    for record in records:
        assert set(fields.split()) <= record.keys()
        assert set(record["tier_bytes"]) == {"device", "host", "nvme"}
        assert set(record["comm_bytes"]) == {"all_gather", "reduce_scatter", "all_reduce"}
        assert set(record["stall_s"]) == {"nvme_read", "nvme_write", "gather", "optimizer", "host_budget"}
        assert record["tokens"] == 4 * 32
    assert tier_files(folder) == []
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000006"]

    (folder / "metrics.jsonl").unlink()
    resumed = run(folder, "--resume", str(folder / "checkpoints" / "step-00000003"))
    assert resumed.returncode == 0, resumed.stderr
    assert [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in metrics(folder)] == [
        (r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in records[3:]
    ]
    kept = sorted(str(path.relative_to(folder)) for path in (folder / "checkpoints").rglob("step-*"))
    assert kept == [f"checkpoints/{name}" for name in ("earlier-1/step-00000006", "step-00000003", "step-00000006")]

    ended = run(folder, "--resume", "auto", "--set", "checkpoint.every=4")
    assert ended.returncode == 0, ended.stderr
    assert "training done already" in ended.stdout
    longer = run(folder, "--resume", "auto", "--steps", "7", "--set", "checkpoint.every=4")
    assert longer.returncode == 0, longer.stderr
    assert (folder / "checkpoints" / "step-00000007").is_dir()


def test_two_ranks_follow_one(folder: Path) -> None:
    alone = ["--set", "train.precision=fp32", "--set", "checkpoint.every=0"]
    assert run(folder, *alone).returncode == 0
    one = metrics(folder)
    (folder / "metrics.jsonl").unlink()
    pair = run(folder, *alone, ranks=2)
    assert pair.returncode == 0, pair.stderr
    for left, right in zip(one, metrics(folder), strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)
    assert tier_files(folder) == []


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--set", "train.stepz=3"], "train.steps"),
        (["--set", "train.batch_size=0"], "train.batch_size"),
        (["--set", "train.micro_batch=3"], "micro_batch"),
        (["--set", "tiers.host=1KB"], "tiers.host"),
        (["--set", "tiers.device=1KB"], "tiers.device"),
        (["--set", "tiers.nvme_limit=100KB"], "nvme_limit"),
        (["--set", 'tiers.nvme=["no/such/folder"]'], "tiers.nvme"),
        (["--set", 'data.path="no/such/*.txt"'], "data.path"),
        (["--set", "train.seq_len=100000"], "data.path"),
        (["--resume", "no/such/checkpoint"], "no/such/checkpoint"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(folder: Path, arguments: list[str], wanted: str) -> None:
    refused = run(folder, *arguments)
    assert refused.returncode == 2, refused.stderr
    lines = [line for line in refused.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, refused.stderr
    assert lines[0].startswith("tierzero: error: ")
    assert wanted in lines[0]
    assert tier_files(folder) == []


def wait_for_steps(started: subprocess.Popen[bytes], folder: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while not ((folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_text().count("\n") >= steps):
        assert started.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_run_with_durable_tiers_goes_on(folder: Path) -> None:
    keys = ("durable=true", "async=true", "every=6")
    flags = [word for key in keys for word in ("--set", f"checkpoint.{key}")]
    flags += ["--set", "optimizer.schedule=constant"]
    whole = run(folder, "--steps", "12", "--set", f"checkpoint.dir={folder / 'other'}", *flags)
    assert whole.returncode == 0, whole.stderr
    assert sorted(path.name for path in (folder / "other").iterdir()) == ["step-00000006", "step-00000012"]
    assert tier_files(folder) == []
    wanted = [(record["step"], record["loss"]) for record in metrics(folder)]

    (folder / "metrics.jsonl").unlink()
    started = subprocess.Popen(command(folder, "--steps", "100000", *flags), stdout=subprocess.PIPE)
    wait_for_steps(started, folder, 4)
    started.kill()
    started.communicate()
    refused = run(folder, "--steps", "12", *flags)
    assert refused.returncode == 2
    assert "is sealed in" in refused.stderr
    assert "--resume auto" in refused.stderr
    resumed = run(folder, "--steps", "12", "--resume", "auto", *flags)
    assert resumed.returncode == 0, resumed.stderr
    assert [(record["step"], record["loss"]) for record in metrics(folder)] == wanted
    assert tier_files(folder) == []


def test_batch_that_the_ranks_do_not_divide(folder: Path) -> None:
    refused = run(folder, "--set", "train.batch_size=3", ranks=2)
    assert refused.returncode != 0
    assert "train.batch_size" in refused.stderr


def test_sigterm_ends_the_run_and_removes_its_files(folder: Path) -> None:
    started = subprocess.Popen(
        command(folder, "--steps", "100000", "--set", "checkpoint.every=0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    wait_for_steps(started, folder, 2)
    started.send_signal(signal.SIGTERM)
    started.communicate(timeout=60)
    assert started.returncode == 143
    assert tier_files(folder) == []
