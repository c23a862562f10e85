#!/usr/bin/env python3
"""A loop with Lightning Fabric.
python tools/examples/fabric_loop.py, or torchrun --nproc-per-node 2 tools/examples/fabric_loop.py"""

import os
import tempfile

import torch
from lightning_fabric import Fabric
from small import Bytes, config, gpt, loss_of
from torch.utils.data import DataLoader

import tierzero as tz
from tierzero.integrations.lightning import TierZeroStrategy


def train(folder: str, steps: int = 20, precision: str = "bf16") -> list[float]:
    fabric = Fabric(devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy=TierZeroStrategy())
    fabric.launch()
    model = tz.shard(gpt(), config(folder, precision))
    optimizer = tz.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    model, optimizer = fabric.setup(model, optimizer)
    loader = iter(fabric.setup_dataloaders(DataLoader(Bytes(), batch_size=4)))
    losses = []
    for _ in range(steps):
        for _ in range(2):  # accumulated
            fabric.backward((loss := loss_of(model, next(loader))) / 2)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    tz.close(model)
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(train(folder))
