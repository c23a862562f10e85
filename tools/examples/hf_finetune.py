"""Trains a causal language model of the transformers library from NVMe: one in a local folder, or a tiny random one."""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import tierzero as tz

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="folder with config.json, tokenizer and *.safetensors; without: a tiny Llama")
parser.add_argument("--text", default=__file__, help="file to train on")
parser.add_argument("--nvme", required=True, help="folder on a fast drive")
parser.add_argument("--out", required=True, type=Path, help="new folder for the checkpoint and the trained model")
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()
text, folder = Path(options.text).read_text(), options.model
tiny = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
shape = AutoConfig.from_pretrained(folder) if folder else LlamaConfig(**tiny, num_attention_heads=4)
ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"] if folder else list(text.encode())
with tz.empty_init():  # takes no memory
    model = AutoModelForCausalLM.from_config(shape)
everything = dict.fromkeys(("params", "optimizer", "gradients"), "nvme")
config = tz.Config.from_dict({"tiers": {"nvme": [options.nvme]}, "placement": everything})
tz.shard(model, config, init=folder or model._init_weights)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = tz.AdamW(model.parameters(), lr=1e-5 if folder else 1e-2)
for step in range(options.steps):
    batch = torch.tensor([ids[start : start + 65] for start in torch.randint(len(ids) - 65, (4,)).tolist()])
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    norm = tz.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {loss.item():.3f}  norm {norm.item():.2f}")
tz.save_checkpoint(model, optimizer, options.out / "checkpoint")
shape.save_pretrained(options.out / "model")
tz.export_safetensors(options.out / "checkpoint", options.out / "model", dtype="bf16")
