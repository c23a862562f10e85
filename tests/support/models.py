"""Small models whose flat groups have every awkward shape: odd sizes, parameters below a tile, 0-dim and empty ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # the usual name
from torch import nn


class Block(nn.Module):
    """A residual block with a parameter of no dimensions and one of no elements."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x)))) + self.empty.sum()


class Net(nn.Module):
    """Token embedding, blocks of the given hidden widths, a norm and a head: cross entropy of ``y`` given ``x``."""

    def __init__(self, dim: int = 33, hidden: Sequence[int] = (66, 129, 40), vocab: int = 53, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, width) for width in hidden)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


UNITS = (Block, "embed", "head")


def net(seed: int = 0, **shape: object) -> Net:
    """A `Net` with the same weights at every call."""
    torch.manual_seed(seed)
    return Net(**shape)  # type: ignore[arg-type]


def batch(step: int, rows: int = 4, length: int = 7, vocab: int = 53) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one step; the same for the same step, different for every other."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(vocab, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
