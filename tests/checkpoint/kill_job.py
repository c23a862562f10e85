"""A run of ten steps with a checkpoint after each, or with durable tiers and each step sealed, which kills itself at a
given moment: ``FOLDER RANK SIZE MOMENT checkpoints|sealed|averaged|both`` (sealed, with averages in use between the
steps, or with updates that are tried in the backward and lost in every fourth step).

Moments are counted over everything that may leave files half done: steps, tiles written, files named, synced, renamed
and removed. It goes on from the newest checkpoint there is, and writes each step's loss to ``FOLDER/losses-RANK``.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tierzero as tz
from tests.support.oracle import config
from tests.support.resuming import Run, running
from tierzero.checkpoint import save as saving
from tierzero.training.checkpoints import all_in, folder_of, keep_newest

STEPS = 10


class Countdown:
    """Kills the process when it has been called so often."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, holder: Any, name: str) -> None:
        """Counts before and after each call of ``holder.name``."""
        original: Callable[..., Any] = getattr(holder, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self()
            result = original(*args, **kwargs)
            self()
            return result

        setattr(holder, name, counted)


def go_on(run: Run, folder: Path, rank: int, how: str, countdown: Countdown) -> None:
    sealed = how != "checkpoints"
    checkpoints = folder / "checkpoints"
    found = all_in(checkpoints)
    if found:
        run.load(found[-1])
    else:
        extra = tz.resume(run.model, run.optimizer) if sealed else None
        if extra is not None:
            run.take(extra)
    with (folder / f"losses-{rank}").open("a") as losses:
        while run.step < STEPS:
            countdown()
            if how == "both":
                run.clip = 0.5 if run.step % 4 == 3 else 1e6
            (loss,) = run.train(1, rank)
            print(run.step, loss.hex(), file=losses, flush=True)
            if sealed:
                tz.seal(run.model, run.optimizer, run.extra())
                if how == "averaged":
                    with tz.averaged(run.model):
                        countdown()
                continue
            run.save(folder_of(checkpoints, run.step), background=run.step % 3 != 0)
            if rank == 0:
                keep_newest(checkpoints, 2)


def main(folder: Path, rank: int, size: int, moment: int, how: str) -> None:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    countdown = Countdown(moment)
    for name in ("fsync", "fdatasync", "rename", "unlink", "posix_fallocate", "pwritev"):
        countdown.around(os, name)
    for holder, name in ((saving, "write_json"), (shutil, "rmtree"), (saving.RankWriter, "receive")):
        countdown.around(holder, name)
    sections: dict[str, Any] = {"train": {"precision": "bf16"}}
    if how != "checkpoints":
        sections["checkpoint"] = {"durable": True, "dir": str(folder / "checkpoints")}
    if how == "averaged":
        sections["optimizer"] = {"ema": 0.5}
    if how == "both":
        sections["optimizer"] = {"overlap": "both"}
    with running(config(folder / "nvme", **sections)) as run:
        go_on(run, folder, rank, how, countdown)
        tz.finish_checkpoint(run.model)
    print("moments", moment - countdown.left, flush=True)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5])
