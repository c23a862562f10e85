"""``overlap = "backward"`` in loops that do not take the step it has anticipated: refused, never silently different."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tierzero as tz

from ..support.oracle import Case, built, config, sharded
from ..support.training import tight
from ..support.zoo import DIM, Block, Stack, regression

STACK = Case(Stack, regression, (Block,))
BACKWARD = {"optimizer": {"overlap": "backward"}, "train": {"grad_clip": 0}}
Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


def given_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    regression(model, 0, 0).backward()
    optimizer.zero_grad()


def given_up_by_the_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    regression(model, 0, 0).backward()
    model.zero_grad()


def stepped_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    regression(model, 0, 0).backward()
    optimizer.step()
    optimizer.step()


def not_zeroed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        regression(model, step, 0).backward()
        optimizer.step()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        regression(model, step, 0).backward()


def changed_late(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    regression(model, 0, 0).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def evaluated_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    regression(model, 0, 0).backward()
    with torch.no_grad():
        regression(model, 1, 0)


def used_in_part_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    regression(model, 0, 0).backward()
    model.blocks[0](torch.ones(1, model.first.weight.shape[0]))


def read_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    regression(model, 0, 0).backward()
    tz.full_state_dict(model)


def edited_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    regression(model, 0, 0).backward()
    with tz.gathered(model.first.weight):
        pass


def dropped_one_by_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    regression(model, 0, 0).backward()
    for parameter in model.parameters():
        parameter.grad = None


LOOPS: dict[Loop, str] = {
    evaluated_between: "weights are used between",
    used_in_part_between: "weights are used between",
    read_between: "weights are used between",
    edited_between: "weights are used between",
    given_up: "gradients are dropped",
    given_up_by_the_model: "gradients are dropped",
    dropped_one_by_one: "gradients are dropped",
    stepped_twice: "a second optimizer.step",
    not_zeroed: "without zero_grad",
    accumulated: "weights are used between",
    changed_late: "hyperparameters of .* were changed",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_without_the_anticipated_step_is_refused(tmp_path: Path, loop: Loop) -> None:
    with sharded(built(STACK), config(tmp_path, **BACKWARD), STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), lr=0.01)
        with pytest.raises(tz.ConfigError, match=rf"{LOOPS[loop]}.*use 'forward'"):
            loop(model, optimizer)


def test_a_checkpoint_makes_it_good_again(tmp_path: Path) -> None:
    with sharded(built(STACK), config(tmp_path, **BACKWARD), STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), lr=0.01)
        tz.save_checkpoint(model, optimizer, tmp_path / "saved")
        before = tz.full_state_dict(model)
        with pytest.raises(tz.ConfigError):
            given_up(model, optimizer)
        tz.load_checkpoint(model, optimizer, tmp_path / "saved")
        assert all(torch.equal(value, before[key]) for key, value in tz.full_state_dict(model).items())
        regression(model, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_two_optimizers_each_confirm_their_own(tmp_path: Path) -> None:
    found = []
    for settings in (BACKWARD, {"optimizer": {"overlap": "none"}}):
        with sharded(built(STACK), config(tmp_path, **settings), STACK.units) as model:
            first = tz.AdamW(model.blocks[0].parameters(), lr=0.01)
            rest = tz.AdamW([p for name, p in model.named_parameters() if not name.startswith("blocks.0")], lr=0.02)
            for step in range(3):
                regression(model, step, 0).backward()
                for optimizer in (first, rest):
                    optimizer.step()
                for optimizer in (first, rest):
                    optimizer.zero_grad()
            found.append(tz.full_state_dict(model))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_one_of_two_optimizers_that_does_not_step_is_missed(tmp_path: Path) -> None:
    with sharded(built(STACK), config(tmp_path, **BACKWARD), STACK.units) as model:
        first = tz.AdamW(model.blocks[0].parameters(), lr=0.01)
        second = tz.AdamW(model.blocks[1].parameters(), lr=0.01)
        regression(model, 0, 0).backward()
        second.step()
        with pytest.raises(tz.ConfigError, match=r"no optimizer\.step"):
            first.zero_grad()


def test_parameters_of_no_optimizer_are_nobodys_concern(tmp_path: Path) -> None:
    found = []
    for settings in (BACKWARD, {"optimizer": {"overlap": "none"}}):
        with sharded(built(STACK), config(tmp_path, **settings), STACK.units) as model:
            optimizer = tz.AdamW([p for p in model.parameters() if p.ndim > 1], lr=0.01)
            for step in range(3):
                regression(model, step, 0).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(tz.full_state_dict(model))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_a_checkpoint_between_backward_and_step_is_refused(tmp_path: Path) -> None:
    with sharded(built(STACK), config(tmp_path, **BACKWARD), STACK.units) as model:
        optimizer = tz.AdamW(model.parameters(), lr=0.01)
        regression(model, 0, 0).backward()
        with pytest.raises(tz.ConfigError, match="weights are used between"):
            tz.save_checkpoint(model, optimizer, tmp_path / "saved")
        optimizer.step()
        tz.save_checkpoint(model, optimizer, tmp_path / "saved")


class Reentrant(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.last(x)


class Halves(nn.Module):
    """Half of it in each of two rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        return torch.tanh((self.one if first else self.other)(x))


class Rounds(nn.Module):
    """All units are half done in the middle of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Halves() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in (True, False):
            for unit in self.units:
                x = x + unit(x, first)
        return x


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("budgets", ["roomy", "tight"])
@pytest.mark.parametrize(("model_class", "units"), [(Reentrant, (Block,)), (Rounds, (Halves,))])
def test_units_are_updated_once_they_are_complete(
    model_class: type[nn.Module], units: Any, budgets: str, tier: str, tmp_path: Path
) -> None:
    """Also where a backward runs inside another, and where gradients are put away before all have come."""
    found = []
    for overlap in ("none", "backward"):
        settings = config(tmp_path, tier, optimizer={"overlap": overlap}, train={"precision": "fp32", "grad_clip": 0})
        if budgets == "tight":
            settings = tight(model_class, settings, units)
        torch.manual_seed(0)
        with sharded(model_class(), settings, units) as model:
            optimizer = tz.AdamW(model.parameters(), lr=0.01)
            for step in range(4):
                regression(model, step, 0).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(tz.full_state_dict(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
