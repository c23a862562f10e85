#!/usr/bin/env python3
"""The Trainer of Hugging Face Transformers.
python tools/examples/trainer.py, or torchrun --nproc-per-node 2 tools/examples/trainer.py"""

import tempfile

import torch
from small import Bytes, config, join_ranks, llama
from transformers import TrainingArguments

import tierzero as tz
from tierzero.integrations.transformers import TierZeroTrainer


def train(folder: str, steps: int = 20, precision: str = "bf16", resume: bool = False, **more) -> TierZeroTrainer:
    join_ranks()
    model = tz.shard(llama(), config(folder, precision))
    arguments = TrainingArguments(
        output_dir=f"{folder}/run",
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        **{"save_strategy": "no"} | more,
    )
    trainer = TierZeroTrainer(model, arguments, train_dataset=Bytes(), eval_dataset=Bytes(count=16))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trained = train(folder)
        trained.save_model(f"{folder}/out")  # as save_pretrained
        tz.close(trained.model)
