#!/usr/bin/env python3
"""A loop of your own, in plain PyTorch.
python tools/examples/plain_loop.py, or torchrun --nproc-per-node 2 tools/examples/plain_loop.py"""

import tempfile

import torch
from small import batches_of_rank, config, gpt, join_ranks, loss_of

import tierzero as tz


def train(folder: str, steps: int = 20, precision: str = "bf16") -> list[float]:
    join_ranks()
    model = tz.shard(gpt(), config(folder, precision))
    optimizer = tz.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    batches = batches_of_rank(4)
    losses = []
    for _ in range(steps):
        for _ in range(2):  # accumulated
            loss = loss_of(model, next(batches)) / 2
            loss.backward()
        tz.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item() * 2)
    tz.close(model)
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(train(folder))
