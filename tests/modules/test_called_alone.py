"""Parts of a model that are called by themselves, whose own parameters belong to the unit around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tierzero.api import running

from ..support.oracle import TIERS, Case, assert_close, built, config, sharded, train_plain, train_sharded
from ..support.rank_pool import RankPool
from ..support.zoo import DIM, Block, vectors


class Side(nn.Module):
    """Blocks between a layer and a norm that are nobody's unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class TwoSided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Side(), Side()
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.decoder(self.encoder(x)))


def by_parts(model: Any, step: int, rank: int) -> torch.Tensor:
    """As a user's own loop over a pretrained model's parts; the encoder's first layer feeds a second path."""
    x = vectors(step, rank)
    out = model.last(model.decoder(model.encoder(x))) + 0.5 * model.encoder.first(x)
    return F.mse_loss(out, torch.sin(3 * x))


def checkpointed_parts(model: Any, step: int, rank: int) -> torch.Tensor:
    x = vectors(step, rank)
    h = checkpoint(model.encoder, x, use_reentrant=False)
    return F.mse_loss(model.last(checkpoint(model.decoder, h, use_reentrant=True)), torch.sin(3 * x))


class Inside(TwoSided):
    """Checkpoints what is no unit, in the middle of its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.encoder, x, use_reentrant=False)
        h = checkpoint(lambda h: self.decoder.norm(self.decoder.first(h)) * self.last.bias, h, use_reentrant=False)
        return self.last(checkpoint(self.decoder, h, use_reentrant=True))


def whole(model: Any, step: int, rank: int) -> torch.Tensor:
    x = vectors(step, rank)
    return F.mse_loss(model(x), torch.sin(3 * x))


LOSSES = {"inside": whole, "plain": by_parts, "checkpointed": checkpointed_parts}
UNITS: dict[str, Any] = {"blocks": (Block,), "nested": (Block, "encoder", "decoder"), "root": ("last",)}


def compare(loss: str, units: str, tier: str, nvme: Path, rank: int = 0, ranks: int = 1) -> None:
    case = Case(Inside if loss == "inside" else TwoSided, LOSSES[loss], UNITS[units], steps=10, eps=1e-6)
    assert_close(train_sharded(case, config(nvme, tier), rank, ranks), train_plain(case, ranks))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("loss", LOSSES)
def test_training_by_parts(loss: str, units: str, tier: str, tmp_path: Path) -> None:
    compare(loss, units, tier, tmp_path)


def compare_as_rank(rank: int, size: int, loss: str, units: str, nvme: str) -> None:
    compare(loss, units, "nvme", Path(nvme), rank, size)


@pytest.mark.parametrize("units", ["blocks", "nested"])
@pytest.mark.parametrize("loss", ["plain", "checkpointed"])
def test_training_by_parts_on_two_ranks(loss: str, units: str, tmp_path: Path, two_ranks: RankPool) -> None:
    two_ranks.run(compare_as_rank, loss, units, str(tmp_path))


def infer_as_rank(rank: int, size: int, nvme: str) -> torch.Tensor:
    case = Case(TwoSided, by_parts)
    plain = built(case)
    with sharded(built(case), config(Path(nvme)), (Block,)) as model, torch.inference_mode():
        found = model.encoder.norm(model.encoder(vectors(7, 0)))
        assert not any(unit.active for unit in running(model).units)
        torch.testing.assert_close(found, plain.encoder.norm(plain.encoder(vectors(7, 0))))
        return found.clone()


def test_inference_by_parts_on_two_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    first, second = two_ranks.run(infer_as_rank, str(tmp_path))
    assert torch.equal(first, second)
