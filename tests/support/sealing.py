"""Runs with durable tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tierzero as tz
from tierzero.api import running as runtime_of

from .oracle import config
from .resuming import Run, running


def durable_settings(root: Path, overlap: str = "forward", **sections: dict[str, Any]) -> tz.Config:
    (root / "nvme").mkdir(exist_ok=True, parents=True)
    durable = {"durable": True, "dir": str(root / "checkpoints")}
    train = {"precision": "bf16"} | sections.pop("train", {})
    optimizer = {"overlap": overlap}
    return config(root / "nvme", "nvme", checkpoint=durable, train=train, optimizer=optimizer, **sections)


def sealed_steps(run: Run, steps: int, rank: int = 0) -> list[float]:
    losses = []
    for _ in range(steps):
        losses += run.train(1, rank)
        tz.seal(run.model, run.optimizer, run.extra())
    return losses


@contextmanager
def killed(settings: tz.Config, **options: Any) -> Iterator[Run]:
    """A run whose process ends without a word: what it would do at its end is left out."""
    with running(settings, **options) as run:
        yield run
        sealer = runtime_of(run.model).sealer
        assert sealer is not None
        sealer._marked = None


def records(root: Path) -> Path:
    (folder,) = (root / "nvme" / "tierzero").glob("lasting-*-rank-0")
    return folder
