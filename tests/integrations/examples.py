"""The scripts in ``tools/examples`` as modules, and what an unsharded model does with their data."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "examples"


def example(name: str) -> ModuleType:
    os.environ["HF_HUB_OFFLINE"] = "1"
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def unsharded(steps: int, ranks: int = 1) -> list[float]:
    """Losses of the second of each two accumulated batches, of four rows from each rank."""
    small = example("small")
    model = small.gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    rows = iter(small.Bytes().rows.split(4 * ranks))
    losses = []
    for _ in range(steps):
        for _ in range(2):
            batch = next(rows)
            loss = small.loss_of(model, {"input_ids": batch, "labels": batch})
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses
