"""A decoder as users write them: causal attention, RMS norm in fp32, SwiGLU, tied or not, checkpointed or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..support.oracle import Case, assert_bits, assert_close, config, train_plain, train_sharded
from ..support.rank_pool import RankPool
from ..support.zoo import language

WIDTH = 32
HEADS = 4
IDS = 101


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)
        return h.to(x.dtype) * self.weight


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention = RootMeanSquare()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.before_mlp = RootMeanSquare()
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        heads = self.qkv(self.before_attention(x)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        h = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, tied: bool, recompute: str, layers: int = 5) -> None:
        super().__init__()
        self.tokens = nn.Embedding(IDS, WIDTH)
        self.positions = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = RootMeanSquare()
        self.head = nn.Linear(WIDTH, IDS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.recompute = recompute

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            if self.recompute == "none":
                x = layer(x)
            else:
                again: torch.Tensor = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
                x = again
        return self.head(self.norm(x))


def case(tied: bool, recompute: str) -> Case:
    return Case(lambda: Decoder(tied, recompute), language, (Layer, "tokens", "head"), steps=10, clip=1.0)


@pytest.mark.parametrize(
    ("tied", "tier"),
    [
        (False, "nvme"),
        (True, "host"),
        pytest.param(False, "host", marks=pytest.mark.long),
        pytest.param(True, "nvme", marks=pytest.mark.long),
    ],
)
def test_decoder(tied: bool, tier: str, tmp_path: Path) -> None:
    found = train_sharded(case(tied, "none"), config(tmp_path, tier))
    assert_close(found, train_plain(case(tied, "none")))
    for recompute in ("reentrant", "non-reentrant"):
        assert_bits(train_sharded(case(tied, recompute), config(tmp_path, tier)), found)


def decoder_on_ranks(rank: int, size: int, nvme: str) -> None:
    for tied, recompute in ((False, "non-reentrant"), (True, "reentrant")):
        found = train_sharded(case(tied, recompute), config(Path(nvme)), rank, size)
        assert_close(found, train_plain(case(tied, "none"), size), tolerance=1e-4)


def test_decoder_on_two_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(decoder_on_ranks, str(tmp_path))
