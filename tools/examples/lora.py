#!/usr/bin/env python3
"""LoRA with PEFT: the frozen base on NVMe, adapters, their gradients and optimizer state where the device computes.
python tools/examples/lora.py, or torchrun --nproc-per-node 2 tools/examples/lora.py"""

import tempfile

from peft import LoraConfig, get_peft_model
from small import batches_of_rank, config, join_ranks, llama

import tierzero as tz
from tierzero.integrations.peft import save_adapters


def train(folder: str, steps: int = 20, precision: str = "bf16") -> list[float]:
    join_ranks()
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    placement = {"params": "device", "frozen": "nvme", "optimizer": "device", "gradients": "device"}
    tz.shard(model, config(folder, precision, **placement))
    optimizer = tz.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batches = batches_of_rank(4)
    losses = []
    for _ in range(steps):
        loss = model(**next(batches)).loss
        loss.backward()
        tz.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    save_adapters(model, f"{folder}/adapters")  # PeftModel.from_pretrained(base, folder) takes them up
    tz.close(model)
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(train(folder))
