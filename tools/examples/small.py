"""What the examples share: small models, and Python's own source text, its bytes as tokens."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import tierzero as tz
from tierzero.models import GPT


class Bytes(Dataset):
    def __init__(self, length: int = 64, count: int = 512) -> None:
        text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40])
        self.rows = torch.frombuffer(bytearray(text[: length * count]), dtype=torch.uint8).view(-1, length).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(dim=64, layers=2, heads=4, vocab=256, seq_len=63)


def llama(**more: object) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape, **more))


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["input_ids"][:, :-1], batch["labels"][:, 1:])


def config(nvme: str, precision: str = "bf16", **placement: str) -> tz.Config:
    """Weights and optimizer state on NVMe files in the folder ``nvme``."""
    placed = {"params": "nvme", "optimizer": "nvme", "gradients": "host"} | placement
    return tz.Config.from_dict({"train": {"precision": precision}, "tiers": {"nvme": [nvme]}, "placement": placed})


def join_ranks() -> None:
    """Before tz.shard, where torchrun has started several."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        dist.init_process_group()


def batches_of_rank(size: int) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's part of the data."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    data = Bytes()
    return iter(DataLoader(data, size, sampler=DistributedSampler(data, ranks, rank, shuffle=False)))
