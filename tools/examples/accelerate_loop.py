#!/usr/bin/env python3
"""A loop with Hugging Face Accelerate.
python tools/examples/accelerate_loop.py, or torchrun --nproc-per-node 2 tools/examples/accelerate_loop.py"""

import tempfile

import torch
from small import Bytes, config, gpt, join_ranks, loss_of
from torch.utils.data import DataLoader

import tierzero as tz
from tierzero.integrations.accelerate import TierZeroAccelerator


def train(folder: str, steps: int = 20, precision: str = "bf16") -> list[float]:
    join_ranks()
    accelerator = TierZeroAccelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    model = tz.shard(gpt(), config(folder, precision))
    optimizer = tz.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Bytes(), batch_size=4))
    losses = []
    for step, batch in zip(range(2 * steps), loader, strict=False):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % 2:
            schedule.step()
            losses.append(loss.item())
    tz.close(model)
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(train(folder))
