"""Saving and loading a checkpoint against fio on the same folder, in turns; and the memory that they take."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

import tierzero as tz
from tierzero.errors import ConfigError
from tierzero.models.gpt import GPT

_BLOCK, _DEPTH = "8m", 8


@dataclass
class CheckpointRate:
    """``what`` is "save" or "load". Seconds of each round for ours and for fio; bytes that the process grew by."""

    what: str
    nbytes: int
    seconds: list[float] = field(default_factory=list)
    fio_seconds: list[float] = field(default_factory=list)
    grown: int = 0

    @property
    def rate(self) -> float:
        """Bytes per second, of the median round."""
        return self.nbytes / statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """Our rate over fio's, the median of the rounds."""
        return statistics.median(fio / own for own, fio in zip(self.seconds, self.fio_seconds, strict=True))


def measure(folder: Path, shape: dict[str, int], tier: str, host: str, rounds: int) -> list[CheckpointRate]:
    """A GPT of ``shape`` whose state lies in ``tier`` ("host", or "nvme": files in ``folder`` too) is saved to
    ``folder`` and loaded from it. fio moves as many bytes: those of the checkpoint, and where the state is in files on
    the same drive, what has to be moved from or to these as well. Raises ConfigError without fio.
    """
    if shutil.which("fio") is None:
        raise ConfigError("the reference is fio, which is not installed")
    with tempfile.TemporaryDirectory(dir=folder, prefix="tierzero-bench-") as name:
        root = Path(name)
        config = tz.Config.from_dict(
            {
                "tiers": {"nvme": [name], "host": host},
                "placement": dict.fromkeys(("params", "optimizer", "gradients"), tier),
            }
        )
        with torch.device("meta"), tz.empty_init():
            model = GPT(shape["dim"], shape["layers"], shape["heads"], shape["vocab"], 128)
        tz.shard(model, config)
        optimizer = tz.AdamW(model.parameters())
        try:
            return list(_compare(model, optimizer, root, tier == "nvme", rounds))
        finally:
            tz.close(model)


def _compare(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, root: Path, on_drive: bool, rounds: int
) -> Iterator[CheckpointRate]:
    target = root / "checkpoint"
    tz.save_checkpoint(model, optimizer, target)
    nbytes = sum(path.stat().st_size for path in target.glob("*.bin"))
    save, load = CheckpointRate("save", nbytes), CheckpointRate("load", nbytes)
    ways: list[tuple[CheckpointRate, Callable[[], object], list[str]]] = [
        (save, lambda: tz.save_checkpoint(model, optimizer, target), ["write", "read"] if on_drive else ["write"]),
        (load, lambda: tz.load_checkpoint(model, optimizer, target), ["read", "write"] if on_drive else ["read"]),
    ]
    _fio(root, nbytes, "write")
    for number in range(rounds):
        for rate, act, directions in ways:
            for ours in (True, False) if number % 2 else (False, True):
                if ours:
                    rate.seconds.append(_timed(act, rate))
                else:
                    rate.fio_seconds.append(sum(_fio(root, nbytes, direction) for direction in directions))
    yield from (save, load)


def _timed(act: Callable[[], object], rate: CheckpointRate) -> float:
    with _growth() as grown:
        started = time.perf_counter()
        act()
        seconds = time.perf_counter() - started
    rate.grown = max(rate.grown, grown[0])
    return seconds


@contextmanager
def _growth() -> Iterator[list[int]]:
    """Most bytes that the process has grown by inside; filled in at the end."""
    process, ended, most = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def watch() -> None:
        while not ended.wait(0.005):
            most[0] = max(most[0], process.memory_info().rss - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


def _fio(root: Path, nbytes: int, direction: str) -> float:
    """Seconds for one sequential pass over a file of ``nbytes``."""
    command = [
        "fio",
        "--name=checkpoint",
        f"--filename={root / 'fio'}",
        f"--size={nbytes}",
        f"--rw={direction}",
        f"--bs={_BLOCK}",
        f"--iodepth={_DEPTH}",
        "--ioengine=io_uring",
        "--direct=1",
        "--end_fsync=1",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job["job_runtime"]) / 1000  # the flush at the end included
