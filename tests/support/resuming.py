"""A run that can be stopped, saved and taken up again, and what it computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tierzero as tz

from .oracle import Outcome, record_state, sharded
from .zoo import DIM, VOCAB, Block, tokens


class Dropping(nn.Module):
    """Tied, with dropout, batch norm's running statistics, a frozen layer and a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(DIM, width) for width in (37, 300, 64))
        self.fixed = nn.Linear(DIM, DIM).requires_grad_(False)
        self.norm = nn.BatchNorm1d(DIM)
        self.drop = nn.Dropout(0.2)
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = self.drop(block(x))
        x = self.norm(self.fixed(x).flatten(0, 1)).view(x.shape)
        return self.head(x + self.none.sum())


UNITS = (Block, "embed", "fixed", "norm")


@dataclass
class Run:
    """A sharded model with its optimizer and schedule; ``step`` counts the steps taken."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    step: int = 0
    clip: float = 0.5

    def train(self, steps: int, rank: int = 0) -> list[float]:
        losses = []
        for _ in range(steps):
            ids = tokens(self.step, rank, length=9)
            logits = self.model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()
            tz.clip_grad_norm_(self.model, self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def extra(self) -> dict[str, Any]:
        return {"step": self.step, "scheduler": self.scheduler.state_dict()}

    def save(self, path: Path, background: bool = False) -> None:
        tz.save_checkpoint(self.model, self.optimizer, path, extra=self.extra(), background=background)

    def load(self, path: Path) -> None:
        self.take(tz.load_checkpoint(self.model, self.optimizer, path))

    def take(self, extra: dict[str, Any]) -> None:
        self.step = extra["step"]
        self.scheduler.load_state_dict(extra["scheduler"])

    def outcome(self) -> Outcome:
        """All state, buffers among the weights."""
        outcome = Outcome()
        record_state(self.model, outcome)
        for name, value in self.model.named_buffers():
            outcome.weights[name], outcome.moments[name] = value.clone(), None
        outcome.losses = [group["lr"] for group in self.optimizer.param_groups]
        return outcome


@contextmanager
def running(settings: tz.Config, seed: int = 0, units: Any = UNITS, **options: Any) -> Iterator[Run]:
    torch.manual_seed(seed)
    with sharded(Dropping().train(), settings, units, **options) as model:
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2]},
            {"params": [p for p in parameters if p.ndim < 2], "lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.99)},
            {"params": []},
        ]
        optimizer = tz.AdamW(groups, lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        yield Run(model, optimizer, scheduler)
