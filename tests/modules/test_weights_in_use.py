"""What a unit's forward does with its own weights beyond computing: handing out views of them, writing into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import tierzero as tz
from tierzero.api import running
from tierzero.errors import NotResidentError

from ..support.oracle import TIERS, Case, assert_close, built, config, sharded, train_plain, train_sharded
from ..support.zoo import DIM, Block, regression, vectors

ROWS = 5


@dataclass
class Rows:
    rows: torch.Tensor


class Kept:
    """Nothing that PyTorch would look into."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


class Positions(nn.Module):
    """Hands out its weight, or parts of it, as they are."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(16, DIM))

    def forward(self) -> object:
        if self.how == "parameter":
            return self.weight
        view = self.weight[:ROWS]
        if self.how == "attribute":
            self.kept = view.detach()
            return None
        outputs = {"view": view, "detached": view.detach(), "nested": {"rows": [(view, None)]}}
        return (outputs | {"dataclass": Rows(view), "object": Kept(view.detach()), "iterator": iter([view])})[self.how]


class Positioned(nn.Module):
    """Uses what ``Positions`` handed out after the memory it was gathered in has been used by others."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.positions = Positions(how)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.positions()
        if isinstance(rows, dict):
            rows = rows["rows"][0][0]
        elif isinstance(rows, Iterator):
            rows = next(rows)
        elif not isinstance(rows, torch.Tensor):
            rows = self.positions.kept if rows is None else rows.rows
        assert isinstance(rows, torch.Tensor)
        for block in self.blocks:
            x = block(x)
        x = x * rows[:ROWS]
        for block in self.blocks:
            x = block(x)
        return x + rows[:1]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    "how", ["view", "detached", "nested", "parameter", "dataclass", "object", "iterator", "attribute"]
)
def test_views_of_weights_outlive_their_unit(how: str, tier: str, tmp_path: Path) -> None:
    case = Case(lambda: Positioned(how), regression, (Block, Positions))
    assert_close(train_sharded(case, config(tmp_path, tier, tiers={"prefetch": 0})), train_plain(case))


def _clamp(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.clamp_(-0.01, 0.01)


def _replace(weight: torch.Tensor) -> None:
    weight.data = weight.data / 2


def _renormalize(weight: torch.Tensor) -> None:
    nn.functional.embedding(torch.tensor([0, 1]), weight, max_norm=0.1)


class Writing(Block):
    def __init__(self) -> None:
        super().__init__()
        self.write: Callable[[torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.write is not None:
            self.write(next(module for module in self.modules() if isinstance(module, nn.Linear)).weight)
        return super().forward(x)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("write", [_clamp, _replace, _renormalize])
def test_changing_a_weight_inside_its_forward_is_refused(
    write: Callable[[torch.Tensor], None], tier: str, tmp_path: Path
) -> None:
    case = Case(lambda: nn.Sequential(Writing(), Writing()), regression)
    with sharded(built(case), config(tmp_path, tier), (Writing,)) as model:
        second = model[1]  # type: ignore[index]
        x = vectors(0, 0)
        wanted = model(x).detach()
        second.write = write
        with pytest.raises(NotResidentError, match=r"'1\..*weight'.*inside the forward of unit '1'.*tierzero.gathered"):
            model(x)
        second.write = None
        if tier == "nvme":  # elsewhere it may have been the weight itself
            assert torch.equal(model(x), wanted)


class Wide(nn.Module):
    """A large root, one large block, and blocks that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, DIM)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, width), nn.Tanh(), nn.Linear(width, DIM)) for width in (8, 8, 200, 8)
        )
        self.head = nn.Linear(DIM, 1000)

    def forward(self, ids: torch.Tensor, route: tuple[int, ...]) -> torch.Tensor:
        x = self.embed(ids)
        for index in route:
            x = self.blocks[index](x)
        loss: torch.Tensor = self.head(x).square().mean()
        return loss


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_an_accepted_plan_has_room_for_any_order(prefetch: int, tmp_path: Path) -> None:
    limits = {"nvme": [str(tmp_path)], "prefetch": prefetch, "device": "1GiB", "host": "1GiB"}
    with sharded(Wide(), config(tmp_path, tiers=limits), ("blocks.*", "embed")) as model:
        optimizer = tz.AdamW(model.parameters())
        for route in ((0, 1, 2, 3), (2, 3), (0, 1, 2, 3), (3, 2, 1, 0)):
            model(torch.arange(5), route).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.arange(5), route)
            tz.full_state_dict(model)


def test_views_that_are_kept_hold_their_memory_until_they_are_gone(tmp_path: Path) -> None:
    """Across an update too, where they stay what they were."""
    case = Case(lambda: Positioned("attribute"), regression, (Block, Positions))
    with sharded(built(case), config(tmp_path, tiers={"prefetch": 0}), case.units) as model:
        optimizer = tz.AdamW(model.parameters(), lr=1e-2)
        kept, wanted = [], []
        for step in range(3):
            wanted.append(tz.read_state(model.positions.weight, "weight")[:ROWS])
            regression(model, step, 0).backward()
            kept.append(model.positions.kept)
            optimizer.step()
            optimizer.zero_grad()
        for have, want in zip(kept, wanted, strict=True):
            assert torch.equal(have, want)
        del model.positions.kept, kept, have
        for step in range(3):
            regression(model, step, 0).backward()
            model.positions.kept = None
            optimizer.zero_grad()
        arena = running(model).pools["arena"]
        assert arena.peak <= arena.capacity
        for unit in running(model).units:
            running(model).pager.forget(unit)
        model.positions.how = "view"
        model(vectors(0, 0))
        for unit in running(model).units:
            running(model).pager.forget(unit)
        assert arena.used == 0
