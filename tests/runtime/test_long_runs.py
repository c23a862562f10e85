"""What only many steps show: memory that grows, and reads that hide behind the computation of a slow drive."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import tierzero as tz
from tierzero.api import running

from ..support.oracle import Case, built, config, sharded
from ..support.zoo import Odd, regression, vectors

ODD = Case(Odd, regression, (nn.Linear,))
DELAY_S = 0.02


@dataclass(frozen=True)
class Held:
    """What a process holds: descriptors, threads and files counted, memory in MiB."""

    descriptors: int
    threads: int
    files: int
    rss: float

    @classmethod
    def now(cls, folder: Path) -> Held:
        gc.collect()
        process = psutil.Process()
        files = sum(1 for path in folder.rglob("*") if path.is_file())
        return cls(process.num_fds(), threading.active_count(), files, process.memory_info().rss / 2**20)


def live(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, steps: int) -> None:
    """Steps, evaluations, whole states, checkpoints written in both ways and loaded, and calls that fail."""
    for step in range(steps):
        regression(model, step, 0).backward()
        tz.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(vectors(step, 0))
        if step % 10 == 0:
            tz.full_state_dict(model)
            tz.save_checkpoint(model, optimizer, folder / "saved", background=step % 20 == 0)
            tz.load_checkpoint(model, optimizer, folder / "saved")
            with pytest.raises(tz.CheckpointError):
                tz.load_checkpoint(model, optimizer, folder / "none")


@pytest.mark.parametrize("steps", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_nothing_grows(steps: int, tmp_path: Path) -> None:
    nvme, saved = tmp_path / "nvme", tmp_path / "saved"
    for folder in (nvme, saved):
        folder.mkdir()
    before = Held.now(tmp_path)
    with sharded(built(ODD), config(nvme), ODD.units) as model:
        optimizer = tz.AdamW(model.parameters(), lr=1e-3)
        live(model, optimizer, saved, 12)
        early = Held.now(tmp_path)
        live(model, optimizer, saved, steps)
        late = Held.now(tmp_path)
        assert (late.descriptors, late.files) == (early.descriptors, early.files)
        assert late.threads <= early.threads + 4  # of pools that had not needed all of theirs
        assert late.rss < early.rss + 4
    del model, optimizer
    after = Held.now(tmp_path)
    assert (after.descriptors, after.threads) == (before.descriptors, before.threads)
    assert [path.name for path in nvme.rglob("*")] == []


class _Busy(torch.autograd.Function):
    """Computes for `DELAY_S`, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(DELAY_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(DELAY_S)
        return grad


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + _Busy.apply(self.linear(self.norm(x)))


class SlowReads:
    """A drive that takes `DELAY_S` for each read."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, op: str, path: Path, offset: int, nbytes: int) -> None:
        if op == "read":
            self.count += 1
            time.sleep(DELAY_S)


@pytest.mark.long
@pytest.mark.parametrize("training", [True, False])
def test_reads_of_a_slow_drive_hide_behind_the_computation(training: bool, tmp_path: Path) -> None:
    model = nn.Sequential(*(Layer() for _ in range(16)))
    with sharded(model, config(tmp_path, tiers={"prefetch": "auto"}), (Layer,)):
        optimizer = tz.AdamW(model.parameters())
        drive = running(model).engine.fault = SlowReads()
        shares = []
        for _ in range(5):
            drive.count, start = 0, time.perf_counter()
            with torch.set_grad_enabled(training):
                out = model(torch.randn(4, 64))
            if training:
                out.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            computing = 16 * DELAY_S * (2 if training else 1)
            shares.append(1 - (time.perf_counter() - start - computing) / (drive.count * DELAY_S))
        assert max(shares[2:]) >= 0.8, shares
