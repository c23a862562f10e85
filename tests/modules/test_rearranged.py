"""Modules and parameters that change places in a sharded model: tied, untied, shared, left out, used by another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ..support.compared import Act, assert_alike, trained
from ..support.oracle import TIERS
from ..support.zoo import DIM, VOCAB, Block, Stack, Tied, language, regression, vectors


def loss(model: nn.Module, step: int) -> torch.Tensor:
    return regression(model, step, 0)


def share_a_block(model: nn.Module) -> list[torch.Tensor]:
    model.blocks[0] = model.blocks[1]
    return trained(model, loss)


def leave_one_out(model: nn.Module) -> list[torch.Tensor]:
    del model.blocks[0]
    model.last.bias = None
    return trained(model, loss)


def exchange_two(model: nn.Module) -> list[torch.Tensor]:
    before = trained(model, loss)
    model.blocks[0], model.blocks[2] = model.blocks[2], model.blocks[0]
    return before + trained(model, loss)


def parts_of_another(model: nn.Module) -> list[torch.Tensor]:
    """A model of its own out of the parts, and a slice of the blocks."""
    other = nn.Sequential(model.first, *model.blocks[:2], model.last)
    return trained(model, lambda _, step: loss(other, step))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    "act", [share_a_block, leave_one_out, exchange_two, parts_of_another], ids=lambda f: f.__name__
)
def test_modules(act: Act, tier: str, tmp_path: Path) -> None:
    assert_alike(Stack, act, tmp_path, tier, (Block,))


class Untied(Tied):
    def __init__(self) -> None:
        super().__init__(functional=True)
        self.functional = False
        self.head = nn.Linear(DIM, VOCAB, bias=False)


@pytest.mark.parametrize("units", [(Block,), (Block, "embed", "head")], ids=["in the root", "units of their own"])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("build", [Untied, lambda: Tied(False)], ids=["untied", "tied already"])
def test_weights_tied_after_sharding(
    build: type[nn.Module], tier: str, units: tuple[object, ...], tmp_path: Path
) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        model.head.weight = model.embed.weight
        return trained(model, lambda model, step: language(model, step, 0))

    chosen = tuple(unit for unit in units if unit != "head" or build is Untied)
    assert_alike(build, act, tmp_path, tier, chosen)


class Lists(nn.Module):
    """Parameters in lists and dicts: by index, by slice, by iteration, and from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.randn(DIM)) for _ in range(3))
        self.named = nn.ParameterDict({"mix": torch.randn(DIM, DIM) * 0.1, "shift": torch.randn(DIM)})
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gain in self.gains:
            x = torch.tanh(x * gain)
        x = x @ self.named["mix"] + self.named["shift"] + sum(gain.sum() for gain in self.gains[:2])
        return self.last(x + self.gains[-1] + sum(values.mean() for _, values in self.named.items()))


@pytest.mark.parametrize("units", [("last",), ("last", "gains", "named")], ids=["in the root", "units of their own"])
def test_parameters_in_lists_and_dicts(units: tuple[str, ...], tmp_path: Path) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        return [*trained(model, loss), model.named["mix"].detach() + 0, model(vectors(9, 0))]

    assert_alike(Lists, act, tmp_path, "nvme", units)
